"""Series, and the TensorBoard event files that hold them: every scalar, in either style, texts and settings of a run.

    length u64 | masked CRC-32C of the length u32 | an Event | its masked CRC-32C u32

A scalar is a `simple_value`, or a tensor of one number whose plugin is "scalars" or missing. TensorBoard's classes
parse the events. The frames are read here: its own loader also verifies the checksums of records, in Python, and takes
five times as long (docs/log.md). The checksums of lengths are verified, so that reading stops at a damaged frame.
"""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["EVENTS", "EventFile", "Floats", "Ints", "Reducer", "Series", "merged", "read_event_file"]

EVENTS = "*tfevents*"
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_SESSION_START = 1
_SAME_SCALE = 2  # how far the last steps of two tags that count the same may be apart

_SCALARS = ("", "scalars")  # plugins of scalars
_HPARAMS = "hparams"
_FLOAT = 1  # the type of nearly all tensors of one number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: ways in which a series becomes one number
Reducer = Literal[
    "last", "best_so_far", "mean_last_k", "auc", "time_to_threshold", "rate", "mean", "median", "max", "min"
]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one tag [n]; `wall` is in seconds since 1970 as read from a file, since the run's t0 in a Run."""

    step: Ints
    wall: Floats
    value: Floats  # may hold NaN and infinities

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def joined(cls, parts: Iterable[Series]) -> Series:
        """Return several parts as one."""
        columns = zip(*((part.step, part.wall, part.value) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, rows: Ints | NDArray[np.bool_]) -> Series:
        """Return some of the points."""
        return Series(self.step[rows], self.wall[rows], self.value[rows])

    def since(self, t0: float) -> Series:
        """Return the points with `wall` relative to `t0`."""
        return Series(self.step, self.wall - t0, self.value)

    def by_step(self) -> Series:
        """Return the points in rising steps, the latest of those that share one."""
        if (np.diff(self.step) > 0).all():
            return self
        order = np.lexsort((np.arange(len(self)), self.wall, self.step))
        last = np.append(np.diff(self.step[order]) > 0, True)
        return self.take(order[last])


# --- event files ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EventFile:
    """The content of an event file; from the steps in `restarts` on, it replaces earlier files."""

    scalars: dict[str, Series] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # tag -> its last text
    hparams: dict[str, Any] = field(default_factory=dict)  # of TensorBoard's HParams, as SB3 and torch log them
    restarts: list[int] = field(default_factory=list)
    first_wall: float = np.inf  # seconds since 1970 of the earliest event of any kind
    last_wall: float = -np.inf


def read_event_file(path: Path) -> EventFile:
    """Return all points of an event file; a torn last record and a record that is not an event are skipped."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    file, plugins, clock = EventFile(), dict[str, str](), array("d")
    columns = defaultdict[str, tuple[Any, Any, Any]](lambda: (array("q"), array("d"), array("d")))
    for record in _records(path):
        try:
            event = Event.FromString(record)
        except DecodeError:
            continue
        step, wall, kind = event.step, event.wall_time, event.WhichOneof("what")
        clock.append(wall)
        if kind == "summary":
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else _tensor(value, file, plugins)
                if number is not None:
                    steps, walls, numbers = columns[value.tag]
                    steps.append(step)
                    walls.append(wall)
                    numbers.append(number)
        elif kind == "session_log" and event.session_log.status == _SESSION_START:
            file.restarts.append(step)
    if clock:
        file.first_wall, file.last_wall = min(clock), max(clock)
    file.scalars = {tag: Series(*map(np.array, column)) for tag, column in columns.items()}
    return file


def merged(files: Sequence[EventFile], tag: str) -> Series:
    """Return the points of a tag in all files, one per step, the latest of those that share it.

    A file that begins after another has ended resumed from a checkpoint: the points the other logged from that step on
    are dropped, those of tags that the resumed run did not write again included. Files that overlap in time were
    written in parallel, and only equal steps conflict.
    """
    files = sorted(files, key=lambda file: file.first_wall)
    kept = []
    for number, file in enumerate(files):
        if tag not in file.scalars:
            continue
        series, later = file.scalars[tag], files[number + 1 :]
        later_files = enumerate(later, number + 1)
        after = [(other, files[:at]) for at, other in later_files if other.first_wall >= file.last_wall]
        cuts = [int(other.scalars[tag].step.min()) for other, _ in after if tag in other.scalars]
        cuts += [step for other, before in after for step in _resumed_at(other, before, tag)]
        cuts += [step for other in later for step in other.restarts]
        kept.append(series.take(series.step < min(cuts)) if cuts else series)
    return Series.joined(kept).by_step()


def _resumed_at(file: EventFile, before: Sequence[EventFile], tag: str) -> list[int]:
    """Return the first steps of the tags that a file continues and that count steps as `tag` does.

    A tag that files have one point of each, as hyperparameters at step 0 of every start, continues nothing; one whose
    last step was far from that of `tag` counts something else, as epochs.
    """
    last: dict[str, int] = {}
    for other in before:
        for name, series in other.scalars.items():
            if len(series) > 1 or name == tag:
                last[name] = max(last.get(name, 0), int(series.step.max()))
    return [
        int(series.step.min())
        for name, series in file.scalars.items()
        if name in last and last[tag] <= _SAME_SCALE * last[name] and last[name] <= _SAME_SCALE * last[tag]
    ]


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in order, up to a torn last one or a damaged frame."""
    size, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            place += _HEADER.size + length + _FOOTER_BYTES
            if place > size or checksum != _checksum(length):
                return
            yield file.read(length + _FOOTER_BYTES)[:length]


@lru_cache(maxsize=4096)  # the records of a run have few different lengths
def _checksum(length: int) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(length.to_bytes(8, "little")))


def _tensor(value: Any, file: EventFile, plugins: dict[str, str]) -> float | None:
    """Return the number of a tensor that is a scalar, None for anything else; keep a text in the file."""
    plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)  # a tag's first value names it
    if plugin == _HPARAMS:
        file.hparams |= _hparams(value.metadata.plugin_data.content)
    for text in value.tensor.string_val:
        file.texts[value.tag] = text.decode(errors="replace")
    return _number(value.tensor) if plugin in _SCALARS else None


def _hparams(content: bytes) -> dict[str, Any]:
    """Return the hyperparameters at the start of a run, {} where a summary says something else about them."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logged = HParamsPluginData.FromString(content).session_start_info.hparams.items()
    values = {name: getattr(value, value.WhichOneof("kind") or "null_value") for name, value in logged}
    return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in values.items()}


def _number(tensor: Any) -> float | None:
    """Return the number of a tensor that has one; TensorBoard's `make_ndarray` takes 50 us."""
    if tensor.dtype == _FLOAT and len(tensor.float_val) == 1:
        return float(tensor.float_val[0])
    if tensor.dtype == _FLOAT and len(tensor.tensor_content) == 4:
        return float(np.frombuffer(tensor.tensor_content, "<f4")[0])
    from tensorboard.util.tensor_util import make_ndarray

    try:
        array = make_ndarray(tensor)
    except (TypeError, ValueError):  # a type that it does not know, or another number of values than the shape says
        return None
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else None
