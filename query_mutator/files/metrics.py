"""Every metric a run logs, and the writer of `metrics.jsonl` and TensorBoard event files.

The table is `metrics.tsv` next to this module; docs/reference/metrics.md shows it on the site. Keys are two words.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.files.json_lines import JsonLines

METRICS_FILE = "metrics.jsonl"

#: By key: unit, `better` (the direction of improvement, "-" for neither), meaning, what to watch for.
METRICS: Mapping[str, Mapping[str, str]] = {
    row["key"]: row
    for row in csv.DictReader(
        Path(__file__).with_name("metrics.tsv").read_text(encoding="utf-8").splitlines(), delimiter="\t"
    )
}


class MetricsWriter:
    """Append rows `{"step", "wall_s", "<key>": number}` to `metrics.jsonl`, and their numbers to `tensorboard/`.

    A key that is neither in METRICS nor `custom/...` is a UsageError; numbers that are not finite are dropped.
    """

    def __init__(self, folder: Path, *, cut_at: int | None = None, first_step: int = 0) -> None:
        self.rows = JsonLines(folder / METRICS_FILE, cut_at=cut_at)
        installed = importlib.util.find_spec("tensorboard") is not None  # a plain install writes the rows alone
        self._events = EventWriter(folder / "tensorboard", first_step=first_step) if installed else None

    def write(self, values: Mapping[str, float], *, step: int, wall_s: float) -> None:
        """Write one row; DiskError when it cannot be written."""
        for key in values:
            if key not in METRICS and not key.startswith("custom/"):
                raise UsageError(f"no metric {key}; call it custom/{key.rpartition('/')[2]}")
        numbers = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        self.rows.append({"step": step, "wall_s": round(wall_s, 3), **numbers})
        if self._events is not None:
            self._events.write(numbers, step=step)

    def close(self) -> None:
        """Close the files; idempotent."""
        self.rows.close()
        if self._events is not None:
            self._events.close()


class EventWriter:
    """Write scalars to a TensorBoard event file, in the calling thread so that a full disk is reported at once."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        with disk_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:  # on resume, TensorBoard drops the points of earlier files from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the scalars of one step."""
        values = [self._summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: Any) -> None:
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()
