"""Flags of every command with values of every kind: numbers, NaN, texts, files, folders, addresses, contradictions.

The flags come from the parser of each command. A case takes words with which the command is quick (a dry run, tiny
sizes, or an input that does not exist), and adds up to four flags with random values, an unknown flag now and then.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts.argument import Argument

from benchmarks.attack.harness import Finished, Outcome, run_cli, unchanged
from query_mutator.cli.flags import flags_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that does not exist is not looked up on the network

Main = Callable[[Sequence[str]], Any]
CLOSED = "http://127.0.0.1:9"  # nothing answers there

#: Words with which a command is quick. A word in capitals stands for a file of `make_files`.
QUICK: dict[str, tuple[str, ...]] = {
    "train_query_mutator.py": (
        *("--backend", "recorded", "--encoder", "hash", "--num-env-steps", "8", "--num-processes", "2"),
        *("--num-steps", "4", "--num-mini-batch", "1", "--no-evaluate", "--eval-interval", "0"),
        *("--operators", "clean", "--forms", "question_answer"),
    ),
    "benchmark_batching.py": ("--target-model", "m", "--num-queries", "2", "--repeats", "1"),
    "extract_tensorboard_data.py": ("RUN",),
    "python -m ppo": (
        *("--num-env-steps", "32", "--num-processes", "2", "--num-steps", "8"),
        *("--num-mini-batch", "1", "--eval-episodes", "1"),
    ),
    "qm plan": (
        *("--backend", "recorded", "--encoder", "hash", "--max-calls", "40"),
        *("--operators", "clean", "--forms", "question_answer"),
    ),
    "qm eval": ("--checkpoint", "RUN", "--ollama-url", CLOSED, "--wait-for-server", "0"),
    "qm rewrite": ("--checkpoint", "RUN", "--ollama-url", CLOSED, "--wait-for-server", "0", "how do I sort"),
    "qm doctor": ("--ollama-url", CLOSED, "--probe-s", "1"),
    "qm data lengths build": ("-d", "FILE", "-t", "bytes", "-o", "lengths.jsonl"),
    "qm data lengths stats": ("-c", "CACHE"),
    "qm data batchplan build": ("-l", "CACHE", "-o", "plan", "--token-budget", "2048"),
    "qm data batchplan info": ("-p", "PLAN"),
    "qm data batchplan verify": ("-p", "PLAN", "-l", "CACHE"),
    "qm data batchplan shard": ("-p", "PLAN", "-w", "2", "-o", "shards"),
    "qm data batching histogram": ("-c", "CACHE"),
    "qm data batching analyze": ("-c", "CACHE"),
    "qm data batching suggest": ("-c", "CACHE"),
    "qm data batch generate": ("-p", "PLAN", "-d", "FILE", "-t", "bytes", "-o", "batches"),
    "qm data export": ("--run", "RUN", "-o", "rows.jsonl"),
    "qm gym run": ("--mock", "--num-episodes", "1", "-o", "samples.jsonl", "-t", "bytes"),
    "qm train sft": (
        *("--model", "missing", "--tokenizer", "bytes", "--dataset", "FILE", "--max-steps", "1", "--out", "model"),
    ),
    "qm bench": ("--num-samples", "50"),
    "qm analyze": ("RUN",),
    "qm sweep": ("--grid", "lr=1,2", "--out", "sweep"),
    "qm size": ("mlp",),
    "qm size workers": ("--from-logs", "RUN"),
}
#: Words after the random ones, which keep a command from serving, from running for long, or from a real server.
LAST: dict[str, tuple[str, ...]] = {
    "benchmark_batching.py": ("--ollama-url", CLOSED),
    "qm test-server": ("--port", "-1"),
    "qm watch": ("--port", "-1"),
    "qm sweep": ("--dry-run", "--", "true"),
}
PLAN = ("--bucket-edges", "8,16", "--overflow-max", "32", "--token-budget", "64")
DRY_RUNS = 0.8  # share of the trainer's cases; the others train for a few steps

SMALL = ("0", "1", "2", "3", "8", "0.5", "0.01", "1.0")  # often valid, and never a long run
NUMBERS = (
    *("0", "1", "2", "3", "-1", "0.5", "-0.0", "1e-300", "1e308", "-1e308", "1e400", "nan", "inf", "-inf", "NaN"),
    *("1" + "0" * 20, "-1" + "0" * 20, "9" * 400, "9" * 5000, "0x10", "1_000", "1,5", "٣", "½", "1e", "--1", "+1"),
)
TEXTS = (
    *("", " ", "\t", "a\nb", "\x1b[31mred", "a\0b", "naïve – ü", "日本語", "\ud800", "\u202e"),
    *("x" * 5000, "y" * 300_000),
    *("a=b", "a=1:2", "a=1,2", "=", "1,2,3", "3,2,1", "8=2GB", "480x640", "0x0", "%s%n", "{}", "$(true)", "*", "-"),
    *("cpu", "cuda:0", "cuda:99", "toaster", "right=1", "right=nan", "spelling", "ollama:m", "None"),
)
ADDRESSES = (
    *(CLOSED, "127.0.0.1:9", "[::1]:9", "http://", "https://", "ftp://there", "file:///none", "http://[::1", "//x"),
    *("http://127.0.0.1:99999", "http://u:p@127.0.0.1:9", "nonsense", ":", ":9", "http://a b", "HTTP://127.0.0.1:9"),
    *("http://127.0.0.1:9/v1?x=1#y", "http://\u2100.example", "127.0.0.1:9/v1"),
)
FILES = ("FILE", "CACHE", "PLAN", "RUN", "EMPTY", "FOLDER", "BROKEN", "LINK")
PATHS = (*FILES, "missing/none.json", "out.csv", "out.png", "out", "none.jsonl", "x/" * 3000, "FILE/x")
UNKNOWN = ("--nonsense", "--batchsize", "--", "-z", "--=1", "--json=", "stray")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command line: its `main`, the words before its flags, its flags, and texts that are its defaults."""

    name: str
    main: Main
    words: tuple[str, ...]
    flags: tuple[Argument, ...]
    defaults: tuple[str, ...]


@cache
def programs() -> tuple[Program, ...]:
    """Return every command of the product."""
    import benchmark_batching
    import train_query_mutator
    from ppo import __main__ as ppo
    from query_mutator.commands import COMMANDS, analyze
    from query_mutator.commands.analyze import ExtractFlags
    from query_mutator.commands.main import main as qm
    from query_mutator.training.config import TrainConfig

    def ppo_main(argv: Sequence[str]) -> int:
        return ppo.main(argv) or 0

    mains: list[tuple[str, Main, tuple[str, ...], type[Any]]] = [
        ("train_query_mutator.py", train_query_mutator.main, (), TrainConfig),
        ("benchmark_batching.py", benchmark_batching.main, (), benchmark_batching.BenchmarkConfig),
        ("extract_tensorboard_data.py", analyze.extract, (), ExtractFlags),
        ("python -m ppo", ppo_main, (), ppo.Args),
        *(
            (f"qm {name}", qm, tuple(name.split()), command.flags)
            for name, command in COMMANDS.items()
            if not command.takes_words  # `qm train` is the trainer above
        ),
    ]
    return tuple(_program(*main) for main in mains)


def _program(name: str, main: Main, words: tuple[str, ...], cls: type[Any]) -> Program:
    defaults = tuple(field.default for field in fields(cls) if isinstance(field.default, str) and field.default)
    return Program(name=name, main=main, words=words, flags=tuple(flags_of(cls).values()), defaults=defaults)


def attack(rng: random.Random, folder: Path) -> Outcome:
    """Run one command with random flags."""
    program = rng.choice(programs())
    files = make_files(folder)
    last = LAST.get(program.name, ())
    if program.name == "train_query_mutator.py" and rng.random() < DRY_RUNS:
        last = ("--dry-run",)
    added = [word for _ in range(rng.choice((1, 1, 2, 3))) for word in random_flag(rng, program.flags)]
    if rng.random() < 0.05:
        added.insert(rng.randrange(len(added) + 1), rng.choice(UNKNOWN))
    kept = [word for word in added if word not in ("--help", "--help-all")]
    words = [_path(word, files) for word in (*QUICK.get(program.name, ()), *kept, *last)]
    prog = program.name.removesuffix(" ".join(program.words)).strip()
    with unchanged(folder / "inputs") as inputs:
        done = run_cli(program.main, [*program.words, *words], folder, prog=prog)
        if changed := [path for path in inputs.changed() if path.name != "report.html"]:  # `qm show` writes it again
            return Outcome(case=done.case, verdict="input changed", detail=", ".join(map(str, changed)))
    return judge(done, program, words)


def judge(done: Finished, program: Program, words: Sequence[str]) -> Outcome:
    """Return "wrong" where the error of exit code 2 names no flag, field or value of the command line."""
    outcome = done.outcome()
    if outcome.verdict != "ok" or done.code != 2:
        return outcome
    line = done.err.strip().splitlines()[-1]
    if "Unknown option" in line or "Unused Tokens" in line:
        return outcome
    named = {spelling for flag in program.flags for spelling in flag.names} | {
        flag.field_info.name for flag in program.flags
    }
    values = {part[:40] for word in (*words, *program.defaults) for part in (word, word.partition("=")[2]) if part}
    said = line.replace("_", "-")
    if any(re.search(rf"(?<![\w-]){re.escape(name.replace('_', '-'))}(?![\w-])", said) for name in named):
        return outcome
    values |= {
        " ".join(re.sub("/+", "/", value).rstrip("/").split()) for value in values
    }  # as a Path, or one line, has it
    if any(value in line or repr(value)[1:-1] in line for value in values):
        return outcome
    return Outcome(case=done.case, verdict="wrong", detail=f"names no flag: {line[:500]}")


def random_flag(rng: random.Random, flags: Sequence[Argument]) -> list[str]:
    """Return one flag, spelled in one of its ways, with a value that may or may not suit it."""
    flag = rng.choice(flags)
    count = (
        rng.choice((0, 1, 1, 2, 3))
        if get_origin(flag.hint) is tuple
        else 1
        if rng.random() < 0.95
        else rng.choice((0, 2))
    )
    values = [random_value(rng, flag) for _ in range(count)]
    if flag.index is not None:
        return values[:1]
    name = rng.choice(flag.names)
    if rng.random() < 0.1:
        name = name.replace("-", "_").replace("__", "--", 1)
    if flag.hint is bool and rng.random() < 0.95:
        return [name]
    return [f"{name}={values[0]}"] if values and rng.random() < 0.3 else [name, *values]


def random_value(rng: random.Random, flag: Argument) -> str:
    """Return a value of the flag's kind most of the time, else of any kind."""
    kinds = [flag.hint, *(part for outer in get_args(flag.hint) for part in (outer, *get_args(outer)))]
    literals = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    suited: list[Sequence[str]] = [PATHS, TEXTS, FILES]
    if literals:
        suited = [literals]
    elif {int, float} & {kind for kind in kinds if isinstance(kind, type)}:
        suited = [NUMBERS, SMALL]
    elif flag.field_info.name.endswith("url") or flag.field_info.name in ("host", "backend"):
        suited = [ADDRESSES]
    value = rng.choice(rng.choice(suited if rng.random() < 0.85 else [NUMBERS, TEXTS, ADDRESSES, PATHS]))
    is_slow = flag.field_info.name == "running_speed" and value in SMALL  # a call takes 16 s divided by it
    return "100" if is_slow else value


@cache
def template() -> Path:
    """Return a folder with the inputs of a case, made once in a process by the commands themselves."""
    folder = Path(tempfile.mkdtemp(prefix="attack-inputs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    questions = [
        {"query": f"how do I sort {n}", "accept": ["sorted"], "text": "a b", "response": "b"} for n in range(8)
    ]
    (folder / "file.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"query": ')
    (folder / "link.jsonl").symlink_to("file.jsonl")
    (folder / "taken").mkdir()
    (folder / "taken" / "note.txt").write_text("mine")
    qm, train = programs()[-1].main, programs()[0].main
    made = [
        run_cli(qm, ["data", "lengths", "build", "-d", "file.jsonl", "-t", "bytes", "-o", "cache.jsonl"], folder),
        run_cli(qm, ["data", "batchplan", "build", "-l", "cache.jsonl", "-o", "plan", *PLAN], folder),
        run_cli(train, [*QUICK["train_query_mutator.py"], "--save-dir", "runs"], folder),
    ]
    assert [done.code for done in made] == [0, 0, 0], [done.err for done in made]
    return folder


def make_files(folder: Path) -> dict[str, Path]:
    """Copy the inputs of a case; return them by the words that stand for them."""
    inputs = folder / "inputs"
    shutil.copytree(template(), inputs, symlinks=True)
    (run,) = inputs.glob("runs/2*")
    paths = {name: inputs / f"{name.lower()}.jsonl" for name in ("FILE", "CACHE", "EMPTY", "BROKEN", "LINK")}
    return {**paths, "FOLDER": inputs / "taken", "PLAN": inputs / "plan", "RUN": run}


def _path(word: str, files: dict[str, Path]) -> str:
    """Return a word with the name of a file in place of the word that stands for it."""
    return re.sub(rf"\b({'|'.join(files)})\b", lambda match: str(files[match[1]]), word)
