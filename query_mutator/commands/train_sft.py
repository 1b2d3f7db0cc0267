"""`qm train sft`: fine-tune a language model."""

from __future__ import annotations

from pathlib import Path

from query_mutator.batching.training.config import SftFlags
from query_mutator.cli.console import note
from query_mutator.cli.outputs import rows_of, show


def train_sft(flags: SftFlags) -> None:
    """Train, and print where the model is."""
    from query_mutator.batching.training.model import checkpoints_in
    from query_mutator.batching.training.trainer import train

    try:
        report = train(flags)
    except KeyboardInterrupt:
        if checkpoints_in(Path(flags.output)):
            note(f"resume with --resume {flags.output}")
        raise
    shown = {name: value for name, value in report.items() if name not in ("notes", "output") and value is not None}
    rows = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in shown.items()}
    show(flags, report, rows_of(rows))
