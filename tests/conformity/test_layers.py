"""The rooms of the tree and what each may import. A folder or file that the table does not name fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "query_mutator"
SURFACE = {"train_query_mutator", "rl_query_mutator_env", "ollama_utils", "benchmark_batching"}

VOCABULARY = {"__init__", "errors", "files", "plugins", "registry", "types"}
CALLS = VOCABULARY | {"stats", "cli", "encoder", "llm", "runs"}
TASK = CALLS | {"data", "operators", "rewards"}
ENV = TASK | {"env"}
LEARNERS = ENV | {"bandit", "iqn", "ppo"}
TOOLS = VOCABULARY | {"stats", "cli", "runs"}

#: Room -> the rooms it may import besides itself, from the bottom up.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"rewriter"},
    "errors": set(),
    "types": {"errors"},
    "registry": {"errors"},
    "files": {"errors"},
    "plugins": {"errors", "types"},
    "stats": VOCABULARY,
    "encoder": VOCABULARY,
    "embedded": VOCABULARY | {"encoder"},
    "cli": VOCABULARY,
    "runs": TOOLS | {"llm"},
    "llm": VOCABULARY | {"encoder", "stats"},
    "operators": CALLS | {"embedded"},
    "rewards": CALLS | {"data"},
    "data": CALLS,
    "env": TASK,
    "iqn": TOOLS | {"env", "ppo"},
    "bandit": TOOLS | {"env", "iqn", "ppo"},
    "batching": VOCABULARY | {"stats"},
    "adapters": VOCABULARY,
    "analysis": TOOLS,
    "sizing": TOOLS | {"iqn", "ppo", "analysis"},
    "sweep": TOOLS | {"analysis"},
    "report": TOOLS | {"analysis", "sizing"},
    "sft": TASK | {"batching", "ppo"},
    "training": LEARNERS | {"embedded"},
    "evaluation": LEARNERS | {"embedded", "training"},
    "serve": ENV | {"embedded", "rewriter"},
    "answering": ENV | {"training"},
    "gym": VOCABULARY | {"batching", "cli"},
    "rewriter": (LEARNERS | {"embedded", "training"}) - {"__init__"},
    "page": TOOLS | {"analysis", "data", "embedded", "evaluation", "rewards"},
    "cluster": LEARNERS | {"analysis", "embedded", "evaluation", "sweep", "training"},
}
#: Command lines may import every room and the surface.
COMMANDS = {"commands", "__main__"}
TOP_LEVEL_MODULES = 6  # besides `__init__` and `__main__`


def room_of(path: Path) -> str:
    """Return the folder or module of query_mutator that a file belongs to; `__main__` files are command lines."""
    return "__main__" if path.stem == "__main__" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the rooms and top-level modules of ours that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [alias.name for alias in node.names]
            # `from query_mutator import operators` imports the room, not the package.
            found |= {f"query_mutator.{name}" for name in names} if node.module == "query_mutator" else {node.module}
    parts = [module.split(".") for module in found]
    ours = {part[1] if part[0] == "query_mutator" and len(part) > 1 else part[0] for part in parts}
    rooms = {*ALLOWED, *COMMANDS, "ppo"} - {"__init__"}
    return ours & (rooms | SURFACE)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    if room in COMMANDS:
        return
    assert room in ALLOWED, f"{path} is in no room of the table; add it with what it may import"
    assert imported(path) <= ALLOWED[room] | {room}


def test_every_room_of_the_table_exists() -> None:
    rooms = {room_of(path) for path in FILES}
    assert {*ALLOWED, *COMMANDS} == rooms


def test_the_table_has_no_circle() -> None:
    # Files are checked one by one, so a circle between rooms needs two entries that allow each other.
    pairs = {(one, other) for one, others in ALLOWED.items() for other in others if one in ALLOWED.get(other, set())}
    assert {(one, other) for one, other in pairs if one != other} == set()


def test_few_modules_stand_outside_the_rooms() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= TOP_LEVEL_MODULES


def test_every_room_says_what_it_offers() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path} has no docstring"
        stars = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
        assert not stars, f"{path} has a star import"
        names = [target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)]
        assert "__all__" in names, f"{path} does not say what it offers"


def _targets(node: ast.stmt) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []


@pytest.mark.parametrize("path", sorted((ROOT / "ppo").rglob("*.py")), ids=lambda path: path.name)
def test_ppo_imports_nothing_of_ours(path: Path) -> None:
    assert imported(path) <= {"ppo"}


def imports_in_functions() -> int:
    """Return the imports inside functions of the product, those under TYPE_CHECKING apart."""
    files = [*FILES, *(ROOT / "ppo").rglob("*.py"), *(ROOT / f"{name}.py" for name in SURFACE)]
    count = 0
    for path in files:
        waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
        while waiting:
            node, inside = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            count += inside and isinstance(node, (ast.Import, ast.ImportFrom))
            inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return count


def test_imports_inside_functions_are_rare() -> None:
    assert imports_in_functions() <= 120


@pytest.mark.parametrize(
    "module",
    ["query_mutator", "query_mutator.llm", "query_mutator.operators", "query_mutator.rewards", "query_mutator.data",
     "query_mutator.training.config", "query_mutator.embedded.server", "query_mutator.analysis.pages",
     "query_mutator.analysis.compare", "query_mutator.report.curve", "query_mutator.commands.main",
     "query_mutator.commands.analyze", "query_mutator.page.build", "ollama_utils", "rl_query_mutator_env",
     "train_query_mutator"],
)  # fmt: skip
def test_import_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
