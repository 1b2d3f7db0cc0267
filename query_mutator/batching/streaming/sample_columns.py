"""Stream samples in a binary file, field by field: about 5 bytes per token and a few dozen per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.files import ArrayFile, BatchFileError, read_arrays, write_arrays
from query_mutator.batching.ids import IdTable
from query_mutator.batching.streaming.types import EpisodeStatus, SampleSource, StreamSample

__all__ = ["read_samples", "write_samples"]

Arrays = dict[str, NDArray[Any]]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SOURCES = list(SampleSource)
STATUSES = list(EpisodeStatus)


class Column(NamedTuple):
    """How a field is stored: one number per sample, -1 (of a float, nan) for None."""

    dtype: type[np.generic]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def to_array(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return the values [n] as numbers [n]."""
        missing = np.nan if self.dtype is np.float64 else -1
        return np.array([missing if value is None else self.encode(value) for value in values], dtype=self.dtype)

    def to_values(self, array: NDArray[Any]) -> list[Any]:
        """Return the values [n] of numbers [n]."""
        missing = np.isnan(array) if self.dtype is np.float64 else array == -1
        return [None if gone else self.decode(one) for one, gone in zip(array.tolist(), missing.tolist(), strict=True)]


COLUMNS = {
    "source": Column(np.int8, SOURCES.index, SOURCES.__getitem__),
    "episode_status": Column(np.int8, STATUSES.index, STATUSES.__getitem__),
    "success": Column(np.int8, int, bool),
    **dict.fromkeys(("step_index", "total_steps", "replay_count"), Column(np.int32, int, int)),
    **dict.fromkeys(("reward", "difficulty", "priority"), Column(np.float64, float, float)),
    "timestamp": Column(
        np.int64,
        lambda time: (time.astimezone(UTC) - EPOCH) // MICROSECOND,
        lambda micros: EPOCH + micros * MICROSECOND,
    ),
}
NAMES = ("dataset_id", "episode_id")  # few different ones: a table, and its row for each sample


def write_samples(
    path: str | Path,
    samples: Sequence[StreamSample],
    *,
    kind: str,
    meta: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write samples with further `meta` and `arrays` (one value per sample) into one checksummed file."""
    columns: Arrays = {**arrays, **_tokens(samples)}
    for field, column in COLUMNS.items():
        columns[field] = column.to_array([_value(sample, field) for sample in samples])
    tables: dict[str, list[str]] = {"sample_id": [sample.sample_id for sample in samples]}
    for field in NAMES:
        values = [getattr(sample, field) for sample in samples]
        tables[field] = sorted({value for value in values if value is not None})
        rows = {value: row for row, value in enumerate(tables[field])}
        columns[field] = Column(np.int32, rows.__getitem__, int).to_array(values)
    for field, strings in tables.items():
        columns |= {f"{field}.{part}": array for part, array in IdTable.from_list(strings).to_arrays().items()}
    counts = {field: len(strings) for field, strings in tables.items()}
    write_arrays(path, columns, kind=kind, meta={**meta, "counts": counts})


def _value(sample: StreamSample, field: str) -> Any:
    """Return a field, None for a priority that the sample was not given: a buffer then has its own default."""
    return None if field == "priority" and field not in sample.model_fields_set else getattr(sample, field)


def _tokens(samples: Sequence[StreamSample]) -> Arrays:
    segments = [sample.segment_ids for sample in samples if sample.segment_ids is not None]
    return {
        "lengths": np.array([sample.length for sample in samples], dtype=np.int32),
        "input_ids": _joined([sample.input_ids for sample in samples], np.int32),
        "loss_mask": _joined([sample.loss_mask for sample in samples], np.uint8),
        "has_segments": np.array([sample.segment_ids is not None for sample in samples], dtype=np.uint8),
        "segment_ids": _joined(segments, np.int32),
    }


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def read_samples(path: str | Path, *, kind: str) -> tuple[list[StreamSample], ArrayFile]:
    """Return the samples of `write_samples`, and the file for its other contents.

    Raises BatchFileError, with the name, for a damaged file.
    """
    file = read_arrays(path, kind=kind)
    try:
        return _samples(file), file
    except (KeyError, IndexError, ValueError) as error:
        raise BatchFileError(f"{path} is not a complete {kind} file: {error}") from error


def _samples(file: ArrayFile) -> list[StreamSample]:
    arrays = file.arrays
    fields: dict[str, list[Any]] = {name: column.to_values(arrays[name]) for name, column in COLUMNS.items()}
    fields |= {name: _split(arrays[name], arrays["lengths"]) for name in ("input_ids", "loss_mask")}
    has_segments = arrays["has_segments"]
    fields["segment_ids"] = _split(arrays["segment_ids"], np.where(has_segments, arrays["lengths"], 0))
    fields["segment_ids"] = [one if has else None for one, has in zip(fields["segment_ids"], has_segments, strict=True)]
    fields["sample_id"] = _table(file, "sample_id")
    for name in NAMES:
        fields[name] = Column(np.int32, int, _table(file, name).__getitem__).to_values(arrays[name])
    rows = zip(*fields.values(), strict=True)
    return [
        # fields were checked when they were written
        StreamSample.model_construct(
            **{name: value for name, value in zip(fields, row, strict=True) if value is not None}
        )
        for row in rows
    ]


def _split(array: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the parts of an array, in memory, so that the file can be replaced, and read-only."""
    copy = np.array(array)
    copy.flags.writeable = False
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    return [copy[start:stop] for start, stop in pairwise(ends)]


def _table(file: ArrayFile, field: str) -> list[str]:
    parts = {name.partition(".")[2]: array for name, array in file.arrays.items() if name.startswith(f"{field}.")}
    return IdTable.from_arrays(parts, count=int(file.meta["counts"][field]), path=file.path).to_list()
