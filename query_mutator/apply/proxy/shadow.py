"""`qm serve --shadow SHARE`: a share of the questions is answered both ways, the second time in the background.

The client gets the reply of the mode. After its end the other way is asked on slots that no client needs: the original
question where a rewrite was sent, else what the policy makes of it. A pair is dropped and counted, not delayed, when
the backlog is full, a client needs the slot, a call fails, or the proxy stops.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from query_mutator.apply.proxy.chat import ChatCall, parsed, text_of, tokens_of
from query_mutator.apply.proxy.traffic import NoSlotError, Place, Status
from query_mutator.apply.proxy.upstream import Headers, UpstreamError, UpstreamGone
from query_mutator.encoder import Encoder
from query_mutator.errors import BackendError, DiskError, EncoderError
from query_mutator.files.json_lines import JsonLines
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.llm.client import Client
from query_mutator.rewards import cosine, is_not_sure, is_refusal
from query_mutator.runs.shadow import HEADER, ORIGINAL, REWRITTEN
from query_mutator.types import AS_IS, ChatRequest, read_part, without_thought

logger = logging.getLogger(__name__)

MAX_PENDING = 32  # questions whose reply was sent and whose other way was not asked yet
MAX_ANSWER_BYTES = 1_000_000  # of a reply that waits for its other way
_FAILURES = (UpstreamError, UpstreamGone, BackendError, EncoderError, DiskError)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A client's request to a virtual model, and what was decided about it."""

    call: ChatCall
    path: str
    headers: Headers  # of the client, for the upstream
    skips: bool = False  # whether the client asks to pass
    wants_field: bool = False  # whether it asks for the field `qm`
    mode: str = "passed"
    started: float = field(default_factory=time.perf_counter)
    decision: str = "passed"
    operators: Sequence[str] = ()
    calls: int = 0
    asked: str = ""  # the question, or the rewrite
    form: str = AS_IS  # in which it was asked
    overhead_s: float = 0.0  # until the request that answers was sent
    acted: bool = False  # whether the policy acted on the question

    @property
    def question(self) -> str:
        """Return the client's question."""
        return self.call.question or ""

    def elapsed_s(self) -> float:
        """Return the seconds since the request came."""
        return time.perf_counter() - self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One way to answer a question: the wording asked and its form, what came back, and what it cost."""

    asked: str
    form: str = AS_IS
    text: str
    tokens: int | None  # of the reply; None where it does not say
    calls: int = 1
    seconds: float

    def row(self, fit: float) -> dict[str, Any]:
        """Return what the file keeps; `fit` is the cosine with the question."""
        return {
            "answer": self.text,
            "refused": is_refusal(self.text),
            "not_sure": is_not_sure(self.text),
            "fit": round(fit, 4),
            "chars": len(self.text),
            "tokens": self.tokens,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
        }


Pair = tuple[str, Answer, Answer]  # which way the client got; the original and the rewritten one
#: Asks the way that was not sent, on spare slots; raises one of _FAILURES or NoSlotError.
Other = Callable[[Exchange, Answer], Awaitable[Pair]]


class Shadow:
    """Draws questions, asks their other way one after the other, and appends the pairs to a file."""

    def __init__(
        self, *, share: float, file: JsonLines, encoder: Encoder, status: Status, judge: Judge | None = None
    ) -> None:
        self._share, self._file, self._encoder, self._status, self._judge = share, file, encoder, status, judge
        self._rng = random.Random(0)  # the same places in the order of requests are drawn after every start
        self._waiting: asyncio.Queue[tuple[Exchange, list[bytes], float, Other]] = asyncio.Queue(MAX_PENDING)
        self._worker: asyncio.Task[None] | None = None
        self._job: asyncio.Task[None] | None = None
        self._is_closing = False
        self.outcomes: Counter[str] = Counter()
        if not file.size_bytes:
            file.append(HEADER)

    def draws(self) -> bool:
        """Return whether the next question is answered both ways."""
        return self._rng.random() < self._share

    async def listen(self, body: AsyncIterator[bytes], exchange: Exchange, other: Other) -> AsyncIterator[bytes]:
        """Yield the parts of a reply as they are; after the last one the other way is due."""
        parts, num_bytes = [], 0
        async with aclosing(body) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes <= MAX_ANSWER_BYTES:
                    parts.append(chunk)
                yield chunk
        if num_bytes > MAX_ANSWER_BYTES or self._is_closing:
            self._count("shutdown" if self._is_closing else "long")
            return
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            self._waiting.put_nowait((exchange, parts, exchange.elapsed_s(), other))
        except asyncio.QueueFull:
            self._count("busy")

    async def close(self) -> None:
        """Drop what is not complete; idempotent."""
        self._is_closing = True
        tasks = [task for task in (self._worker, self._job) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self._count("shutdown")
        self._worker = self._job = None

    async def _work(self) -> None:
        while True:
            due = await self._waiting.get()
            self._job = asyncio.create_task(self._keep(*due))  # a task: a client's call may cancel it
            await asyncio.wait((self._job,))

    async def _keep(self, exchange: Exchange, parts: list[bytes], seconds: float, other: Other) -> None:
        try:
            pair = await other(exchange, _answer(exchange, parts, seconds))
            await asyncio.to_thread(self._file.append, await self._row(exchange, pair))
        except asyncio.CancelledError:
            self._count("shutdown" if self._is_closing else "cut")
        except NoSlotError:
            self._count("busy")
        except _FAILURES as error:
            self._count("failed")
            logger.warning("a question was not answered both ways: %s", error)
        else:
            self._count("kept")

    async def _row(self, exchange: Exchange, pair: Pair) -> dict[str, Any]:
        sent, original, rewritten = pair
        texts = [exchange.question, read_part(original.text), read_part(rewritten.text)]
        question, *answers = await asyncio.to_thread(self._encoder.encode, texts)
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": exchange.call.model,
            "mode": exchange.mode,
            "decision": exchange.decision,
            "sent": sent,
            "operators": list(exchange.operators),
            "question": exchange.question,
            "rewrite": rewritten.asked,
            "form": rewritten.form,
            ORIGINAL: original.row(cosine(question, answers[0])),
            REWRITTEN: rewritten.row(cosine(question, answers[1])),
            "judge": await self._judged(exchange, original.text, rewritten.text),
        }

    async def _judged(self, exchange: Exchange, *answers: str) -> dict[str, str] | None:
        if self._judge is None:
            return None
        options = exchange.call.runner_options(self._judge.model)
        try:
            choice = await self._judge.choose(
                exchange.question, *answers, place=self._status.queue.spare, options=options
            )
        except BackendError as error:  # the pair shows the rest without it
            logger.warning("the judge %s made no choice: %s", self._judge.model, error)
            return None
        return {"model": self._judge.model, "choice": choice}

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._status.count("qm_shadow_total", outcome=outcome)


def _answer(exchange: Exchange, parts: list[bytes], seconds: float) -> Answer:
    """Return the answer in a reply that was sent; UpstreamGone for a stream that ended with an error."""
    found = [reply for line in b"".join(parts).split(b"\n") if (reply := parsed(line)) is not None]
    if not found or any("error" in reply for reply in found):
        raise UpstreamGone("the reply that was sent ended with an error")
    counts = [count for reply in found if (count := tokens_of(reply)) is not None]
    return Answer(
        asked=exchange.asked,
        form=exchange.form,
        text=without_thought("".join(text_of(exchange.call.api, reply) for reply in found)),
        tokens=counts[-1] if counts else None,
        calls=exchange.calls,
        seconds=seconds,
    )


# --- the judge -------------------------------------------------------------------------------------------------------

PROMPT = """\
Two answers to one question follow. Which one helps the person who asked more? A correct answer is better than a wrong \
one, an answer is better than none, and length alone counts for nothing.

Question:
{question}

Answer A:
{a}

Answer B:
{b}

Reply with the letter of the better answer alone: A or B."""
_LETTER = re.compile(r"\b([AB])\b")
_MAX_TOKENS = 16
_AT_ONCE = 4  # calls, in the background


class Judge:
    """A model that compares two answers. It is asked in both orders, and only one choice in both counts."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self.model = client, model
        self._callers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="qm-judge")

    async def choose(
        self, question: str, original: str, rewritten: str, *, place: Place, options: Mapping[str, Any]
    ) -> Literal["original", "rewritten", "tie"]:
        """Return the better answer; a tie if the two orders disagree, or a reply names none. BackendError."""
        if original == rewritten:
            return "tie"
        forward = await self._letter(question, original, rewritten, place, options)
        backward = await self._letter(question, rewritten, original, place, options)
        if (forward, backward) == ("A", "B"):
            return "original"
        return "rewritten" if (forward, backward) == ("B", "A") else "tie"

    async def _letter(self, question: str, a: str, b: str, place: Place, options: Mapping[str, Any]) -> str | None:
        prompt = PROMPT.format(question=question, a=a, b=b)
        request = ChatRequest.user(prompt, model=self.model, purpose="judge", max_tokens=_MAX_TOKENS, options=options)
        async with place(self.model):
            reply = await complete_in_thread(self._client, request, self._callers)
        if reply.error is not None:
            raise BackendError(str(reply.error), kind=reply.error.kind)
        found = _LETTER.search(reply.text)
        return found.group(1) if found else None
