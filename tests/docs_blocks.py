"""The code blocks of README and docs: find them, run them, or read the flags of those that need something else."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from query_mutator.cli.console import exit_code
from query_mutator.cli.flags import parse_flags
from query_mutator.commands import COMMANDS
from query_mutator.commands.main import main as qm_main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NEEDS = (
    "ollama", "gguf", "ray", "hub", "gpu", "lerobot", "gym", "openenv", "verifiers", "wandb", "mlflow",
    "run", "make",
)  # fmt: skip

#: Put before the flags of the training commands of unmarked blocks, which win.
DEFAULTS = shlex.split(
    "--target-model librarian --mutator-model softener --encoder hash --dataset questions.jsonl --embedding-dims 4"
    " --operators spelling,neutral,filler --forms none --answer best --eval-questions 3"
    " --learning-starts 16 --train-batch-size 32 --replay-ratio 4"
)
#: Put behind them: two updates, which take about a second.
SIZES = shlex.split("--num-processes 4 --num-steps 8 --num-mini-batch 2 --batch-size 4 --num-env-steps 64")

#: Programs that blocks may name besides ours; their flags are not ours to check.
FOREIGN = {
    "docker",
    "sqlite3",
    "ollama",
    "pip",
    "tensorboard",
    "wandb",
    "mlflow",
    "torchrun",
    "git",
    "cd",
    "curl",
    "kill",
    "ray",
    "openenv",
    "uv",
    "vf-eval",
    "vf-replay",
    "echo",
}

_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"[|&<>]|\$\(|^\w+=", re.MULTILINE)
_PLAIN = re.compile(r"'[^'\n]*'|\s#[^\n]*")  # quoted text and comments, where these signs mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block; `needs` is what its mark names, `file` the name that a Python block is saved under."""

    page: Path
    line: int
    language: str
    needs: str
    file: str
    code: str

    @property
    def where(self) -> str:
        """Return the page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the bash and Python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found[1],
            needs=_mark(found[2], "needs"),
            file=_mark(found[2], "file"),
            code=found[3],
        )
        for found in _BLOCK.finditer(text)
        if found[1] in ("bash", "python")
    ]


def _mark(info: str, name: str) -> str:
    found = re.search(rf"\b{name}: *(\S+)", info)
    return found[1] if found else ""


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command of a bash block, without comments and without variables set in front."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" < ")[0], comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def run_block(block: Block, folder: Path) -> None:
    """Run an unmarked block in `folder`, which is the working directory; anything but success is an AssertionError."""
    if block.language == "python":
        _run_python(block, folder)
    elif _SHELL.search(_PLAIN.sub("", block.code)):
        _run(["bash", "-euo", "pipefail", "-c", block.code], folder, block)
    else:
        for words in commands(block.code):
            run_command(words, folder, block)


def run_command(words: Sequence[str], folder: Path, block: Block) -> None:
    """Run one command line: in this process where that saves the start of an interpreter."""
    program, argv = _program(words)
    if program == "python train_query_mutator.py" and "--dry-run" not in argv:
        argv = [*DEFAULTS[2 * ("--target-model" in argv) :], *argv, *SIZES]  # several target models are for qm plan
    entry = _entry(program)
    if entry is None:
        _run([sys.executable, *words[1:]] if words[0] == "python" else words, folder, block)
    else:
        try:
            code = exit_code(entry, argv, prog=program)
        except SystemExit as done:  # --help
            code = int(done.code or 0)
        assert not code, f"{block.where}: exit code {code} of {shlex.join(words)}"


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the program that a command runs and its arguments."""
    if list(words[:2]) == ["qm", "train"] and words[2:3] != ["sft"]:  # two names of one program
        return "python train_query_mutator.py", list(words[2:])
    length = 1 if words[0] != "python" else 3 if words[1:2] == ["-m"] else 2
    return " ".join(words[:length]), list(words[length:])


def _entry(program: str) -> Callable[[Sequence[str]], int | None] | None:
    if program in ("qm", "python -m query_mutator"):
        return qm_main
    if program == "python train_query_mutator.py":
        return importlib.import_module("train_query_mutator").main
    if program == "python benchmark_batching.py":
        return importlib.import_module("benchmark_batching").main
    if program == "python -m ppo":
        return importlib.import_module("ppo.__main__").main
    return None


def _run_python(block: Block, folder: Path) -> None:
    """Save the block and run it in a fresh namespace; one that names a file is run by the commands that use it."""
    path = folder / (block.file or f"block_{block.line}.py")
    path.write_text(block.code, encoding="utf-8")
    if not block.file:
        runpy.run_path(str(path), run_name="__main__")


def _run(words: Sequence[str], folder: Path, block: Block) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{block.where}: {shlex.join(words)}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"


def check_block(block: Block) -> None:
    """Read a marked block: flags and values of our commands, targets of make, imports of Python."""
    assert block.needs in NEEDS, f"{block.where}: needs: {block.needs}"
    if block.language == "python":
        if block.needs not in ("openenv", "verifiers"):  # tests in environments of their own run those
            _check_imports(block)
        return
    for words in commands(block.code):
        check_command(words, block)


def check_command(words: Sequence[str], block: Block) -> None:
    """Parse the flags of one command line."""
    program, argv = _program(words)
    if words[0] == "torchrun" and "query_mutator" in words:
        program, argv = "qm", list(words[words.index("query_mutator") + 1 :])
    if program == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in argv), f"{block.where}: {argv}"
    elif program == "qm":
        name = max((name for name in COMMANDS if argv[: len(name.split())] == name.split()), key=len, default="")
        assert name, f"{block.where}: {shlex.join(words)}"
        parse_flags(COMMANDS[name].flags, argv[len(name.split()) :], prog=name)
    elif program == "python train_query_mutator.py":
        from query_mutator.training.config import TrainConfig

        parse_flags(TrainConfig, argv, prog=program)
    elif program == "python benchmark_batching.py":
        from benchmark_batching import BenchmarkConfig

        parse_flags(BenchmarkConfig, argv, prog=program)
    elif program.startswith("python -m query_rewriting_env"):  # its own tests run it, where OpenEnv is installed
        assert (ROOT / "environments" / "query_rewriting_env").is_dir()
    elif words[0] == "python":
        known = set(re.findall(r"--[\w-]+", help_text(*program.split()[1:])))
        flags = {word for word in argv if word.startswith("--") and " " not in word}  # else a quoted value
        missing = {word.partition("=")[0] for word in flags} - known
        assert not missing, f"{block.where}: {program} has no {missing}"
    else:
        assert words[0] in FOREIGN, f"{block.where}: {words[0]} is not a known program"


@functools.cache
def help_text(*program: str) -> str:
    """Return what `python PROGRAM --help` prints."""
    command = [sys.executable, *program, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def _check_imports(block: Block) -> None:
    for node in ast.parse(block.code).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{block.where}: {node.module} has no {missing}"
