"""Stream samples in a binary file, field by field: about 5 bytes a token and a few dozen a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.files import ArrayFile, BatchFileError, read_arrays, write_arrays
from query_mutator.batching.ids import IdTable
from query_mutator.batching.streaming.types import EpisodeStatus, SampleSource, StreamSample

Arrays = dict[str, NDArray[Any]]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NONE = -1  # in columns of whole numbers and codes
SOURCES = list(SampleSource)
STATUSES = list(EpisodeStatus)


def write_samples(
    path: str | Path,
    samples: Sequence[StreamSample],
    *,
    kind: str,
    meta: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write samples with further `meta` and `arrays` (one value per sample) into one checksummed file."""
    columns: Arrays = {**arrays, **_tokens(samples), **_numbers(samples)}
    names: dict[str, list[str]] = {"sample_id": [sample.sample_id for sample in samples]}
    for field in ("dataset_id", "episode_id"):
        values = [getattr(sample, field) for sample in samples]
        known = sorted({value for value in values if value is not None})
        code = {value: number for number, value in enumerate(known)} | {None: NONE}
        columns[field] = np.array([code[value] for value in values], dtype=np.int32)
        names[field] = known
    for field, strings in names.items():
        columns |= {f"{field}.{part}": array for part, array in IdTable.from_list(strings).to_arrays().items()}
    counts = {field: len(strings) for field, strings in names.items()}
    write_arrays(path, columns, kind=kind, meta={**meta, "counts": counts})


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


def _numbers(samples: Sequence[StreamSample]) -> Arrays:
    def whole(values: list[int | None], dtype: type[np.signedinteger[Any]] = np.int32) -> NDArray[Any]:
        return np.array([NONE if value is None else value for value in values], dtype=dtype)

    def real(values: list[float | None]) -> NDArray[np.float64]:
        return np.array([nan if value is None else value for value in values], dtype=np.float64)

    micros = [(sample.timestamp.astimezone(UTC) - EPOCH) // timedelta(microseconds=1) for sample in samples]
    statuses = [sample.episode_status for sample in samples]
    return {
        "source": whole([SOURCES.index(sample.source) for sample in samples], np.int8),
        "episode_status": whole([None if one is None else STATUSES.index(one) for one in statuses], np.int8),
        "success": whole([None if sample.success is None else int(sample.success) for sample in samples], np.int8),
        "step_index": whole([sample.step_index for sample in samples]),
        "total_steps": whole([sample.total_steps for sample in samples]),
        "replay_count": whole([sample.replay_count for sample in samples]),
        "reward": real([sample.reward for sample in samples]),
        "difficulty": real([sample.difficulty for sample in samples]),
        "priority": real([sample.priority if "priority" in sample.model_fields_set else None for sample in samples]),
        "timestamp": np.array(micros, dtype=np.int64),
    }


def read_samples(path: str | Path, *, kind: str) -> tuple[list[StreamSample], ArrayFile]:
    """Return the samples of `write_samples`, and the file for what else is in it; a damaged file is named."""
    file = read_arrays(path, kind=kind)
    try:
        return _samples(file), file
    except (KeyError, IndexError, ValueError) as error:
        raise BatchFileError(f"{path} is no complete {kind} file: {error}") from error


def _samples(file: ArrayFile) -> list[StreamSample]:
    arrays = file.arrays
    names = {field: _names(file, field) for field in ("sample_id", "dataset_id", "episode_id")}
    lists = {field: arrays[field].tolist() for field in arrays if arrays[field].ndim == 1 and "." not in field}
    ends = np.cumsum(arrays["lengths"], dtype=np.int64).tolist()
    ids, masks, segments = (_frozen(arrays[name]) for name in ("input_ids", "loss_mask", "segment_ids"))
    samples, segment_end = [], 0
    for number, end in enumerate(ends):
        span = slice(end - lists["lengths"][number], end)
        fields = {
            "input_ids": ids[span],
            "loss_mask": masks[span],
            "sample_id": names["sample_id"][number],
            **_fields(lists, names, number),
        }
        if lists["has_segments"][number]:
            segment_end += span.stop - span.start
            fields["segment_ids"] = segments[segment_end - (span.stop - span.start) : segment_end]
        samples.append(StreamSample.model_construct(**fields))  # checked when they were written
    return samples


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    copy = np.array(array)  # in memory, so that the file can be replaced
    copy.flags.writeable = False
    return copy


def _names(file: ArrayFile, field: str) -> list[str]:
    parts = {name.partition(".")[2]: array for name, array in file.arrays.items() if name.startswith(f"{field}.")}
    return IdTable.from_arrays(parts, count=int(file.meta["counts"][field]), path=file.path).to_list()


def _fields(lists: Mapping[str, list[Any]], names: Mapping[str, list[str]], number: int) -> dict[str, Any]:
    """Return the fields of one sample that are not None."""
    found: dict[str, Any] = {
        "source": SOURCES[lists["source"][number]],
        "timestamp": EPOCH + timedelta(microseconds=lists["timestamp"][number]),
        "replay_count": lists["replay_count"][number],
    }
    for field in ("dataset_id", "episode_id"):
        if lists[field][number] != NONE:
            found[field] = names[field][lists[field][number]]
    for field in ("step_index", "total_steps"):
        if lists[field][number] != NONE:
            found[field] = lists[field][number]
    for field in ("reward", "difficulty", "priority"):
        if not isnan(lists[field][number]):
            found[field] = lists[field][number]
    if lists["episode_status"][number] != NONE:
        found["episode_status"] = STATUSES[lists["episode_status"][number]]
    if lists["success"][number] != NONE:
        found["success"] = bool(lists["success"][number])
    return found
