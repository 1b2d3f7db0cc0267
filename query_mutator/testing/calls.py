"""One call through the test server: load the model, wait for a slot, work, take the configured time.

A model is a function of a request, an object that answers prompts, or a built-in one.

    total = load + queue wait + prompt_eval + eval      (nanoseconds, as Ollama reports them)

`prompt_eval` and `eval` share the time in the slot, so the wait for a slot is the total minus the other three. A loaded
model has its own slots, and any number of calls may wait for them. Only a load has a bounded queue: while one is
pending every other request waits behind it, and requests beyond `max_queue` get status 503. Everything but a model's
work runs on the server's event loop, so no state here needs a lock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast, get_args

from query_mutator.bounds import Ge, Le, Million, Port, Seed, Tokens, Wait
from query_mutator.errors import UsageError
from query_mutator.registry import check_known
from query_mutator.settings import Simulation
from query_mutator.types import ChatRequest, Completion, Message

logger = logging.getLogger(__name__)

#: Words in an answer of `echo`; of a rewrite new ones, and those of the question.
ANSWER_WORDS, NEW_WORDS, KEPT_WORDS = 30, 3, 11


class PromptError(UsageError):
    """A request that cannot be answered; the server replies with this message and HTTP 400, or another `status`."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TextModel(Protocol):
    """A model that answers the text of the last user message; it is asked from one thread at a time.

    Optional attributes: `is_instant` (it is asked on the server's event loop: it neither waits nor computes for long),
    `digest` (what the replies depend on), `weights` (models with the same share a runner), `parameters` (of the model's
    file, as {"num_ctx": 2048}), `threads` (that may ask at once, where that is more than one).
    """

    name: str

    def reply(self, prompt: str) -> str:
        """Return the reply to a prompt; raise PromptError for one that cannot be answered."""
        ...


#: A function as a model. Its request has what the client sent: `max_tokens` is -1 without a limit. A completion says
#: more than a text: `logprob`, `hit_limit`, and its counts of tokens where they are above 0.
Answer: TypeAlias = "Callable[[ChatRequest], str | Completion]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as the server lists and asks it."""

    name: str  # without tag
    digest: str
    weights: str  # models with the same share a runner
    answer: Answer
    parameters: Mapping[str, int] = field(default_factory=dict)  # of the model's file, as num_ctx
    threads: Executor | None = None  # None: it is asked on the event loop

    @property
    def tagged(self) -> str:
        """Return the name as Ollama lists it."""
        return f"{self.name}:latest"


def text_model(name: str, model: TextModel | Answer) -> Served:
    """Return what the server needs of a model that writes text."""
    ask: Any = getattr(model, "reply", None)
    threads = ThreadPoolExecutor(getattr(model, "threads", 1), thread_name_prefix=f"model-{name}")
    return Served(
        name=name.removesuffix(":latest"),
        digest=getattr(model, "digest", None) or _sha256(f"{name}\0{type(model).__qualname__}"),
        weights=getattr(model, "weights", name),
        answer=(lambda request: ask(user_text(request))) if ask else cast(Answer, model),
        threads=None if getattr(model, "is_instant", False) else threads,
        parameters=getattr(model, "parameters", {}),
    )


def user_text(request: ChatRequest) -> str:
    """Return the last user message, or the last message if no user wrote one."""
    texts = {message.role: message.content for message in request.messages}
    return texts.get("user", request.messages[-1].content if request.messages else "")


class Echo:
    """Answers with thirty words of the prompt, drawn by its hash.

    A rewrite of a `<question>` is its beginning with three of its words in front.
    """

    name = "echo"
    is_instant = True

    def reply(self, prompt: str) -> str:
        """Return the reply; equal prompts get equal ones."""
        _, opening, rest = prompt.partition("<question>")
        words = (rest.partition("</question>")[0] if opening else prompt).split() or ["nothing"]
        drawn = [words[byte % len(words)] for byte in hashlib.shake_128(_bytes(prompt)).digest(ANSWER_WORDS)]
        return " ".join([*drawn[:NEW_WORDS], *words[:KEPT_WORDS]] if opening else drawn)


@lru_cache(maxsize=1024)
def tokens_of(text: str) -> tuple[str, ...]:
    """Return the tokens of `text`, which joined are the text: words of up to eight letters, and other characters."""
    return tuple(re.findall(r"\s*\w{1,8}|\s*[^\w\s]|\s+", text))


def in_format(text: str, schema: Mapping[str, Any]) -> str:
    """Return `text` in the first string of a schema's smallest value; a JSON object stays as it is."""
    if text.lstrip().startswith("{"):
        return text
    texts = [text]

    def smallest(part: Mapping[str, Any]) -> Any:
        if choices := part.get("enum"):
            return texts.pop() if texts and text in choices else choices[0]
        kind = part.get("type", "object" if "properties" in part else "string")
        if kind == "object":
            return {name: smallest(one) for name, one in part.get("properties", {}).items()}
        if kind == "string":
            return texts.pop() if texts else ""
        return {"boolean": False, "integer": 0, "number": 0.0, "array": []}.get(kind)

    return json.dumps(smallest(schema), ensure_ascii=False)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _sha256(text: str) -> str:
    return hashlib.sha256(_bytes(text)).hexdigest()


# --- a call ----------------------------------------------------------------------------------------------------------

OllamaVersion = Literal["0.9", "0.24"]
Write = Callable[[Sequence[str]], Awaitable[None]]  # takes the next tokens of a streamed reply

MIN_CONTEXT, MAX_CONTEXT = 4, 32768  # tokens; a smaller or larger num_ctx becomes one of them
BUSY = "server busy, please try again.  maximum pending requests exceeded"
#: Time to read a token of the prompt, as a share of the time to write one of the reply.
READ_SHARE = 0.1
KINDS = ("500", "503", "reset", "stall", "cut", "empty", "incomplete")

#: Options of the loaded model rather than of one call: another value means a reload.
_RUNNER_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap")
_TOO_LONG = {
    "0.9": "input length exceeds maximum context length",
    "0.24": "the input length exceeds the context length",
}


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Simulation):
    """Settings of the server; a setting out of range is a ValueError."""

    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    num_parallel: Annotated[int, Ge(1), Le(4096)] = 1
    """Slots of each model."""
    max_queue: Million = 512
    """Requests that may wait while a model loads."""
    num_ctx: Tokens = 4096
    """Context of a model, in tokens, where no request names one."""
    load_ms: Wait = 0.0
    """Time that a model takes to load, and to load again with other options."""
    seed: Seed = 0
    """Seed of latencies and faults."""
    behave_as: OllamaVersion = "0.24"
    """The Ollama version to mimic where a prompt or reply does not fit the context; 0.9 cuts prompts silently."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("Ollama version", self.behave_as, get_args(OllamaVersion))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The total time of one call in its slot, computation included; equal prompts and seeds take equal time.

    Log-normal around a mean: with sigma s the factor is exp(s z - s^2 / 2), which has mean 1 for every s.
    """

    mean_s: float = 0.0
    sigma: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Simulation, *, seed: int = 0) -> Latency:
        """Return that of `--latency-ms`, or of `--running-speed` X: 16 s / X per call; UsageError for both at once."""
        if settings.latency_ms and settings.running_speed:
            raise UsageError("latency_ms and running_speed both set how long a call takes; give one of them")
        return cls(mean_s=settings.simulated_s, sigma=settings.latency_sigma, seed=seed)

    def total_s(self, prompt: str) -> float:
        """Return the seconds a call with this prompt takes."""
        if self.mean_s == 0 or self.sigma == 0:
            return self.mean_s
        key = f"{self.seed}\0{prompt}".encode("utf-8", "surrogatepass")
        share = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") + 0.5) / 2**64
        return self.mean_s * math.exp(self.sigma * NormalDist().inv_cdf(share) - self.sigma**2 / 2)


class FaultPlan:
    """Makes a seeded `share` of all calls fail, each of the `kinds` equally often.

    500 and 503 are error replies and reset closes the connection, before the model works; stall holds its slot until
    the client gives up; cut is JSON that stops in the middle, empty has no text, incomplete says `done: false`.

    The draw depends only on the seed, the request's bytes and the attempt: the order of calls does not matter, and a
    retried request may succeed. The attempt is the header X-Stainless-Retry-Count, so that a client that restarts gets
    the same faults; without the header it is the number of times the same bytes came before.
    """

    def __init__(self, share: float, *, kinds: Sequence[str] = KINDS, seed: int = 0) -> None:
        for kind in kinds:
            check_known("fault", kind, KINDS)
        if not kinds:
            raise UsageError(f"name at least one kind of fault: {', '.join(KINDS)}")
        self.share = share
        self.kinds = tuple(kinds)
        self.seed = seed
        self._attempts: Counter[bytes] = Counter()

    def pick(self, body: bytes, *, attempt: int | None = None) -> str | None:
        """Return the kind of fault for a request, or None; without `attempt`, count the request's attempts here."""
        key = hashlib.blake2b(body, digest_size=16).digest()
        if attempt is None:
            attempt = self._attempts[key]
            self._attempts[key] += 1
        draw = hashlib.blake2b(b"%d:%d:" % (self.seed, attempt) + key, digest_size=16).digest()
        if int.from_bytes(draw[:8], "big") >= self.share * 2**64:
            return None
        return self.kinds[int.from_bytes(draw[8:], "big") % len(self.kinds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request for a text; `fault` is the failure it is to have, if any.

    `truncate`: a prompt that does not fit the context loses its beginning, else it is HTTP 400. `shift`: a reply pushes
    the prompt out of the context, else it ends there. Ollama 0.9 ignores both.
    """

    model: Served
    request: ChatRequest
    truncate: bool = True
    shift: bool = True
    fault: str | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A model's text, how it ended, and its times (nanoseconds)."""

    arrived: int
    loaded: int = 0
    began: int = 0
    ended: int = 0
    text: str = ""
    done_reason: str = "stop"
    done: bool = True
    prompt_tokens: int = 0
    reply_tokens: int = 0
    logprobs: Sequence[Mapping[str, Any]] | None = None  # as Ollama has them, None where none were asked for

    def durations(self) -> dict[str, int]:
        """Return Ollama's counts and durations, in its order."""
        service = self.ended - self.began
        reading = self.prompt_tokens * READ_SHARE
        prompt_eval = int(service * reading / (reading + self.reply_tokens)) if self.prompt_tokens else 0
        return {
            "total_duration": self.ended - self.arrived,
            "load_duration": self.loaded - self.arrived,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt_eval,
            "eval_count": self.reply_tokens,
            "eval_duration": service - prompt_eval,
        }


@dataclass(slots=True)
class Stats:
    """Counters: pending_loads -> waiting (for a slot) -> in_service (`service_s`) -> calls, or cancelled."""

    routes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    calls_by_model: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    loads: int = 0
    service_s: float = 0.0
    queue_wait_s: float = 0.0
    pending_loads: int = 0
    waiting: int = 0
    in_service: int = 0
    max_in_service: int = 0
    first_s: float = 0.0  # time.monotonic() at the first arrival and the last end
    last_s: float = 0.0

    def snapshot(self) -> dict[str, Any]:
        """Return all counters as plain JSON types; `span_s` is from the first arrival to the last end."""
        counted = {name: getattr(self, name) for name in self.__slots__}
        counted |= {name: dict(one) for name, one in counted.items() if isinstance(one, Counter)}
        counted |= {"requests": self.routes.total(), "calls": self.calls_by_model.total()}
        return {**counted, "span_s": max(0.0, self.last_s - self.first_s)}

    def cleared(self) -> Stats:
        """Return counters that know only of the calls in flight."""
        flying = {name: getattr(self, name) for name in ("pending_loads", "waiting", "in_service")}
        return Stats(**flying, max_in_service=self.in_service)


@dataclass(slots=True)
class Runner:
    """One loaded model: its options, its slots (first come, first served), and how many calls use it."""

    model: Served
    options: dict[str, Any]
    slots: asyncio.Semaphore
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        """Count a call that has finished with the model."""
        self.users -= 1
        if self.users == 0:
            self.idle.set()


class Calls:
    """The loaded models of one server, and the calls on them."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._latency = Latency.of(settings, seed=settings.seed)
        self.stats = Stats()
        self.loaded: dict[str, Runner] = {}  # by weights; a model stays
        self._load_lock = asyncio.Lock()

    async def load(self, call: Call) -> None:
        """Load the model."""
        (await self._enter(call)).leave()

    async def complete(self, call: Call, write: Write | None = None) -> Outcome:
        """Return the model's reply; with `write` its tokens are also streamed over the time the call takes."""
        prompt, cuts_silently = user_text(call.request), self._settings.behave_as == "0.9"
        async with self._slot(call) as (outcome, size):
            read = self._read(prompt, size, may_cut=call.truncate or cuts_silently)
            request = call.request
            if read != prompt:
                request = replace(request, messages=(Message(role="user", content=read),))
            said = await self._work(call.model, request)
            # A completion has no thoughts, which a text may have.
            text, said = (said, Completion()) if isinstance(said, str) else (said.text, said)
            if said.error is not None and said.error.kind != "empty":
                raise PromptError(said.error.message, status=said.error.status or 400)
            if call.fault == "stall":
                await asyncio.Event().wait()  # until the client closes the connection, which cancels the call
            if request.logprobs:
                if said.logprob is None:
                    raise PromptError(f'"{request.model}" does not support logprobs')
                outcome.logprobs = [{"token": token, "logprob": said.logprob} for token in tokens_of(text)]
            outcome.prompt_tokens = said.prompt_tokens or len(tokens_of(read))
            limit = request.max_tokens
            if not (call.shift or cuts_silently):
                room = max(1, size - outcome.prompt_tokens)
                limit = min(limit, room) if limit > 0 else room
            # As in a language model the format is written first, and is cut in the middle of its JSON.
            text = in_format(text, request.json_schema) if request.json_schema else text
            cuts = [at for word in request.options.get("stop") or () if (at := text.find(word)) >= 0]
            whole = tokens_of("" if call.fault == "empty" else text[: min(cuts)] if cuts else text)
            tokens = whole[:limit] if limit > 0 else whole
            left_s = self._latency.total_s(prompt) - (time.perf_counter_ns() - outcome.began) / 1e9
            if write is not None:
                await _stream(tokens, write, over_s=left_s, before=outcome.prompt_tokens * READ_SHARE)
            elif left_s > 0:
                await asyncio.sleep(left_s)
        outcome.text = "".join(tokens)
        outcome.done = call.fault != "incomplete"
        outcome.done_reason = "length" if said.hit_limit or tokens != whole else "stop"
        outcome.reply_tokens = said.completion_tokens or len(tokens)
        return outcome

    @asynccontextmanager
    async def _slot(self, call: Call) -> AsyncIterator[tuple[Outcome, int]]:
        """Load the model and hold one of its slots; yield what the call becomes, and the model's context."""
        outcome = Outcome(arrived=time.perf_counter_ns())
        runner = await self._enter(call)
        try:
            outcome.loaded = time.perf_counter_ns()
            self.stats.first_s = self.stats.first_s or time.monotonic()
            self.stats.waiting += 1
            try:
                await runner.slots.acquire()
            finally:
                self.stats.waiting -= 1
            outcome.began = time.perf_counter_ns()
            self.stats.queue_wait_s += (outcome.began - outcome.loaded) / 1e9
            self.stats.in_service += 1
            self.stats.max_in_service = max(self.stats.max_in_service, self.stats.in_service)
            try:
                yield outcome, runner.options["num_ctx"]
                self.stats.calls_by_model[call.model.name] += 1
            finally:
                outcome.ended = time.perf_counter_ns()
                runner.slots.release()
                self.stats.in_service -= 1
                self.stats.service_s += (outcome.ended - outcome.began) / 1e9
                self.stats.last_s = time.monotonic()
        finally:
            runner.leave()

    async def _enter(self, call: Call) -> Runner:
        """Return the loaded model with this call counted as a user; load the model first if necessary.

        Raises PromptError when a load is pending and its queue is full.
        """
        given = {**call.model.parameters, **call.request.options}
        wanted = {name: given.get(name) for name in _RUNNER_OPTIONS}
        wanted["num_ctx"] = min(max(MIN_CONTEXT, wanted["num_ctx"] or self._settings.num_ctx), MAX_CONTEXT)
        runner = None if self._load_lock.locked() else self._usable(call.model, wanted)
        if runner is None:
            # One of the pending requests holds the lock, so the queue behind it is one shorter.
            if self.stats.pending_loads > self._settings.max_queue:
                raise PromptError(BUSY, status=503)
            self.stats.pending_loads += 1
            try:
                async with self._load_lock:
                    runner = self._usable(call.model, wanted) or await self._load(call.model, wanted)
            finally:
                self.stats.pending_loads -= 1
        runner.users += 1
        runner.idle.clear()
        return runner

    def _usable(self, model: Served, wanted: dict[str, Any]) -> Runner | None:
        runner = self.loaded.get(model.weights)
        return runner if runner and runner.options == wanted else None

    async def _load(self, model: Served, wanted: dict[str, Any]) -> Runner:
        before = self.loaded.get(model.weights)
        if before is not None and before.users:
            await before.idle.wait()
        self.loaded.pop(model.weights, None)
        await asyncio.sleep(self._settings.load_ms / 1000)
        self.stats.loads += 1
        runner = self.loaded[model.weights] = Runner(model, wanted, asyncio.Semaphore(self._settings.num_parallel))
        return runner

    def _read(self, text: str, size: int, *, may_cut: bool) -> str:
        """Return the part of a text that the model reads; PromptError for one that may not be cut."""
        if len(text) <= size or len(tokens_of(text)) <= size:
            return text
        if not may_cut:
            raise PromptError(_TOO_LONG[self._settings.behave_as])
        return "".join(tokens_of(text)[-size:])

    async def _work(self, model: Served, request: ChatRequest) -> str | Completion:
        """Return what a model makes of a request; PromptError for whatever it raises, 400 for a UsageError."""
        try:
            if model.threads is None:
                return model.answer(request)
            return await asyncio.get_running_loop().run_in_executor(model.threads, model.answer, request)
        except UsageError as error:
            raise error if isinstance(error, PromptError) else PromptError(str(error)) from None
        except Exception as error:
            logger.exception("a model failed")
            raise PromptError(f"an error was encountered while running the model: {error}", status=500) from error


async def _stream(tokens: Sequence[str], write: Write, *, over_s: float, before: float) -> None:
    """Write `tokens` evenly over `over_s` seconds, after the share of it that reading the prompt takes.

    `before` is the weight of that share, where each token weighs 1.
    """
    if over_s <= 0:
        await write(tokens)
        return
    end_s, each_s = time.monotonic() + over_s, over_s / (before + len(tokens) + 1e-9)
    for number, token in enumerate(tokens, start=1):
        await asyncio.sleep(end_s - (len(tokens) - number) * each_s - time.monotonic())
        await write([token])
    await asyncio.sleep(end_s - time.monotonic())
