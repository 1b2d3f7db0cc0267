"""The folder of one run: `<save_dir>/<time>-<name>/`, always a new one.

`<save_dir>/latest` links to the newest run that holds something: a finished step, or a plan.

config.json          flags, versions, commit, hardware, command line, who answered, which encoder, plugins
metrics.jsonl        {"step", "wall_s", "<key>": number} a row
tensorboard/         the same numbers
transcripts.jsonl    one StepRecord a row
checkpoints/         step_<n>.pt
policy.qm            the newest checkpoint's policy with all that acting needs (session/policy_file.py)
journal/             calls and actions since the last two checkpoints (session/journal.py)
summary.json         the evaluation and the cost of the run
evaluation.jsonl     a row per method and question of the evaluation
learning_curve.png
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from query_mutator.errors import CheckpointError
from query_mutator.files import disk_errors, read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonLines
from query_mutator.files.metrics import MetricsWriter
from query_mutator.types import StepRecord

logger = logging.getLogger(__name__)

LATEST = "latest"
SUMMARY = "summary.json"
CONFIDENCE = "confidence.npz"  # of qm plan --from-logs, which may leave no policy
T = TypeVar("T")

_CHECKPOINT = re.compile(r"step_(\d+)\.pt")


class RunDir:
    """A run folder that is being written."""

    def __init__(
        self,
        path: Path,
        *,
        first_step: int = 0,
        transcripts_bytes: int | None = None,
        metrics_bytes: int | None = None,
    ) -> None:
        """Open the files of a folder. On resume, truncate the row files to these lengths."""
        self.path = path
        self.config_path, self.summary_path = path / "config.json", path / SUMMARY
        self.metrics_path, self.curve_path = path / "metrics.jsonl", path / "learning_curve.png"
        self.journal_path, self.evaluation_path = path / "journal", path / "evaluation.jsonl"
        self.confidence_path = path / "p_right.pt"
        self.transcripts = JsonLines(path / "transcripts.jsonl", cut_at=transcripts_bytes)
        self._records: list[StepRecord] = []
        self._is_latest = first_step > 0
        self.metrics = MetricsWriter(path, cut_at=metrics_bytes, first_step=first_step)

    @classmethod
    def create(cls, save_dir: str | Path, name: str) -> Self:
        """Create a new folder; DiskError when it cannot be created."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        with disk_errors(save_dir):
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            path = _make_new(Path(save_dir), stem)
            (path / "checkpoints").mkdir()
        return cls(path)

    def take_latest(self) -> None:
        """Point `latest` to this run; idempotent."""
        if not self._is_latest:
            self._is_latest = True
            _point_latest_to(self.path)

    def checkpoint_path(self, env_steps: int) -> Path:
        """Return the path of the checkpoint after this many environment steps."""
        return self.path / "checkpoints" / f"step_{env_steps}.pt"

    def add_record(self, record: StepRecord) -> None:
        """Buffer one step of the transcript until `write_records`."""
        self._records.append(record)

    def write_records(self) -> list[StepRecord]:
        """Append the buffered steps to the transcript, flush them and return them; `latest` is this run then."""
        records, self._records = self._records, []
        self.transcripts.append(*(record.to_json() for record in records))
        if records:
            self.take_latest()
        return records

    def write_config(self, config: Mapping[str, Any], *, resumed_at: int = 0) -> None:
        """Write config.json; a resumed run adds an entry under `resumed`."""
        before: dict[str, Any] = {}
        if self.config_path.exists():
            before = read_checked_json(self.config_path)
        started, resumed = before.get("started", _now()), before.get("resumed", [])
        if resumed_at:
            resumed.append({"at_step": resumed_at, "command_line": config.get("command_line"), "time": _now()})
        write_checked_json(self.config_path, {**config, "started": started, "resumed": resumed})

    def sync(self) -> None:
        """Sync all rows to disk."""
        self.transcripts.sync()
        self.metrics.rows.sync()

    def close(self) -> None:
        """Close the files; idempotent."""
        self.transcripts.close()
        self.metrics.close()


def check_name(name: str) -> None:
    """Raise a ValueError for a name that cannot be part of a folder's."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name={name!r} must be usable in a folder's name; try letters, digits and -")


def earlier_runs(save_dir: str | Path, flags: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the run folders in `save_dir` whose config.json has these flags, the newest first."""
    wanted = json.loads(json.dumps(flags))
    paths = sorted(Path(save_dir).glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for run in (path.parent for path in paths if not path.parent.is_symlink()):
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            kept = json.loads((run / "config.json").read_bytes())["flags"]
            if {name: kept.get(name) for name in wanted} == wanted:
                yield run


def checkpoints_in(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, the newest first."""
    found = [
        (int(match[1]), path)
        for path in (run / "checkpoints").glob("*.pt")
        if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def newest_checkpoint(run: Path, read: Callable[[Path], T]) -> T:
    """Return what `read` makes of the newest checkpoint that it can read, and warn of those it cannot.

    Raises a CheckpointError where there is none.
    """
    candidates = checkpoints_in(run)
    if not candidates and (run / CONFIDENCE).exists():
        raise CheckpointError(
            f"{run} has no policy: a log taught it P(right) and an order of prompts that are no forms"
        )
    if not candidates and ((run / "checkpoints").is_dir() or (run / "config.json").exists()):
        raise CheckpointError(f"{run} was stopped before its first checkpoint, there is nothing to resume; start again")
    if not candidates:
        raise CheckpointError(f"{run}: no checkpoint in it; give a run folder such as runs/latest, or a .pt")
    for candidate in candidates[:-1]:
        try:
            return read(candidate)
        except CheckpointError as error:
            logger.warning("%s; using the previous one", error)
    return read(candidates[-1])


def steps_of(checkpoint: Path, *, default: int = 0) -> int:
    """Return the environment steps in a checkpoint's name, or `default` for another name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else default


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_new(folder: Path, stem: str) -> Path:
    """Create `stem`, or `stem-2`, `stem-3`, ... when runs start within the same second."""
    number = 1
    while True:
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _point_latest_to(path: Path) -> None:
    """Replace the link atomically; without one (no links, or something else has the name) only warn."""
    link = path.parent / LATEST
    partial = path.parent / f".{LATEST}.{os.getpid()}"
    try:
        partial.symlink_to(path.name)
        partial.replace(link)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logger.warning("%s does not point to %s (%s)", link, path.name, error.strerror)
