"""What every source of samples can do, in its sync and its async form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol, runtime_checkable

from query_mutator.batching.streaming.types import StreamMetrics, StreamSample, StreamState


@runtime_checkable
class SampleStream(Protocol):
    """A source that is iterated; `reset` goes back to its beginning, `close` gives up what it holds."""

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        ...

    @property
    def metrics(self) -> StreamMetrics:
        """What it has produced since the last reset."""
        ...

    def __iter__(self) -> Iterator[StreamSample]: ...

    def reset(self) -> None:
        """Go back to the first sample; the order does not depend on how often this was called."""
        ...

    def close(self) -> None:
        """Give up files and connections; idempotent."""
        ...


@runtime_checkable
class AsyncSampleStream(Protocol):
    """The same source for `async for`."""

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        ...

    @property
    def metrics(self) -> StreamMetrics:
        """What it has produced since the last reset."""
        ...

    def __aiter__(self) -> AsyncIterator[StreamSample]: ...

    async def reset(self) -> None:
        """Go back to the first sample; the order does not depend on how often this was called."""
        ...

    async def close(self) -> None:
        """Give up files and connections; idempotent."""
        ...
