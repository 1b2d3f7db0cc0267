"""The folder of one run: `<save_dir>/<time>-<name>/`, never an existing one; `<save_dir>/latest` points to it.

config.json          flags, versions, commit, hardware, command line, who answered, which encoder
metrics.jsonl        {"step", "wall_s", "<key>": number} a row
tensorboard/         the same numbers
transcripts.jsonl    one StepRecord a row
checkpoints/         step_<n>.pt
journal/             calls and actions since the last two checkpoints (journal.py)
summary.json         the evaluation and what the run cost
learning_curve.png
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from query_mutator.files import JsonLines, disk_errors, write_json
from query_mutator.runs.metrics import MetricsWriter
from query_mutator.types import StepRecord

logger = logging.getLogger(__name__)

LATEST = "latest"
SUMMARY = "summary.json"
_CHECKPOINT = re.compile(r"step_(\d+)\.pt")


class RunDir:
    """A run folder that is being written; files that are replaced are replaced whole, by rename."""

    def __init__(
        self,
        path: Path,
        *,
        first_step: int = 0,
        transcripts_bytes: int | None = None,
        metrics_bytes: int | None = None,
    ) -> None:
        """Open a folder's files; to go on in it, say where and to which lengths its row files are cut back."""
        self.path = path
        self.transcripts = JsonLines(path / "transcripts.jsonl", cut_at=transcripts_bytes)
        self._records: list[StepRecord] = []
        self.metrics = MetricsWriter(path, cut_at=metrics_bytes, first_step=first_step)

    @classmethod
    def create(cls, save_dir: str | Path, name: str) -> Self:
        """Make a new folder and point `latest` to it; DiskError when it cannot be made."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        with disk_errors(save_dir):
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            path = _make_new(Path(save_dir), stem)
            (path / "checkpoints").mkdir()
        _point_latest_to(path)
        return cls(path)

    @property
    def config_path(self) -> Path:
        """Where the run's settings are."""
        return self.path / "config.json"

    @property
    def summary_path(self) -> Path:
        """Where the results are."""
        return self.path / SUMMARY

    @property
    def metrics_path(self) -> Path:
        """Where the rows of metrics are."""
        return self.path / "metrics.jsonl"

    @property
    def curve_path(self) -> Path:
        """Where the picture is."""
        return self.path / "learning_curve.png"

    def checkpoint_path(self, env_steps: int) -> Path:
        """Return where the checkpoint after so many environment steps belongs."""
        return self.path / "checkpoints" / f"step_{env_steps}.pt"

    @property
    def journal_path(self) -> Path:
        """Where calls are written down before they are used."""
        return self.path / "journal"

    def add_record(self, record: StepRecord) -> None:
        """Take one step for the transcript; `write_records` writes those taken."""
        self._records.append(record)

    def write_records(self) -> None:
        """Append the steps taken to the transcript; they are with the operating system when this returns."""
        records, self._records = self._records, []
        self.transcripts.append(*(record.to_json() for record in records))

    def write_config(self, config: Mapping[str, Any], *, resumed_at: int = 0) -> None:
        """Write config.json; that of a run gone on with keeps where and how that was done."""
        before: dict[str, Any] = {}
        if self.config_path.exists():
            before = json.loads(self.config_path.read_text(encoding="utf-8"))
        started, resumed = before.get("started", _now()), before.get("resumed", [])
        if resumed_at:
            resumed.append({"at_step": resumed_at, "command_line": config.get("command_line"), "time": _now()})
        self.write_json(self.config_path, {**config, "started": started, "resumed": resumed})

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        """Replace a JSON file; numbers that are not finite become null."""
        write_json(path, data)

    def sync(self) -> None:
        """Have all rows on the disk itself."""
        self.transcripts.sync()
        self.metrics.rows.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        self.transcripts.close()
        self.metrics.close()


def checkpoints_in(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, the newest first."""
    found = [
        (int(match[1]), path)
        for path in (run / "checkpoints").glob("*.pt")
        if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def steps_of(checkpoint: Path) -> int:
    """Return the environment steps in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_new(folder: Path, stem: str) -> Path:
    """Make `stem`, or `stem-2`, `stem-3`, ... when runs begin within the same second."""
    number = 1
    while True:
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _point_latest_to(path: Path) -> None:
    """Replace the link by rename; a file system without links, or something else of that name, costs only the link."""
    link = path.parent / LATEST
    partial = path.parent / f".{LATEST}.{os.getpid()}"
    try:
        partial.symlink_to(path.name)
        partial.replace(link)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logger.warning("%s does not point to %s (%s)", link, path.name, error.strerror)
