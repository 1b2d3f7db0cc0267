"""The package as installed, and registries: names of the package, of a plugin and of installed distributions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from query_mutator.errors import UsageError
from query_mutator.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"train", "batching", "lab", "sft", "ray", "parquet", "llama", "optuna", "dev"}


def ranges(*groups: str) -> dict[str, Requirement]:
    """Return the requirements of some extras, or of the package itself, by canonical name."""
    lines = [line for group in groups for line in PROJECT["optional-dependencies"][group]] or PROJECT["dependencies"]
    found = {canonicalize_name(one.name): one for one in map(Requirement, lines)}
    return {name: one for name, one in found.items() if name != PROJECT["name"]}  # an extra may hold another


def pins(name: str) -> dict[str, str]:
    """Return the exact versions of a requirements file by canonical name."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all([one.operator for one in pin.specifier] == ["=="] for pin in found)
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in found}


@pytest.mark.parametrize("extras", [(), ("train",), tuple(sorted(EXTRAS))], ids=len)
def test_the_lock_has_one_version_within_each_range(extras: tuple[str, ...]) -> None:
    locked = pins("requirements.txt") | (pins("requirements-dev.txt") if len(extras) > 1 else {})
    wanted = ranges(*extras)
    assert wanted.keys() <= locked.keys()
    assert [name for name, one in wanted.items() if not one.specifier.contains(locked[name])] == []


def test_versions_that_run_code_of_an_encoder_folder_are_out_of_range() -> None:
    assert not ranges("train")["sentence-transformers"].specifier.contains("5.9.0")


@pytest.mark.parametrize("one", [*ranges().values(), *ranges(*sorted(EXTRAS)).values()], ids=str)
def test_every_range_has_two_ends(one: Requirement) -> None:
    assert {spec.operator for spec in one.specifier} == {">=", "<"}


def test_extras_are_those_that_messages_and_pages_name() -> None:
    assert set(PROJECT["optional-dependencies"]) == EXTRAS
    files = [*ROOT.glob("query_mutator/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {match for file in files for match in re.findall(r"query-mutator\[([\w,-]+)\]", file.read_text("utf-8"))}
    assert {extra for names in named for extra in names.split(",")} <= EXTRAS


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a distribution with two entry points on the path; the second one cannot be loaded."""
    info = tmp_path / "colors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: colors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[test.colors]\nteal = colors:TEAL\n\n[test.broken]\nmud = colors:MUD\n")
    (tmp_path / "colors.py").write_text("TEAL = '#008080'\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_an_installed_name_is_found_but_not_among_the_registered_ones() -> None:
    registry: Registry[str] = Registry("color", group="test.colors")
    registry.add("red", "#ff0000")
    assert registry.get("teal") == "#008080"
    assert registry.names() == ["red", "teal"]
    assert registry.registered() == ["red"]


@pytest.mark.usefixtures("installed")
def test_the_packages_own_name_wins() -> None:
    registry: Registry[str] = Registry("color", group="test.colors")
    registry.add("teal", "ours")
    assert registry.names() == ["teal"]
    assert registry.get("teal") == "ours"


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_cannot_be_loaded_names_its_package() -> None:
    with pytest.raises(UsageError, match="color 'mud' of colors cannot be loaded"):
        Registry("color", group="test.broken").names()


def test_a_name_taken_twice_is_an_error_and_a_typo_lists_the_known_names() -> None:
    registry: Registry[str] = Registry("color")
    registry.add("red", "#ff0000")
    with pytest.raises(ValueError, match="'red' is registered already"):
        registry.add("red", "#fe0000")
    with pytest.raises(UsageError, match=r"unknown color 'rad' \(did you mean 'red'\?\); known: red"):
        registry.get("rad")


#: Packages that a plain install does without.
MISSING = [
    "torch", "gymnasium", "transformers", "sentence_transformers", "tokenizers", "huggingface_hub", "tensorboard",
    "matplotlib", "yaml", "pydantic", "websockets", "scipy", "sklearn",
]  # fmt: skip
#: What using a policy or a plan takes; the other commands may need an extra.
USING = {
    "init",
    "check",
    "doctor",
    "plan",
    "eval",
    "rewrite",
    "batch",
    "serve",
    "report",
    "show",
    "judge",
    "test-server",
}


def test_a_plain_install_has_what_using_takes_and_names_the_extra_of_every_other_command() -> None:
    code = f"""
import sys
sys.modules |= dict.fromkeys({MISSING!r})
from query_mutator.cli.console import exit_code
from query_mutator.cli.registry import COMMANDS
import query_mutator.report.table, query_mutator.lab.analysis.runs
for name, command in COMMANDS.items():
    if exit_code(lambda argv: 0 * bool(command.run), [], prog=name):
        print(name)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    needing = set(found.stdout.splitlines())
    assert found.returncode == 0, found.stderr
    assert not needing & USING
    hints = found.stderr.splitlines()
    named = re.compile(r'this needs \w+: pip install "query-mutator\[(train|batching|lab)\]"$')
    assert [bool(named.search(line)) for line in hints] == [True] * len(needing)
