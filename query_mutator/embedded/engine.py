"""One call through the server: load the model, wait for a slot, let it work, take the time it should take.

    total = load + queue wait + prompt_eval + eval      (nanoseconds, as Ollama reports them)

The time in the slot is what `prompt_eval` and `eval` share, so the wait for a slot shows as total minus the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from query_mutator.embedded.catalogue import Entry
from query_mutator.embedded.latency import Latency
from query_mutator.embedded.models import PromptError
from query_mutator.embedded.runners import Runners
from query_mutator.embedded.shaping import shape, tokens_of
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import ApiError

if TYPE_CHECKING:
    from query_mutator.encoder import FloatArray

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Write = Callable[[Sequence[str]], None]  # takes the next tokens of a streamed reply

#: Reading a token of the prompt costs this share of writing one of the reply.
READ_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for a text; `fault` is the kind of failure it is to suffer, if any."""

    entry: Entry
    prompt: str
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    format: str | Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_alive_s: float | None = None
    fault: str | None = None


@dataclass(slots=True)
class Clock:
    """When a call came, found its model loaded, got its slot and was done with it (nanoseconds)."""

    came: int
    loaded: int = 0
    began: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model wrote, how it ended, and where the time went."""

    text: str
    done_reason: str
    prompt_tokens: int
    reply_tokens: int
    clock: Clock
    done: bool = True

    def durations(self) -> dict[str, int]:
        """Return Ollama's counts and durations, in its order."""
        clock = self.clock
        service = clock.ended - clock.began
        reading = self.prompt_tokens * READ_SHARE
        prompt_eval = int(service * reading / (reading + self.reply_tokens)) if self.prompt_tokens else 0
        return {
            "total_duration": clock.ended - clock.came,
            "load_duration": clock.loaded - clock.came,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt_eval,
            "eval_count": self.reply_tokens,
            "eval_duration": service - prompt_eval,
        }


class Engine:
    """Carries calls out on the loaded models of one server."""

    def __init__(self, runners: Runners, *, latency: Latency, stats: Stats) -> None:
        self._runners = runners
        self._latency = latency
        self._stats = stats

    async def load(self, entry: Entry, options: Mapping[str, Any], *, keep_alive_s: float | None) -> str:
        """Load the model, or unload it for a keep-alive of 0; return the `done_reason`."""
        if keep_alive_s == 0:
            self._runners.unload(entry)
            return "unload"
        (await self._runners.enter(entry, options, keep_alive_s=keep_alive_s)).leave()
        return "load"

    async def complete(self, call: Call, write: Write | None = None) -> Reply:
        """Return the model's reply; with `write` its tokens are also handed out over the time the call takes."""

        async def work(clock: Clock) -> Reply:
            return await self._answer(call, clock, write)

        return await self._in_slot(call.entry, call.options, call.keep_alive_s, work)

    async def embed(
        self,
        entry: Entry,
        texts: Sequence[str],
        options: Mapping[str, Any],
        *,
        keep_alive_s: float | None,
        fault: str | None = None,
    ) -> tuple[FloatArray, Clock]:
        """Return the vectors [n, dim] of `texts` and when they were made; embedding has no added latency."""
        worker = entry.vectors
        if worker is None:
            raise ApiError(501, "this model does not support embeddings")

        async def work(clock: Clock) -> tuple[FloatArray, Clock]:
            if fault == "stall":
                await _stall()
            return await _or_api_error(worker.submit(texts)), clock

        return await self._in_slot(entry, options, keep_alive_s, work)

    async def _in_slot(
        self,
        entry: Entry,
        options: Mapping[str, Any],
        keep_alive_s: float | None,
        work: Callable[[Clock], Awaitable[Result]],
    ) -> Result:
        clock = Clock(time.perf_counter_ns())
        runner = await self._runners.enter(entry, options, keep_alive_s=keep_alive_s)
        try:
            clock.loaded = time.perf_counter_ns()
            self._stats.came()
            try:
                await runner.slots.acquire()
            finally:
                self._stats.waiting -= 1
            clock.began = time.perf_counter_ns()
            self._stats.begin(waited_s=(clock.began - clock.loaded) / 1e9)
            finished = False
            try:
                result = await work(clock)
                finished = True
            finally:
                clock.ended = time.perf_counter_ns()
                runner.slots.release()
                self._stats.end(service_s=(clock.ended - clock.began) / 1e9, model=entry.name, finished=finished)
        finally:
            runner.leave()
        return result

    async def _answer(self, call: Call, clock: Clock, write: Write | None) -> Reply:
        text = await self._text(call)
        if call.fault == "stall":
            await _stall()
        if call.fault == "empty":
            text = ""
        tokens, done_reason = shape(text, format=call.format, stop=call.stop, max_tokens=call.max_tokens)
        prompt_tokens = len(tokens_of(call.prompt))
        left_s = self._latency.total_s(call.prompt) - (time.perf_counter_ns() - clock.began) / 1e9
        if write is not None:
            await _spread(tokens, write, over_s=left_s, before=prompt_tokens * READ_SHARE)
        elif left_s > 0:
            await asyncio.sleep(left_s)
        return Reply(
            text="".join(tokens),
            done_reason=done_reason,
            prompt_tokens=prompt_tokens,
            reply_tokens=len(tokens),
            clock=clock,
            done=call.fault != "incomplete",
        )

    async def _text(self, call: Call) -> str:
        if call.entry.fixed_reply is not None:
            return call.entry.fixed_reply
        worker = call.entry.replies
        assert worker is not None, "routes send only text models here"
        return await _or_api_error(worker.submit(call.prompt))


async def _stall() -> None:
    """Wait until the client leaves, which cancels the call."""
    await asyncio.Event().wait()


async def _or_api_error(work: Awaitable[Result]) -> Result:
    """Return the result of a model's work, or raise the ApiError for what it raised."""
    try:
        return await work
    except PromptError as error:
        raise ApiError(400, str(error)) from error
    except Exception as error:
        logger.exception("a model failed")
        raise ApiError(500, f"an error was encountered while running the model: {error}") from error


async def _spread(tokens: Sequence[str], write: Write, *, over_s: float, before: float) -> None:
    """Hand out `tokens` evenly over `over_s` seconds, after the share of it that reading the prompt takes.

    `before` is that share's weight, where each token weighs 1; tokens that are due together go out together.
    """
    if over_s <= 0:
        write(tokens)
        return
    began_s = time.monotonic()
    each_s = over_s / (before + len(tokens)) if tokens else 0.0
    sent = 0
    while sent < len(tokens):
        due_s = began_s + each_s * (before + sent + 1)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        upto = min(len(tokens), max(sent + 1, int((time.monotonic() - began_s) / each_s - before)))
        write(tokens[sent:upto])
        sent = upto
    await asyncio.sleep(max(0.0, began_s + over_s - time.monotonic()))
