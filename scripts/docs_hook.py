"""Hooks of mkdocs.yml: add the pages of flags and the table of metrics, drop the ` needs: ...` mark of code blocks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without being installed

from scripts import flag_pages

METRICS_MARK = "<!-- metrics.tsv -->"

_FENCE = re.compile(r"^( *```\w+) [^\n`]+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page with the flags of every command."""
    for name, text in flag_pages.pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page as Python-Markdown reads it."""
    text = _FENCE.sub(r"\1", markdown)
    return text.replace(METRICS_MARK, metrics_table()) if METRICS_MARK in text else text


def metrics_table() -> str:
    """Return the table of every metric, in Markdown."""
    from query_mutator.files.run_dir import METRICS

    head = ["| key | unit | better | meaning | watch for |", "|---|---|---|---|---|"]
    rows = ["| `{key}` | {unit} | {better} | {meaning} | {watch} |".format_map(one) for one in METRICS.values()]
    return "\n".join([*head, *rows])
