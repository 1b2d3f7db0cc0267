"""Read TensorBoard event files as columns: every scalar, in either style, and the texts that describe a run.

    Event    1 wall_time double   2 step varint   5 summary   7 session_log {1 status}
    Summary  1 value, repeated
    Value    1 tag   2 simple_value float   8 tensor   9 metadata {1 plugin_data {1 plugin_name}}

A scalar is a `simple_value`, or a tensor of one number whose plugin is "scalars" or missing. V values in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from query_mutator.analysis.records import BLOCK_BYTES, Block, Bytes, read_blocks, words
from query_mutator.analysis.series import Floats, Ints, Series
from query_mutator.analysis.tensors import Tensors
from query_mutator.analysis.wire import FIXED32, FIXED64, LENGTH, VARINT, Fields, read_fields

__all__ = ["EVENTS", "EventFile", "merged", "read_event_file"]

EVENTS = "*tfevents*"
_SESSION_START = 1


@dataclass(slots=True)
class EventFile:
    """The content of an event file; from the steps in `restarts` on, it replaces earlier files."""

    scalars: dict[str, Series] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # tag -> its last text
    restarts: list[int] = field(default_factory=list)
    first_wall: float = np.inf  # seconds since 1970 of the earliest event of any kind
    last_wall: float = -np.inf


def read_event_file(path: Path, *, block_bytes: int = BLOCK_BYTES) -> EventFile:
    """Return all points of an event file; a torn last record is skipped."""
    file, tags = EventFile(), _Tags()
    parts: dict[str, list[Series]] = {}
    for block in read_blocks(path, block_bytes=block_bytes):
        for tag, series in _read_block(block, file, tags):
            parts.setdefault(tag, []).append(series)
    file.scalars = {tag: Series.joined(of_tag) for tag, of_tag in parts.items()}
    return file


def merged(files: Sequence[EventFile], tag: str) -> Series:
    """Return the points of a tag in all files, one per step, the latest of those that share it.

    A file that begins after another has ended resumed from a checkpoint: the points the other logged from that step on
    are dropped. Files that overlap in time were written in parallel, and only equal steps conflict.
    """
    files = sorted((file for file in files if tag in file.scalars), key=lambda file: file.first_wall)
    kept = []
    for number, file in enumerate(files):
        series, later = file.scalars[tag], files[number + 1 :]
        cuts = [int(other.scalars[tag].step.min()) for other in later if other.first_wall >= file.last_wall]
        cuts += [step for other in later for step in other.restarts]
        kept.append(series.take(series.step < min(cuts)) if cuts else series)
    return Series.joined(kept).by_step()


class _Tags:
    """Numbers for tags, and the plugins that their first values name."""

    def __init__(self) -> None:
        self.number: dict[bytes, int] = {}
        self.plugins: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        """Return the tags in the order of their numbers."""
        return [tag.decode(errors="replace") for tag in self.number]

    def numbers(self, data: Bytes, names: Fields) -> list[int]:
        """Return the number of each tag."""
        text, number = data.tobytes(), self.number
        bounds = zip(names.start.tolist(), names.end.tolist(), strict=True)
        return [number.setdefault(text[start:end], len(number)) for start, end in bounds]

    def learn_plugins(self, data: Bytes, metadata: Fields, tag: Ints) -> None:
        """Record the plugin in the first value of each tag; `tag` [V] is the tag of each value."""
        for number, first in zip(*np.unique(tag[metadata.owner], return_index=True), strict=True):
            if int(number) not in self.plugins:
                plugin = read_fields(data, metadata.start[[first]], metadata.end[[first]]).of(1, LENGTH)
                name = read_fields(data, plugin.start, plugin.end).of(1, LENGTH)
                text = bytes(data[name.start[0] : name.end[0]]).decode(errors="replace") if len(name.start) else ""
                self.plugins[int(number)] = text

    def may_be_scalar(self) -> NDArray[np.bool_]:
        """Return, for each tag, whether its tensors of one number are scalars."""
        return np.array([self.plugins.get(number, "") in ("", "scalars") for number in range(len(self.number))])


def _read_block(block: Block, file: EventFile, tags: _Tags) -> Iterator[tuple[str, Series]]:
    data, count = block.data, len(block.starts)
    events = read_fields(data, block.starts, block.ends)
    wall, step = np.zeros(count), np.zeros(count, dtype=np.int64)
    walls, steps = events.of(1, FIXED64), events.of(2, VARINT)
    wall[walls.owner] = words(data, "<f8")[walls.start]
    step[steps.owner] = steps.value.astype(np.int64)
    if len(walls.owner):
        file.first_wall = min(file.first_wall, float(wall[walls.owner].min()))
        file.last_wall = max(file.last_wall, float(wall[walls.owner].max()))
    logs = events.of(7, LENGTH)
    status = read_fields(data, logs.start, logs.end).of(1, VARINT)
    file.restarts += step[logs.owner[status.owner[status.value == _SESSION_START]]].tolist()
    # Summaries hold values; each value belongs to the event of its summary.
    summaries = events.of(5, LENGTH)
    values = read_fields(data, summaries.start, summaries.end).of(1, LENGTH)
    event = summaries.owner[values.owner]
    for tag, rows, numbers in _scalars(data, values, file, tags):
        yield tag, Series(step[event[rows]], wall[event[rows]], numbers)


def _scalars(data: Bytes, values: Fields, file: EventFile, tags: _Tags) -> Iterator[tuple[str, Ints, Floats]]:
    """Yield, for each tag in the block, the indices of its scalars among the values, and their numbers."""
    inside = read_fields(data, values.start, values.end)
    names = inside.of(1, LENGTH)
    tag = np.full(len(values.owner), -1, dtype=np.int64)
    tag[names.owner] = tags.numbers(data, names)
    tag_names = tags.names
    number, is_scalar = np.full(len(tag), np.nan), np.zeros(len(tag), dtype=bool)
    simple = inside.of(2, FIXED32)
    number[simple.owner], is_scalar[simple.owner] = words(data, "<f4")[simple.start], True
    messages = inside.of(8, LENGTH)
    if len(messages.owner):  # newer style: tensors of one number
        tags.learn_plugins(data, inside.of(9, LENGTH), tag)
        tensors = Tensors.of(data, messages)
        row, numbers = tensors.scalars(data)
        allowed = tags.may_be_scalar()[tag[messages.owner[row]]]
        kept = messages.owner[row[allowed]]
        number[kept], is_scalar[kept] = numbers[allowed], True
        file.texts |= {tag_names[tag[messages.owner[row]]]: text for row, text in tensors.texts(data)}
    # Group the values by tag, in the order of the file.
    rows = np.flatnonzero(is_scalar & (tag >= 0))
    rows = rows[np.argsort(tag[rows], kind="stable")]
    for found in np.split(rows, np.flatnonzero(np.diff(tag[rows])) + 1):
        if len(found):
            yield tag_names[tag[found[0]]], found, number[found]
