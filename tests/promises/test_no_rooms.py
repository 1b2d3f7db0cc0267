"""The promises know commands, HTTP and documented names only, and each is one sentence with a break that shows it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PRODUCT = {"query_mutator", "ppo", "rl_query_mutator_env", "train_query_mutator", "ollama_utils", "benchmark_batching"}
PUBLIC = {
    *PRODUCT,
    "query_mutator.batching",
    "query_mutator.lab",
    "query_mutator.testing",
    "query_mutator.adapters.sb3",
}
FILES = sorted(HERE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports, at its top or later, by a statement or `importlib`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import is absolute"
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func) and node.args:
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return found


def public_names(module: str) -> set[str] | None:
    """Return `__all__` of a package of the product, read without importing it; None where it has none."""
    path = HERE.parents[1] / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_no_promise_imports_an_inner_room(path: Path) -> None:
    """A test of a promise imports documented names only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for module in imported(tree):
        first = module.split(".")[0]
        assert first not in PRODUCT or module in PUBLIC, f"{path.name} imports {module}"
        assert first != "tests" or module.startswith("tests.promises"), f"{path.name} imports {module}"
        assert first != "benchmarks", f"{path.name} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PUBLIC:
            public = public_names(node.module)
            names = {alias.name for alias in node.names}
            assert public is None or names <= public, f"{path.name}: {node.module} does not offer {names - public}"


def promises_in(path: Path) -> dict[str, str | None]:
    """Return the tests of a file with their docstrings."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: ast.get_docstring(node) for node in functions if node.name.startswith("test_")}


def test_each_promise_is_one_sentence_with_a_break_that_turns_it_red() -> None:
    """Every test here states its promise in its docstring, and breaks/ has a one-line break for it."""
    own = {f"{path.name}::{name}": doc for path in FILES for name, doc in promises_in(path).items()}
    assert not [name for name, doc in own.items() if not doc]
    files = (HERE / "breaks").glob("*.toml")
    rows = [row for file in files for row in tomllib.loads(file.read_text(encoding="utf-8"))["break"]]
    named = {row["test"].split("[")[0] for row in rows}
    assert named <= own.keys(), "breaks/ names tests that do not exist"
    missing = own.keys() - named - {name for name in own if name.startswith(Path(__file__).name)}
    assert not missing, f"without a break: {sorted(missing)}"
    gone = [row["old"] for row in rows if (HERE.parents[1] / row["file"]).read_text("utf-8").count(row["old"]) != 1]
    assert not gone, f"lines of breaks/ that are not there, or not once: {gone}"
