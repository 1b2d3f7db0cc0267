"""Run the trainer in this process and read what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from query_mutator.cli.console import exit_code
from query_mutator.files import read_json_lines
from train_query_mutator import main


def train(*flags: str) -> int:
    """Run the trainer's command line and return its exit code."""
    return exit_code(main, flags, prog="train")


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of one of a run's JSON-lines files."""
    return list(read_json_lines(run / f"{name}.jsonl"))


def summary(tmp_path: Path) -> dict[str, Any]:
    """Return the summary of the latest run."""
    found: dict[str, Any] = json.loads((the_run(tmp_path) / "summary.json").read_text())
    return found


def the_run(tmp_path: Path) -> Path:
    """Return the folder of the latest run."""
    return (tmp_path / "runs" / "latest").resolve()
