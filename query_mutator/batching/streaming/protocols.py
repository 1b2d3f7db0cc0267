"""The interface of every source of samples, in its sync and its async form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol, runtime_checkable

from query_mutator.batching.streaming.types import StreamMetrics, StreamSample, StreamState

__all__ = ["AsyncSampleStream", "SampleStream"]


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
