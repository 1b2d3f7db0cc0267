"""One call through the server: load the model, wait for a slot, work, take the configured time.

    total = load + queue wait + prompt_eval + eval      (nanoseconds, as Ollama reports them)

`prompt_eval` and `eval` share the time in the slot, so the wait for a slot is the total minus the other three.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from query_mutator.embedded.catalogue import Entry
from query_mutator.embedded.context import Context, OllamaVersion
from query_mutator.embedded.latency import Latency
from query_mutator.embedded.models import PromptError
from query_mutator.embedded.runners import Runner, Runners
from query_mutator.embedded.shaping import shape, tokens_of
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import ApiError

__all__ = ["Call", "Embeddings", "Engine", "Reply"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Write = Callable[[Sequence[str]], None]  # takes the next tokens of a streamed reply

#: Time to read a token of the prompt, as a share of the time to write one of the reply.
READ_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for a text, or for the vectors of `texts`; `fault` is the failure it is to have, if any."""

    entry: Entry
    prompt: str = ""
    texts: Sequence[str] = ()
    dimensions: int = 0  # of a vector; 0 and more than the encoder has: all
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    format: str | Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_alive_s: float | None = None
    truncate: bool = True
    shift: bool = True
    fault: str | None = None


@dataclass(slots=True)
class Clock:
    """When a call arrived, its model was loaded, it got its slot and left it (nanoseconds)."""

    arrived: int
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
            "total_duration": clock.ended - clock.arrived,
            "load_duration": clock.loaded - clock.arrived,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt_eval,
            "eval_count": self.reply_tokens,
            "eval_duration": service - prompt_eval,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Unit vectors in the order of their texts; an empty text has an empty vector."""

    vectors: list[list[float]]
    tokens: int = 0
    total_ns: int = 0
    load_ns: int = 0


class Engine:
    """Runs calls on the loaded models of one server."""

    def __init__(self, runners: Runners, *, latency: Latency, stats: Stats, behave_as: OllamaVersion) -> None:
        self._runners = runners
        self._behave_as = behave_as
        self._latency = latency
        self._stats = stats

    async def load(self, call: Call) -> str:
        """Load the model, or unload it for a keep-alive of 0; return the `done_reason`."""
        if call.keep_alive_s == 0:
            self._runners.unload(call.entry)
            return "unload"
        (await self._runners.enter(call.entry, call.options, keep_alive_s=call.keep_alive_s)).leave()
        return "load"

    async def complete(self, call: Call, write: Write | None = None) -> Reply:
        """Return the model's reply; with `write` its tokens are also streamed over the time the call takes."""
        async with self._slot(call) as (clock, context):
            prompt = context.prompt(call.prompt)
            text = await self._text(call, prompt)
            if call.fault == "stall":
                await _stall()
            if call.fault == "empty":
                text = ""
            max_tokens = context.reply_limit(prompt, call.max_tokens)
            try:
                tokens, done_reason = shape(text, format=call.format, stop=call.stop, max_tokens=max_tokens)
            except PromptError as error:
                raise ApiError(400, str(error)) from error
            prompt_tokens = len(tokens_of(prompt))
            left_s = self._latency.total_s(call.prompt) - (time.perf_counter_ns() - clock.began) / 1e9
            if write is not None:
                await _stream(tokens, write, over_s=left_s, before=prompt_tokens * READ_SHARE)
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

    async def embed(self, call: Call) -> Embeddings:
        """Return a unit vector for each text; an empty text never reaches the encoder. No latency is added.

        The faults "empty" and "incomplete" leave out the vectors.
        """
        written = [text for text in call.texts if text]
        if not written:
            await self.load(call)
            return Embeddings(vectors=[[] for _ in call.texts])
        worker = call.entry.vectors
        if worker is None:
            raise ApiError(501, "this model does not support embeddings")
        async with self._slot(call) as (clock, context):
            written = [context.text(text) for text in written]
            if call.fault == "stall":
                await _stall()
            rows = await _or_api_error(worker.submit(written))
        total_ns = clock.ended - clock.arrived
        if call.fault in ("empty", "incomplete"):
            return Embeddings(vectors=[[] for _ in call.texts], total_ns=total_ns)
        vectors = iter(_truncate(row.tolist(), call.dimensions) for row in rows)
        return Embeddings(
            vectors=[next(vectors) if text else [] for text in call.texts],
            tokens=sum(len(tokens_of(text)) for text in written),
            total_ns=total_ns,
            load_ns=clock.loaded - clock.arrived,
        )

    @asynccontextmanager
    async def _slot(self, call: Call) -> AsyncIterator[tuple[Clock, Context]]:
        """Load the model and hold one of its slots; the clock is complete when the block has ended."""
        clock = Clock(time.perf_counter_ns())
        runner = await self._runners.enter(call.entry, call.options, keep_alive_s=call.keep_alive_s)
        try:
            clock.loaded = time.perf_counter_ns()
            self._stats.arrive()
            try:
                await runner.slots.acquire()
            finally:
                self._stats.waiting -= 1
            clock.began = time.perf_counter_ns()
            self._stats.begin(waited_s=(clock.began - clock.loaded) / 1e9)
            finished = False
            try:
                yield clock, self._context(call, runner)
                finished = True
            finally:
                clock.ended = time.perf_counter_ns()
                runner.slots.release()
                service_s = (clock.ended - clock.began) / 1e9
                self._stats.end(service_s=service_s, model=call.entry.name, finished=finished)
        finally:
            runner.leave()

    def _context(self, call: Call, runner: Runner) -> Context:
        size = runner.options["num_ctx"]
        return Context(tokens=size, version=self._behave_as, truncate=call.truncate, shift=call.shift)

    async def _text(self, call: Call, prompt: str) -> str:
        if call.entry.fixed_reply is not None:
            return call.entry.fixed_reply
        worker = call.entry.replies
        assert worker is not None, "routes send only text models here"
        return await _or_api_error(worker.submit(prompt))


async def _stall() -> None:
    """Wait until the client closes the connection, which cancels the call."""
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


def _truncate(vector: list[float], dimensions: int) -> list[float]:
    """Return the first `dimensions` numbers scaled to length one (Matryoshka truncation)."""
    if not 0 < dimensions < len(vector):
        return vector
    head = vector[:dimensions]
    norm = max(sum(x * x for x in head) ** 0.5, 1e-12)
    return [x / norm for x in head]


async def _stream(tokens: Sequence[str], write: Write, *, over_s: float, before: float) -> None:
    """Write `tokens` evenly over `over_s` seconds, after the share of it that reading the prompt takes.

    `before` is the weight of that share, where each token weighs 1; tokens that are due together are written together.
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
