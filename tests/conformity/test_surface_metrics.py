"""The keys of metrics are frozen in metrics.txt, and the page about them on the site has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

from query_mutator.files.metrics import METRICS
from scripts.docs_hook import on_page_markdown

FROZEN = Path(__file__).with_name("metrics.txt")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def test_keys_are_frozen() -> None:
    assert list(METRICS) == FROZEN.read_text(encoding="utf-8").splitlines()


def test_every_key_has_a_row_in_the_docs_and_every_row_a_key() -> None:
    page = on_page_markdown(DOCS.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([a-z]+/[^`]+)` \|(.+)\|$", page, re.M)
    documented = {key: tuple(cell.strip() for cell in cells.split("|")) for key, cells in rows}
    assert documented == {
        key: (metric.unit, metric.better, metric.meaning, metric.watch) for key, metric in METRICS.items()
    }


def test_keys_are_two_words() -> None:
    assert all(re.fullmatch(r"[a-z]+/[A-Za-z_]+", key) for key in METRICS)
