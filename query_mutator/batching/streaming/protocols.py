"""The interface of every source of samples, in its sync and its async form, and what the sources have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from query_mutator.batching.streaming.types import StreamMetrics, StreamSample, StreamState
from query_mutator.errors import UsageError


class _Observable(Protocol):
    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        ...

    @property
    def metrics(self) -> StreamMetrics:
        """Counts since the last reset."""
        ...


@runtime_checkable
class SampleStream(_Observable, Protocol):
    """An iterable source of samples."""

    def __iter__(self) -> Iterator[StreamSample]: ...

    def reset(self) -> None:
        """Return to the first sample; the order does not depend on the number of calls."""
        ...

    def close(self) -> None:
        """Release files and connections; idempotent."""
        ...


@runtime_checkable
class AsyncSampleStream(_Observable, Protocol):
    """The same source for `async for`."""

    def __aiter__(self) -> AsyncIterator[StreamSample]: ...

    async def reset(self) -> None:
        """Return to the first sample; the order does not depend on the number of calls."""
        ...

    async def close(self) -> None:
        """Release files and connections; idempotent."""
        ...


class StreamBase:
    """State and metrics of a stream whose samples have `min_length` to `max_length` tokens."""

    def __init__(self, *, min_length: int = 1, max_length: int = 8192) -> None:
        if not 1 <= min_length <= max_length:
            raise UsageError(
                f"min_length={min_length} and max_length={max_length} do not fit; use 1 <= min_length <= max_length"
            )
        self.min_length = min_length
        self.max_length = max_length
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        return self._state

    @property
    def metrics(self) -> StreamMetrics:
        """Counts since the last reset."""
        return self._metrics

    def _counted(self, sample: StreamSample, *, keep: bool = True) -> bool:
        """Count a sample as produced or as filtered, and return which."""
        if keep and self.min_length <= sample.length <= self.max_length:
            self._metrics = self._metrics.record_sample(sample)
            return True
        self._metrics = self._metrics.record_filtered()
        return False

    def _restart(self) -> None:
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()

    def _stop(self) -> None:
        if self._state is StreamState.STREAMING:
            self._state = StreamState.IDLE

    def _check_state(self, state: Mapping[str, Any], **own: object) -> None:
        """Raise UsageError when a `state_dict` was taken from a stream with other settings than `own`."""
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"the state has {name}={state[name]} and this stream {name}={value}; resume with equal settings"
                )
