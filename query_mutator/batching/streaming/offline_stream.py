"""A JSONL file as a stream of samples, for `for` and for `async for`; both run the same code.

The order is a function of (seed, epoch) alone. A row's number among the rows of the file is fixed, so an id made from
it does not depend on how the file is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.generation.rows import JsonlIndex, RowTokenizer, Tokenizer, parse_row, row_errors, row_id
from query_mutator.batching.samples import DifficultyLevel
from query_mutator.batching.streaming.protocols import StreamBase
from query_mutator.batching.streaming.types import SampleSource, StreamMetrics, StreamSample, StreamState
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import DatasetError, UsageError

logger = logging.getLogger(__name__)

DIFFICULTIES = {level.value: rank / (len(DifficultyLevel) - 1) for rank, level in enumerate(DifficultyLevel)}
COPIED = ("segment_ids", "episode_id", "episode_status", "step_index", "total_steps", "reward", "success", "priority")
ROWS_BETWEEN_YIELDS = 64  # rows the async stream parses before other tasks may run


class OfflineDatasetStream(StreamBase):
    """Samples of a JSONL file; rows with text need a `tokenizer`.

    An iteration that was left early continues where it stopped; one that reached the end starts again. An invalid row
    is a DatasetError with file and line, or with `skip_bad` counted in `metrics.samples_errored`.
    """

    def __init__(
        self,
        path: str | Path,
        dataset_id: str | None = None,
        min_length: int = 1,
        max_length: int = 8192,
        shuffle: bool = False,
        seed: int = 42,
        *,
        tokenizer: Tokenizer | None = None,
        skip_bad: bool = False,
        mask_prompt: bool = True,
        keep: Callable[[StreamSample], bool] | None = None,
    ) -> None:
        super().__init__(min_length=min_length, max_length=max_length)
        self.path = Path(path)
        self.dataset_id = dataset_id if dataset_id is not None else self.path.stem
        self.shuffle = shuffle
        self.seed = seed
        self.skip_bad = skip_bad
        self.keep = keep
        self.epoch = 0
        self.first_errors: list[str] = []
        self._rows = RowTokenizer(tokenizer, mask_prompt=mask_prompt)
        self._index: JsonlIndex | None = None
        self._position = 0  # rows of this epoch's order that were read

    @property
    def index(self) -> JsonlIndex:
        """Offsets of the rows, found by one pass over the file."""
        if self._index is None:
            self._index = JsonlIndex(self.path)
        return self._index

    # --- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StreamSample]:
        if self._state == StreamState.EXHAUSTED:
            self._position = 0
        self._state = StreamState.STREAMING
        try:
            for number, line in self.index.rows(self._order(), start=self._position):
                begin = time.perf_counter()
                self._position += 1
                sample = self._accepted(number, line)
                self._metrics = self._metrics.record_time(time.perf_counter() - begin)
                if sample is not None:
                    yield sample
            self._state = StreamState.EXHAUSTED
        except DatasetError:
            self._state = StreamState.ERROR
            raise

    def _order(self) -> NDArray[np.int64] | None:
        if not self.shuffle:
            return None
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.index))

    def _accepted(self, number: int, line: bytes) -> StreamSample | None:
        """Return the sample of a row, or None if it was filtered or skipped, and count it."""
        try:
            sample = self._sample(number, line)
        except DatasetError as error:
            if not self.skip_bad:
                raise
            self._metrics = self._metrics.record_error()
            if len(self.first_errors) < 10:
                self.first_errors.append(str(error))
            logger.debug("skipped: %s", error)
            return None
        return sample if self._counted(sample, keep=self.keep is None or self.keep(sample)) else None

    def _sample(self, number: int, line: bytes) -> StreamSample:
        where = self.index.where(number)
        with row_errors(where):
            row = parse_row(line, where)
            tokens = self._rows.tokens(row)
            meta = row.get("meta")
            row = {**meta, **row} if isinstance(meta, dict) else row  # where `save_samples` writes the rest
            return StreamSample(
                input_ids=tokens.input_ids,
                loss_mask=tokens.loss_mask,
                sample_id=row_id(row, number, dataset_id=self.dataset_id),
                dataset_id=str(row.get("dataset_id") or self.dataset_id),
                source=SampleSource.OFFLINE,
                difficulty=difficulty_of(row),
                **{name: row[name] for name in COPIED if row.get(name) is not None},
            )

    # --- reset and resume ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return to the first sample of this epoch, with metrics from zero."""
        self._position = 0
        self.first_errors = []
        self._restart()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; with `shuffle` every epoch has a different order."""
        if epoch < 0:
            raise UsageError(f"epoch={epoch} is below 0; use 0 for the first epoch")
        self.epoch, self._position = epoch, 0
        self._state = StreamState.IDLE

    def close(self) -> None:
        """Drop the index; the next iteration starts at the first row. Idempotent."""
        self._index, self._position = None, 0
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position; `load_state_dict` resumes there without reading earlier rows."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "exhausted": self._state == StreamState.EXHAUSTED,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise UsageError for one of a file of another size or in another order."""
        self._check_state(state, **self._identity())
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._state = StreamState.EXHAUSTED if state["exhausted"] else StreamState.PAUSED

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "rows": len(self.index)}

    # --- statistics ------------------------------------------------------------------------------------------------

    def count_samples(self) -> int:
        """Return the number of rows in the file, including those that a filter would drop."""
        return len(self.index)

    def peek(self, n: int = 5) -> list[StreamSample]:
        """Return the first samples of the file without moving the stream."""
        return list(islice(self._fresh(), n))

    def get_length_distribution(self) -> dict[str, int]:
        """Return the length of each sample by its id, without moving the stream."""
        return {sample.sample_id: sample.length for sample in self._fresh()}

    def _fresh(self) -> Iterator[StreamSample]:
        twin = OfflineDatasetStream(
            self.path, self.dataset_id, self.min_length, self.max_length, skip_bad=self.skip_bad, keep=self.keep
        )
        twin._rows, twin._index = self._rows, self.index
        return iter(twin)


class AsyncOfflineDatasetStream:
    """`OfflineDatasetStream` for `async for`, with the same arguments and the same samples.

    Parsing rows is bound by the CPU, so iteration uses no thread; other tasks run every 64 rows.
    """

    def __init__(self, path: str | Path, dataset_id: str | None = None, **options: Any) -> None:
        stream = self.stream = OfflineDatasetStream(path, dataset_id, **options)
        self._iterate = to_async_iterator(stream.__iter__, every=ROWS_BETWEEN_YIELDS)
        self.reset = to_async(stream.reset, thread=False)
        self.close = to_async(stream.close, thread=False)
        self.peek = to_async(stream.peek, thread=False)
        self.count_samples = to_async(stream.count_samples)
        self.get_length_distribution = to_async(stream.get_length_distribution)
        self.set_epoch = stream.set_epoch
        self.state_dict = stream.state_dict
        self.load_state_dict = stream.load_state_dict

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        return self.stream.state

    @property
    def metrics(self) -> StreamMetrics:
        """Counts since the last reset."""
        return self.stream.metrics

    def __aiter__(self) -> AsyncGenerator[StreamSample, None]:
        return self._iterate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def difficulty_of(row: Mapping[str, Any]) -> float | None:
    """Return a row's difficulty from 0 to 1; the words trivial .. expert are 0, 0.25, 0.5, 0.75 and 1."""
    value = row.get("difficulty_score", row.get("difficulty"))
    if isinstance(value, str):
        if value.lower() not in DIFFICULTIES:
            raise ValueError(f"difficulty {value!r} is unknown; use a number from 0 to 1 or {', '.join(DIFFICULTIES)}")
        return DIFFICULTIES[value.lower()]
    return None if value is None else float(value)
