"""`qm` in this process."""

from __future__ import annotations

from pathlib import Path

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main


def qm(*argv: str | Path) -> int:
    """Run a command line of `qm` and return its exit code."""
    return exit_code(qm_main, [str(word) for word in argv], prog="qm")
