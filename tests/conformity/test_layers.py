"""The rooms of the tree and what each may import. A folder or file that the table does not name fails."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "query_mutator"
SURFACE = {"train_query_mutator", "rl_query_mutator_env", "ollama_utils", "benchmark_batching"}

VOCABULARY = {"errors", "registry", "types", "version"}
BASE = VOCABULARY | {"bounds", "files", "settings", "stats", "cli"}
CALLS = BASE | {"encoder", "llm"}
TASK = CALLS | {"confidence", "data", "forms", "operators", "reading", "rewards"}
ENV = TASK | {"env"}
LEARNERS = ENV | {"learners", "ppo"}
SESSION = LEARNERS | {"session", "testing"}
PLAN = SESSION | {"plan"}
EVALUATION = PLAN | {"evaluation"}
TRAINING = EVALUATION | {"training"}

#: Room -> the rooms it may import besides itself, from the bottom up.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"apply", "version"},
    "version": set(),
    "errors": set(),
    "types": {"errors"},
    "registry": {"errors", "types"},
    "bounds": {"ppo"},
    "settings": {"bounds", "types", "ppo"},
    "stats": VOCABULARY,
    "files": VOCABULARY | {"stats"},
    "cli": VOCABULARY | {"bounds", "files", "ppo", "settings"},
    "encoder": VOCABULARY,
    "testing": VOCABULARY | {"bounds", "files", "settings", "stats"},
    "llm": BASE - {"cli"} | {"encoder"},
    "reading": VOCABULARY | {"files", "stats"},
    "operators": CALLS | {"reading"},
    "forms": VOCABULARY | {"reading"},
    "rewards": CALLS | {"data", "reading"},
    "confidence": VOCABULARY | {"encoder", "files", "reading", "stats"},
    "data": CALLS,
    "env": TASK,
    "learners": ENV | {"ppo"},
    "session": LEARNERS | {"testing"},
    "plan": SESSION,
    "evaluation": PLAN,
    "training": EVALUATION,
    "adapters": set(),
    "apply": EVALUATION,
    "batching": BASE | {"ppo"},
    "lab": BASE | {"ppo"},
    "report": EVALUATION | {"lab"},
    "cluster": TRAINING | {"lab"},
}
#: Command lines may import every room and the surface.
COMMANDS = {"commands", "__main__"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports at any depth of a file's code."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported(path: Path) -> set[str]:
    """Return the rooms and top-level modules of ours that a file imports, at any depth of its code."""
    found = {alias.name for node in imports_of(path) if isinstance(node, ast.Import) for alias in node.names}
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from query_mutator import operators` imports the room, not the package.
            in_package = {f"query_mutator.{alias.name}" for alias in node.names}
            found |= in_package if node.module == "query_mutator" else {str(node.module)}
    parts = [module.split(".") for module in found]
    ours = {part[1] if part[0] == "query_mutator" and len(part) > 1 else part[0] for part in parts}
    return ours & ({*ALLOWED, *COMMANDS, "ppo"} - {"__init__"} | SURFACE)


def room_of(path: Path) -> str:
    """Return the folder or module of query_mutator that a file belongs to; `__main__` files are command lines."""
    return "__main__" if path.stem == "__main__" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
PRODUCT = [*FILES, *sorted((ROOT / "ppo").rglob("*.py")), *(ROOT / f"{name}.py" for name in sorted(SURFACE))]


def test_files_import_only_what_their_rooms_may() -> None:
    assert {room_of(path) for path in FILES} == {*ALLOWED, *COMMANDS}, "the table names other rooms than the tree has"
    allowed = {path: ALLOWED[room_of(path)] | {room_of(path)} for path in FILES if room_of(path) not in COMMANDS}
    allowed |= {path: {"ppo"} for path in (ROOT / "ppo").rglob("*.py")}
    offenders = {str(path): imported(path) - rooms for path, rooms in allowed.items()}
    assert {path: rooms for path, rooms in offenders.items() if rooms} == {}
    # Files are checked one by one, so a circle between rooms needs two entries that allow each other.
    pairs = {(one, other) for one, others in ALLOWED.items() for other in others - {one}}
    assert {(one, other) for one, other in pairs if (other, one) in pairs} == set()


#: What packages under environments/ may import: the environment, the extension point for operators, the test server.
PUBLIC = SURFACE | {"query_mutator", "query_mutator.errors", "query_mutator.operators", "query_mutator.testing"}


def test_an_environment_imports_no_inner_room() -> None:
    ours = ("query_mutator", "tests", "ppo", *SURFACE)
    for path in (ROOT / "environments").rglob("*.py"):
        modules = {node.module for node in imports_of(path) if isinstance(node, ast.ImportFrom) and not node.level}
        modules |= {alias.name for node in imports_of(path) if isinstance(node, ast.Import) for alias in node.names}
        assert {name for name in modules if name and name.partition(".")[0] in ours} <= PUBLIC, path


def test_every_room_says_what_it_offers() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        stars = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
        assert not stars, f"{path} has a star import"
        names = [target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)]
        assert "__all__" in names, f"{path} does not say what it offers"


def _targets(node: ast.stmt) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []


def module_of(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Return the modules of ours that each imports: at its top, in functions and for type checking."""
    graph: dict[str, set[str]] = {module_of(path): set() for path in PRODUCT}
    for path in PRODUCT:
        for node in imports_of(path):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [
                    f"{node.module}.{name}" if f"{node.module}.{name}" in graph else node.module or "" for name in names
                ]
            graph[module_of(path)] |= {name for name in names if name in graph} - {module_of(path)}
    return graph


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(import_graph()).prepare()  # a CycleError names the modules


def test_an_alias_is_defined_once() -> None:
    aliases = {"FloatArray", "DoubleArray", "IntArray", "BoolArray", "Json"}
    for path in set(FILES) - {PACKAGE / "types.py"} | {ROOT / f"{name}.py" for name in SURFACE}:
        body = tree_of(path).body
        names = {target.id for node in body for target in _targets(node) if isinstance(target, ast.Name)}
        assert not names & aliases, f"{path} defines {names & aliases} again; import it from types"


def test_imports_inside_functions_are_rare() -> None:
    count = 0
    waiting: list[tuple[ast.AST, bool]] = [(tree_of(path), False) for path in PRODUCT]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        count += inside and isinstance(node, (ast.Import, ast.ImportFrom))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    assert count <= 120


SIZING = "sizing, sizing.collecting, sizing.machine, sizing.sizes, sizing.workers"
LAB = f"{SIZING}, analysis, analysis.runs, analysis.report, analysis.compare, sweep, sweep.job, sweep.trials"
HELP = "import contextlib\nwith contextlib.suppress(SystemExit): main(['--help'])"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import query_mutator; query_mutator.Rewriter; query_mutator.Step", "torch gymnasium"),
        ("import query_mutator", "numpy"),
        ("import query_mutator.llm, query_mutator.operators, query_mutator.rewards", "torch"),
        ("import query_mutator.data, query_mutator.confidence, query_mutator.training.config", "torch"),
        ("import query_mutator.testing, query_mutator.batching, query_mutator.report.table", "torch"),
        ("import query_mutator.commands.analyze, query_mutator.report.build", "torch"),
        ("import rl_query_mutator_env, train_query_mutator", "torch"),
        ("; ".join(f"import query_mutator.lab.{name}" for name in LAB.split(", ")), "torch gymnasium"),
        ("import query_mutator.commands.main", "torch numpy pydantic"),
        ("import ollama_utils", "torch transformers sentence_transformers gymnasium numpy requests"),
        ("from query_mutator.encoder import HashEncoder; HashEncoder().encode(['a'])", "torch transformers"),
        (f"from ppo.__main__ import main\n{HELP}", "torch"),
        (f"from benchmark_batching import main\n{HELP}", "torch matplotlib gymnasium"),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str, heavy: str) -> None:
    check = f"{code}\nimport sys; sys.exit(' '.join(set({heavy.split()}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
