"""Registries: names of the package, of a plugin and of installed distributions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.errors import UsageError
from query_mutator.registry import Registry


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


#: The documented group of each kind -> where its registry is.
GROUPS = {
    "operators": "query_mutator.operators.OPERATORS",
    "forms": "query_mutator.forms.FORMS",
    "rewards": "query_mutator.rewards.PARTS",
    "backends": "query_mutator.llm.backends.BACKENDS",
    "learners": "query_mutator.learners.named.LEARNERS",
    "callbacks": "query_mutator.training.callbacks.CALLBACKS",
}


@pytest.mark.usefixtures("installed")
def test_each_kind_has_its_documented_group(tmp_path: Path) -> None:
    groups = "".join(f"[query_mutator.{group}]\nmine = colors:TEAL\n" for group in GROUPS)
    (tmp_path / "colors-1.0.dist-info" / "entry_points.txt").write_text(groups)
    code = "import pkgutil, sys\nfor name in sys.argv[1:]: print(pkgutil.resolve_name(name).get('mine'))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    said = subprocess.run([sys.executable, "-c", code, *GROUPS.values()], env=env, capture_output=True, check=True)
    assert said.stdout.split() == [b"#008080"] * len(GROUPS)


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
