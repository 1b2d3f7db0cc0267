"""The folder of one run: `<save_dir>/<time>-<name>/`, always a new one.

`<save_dir>/latest` links to the newest run that holds something: a finished step, or a plan.

config.json          flags, versions, commit, hardware, command line, who answered, which encoder, plugins
metrics.jsonl        {"step", "wall_s", "<key>": number} a row
tensorboard/         the same numbers
transcripts.jsonl    one StepRecord a row
resume.pt            the newest state of the training, the one before as resume.previous.pt (session/checkpoint.py)
policy.qm            its policy with all that acting needs (session/policy_file.py)
replies.sqlite       every reply and action of the run (llm/store.py)
summary.json         the evaluation and the cost of the run
evaluation.jsonl     a row per method and question of the evaluation
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from query_mutator.errors import CheckpointError
from query_mutator.files import LOCK, decode_object, disk_errors, read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonLines
from query_mutator.files.metrics import METRICS_FILE, MetricsWriter
from query_mutator.types import StepRecord

logger = logging.getLogger(__name__)


LATEST = "latest"
SUMMARY = "summary.json"
STORE = "replies.sqlite"
T = TypeVar("T")
CONFIDENCE = "confidence.npz"  # of qm plan --from-logs, which may leave no policy

RunState = Literal["running", "finished", "interrupted", "killed"]

_TAIL_BYTES = 1 << 20  # of metrics.jsonl: about 500 rows


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
        self.metrics_path = path / "metrics.jsonl"
        self.store_path, self.evaluation_path = path / STORE, path / "evaluation.jsonl"
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
        return cls(path)

    def take_latest(self) -> None:
        """Point `latest` to this run; idempotent."""
        if not self._is_latest:
            self._is_latest = True
            _point_latest_to(self.path)

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


def first_readable(checkpoints: Sequence[Path], read: Callable[[Path], T]) -> T:
    """Return what `read` makes of the first checkpoint that it can read; warn of those before it."""
    for checkpoint in checkpoints[:-1]:
        try:
            return read(checkpoint)
        except CheckpointError as error:
            logger.warning("%s; using the previous one", error)
    return read(checkpoints[-1])


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


def run_state(folder: Path) -> RunState:
    """Return the state of a run: its lock names the process that writes it, its summary is written last.

    A summary of fewer steps than the metrics have is that of an earlier part of the run. A process on another host
    cannot be checked and counts as running.
    """
    locked, done = _mtime(folder / LOCK), _mtime(folder / SUMMARY)
    if locked is not None:
        if done is not None and done >= locked:
            return "finished"
        return "running" if _may_be_alive(folder / LOCK) else "killed"
    if done is None or _summarized_steps(folder / SUMMARY) < last_values(folder / METRICS_FILE, ["step"]).get(
        "step", 0
    ):
        return "interrupted"
    return "finished"


def _summarized_steps(path: Path) -> float:
    try:
        steps = decode_object(path.read_bytes()).get("env_steps")
    except (OSError, ValueError):
        return math.inf
    return steps if isinstance(steps, (int, float)) else math.inf


def last_values(path: Path, keys: Collection[str]) -> dict[str, float]:
    """Return the last number under each key in a metrics.jsonl; only the end of a long file is read."""
    found: dict[str, float] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # a line that was cut off
            row = decode_object(line)
            found = {key: row[key] for key in keys if isinstance(row.get(key), (int, float))} | found
        if len(found) == len(keys):
            break
    return found


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _may_be_alive(lock: Path) -> bool:
    """Return whether the process that a lock names may be alive."""
    try:
        pid, host, *_ = [*lock.read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
        if host != socket.gethostname():
            return True
        os.kill(int(pid), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    except (OSError, ValueError):  # another user's process, a lock that is just being written
        return True
    return True
