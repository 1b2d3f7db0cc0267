"""`qm serve --shadow SHARE`: a share of the questions is answered both ways, the second time in the background.

The client gets the reply of the mode. After its end the other way is asked on slots that no client needs: the original
question where a rewrite was sent, else what the policy makes of it. A pair is dropped and counted, not delayed, when
the backlog is full, a client needs the slot, a call fails, or the proxy stops.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from query_mutator.apply import Limits
from query_mutator.apply.proxy.episodes import Episodes
from query_mutator.apply.proxy.judge import Judge, JudgeFailed
from query_mutator.apply.proxy.queue import NoSlotError
from query_mutator.apply.proxy.replies import LineReader, parsed, text_of, tokens_of
from query_mutator.apply.proxy.requests import ChatCall
from query_mutator.apply.proxy.status import Status
from query_mutator.apply.proxy.upstream import Header, Upstream, UpstreamError, UpstreamGone
from query_mutator.encoder import Encoder
from query_mutator.errors import BackendError, DiskError, EncoderError
from query_mutator.files.json_lines import JsonLines
from query_mutator.forms import Framed
from query_mutator.rewards import cosine, is_not_sure, is_refusal
from query_mutator.runs.shadow import HEADER, ORIGINAL, REWRITTEN
from query_mutator.types import AS_IS, Completion, read_part, without_thought

__all__ = ["Counterfactual", "Sent", "Shadow"]

logger = logging.getLogger(__name__)

MAX_PENDING = 32  # questions whose reply was sent and whose other way was not asked yet
MAX_ANSWER_BYTES = 1_000_000  # of a reply that waits for its other way
_FAILURES = (UpstreamError, UpstreamGone, BackendError, EncoderError, DiskError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One way to answer a question: the wording asked and its form, what came back, and what it cost."""

    asked: str
    form: str
    text: str
    tokens: int | None  # of the reply; None where it does not say
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a client asked and got."""

    call: ChatCall
    headers: list[Header]
    path: str
    mode: str
    question: str
    asked: str  # the question, or the rewrite
    form: str  # in which it was asked
    decision: str
    operators: tuple[str, ...]
    calls: int
    started: float  # time.perf_counter()
    acted: bool  # whether the policy acted on it; else its way is not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A question with its two answers."""

    sent: str  # "original" or "rewritten"
    original: Answer
    rewritten: Answer
    decision: str
    operators: tuple[str, ...]


class Counterfactual:
    """Asks the way that was not sent, on spare slots."""

    def __init__(self, upstream: Upstream, episodes: Episodes, status: Status, limits: Limits) -> None:
        self._upstream, self._episodes, self._queue, self._limits = upstream, episodes, status.queue, limits

    async def pair(self, sent: Sent, answer: Answer) -> Pair:
        """Return both ways of a question whose `answer` was sent; UpstreamError, UpstreamGone or NoSlotError."""
        if (sent.asked, sent.form) != (sent.question, AS_IS):
            original = await self._ask(sent, Framed.user(sent.question))
            found = Pair(
                sent=REWRITTEN, original=original, rewritten=answer, decision=sent.decision, operators=sent.operators
            )
        elif sent.acted:  # the policy left it as it is, or a guard did
            found = Pair(sent=ORIGINAL, original=answer, rewritten=answer, decision=sent.decision, operators=())
        else:
            found = await self._rewritten(sent, answer)
        return found

    async def _rewritten(self, sent: Sent, answer: Answer) -> Pair:
        """Let the policy act, which may see the answer that was sent."""
        answers, started = {sent.call.key(Framed.user(sent.question)): answer}, time.perf_counter()

        async def ask(framed: Framed) -> Completion:
            if (key := sent.call.key(framed)) not in answers:
                answers[key] = await self._ask(sent, framed)
            return Completion(text=answers[key].text)

        acted = await self._episodes.answer(
            sent.call, ask, self._limits, place=self._queue.spare, first_answer=answer.text
        )
        await ask(acted.framed)
        calls = sum(each.calls for each in answers.values()) + acted.calls
        seconds = answer.seconds + time.perf_counter() - started
        found = answers[sent.call.key(acted.framed)]
        rewritten = replace(found, asked=acted.text, form=acted.form, calls=calls, seconds=seconds)
        decision = sent.decision if acted.problem is None else f"guarded; {acted.problem}"
        return Pair(sent=ORIGINAL, original=answer, rewritten=rewritten, decision=decision, operators=acted.operators)

    async def _ask(self, sent: Sent, framed: Framed) -> Answer:
        started = time.perf_counter()
        async with self._queue.spare(sent.call.upstream_model):
            reply = await self._upstream.post_json(sent.path, sent.call.asking(framed, stream=False), sent.headers)
        text, tokens = without_thought(text_of(sent.call.api, reply)), tokens_of(reply)
        seconds = time.perf_counter() - started
        return Answer(asked=sent.question, form=AS_IS, text=text, tokens=tokens, calls=1, seconds=seconds)


class Shadow:
    """Draws questions, asks their other way one after the other, and appends the pairs to a file."""

    def __init__(
        self,
        *,
        share: float,
        file: JsonLines,
        other: Counterfactual,
        encoder: Encoder,
        status: Status,
        judge: Judge | None,
    ) -> None:
        self._share, self._file, self._other, self._encoder = share, file, other, encoder
        self._status, self._judge = status, judge
        self._rng = random.Random(0)  # the same places in the order of requests are drawn after every start
        self._waiting: asyncio.Queue[tuple[Sent, list[bytes], float]] = asyncio.Queue(MAX_PENDING)
        self._worker: asyncio.Task[None] | None = None
        self._job: asyncio.Task[None] | None = None
        self._is_closing = False
        self.outcomes: Counter[str] = Counter()
        if not file.size_bytes:
            file.append(HEADER)

    def draws(self) -> bool:
        """Return whether the next question is answered both ways."""
        return self._rng.random() < self._share

    async def listen(self, body: AsyncIterator[bytes], sent: Sent) -> AsyncIterator[bytes]:
        """Yield the parts of a reply as they are; after the last one the other way is due."""
        parts, num_bytes = [], 0
        async with aclosing(body) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes <= MAX_ANSWER_BYTES:
                    parts.append(chunk)
                yield chunk
        if num_bytes > MAX_ANSWER_BYTES:
            self._count("long")
        else:
            self._offer(sent, parts, time.perf_counter() - sent.started)

    async def close(self) -> None:
        """Drop what is not complete; idempotent."""
        self._is_closing = True
        tasks = [task for task in (self._worker, self._job) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(self._waiting.qsize()):
            self._waiting.get_nowait()
            self._count("shutdown")
        self._worker = self._job = None

    def _offer(self, sent: Sent, parts: list[bytes], seconds: float) -> None:
        if self._is_closing:
            self._count("shutdown")
            return
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            self._waiting.put_nowait((sent, parts, seconds))
        except asyncio.QueueFull:
            self._count("busy")

    async def _work(self) -> None:
        while True:
            sent, parts, seconds = await self._waiting.get()
            self._job = asyncio.create_task(self._keep(sent, parts, seconds))  # a task: a client's call may cancel it
            await asyncio.wait((self._job,))

    async def _keep(self, sent: Sent, parts: list[bytes], seconds: float) -> None:
        try:
            answer = _answer(sent, parts, seconds)
            row = await self._row(sent, await self._other.pair(sent, answer))
            await asyncio.to_thread(self._file.append, row)
        except asyncio.CancelledError:
            self._count("shutdown" if self._is_closing else "cut")
        except NoSlotError:
            self._count("busy")
        except _FAILURES as error:
            self._count("failed")
            logger.warning("a question was not answered both ways: %s", error)
        else:
            self._count("kept")

    async def _row(self, sent: Sent, pair: Pair) -> dict[str, Any]:
        texts = [sent.question, read_part(pair.original.text), read_part(pair.rewritten.text)]
        question, *answers = await asyncio.to_thread(self._encoder.encode, texts)
        fits = [round(cosine(question, answer), 4) for answer in answers]
        ways = {ORIGINAL: pair.original, REWRITTEN: pair.rewritten}
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": sent.call.model,
            "mode": sent.mode,
            "decision": pair.decision,
            "sent": pair.sent,
            "operators": list(pair.operators),
            "question": sent.question,
            "rewrite": pair.rewritten.asked,
            "form": pair.rewritten.form,
            **{name: _way(way, fit) for (name, way), fit in zip(ways.items(), fits, strict=True)},
            "judge": await self._judged(sent, pair),
        }

    async def _judged(self, sent: Sent, pair: Pair) -> dict[str, str] | None:
        if self._judge is None:
            return None
        answers = pair.original.text, pair.rewritten.text
        try:
            options = sent.call.runner_options(self._judge.model)
            place = self._status.queue.spare
            choice = await self._judge.choose(sent.question, *answers, place=place, options=options)
        except JudgeFailed as error:  # the pair shows the rest without it
            logger.warning("the judge %s made no choice: %s", self._judge.model, error)
            return None
        names = {"first": ORIGINAL, "second": REWRITTEN, "tie": "tie"}
        return {"model": self._judge.model, "choice": names[choice]}

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._status.count("qm_shadow_total", outcome=outcome)


def _answer(sent: Sent, parts: list[bytes], seconds: float) -> Answer:
    """Return the answer in a reply that was sent; UpstreamGone for a stream that ended with an error."""
    reader = LineReader()
    lines = [*reader.lines(b"".join(parts)), reader.rest()]
    found = [reply for line in lines if (reply := parsed(line)) is not None]
    if not found or any("error" in reply for reply in found):
        raise UpstreamGone("the reply that was sent ended with an error")
    counts = [count for reply in found if (count := tokens_of(reply)) is not None]
    return Answer(
        asked=sent.asked,
        form=sent.form,
        text=without_thought("".join(text_of(sent.call.api, reply) for reply in found)),
        tokens=counts[-1] if counts else None,
        calls=sent.calls,
        seconds=seconds,
    )


def _way(answer: Answer, fit: float) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "refused": is_refusal(answer.text),
        "not_sure": is_not_sure(answer.text),
        "fit": fit,
        "chars": len(answer.text),
        "tokens": answer.tokens,
        "calls": answer.calls,
        "seconds": round(answer.seconds, 3),
    }
