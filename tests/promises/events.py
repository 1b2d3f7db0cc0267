"""Event files for tests, written by TensorBoard's own record writer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def write_events(
    folder: Path,
    rows: Iterable[tuple[int, float, Mapping[str, float]]],
    *,
    name: str = "0",
    began: float = 1e9,
    restart: int | None = None,
) -> Path:
    """Write rows of (step, seconds since `began`, numbers) as a trainer would; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{name}"
    with path.open("wb") as file:
        records = RecordWriter(file)
        records.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        if restart is not None:
            log = SessionLog(status=SessionLog.START)
            records.write(Event(wall_time=began, step=restart, session_log=log).SerializeToString())
        for step, wall_s, numbers in rows:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            event = Event(wall_time=began + wall_s, step=step, summary=Summary(value=values))
            records.write(event.SerializeToString())
    return path


def write_run(folder: Path, numbers: Mapping[str, Iterable[float]], *, every: int = 100, **config: object) -> Path:
    """Write one point of every tag each `every` steps, ten seconds apart, and settings if any; return the folder."""
    columns = zip(*numbers.values(), strict=True)
    rows = [
        ((place + 1) * every, 10.0 * (place + 1), dict(zip(numbers, values, strict=True)))
        for place, values in enumerate(columns)
    ]
    write_events(folder, rows)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
