"""`qm train`: train_query_mutator.py under the name of the one command."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.commands.main import main as qm
from query_mutator.training.config import TrainConfig  # noqa: F401  cli.registry reads the flags here

FROM_LOGS = "--from-logs"


def train(argv: Sequence[str]) -> int:
    """Train with the flags of `argv`, or learn from logs as `qm plan` does; return the exit code."""
    if any(word.partition("=")[0].replace("_", "-") == FROM_LOGS for word in argv):
        return qm(["plan", *argv])
    from train_query_mutator import main  # at the top it would cost `qm train sft` half a second

    return main(argv, prog="qm train")
