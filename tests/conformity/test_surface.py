"""Frozen surfaces: the names of the documented modules, exit codes, and the files of the wheel.

A deliberate change: `python -m tests.conformity.test_surface` writes exports.json again; the diff shows the change.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from query_mutator import errors
from query_mutator.cli.console import exit_code

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = Path(__file__).with_name("exports.json")
ERRORS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.QueryMutatorError)]
SURFACE = ("train_query_mutator.py", "rl_query_mutator_env.py", "ollama_utils.py", "benchmark_batching.py")
#: Modules whose names are documented: the surface, the extension points and the toolkits.
PROMISED = {"query_mutator", "query_mutator.errors", "query_mutator.testing", "query_mutator.batching"}
PROMISED |= {f"query_mutator.{name}" for name in ("operators", "forms", "rewards", "learners", "lab", "lab.sizing")}


def exports() -> dict[str, list[str]]:
    """Return the public names of every room and of the modules at the top: `__all__`, else what the module defines."""
    files = [*ROOT.glob("query_mutator/**/__init__.py"), *ROOT.glob("ppo/[!_]*.py"), *(ROOT / one for one in SURFACE)]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    found = {}
    for name in sorted(names | PROMISED):
        module = importlib.import_module(name)
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
        found[name] = sorted(getattr(module, "__all__", [key for key in own if not key.startswith("_")]))
    return found


def promised() -> dict[str, list[str]]:
    rooms = PROMISED | {path.removesuffix(".py") for path in SURFACE}
    return {name: names for name, names in exports().items() if name in rooms or name.startswith("ppo.")}


def test_promised_names_are_the_recorded_ones() -> None:
    assert promised() == json.loads(EXPORTS.read_text(encoding="utf-8"))


def test_every_exported_name_exists() -> None:
    for module, names in exports().items():
        for name in names:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")  # a room may offer a module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Return the tracked files, and the folder with the sdist and the wheel that was built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:  # a copy: building leaves folders behind
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(build, check=True, timeout=240, capture_output=True, cwd=out)
    return tracked, out


def test_the_wheel_holds_the_tracked_files_and_no_others(built: tuple[list[str], Path]) -> None:
    tracked, out = built
    (wheel,) = out.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked if name.startswith(("query_mutator/", "ppo/")) or name in SURFACE}


def test_the_sdist_holds_code_tests_and_pages(built: tuple[list[str], Path]) -> None:
    tracked, out = built
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("query_mutator/", "ppo/", "tests/", "docs/", "examples/", "scripts/", "benchmarks/")
    wanted = {name for name in tracked if name.startswith(folders) or name in (*SURFACE, "LICENSE", "CHANGELOG.md")}
    assert wanted - packed == set()


def test_a_package_index_would_accept_metadata_and_readme(built: tuple[list[str], Path]) -> None:
    _, out = built
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, out.iterdir())]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


if __name__ == "__main__":
    EXPORTS.write_text(json.dumps(promised(), indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_a_command_ends_with_the_code_of_its_error(kind: type[Exception]) -> None:
    def command(argv: object) -> int:
        raise kind("x")

    assert exit_code(command, [], prog="qm") == (3 if kind is errors.TooManyFailuresError else 2)
