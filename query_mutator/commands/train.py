"""`qm train`: train_query_mutator.py under the name of the one command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from query_mutator.training.config import TrainConfig


def train(argv: Annotated[Sequence[str], TrainConfig]) -> int:
    """Train with the flags of `argv`; return the exit code."""
    from train_query_mutator import main  # at the top it would cost `qm train sft` half a second

    return main(argv, prog="qm train")
