"""Derive the async form of a function from its sync form, and the sync form of an async generator.

Each pair of public names (`save_samples`, `save_samples_async`) has one implementation; the other is made here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from query_mutator.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def to_async(function: Callable[P, T], *, thread: bool = True) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the coroutine function that calls `function` in a thread, or directly if it does not block."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if thread:
            return await asyncio.to_thread(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def to_async_iterator(function: Callable[P, Iterable[T]], *, every: int = 1) -> Callable[P, AsyncGenerator[T, None]]:
    """Return the async generator function over the items of `function`; other tasks run before every `every`-th."""

    @functools.wraps(function)
    async def iterate(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        for number, item in enumerate(function(*args, **kwargs)):
            if number % every == 0:
                await asyncio.sleep(0)
            yield item

    return iterate


def to_sync_iterator(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Iterate over an async generator without `await`; an interrupt cancels it, leaving the loop early closes it.

    Raises UsageError in a thread whose event loop is running; use `async for` there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _iterate(make)
    raise UsageError("an event loop is running in this thread; use `async for`")


def _iterate(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    with asyncio.Runner() as runner:
        generator = make()

        async def next_item() -> T:
            return await anext(generator)

        async def close() -> None:
            await generator.aclose()

        try:
            while True:
                try:
                    item = runner.run(next_item())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            runner.run(close())
