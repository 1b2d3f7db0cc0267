"""Imports point one way: each part of the tree may import only the parts listed for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = {"types", "errors", "registry", "pynames", "intervals", "disk", "jsonlines", "json_text", "one_cpu", "__init__"}
ENCODER = {"encoder", "encoder_bert", "encoder_weights"}
CALLS = BASE | ENCODER | {"llm"}
ENV = CALLS | {"operators", "rewards", "data", "observation", "task", "journal", "scheduling", "workers", "episode"}

#: part of query_mutator -> the other parts it may import
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(ENCODER, BASE | ENCODER),
    "embedded": {"types", "errors", "registry", "__init__"} | ENCODER,
    "llm": BASE | ENCODER,
    "operators": CALLS,
    "rewards": CALLS,
    "data": CALLS,
    "observation": CALLS,
    "task": CALLS | {"operators", "rewards", "data", "observation"},
    "journal": CALLS,
    "workers": BASE,
    "scheduling": CALLS | {"journal", "workers"},
    "episode": CALLS | {"rewards"},
    "failure_rate": BASE,
    "report": BASE | {"metrics", "rundir", "console"},
    "metrics": BASE,
    "rundir": BASE | {"metrics"},
    "analysis": BASE | {"console", "flags"},
    "sweep": BASE | {"console", "flags", "analysis"},
    "console": BASE,
    "flags": BASE,
    "config": BASE | {"flags", "iqn"},
    "iqn": BASE | {"iqn", "console", "flags"},
}
TOP_LEVEL = {
    "train_query_mutator",
    "rl_query_mutator_env",
    "ollama_utils",
    "benchmark_batching",
    "ppo",
    "query_mutator",
}


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT / "query_mutator").parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return every module of ours that a file imports, at any depth of its code."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from query_mutator import operators` imports the part, not the package
            modules |= {
                f"{node.module}.{alias.name}" if node.module == "query_mutator" else node.module for alias in node.names
            }
    return {module for module in modules if module.split(".")[0] in TOP_LEVEL}


@pytest.mark.parametrize("path", sorted((ROOT / "query_mutator").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    if part not in ALLOWED:  # command-line level: may use everything
        return
    for module in imported(path):
        if module == "ppo.config" and part == "config":  # the trainer's flags extend PPO's; it loads no torch
            continue
        if module.startswith("ppo.") and part == "iqn":  # its helpers serve any learner
            continue
        pieces = module.split(".")
        assert pieces[0] == "query_mutator", f"{part} imports the top-level module {module}"
        assert len(pieces) == 1 or pieces[1] in ALLOWED[part] | {part, "__version__"}, f"{part} imports {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "ppo").rglob("*.py")), ids=lambda p: p.name)
def test_ppo_imports_nothing_of_ours(path: Path) -> None:
    assert {module.split(".")[0] for module in imported(path)} <= {"ppo"}


def test_environment_stands_on_its_layers() -> None:
    for module in imported(ROOT / "rl_query_mutator_env.py"):
        assert module.split(".")[1] in ENV


@pytest.mark.parametrize(
    "module",
    ["query_mutator", "query_mutator.llm", "query_mutator.operators", "query_mutator.rewards", "query_mutator.data",
     "query_mutator.config", "query_mutator.embedded.server", "query_mutator.analysis.command",
     "query_mutator.analysis.pages", "query_mutator.cli", "ollama_utils", "train_query_mutator"],
)  # fmt: skip
def test_import_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
