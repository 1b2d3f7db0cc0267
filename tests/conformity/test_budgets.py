"""The budgets of docs/explanation/architecture.md: no room outgrows its lines, and the pages keep to their words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
TOOLKITS = ("batching", "lab")


def budgets() -> dict[str, int]:
    """Return the bound in each row of the page's table of budgets."""
    section = PAGE.read_text(encoding="utf-8").partition("## Budgets")[2].partition("\n## ")[0]
    return {name: int(bound.replace(",", "")) for name, bound in re.findall(r"^([a-z,-]+) +([\d,]+)$", section, re.M)}


def lines_in(*paths: Path) -> int:
    """Return the lines of Python files, as `wc -l` counts them."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def sizes() -> dict[str, int]:
    """Return the size of each row: lines of `*.py` in a folder, those of all rooms but the toolkits, words of docs."""
    package = ROOT / "query_mutator"
    rooms = [path for path in sorted(package.iterdir()) if [*path.rglob("*.py")]]
    found = {room.name: lines_in(*room.rglob("*.py")) for room in rooms}
    found["top-level,-ppo"] = lines_in(*ROOT.glob("*.py"), *(ROOT / "ppo").rglob("*.py"), *package.glob("*.py"))
    toolkits = sum(found[name] for name in TOOLKITS)
    found["all-but-toolkits"] = sum(found.values()) - toolkits
    for name in ("tests", "benchmarks"):
        found[name] = lines_in(*(ROOT / name).rglob("*.py"))
    found["words-of-docs"] = sum(
        len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").rglob("*.md")
    )
    return found


def test_every_room_has_a_budget() -> None:
    assert set(budgets()) == set(sizes())


@pytest.mark.parametrize("name", sorted(budgets()))
def test_no_room_outgrows_its_budget(name: str) -> None:
    """Who raises a bound says in the commit what left for it."""
    assert sizes()[name] <= budgets()[name]
