"""A JSONL file as a stream of samples, for `for` and for `async for`; both run the same code.

The order is a function of (seed, epoch) alone. Rows keep the number they have among the rows of the file, so an id
made from it is the same however the file is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from query_mutator.batching.generation.rows import JsonlIndex, RowTokenizer, Tokenizer, parse_row, row_id
from query_mutator.batching.samples import DifficultyLevel
from query_mutator.batching.streaming.types import SampleSource, StreamAccount, StreamMetrics, StreamSample, StreamState
from query_mutator.errors import DatasetError, UsageError

logger = logging.getLogger(__name__)

DIFFICULTIES = {level.value: rank / (len(DifficultyLevel) - 1) for rank, level in enumerate(DifficultyLevel)}
CARRIED = ("segment_ids", "episode_id", "episode_status", "step_index", "total_steps", "reward", "success", "priority")
ROWS_BETWEEN_YIELDS = 64  # how many rows the async stream parses before it lets other tasks run


class OfflineDatasetStream(StreamAccount):
    """Samples of a JSONL file; rows with text need a `tokenizer`.

    An iteration left halfway goes on where it stopped; one that came to its end begins again. A row that gives
    nothing is a DatasetError naming file and line, or with `skip_bad` counted in `metrics.samples_errored`.
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
        if not 1 <= min_length <= max_length:
            raise UsageError(f"min_length={min_length} and max_length={max_length}: 1 <= min_length <= max_length")
        self.path = Path(path)
        self.dataset_id = dataset_id if dataset_id is not None else self.path.stem
        self.min_length = min_length
        self.max_length = max_length
        self.shuffle = shuffle
        self.seed = seed
        self.skip_bad = skip_bad
        self.keep = keep
        self.epoch = 0
        self.first_errors: list[str] = []
        self._rows = RowTokenizer(tokenizer, mask_prompt=mask_prompt)
        self._index: JsonlIndex | None = None
        self._position = 0  # rows of this epoch's order that were taken
        super().__init__()

    @property
    def index(self) -> JsonlIndex:
        """Where the rows are; made by one pass over the file."""
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
                self._metrics.record_time(time.perf_counter() - begin)
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
        """Return the sample of a row, or None when it was filtered or skipped, which is counted."""
        try:
            sample = self._sample(number, line)
        except DatasetError as error:
            if not self.skip_bad:
                raise
            self._metrics.record_error()
            if len(self.first_errors) < 10:
                self.first_errors.append(str(error))
            logger.debug("skipped: %s", error)
            return None
        if not self.min_length <= sample.length <= self.max_length or (self.keep and not self.keep(sample)):
            self._metrics.record_filtered()
            return None
        self._metrics.record_sample(sample)
        return sample

    def _sample(self, number: int, line: bytes) -> StreamSample:
        where = self.index.where(number)
        row = parse_row(line, where)
        try:
            tokens = self._rows.tokens(row)
            return StreamSample(
                input_ids=tokens.input_ids,
                loss_mask=tokens.loss_mask,
                sample_id=row_id(row, number, dataset_id=self.dataset_id),
                dataset_id=str(row.get("dataset_id") or self.dataset_id),
                source=SampleSource.OFFLINE,
                difficulty=difficulty_of(row),
                **{name: row[name] for name in CARRIED if row.get(name) is not None},
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise DatasetError(f"{where}: {'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from error
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from error

    # --- going back and resuming -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Go back to the first sample of this epoch, with metrics from zero."""
        self._position = 0
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()
        self.first_errors = []

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; with `shuffle` every epoch has an order of its own."""
        if epoch < 0:
            raise UsageError(f"epoch={epoch} is below 0")
        self.epoch, self._position = epoch, 0
        self._state = StreamState.IDLE

    def close(self) -> None:
        """Forget the index; the next iteration begins at the beginning."""
        self._index, self._position = None, 0
        if self._state == StreamState.STREAMING:
            self._state = StreamState.IDLE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands; `load_state_dict` goes on from there without reading what came before."""
        rows = len(self.index)
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": rows,
            "exhausted": self._state == StreamState.EXHAUSTED,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a file of another size or another order is a UsageError."""
        mine = {"seed": self.seed, "shuffle": self.shuffle, "rows": len(self.index)}
        for name, value in mine.items():
            if state[name] != value:
                raise UsageError(f"the state of another stream: {name}={state[name]} there, {value} for {self.path}")
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._state = StreamState.EXHAUSTED if state["exhausted"] else StreamState.PAUSED

    # --- looking in ------------------------------------------------------------------------------------------------

    def count_samples(self) -> int:
        """Return the number of rows in the file, those included that a filter would hold back."""
        return len(self.index)

    def peek(self, n: int = 5) -> list[StreamSample]:
        """Return the first samples of the file without moving the stream."""
        return list(islice(self._fresh(), n))

    def get_length_distribution(self) -> dict[int, int]:
        """Return how many samples have each length, without moving the stream."""
        counts: dict[int, int] = {}
        for sample in self._fresh():
            counts[sample.length] = counts.get(sample.length, 0) + 1
        return dict(sorted(counts.items()))

    def _fresh(self) -> Iterator[StreamSample]:
        twin = OfflineDatasetStream(
            self.path, self.dataset_id, self.min_length, self.max_length, skip_bad=self.skip_bad, keep=self.keep
        )
        twin._rows, twin._index = self._rows, self.index
        return iter(twin)


class AsyncOfflineDatasetStream:
    """`OfflineDatasetStream` for `async for`, with the same arguments and the same samples.

    Parsing rows is work for the processor, so nothing is gained by a thread; other tasks run every 64 rows.
    """

    def __init__(self, path: str | Path, dataset_id: str | None = None, **options: Any) -> None:
        self.stream = OfflineDatasetStream(path, dataset_id, **options)

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        return self.stream.state

    @property
    def metrics(self) -> StreamMetrics:
        """What it has produced since the last reset."""
        return self.stream.metrics

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        for number, sample in enumerate(self.stream):
            if number % ROWS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            yield sample

    async def reset(self) -> None:
        """Go back to the first sample of this epoch, with metrics from zero."""
        self.stream.reset()

    async def close(self) -> None:
        """Forget the index; idempotent."""
        self.stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken."""
        self.stream.load_state_dict(state)

    async def count_samples(self) -> int:
        """Return the number of rows in the file."""
        return await asyncio.to_thread(self.stream.count_samples)

    async def peek(self, n: int = 5) -> list[StreamSample]:
        """Return the first samples of the file without moving the stream."""
        return self.stream.peek(n)

    async def get_length_distribution(self) -> dict[int, int]:
        """Return how many samples have each length."""
        return await asyncio.to_thread(self.stream.get_length_distribution)


def difficulty_of(row: Mapping[str, Any]) -> float | None:
    """Return a row's difficulty from 0 to 1; the words trivial .. expert are 0, 0.25, 0.5, 0.75 and 1."""
    value = row.get("difficulty_score", row.get("difficulty"))
    if isinstance(value, str):
        if value.lower() not in DIFFICULTIES:
            raise ValueError(f"difficulty {value!r} is none of {', '.join(DIFFICULTIES)}")
        return DIFFICULTIES[value.lower()]
    return None if value is None else float(value)
