"""An async generator as a plain iterator: the sync form of what waits for a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

from query_mutator.errors import UsageError

T = TypeVar("T")


def iterate(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Yield what the generator yields; an interrupt cancels what it waits for, and leaving early closes it.

    In a thread whose event loop is running this is a UsageError: `async for` is the way there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError("an event loop is running in this thread: use `async for`")
    return _iterate(make)


def _iterate(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    with asyncio.Runner() as runner:
        generator = make()

        async def following() -> T:
            return await anext(generator)

        async def close() -> None:
            await generator.aclose()

        try:
            while True:
                try:
                    item = runner.run(following())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            runner.run(close())
