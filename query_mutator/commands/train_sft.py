"""`qm train sft`: fine-tune a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from query_mutator.cli.common import rows_of, show
from query_mutator.cli.console import note
from query_mutator.sft.config import SftFlags


def train_sft(flags: SftFlags) -> None:
    """Train, and say where the model is."""
    from query_mutator.batching.distributed.config import DistributedConfig
    from query_mutator.sft.trainer import resumable, train

    is_main = DistributedConfig.from_env().is_main
    try:
        report = train(flags)
    except KeyboardInterrupt:
        if is_main and resumable(Path(flags.output)):
            note(f"go on with --resume {flags.output}")
        raise
    if is_main:
        show(flags, report, _text(report))


def _text(report: dict[str, Any]) -> str:
    shown = {name: value for name, value in report.items() if name not in ("notes", "output") and value is not None}
    rows = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in shown.items()}
    return rows_of({**rows, "serve it": f"--mutator-model hf:{report['model']}"})
