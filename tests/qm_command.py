"""`qm` in this process."""

from __future__ import annotations

from pathlib import Path

from query_mutator.cli import main as qm_main
from query_mutator.console import exit_code


def qm(*argv: str | Path) -> int:
    """Run a command line of `qm` and return its exit code."""
    return exit_code(qm_main, [str(word) for word in argv], prog="qm")
