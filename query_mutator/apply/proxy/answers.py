"""Answer a request to a virtual model in one of three modes.

blind   rewrite without asking, then ask once: that answer streams as it arrives
gate    ask the question; an answer that does not refuse streams on from its first sentence, else the policy rewrites
full    the policy rewrites and asks as it was trained to, and the answer that it submits is sent whole

Every answer comes from the client's own request with another question in it, so that its options, its system prompt and
its loaded model stay what they are. A form that is more than one text is used only where there is no conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import ClientResponse

from query_mutator.apply import Limits
from query_mutator.apply.proxy.contract import Reply
from query_mutator.apply.proxy.eligibility import MAX_QUESTION_TOKENS, skip_reason
from query_mutator.apply.proxy.episodes import Episodes, Rewritten
from query_mutator.apply.proxy.replies import (
    STREAM_TYPES,
    answer_of,
    as_stream,
    parsed,
    read_lines,
    renamed,
    renamed_lines,
    text_of,
    with_fields,
)
from query_mutator.apply.proxy.requests import LOGPROBS, ChatCall
from query_mutator.apply.proxy.shadow import Sent, Shadow
from query_mutator.apply.proxy.status import Status
from query_mutator.apply.proxy.upstream import Header, Upstream, UpstreamError, end_to_end
from query_mutator.forms import Framed
from query_mutator.llm.early_stop import first_sentence
from query_mutator.llm.http_server import REFUSALS
from query_mutator.rewards import OPENING_CHARS, is_not_sure, is_refusal
from query_mutator.types import AS_IS, THOUGHT_TAG_CHARS, Completion, Json, said_in

__all__ = ["BODY_HEADER", "Mode", "PolicyAnswerer", "Rules"]

Mode = Literal["blind", "gate", "full"]

BODY_HEADER = "x-qm-body"
MAX_HELD_LINES = 100_000  # of a stream that begins without text; a line is a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How requests to virtual models are answered."""

    mode: Mode = "gate"
    limits: Limits
    gates_not_sure: bool = False  # whether "not sure" is rewritten too, next to refusals
    max_question_tokens: int = MAX_QUESTION_TOKENS
    max_tokens: int = 0  # of an answer where the client sets no limit; 0: none
    token_field: str = "max_tokens"  # of a request to OpenAI's API

    def is_bad(self, text: str) -> bool:
        """Return whether an answer, or its first sentence, is to be replaced."""
        return is_refusal(text) or (self.gates_not_sure and is_not_sure(text))


@dataclass(slots=True, kw_only=True)
class _Request:
    """A client's request on its way, and what was decided about it."""

    call: ChatCall
    headers: list[Header]
    path: str
    rules: Rules
    started: float = field(default_factory=time.perf_counter)
    decision: str = "passed"
    operators: Sequence[str] = ()
    calls: int = 0
    question: str = ""
    form: str = AS_IS
    overhead_s: float = 0.0  # until the request that answers was sent
    wants_field: bool = False
    acted: bool = False  # whether the policy acted on the question

    def elapsed_s(self) -> float:
        """Return the seconds since the request came."""
        return time.perf_counter() - self.started

    def sent(self, question: str) -> Sent:
        """Return what the client asked and gets, for the shadow."""
        return Sent(
            call=self.call,
            headers=self.headers,
            path=self.path,
            mode=self.rules.mode,
            question=question,
            asked=self.question,
            form=self.form,
            decision=self.decision,
            operators=tuple(self.operators),
            calls=self.calls,
            started=self.started,
            acted=self.acted,
        )

    def facts(self) -> Json:
        """Return what the headers say, and the question that was asked."""
        return {
            "decision": self.decision,
            "operators": list(self.operators),
            "form": self.form,
            "calls": self.calls,
            "overhead_ms": round(1000 * self.overhead_s, 1),
            "question": self.question,
        }

    def qm_headers(self) -> list[Header]:
        """Return the headers of the proxy's own."""
        facts = self.facts()
        return [
            (b"x-qm-decision", self.decision.encode()),
            (b"x-qm-operators", ",".join(self.operators).encode()),
            (b"x-qm-form", self.form.encode()),
            (b"x-qm-calls", str(self.calls).encode()),
            (b"x-qm-overhead-ms", str(facts["overhead_ms"]).encode()),
        ]


class PolicyAnswerer:
    """Answers requests to virtual models with a policy."""

    def __init__(
        self, upstream: Upstream, episodes: Episodes, status: Status, rules: Rules, *, shadow: Shadow | None = None
    ) -> None:
        self._upstream, self._episodes, self._status, self._rules = upstream, episodes, status, rules
        self._shadow = shadow
        self._asks_logprobs = episodes.reads_logprobs  # until an upstream refuses them

    async def answer(self, call: ChatCall, headers: list[Header], path: str) -> Reply:
        """Return the reply; UpstreamError or UpstreamGone if the upstream gives none."""
        named = _named(headers)
        reason = skip_reason(call, named, max_tokens=self._rules.max_question_tokens)
        if reason is None:
            call = call.limited(self._rules.max_tokens, openai_field=self._rules.token_field)
        request = _Request(call=call, headers=headers, path=path, rules=self._rules)
        request.wants_field = named.get(BODY_HEADER, "0") not in ("", "0")
        mode = self._rules.mode if reason is None else "passed"
        if call.question is None or reason is not None:
            request.decision, request.question = f"passed; {reason}", call.question or ""
            reply = await self._ask(request, call.body)
        elif mode == "blind":
            reply = await self._blind(request, call.question)
        elif mode == "gate":
            reply = await self._gate(request, call.question)
        else:
            reply = await self._full(request, call.question)
        self._status.count("qm_decisions_total", decision=request.decision.partition(";")[0], mode=mode)
        for operator in request.operators:
            self._status.count("qm_rewrites_total", operator=operator)
        if request.form != AS_IS:
            self._status.count("qm_rewrites_total", operator=request.form)
        self._status.observe("qm_first_byte_seconds", time.perf_counter() - request.started, mode=mode)
        body = self._timed(reply.body, request.started, mode)
        if self._shadow is not None and call.question is not None and reason is None and self._shadow.draws():
            body = self._shadow.listen(body, request.sent(call.question))
        return Reply(status=reply.status, headers=reply.headers, body=body)

    async def close(self) -> None:
        """Stop what is asked in the background."""
        self._episodes.close()
        if self._shadow is not None:
            await self._shadow.close()

    async def rewrite(self, call: ChatCall, headers: list[Header]) -> Json:
        """Return what would be asked in the place of a question, its operators and form, and why it stays as it is.

        A form that is more than one text is not used.
        """
        reason = skip_reason(call, _named(headers), max_tokens=self._rules.max_question_tokens)
        problem = reason if reason is not None or self._episodes.can_be_blind else "policy"
        if problem is not None:
            return {"question": call.question or "", "operators": [], "form": AS_IS, "calls": 0, "problem": problem}
        found = await self._episodes.rewrite(
            call, self._rules.limits, place=self._status.queue.place, usable=lambda framed: framed.text is not None
        )
        self._count(found)
        return {
            "question": found.framed.text,
            "operators": list(found.operators),
            "form": found.form,
            "calls": found.calls,
            "problem": found.problem,
        }

    async def _timed(self, body: AsyncIterator[bytes], started: float, mode: str) -> AsyncIterator[bytes]:
        async with aclosing(body) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk
        self._status.observe("qm_request_seconds", time.perf_counter() - started, mode=mode)

    # --- the modes -------------------------------------------------------------------------------------------------

    async def _blind(self, request: _Request, question: str) -> Reply:
        found = await self._episodes.rewrite(request.call, request.rules.limits, place=self._status.queue.place)
        self._decide(request, question, found)
        return await self._ask(request, request.call.asking(found.framed))

    async def _gate(self, request: _Request, question: str) -> Reply:
        request.overhead_s = request.elapsed_s()
        async with AsyncExitStack() as stack:
            response = await self._open(stack, request, request.call.body)
            if request.call.streams:
                lines = read_lines(self._upstream.pieces(response))
                held, text = await _opening(lines, request.call)
            else:
                reply = await self._upstream.read_object(response)
                text = text_of(request.call.api, reply)
            if not request.rules.is_bad(text):
                request.decision, request.question = "kept", question
                if request.call.streams:
                    return self._streamed(request, response, held, lines, stack.pop_all())
                return self._finished(request, reply)
        # Here the slot is free again: a refusal that was streaming is cut.
        return await self._full(request, question, first=text, whole=None if request.call.streams else reply)

    async def _full(
        self, request: _Request, question: str, *, first: str | None = None, whole: Json | None = None
    ) -> Reply:
        """Answer with what the policy submits; `first` is the answer to the question, if known, `whole` its reply."""
        original = request.call.key(Framed.user(question))
        answers = {} if first is None else {original: Completion(text=first)}
        replies = {} if whole is None else {original: whole}
        sent_s = {original: request.overhead_s}

        async def ask(framed: Framed) -> Completion:
            key = request.call.key(framed)
            if key not in answers:
                sent_s[key] = request.elapsed_s()
                replies[key] = await self._reply(request, framed)
                answers[key] = answer_of(request.call.api, replies[key])
            return answers[key]

        found = await self._episodes.answer(
            request.call, ask, request.rules.limits, place=self._status.queue.place, first_answer=first
        )
        self._decide(request, question, found)
        reply = replies.get(request.call.key(found.framed))
        if reply is None:
            return await self._ask(request, request.call.asking(found.framed))
        request.overhead_s = sent_s[request.call.key(found.framed)]
        return self._finished(request, reply)

    def _decide(self, request: _Request, question: str, found: Rewritten) -> None:
        request.operators, request.acted = found.operators, True
        request.question, request.form = found.text, found.form
        request.calls += found.calls
        self._count(found)
        if found.problem is not None:
            request.decision = f"guarded; {found.problem}"
        else:
            is_kept = (found.text, found.form) == (question, AS_IS)
            request.decision = "kept" if is_kept else "rewritten"

    def _count(self, found: Rewritten) -> None:
        self._status.count("qm_calls_total", found.calls, purpose="rewrite")
        for operator, guard in found.rejected:
            self._status.count("qm_rejected_rewrites_total", operator=operator, guard=guard)

    # --- calls and replies -----------------------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack, request: _Request, body: Json) -> ClientResponse:
        """Send a request of the client's form to the upstream, which `stack` closes."""
        await stack.enter_async_context(self._status.queue.place(request.call.upstream_model))
        request.calls += 1
        self._status.count("qm_calls_total", purpose="answer")
        return await stack.enter_async_context(self._upstream.post(request.path, body, request.headers))

    async def _reply(self, request: _Request, framed: Framed) -> Json:
        """Return the upstream's whole reply to a form of the question, with log probabilities if it gives them."""
        body = request.call.asking(framed, stream=False)
        if self._asks_logprobs:
            try:
                return await self._read(request, {**body, **LOGPROBS})
            except UpstreamError as error:
                if error.status not in REFUSALS or b"logprob" not in error.body.lower():
                    raise
                self._asks_logprobs = False
        return await self._read(request, body)

    async def _read(self, request: _Request, body: Json) -> Json:
        async with AsyncExitStack() as stack:
            return await self._upstream.read_object(await self._open(stack, request, body))

    async def _ask(self, request: _Request, body: Json) -> Reply:
        """Return the upstream's answer as it arrives."""
        request.overhead_s = request.elapsed_s()
        async with AsyncExitStack() as stack:
            response = await self._open(stack, request, body)
            if request.call.streams:
                lines = read_lines(self._upstream.pieces(response))
                return self._streamed(request, response, [], lines, stack.pop_all())
            return self._finished(request, await self._upstream.read_object(response))

    def _streamed(
        self,
        request: _Request,
        response: ClientResponse,
        held: Iterable[list[bytes]],
        lines: AsyncIterator[list[bytes]],
        stack: AsyncExitStack,
    ) -> Reply:
        """Return the reply of lines held back and those that follow, under the client's model name."""
        kept, model = end_to_end(response.raw_headers, without=(b"content-length",)), request.call.model

        async def body() -> AsyncIterator[bytes]:
            async with stack:
                for together in held:
                    yield b"".join(renamed(line, model) for line in together)
                    await asyncio.sleep(0)  # a turn for others: nothing here waits for the upstream
                async for piece in renamed_lines(lines, model):
                    yield piece

        return Reply(status=200, headers=[*kept, *request.qm_headers()], body=body())

    def _finished(self, request: _Request, reply: Json) -> Reply:
        """Return a whole reply, as a stream if the client wants one."""
        call = request.call
        if call.streams:
            content_type, chunks = STREAM_TYPES[call.api], list(as_stream(call, reply))
        else:
            content_type = b"application/json"
            chunks = [with_fields(reply, call.model, request.facts() if request.wants_field else None)]
        return Reply(
            status=200, headers=[(b"content-type", content_type), *request.qm_headers()], body=_iterate(chunks)
        )


def _named(headers: Iterable[Header]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


async def _iterate(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def _opening(lines: AsyncIterator[list[bytes]], call: ChatCall) -> tuple[list[list[bytes]], str]:
    """Return the lines up to the end of an answer's first sentence, or of what verdicts read, and that text.

    Thoughts are held back and are not in the text.
    """
    held: list[list[bytes]] = []
    text, said, num_lines = "", "", 0
    async for together in lines:
        held.append(together)
        num_lines += len(together)
        texts = map(parsed, together) if any(b'"' in line for line in together) else ()
        for found in filter(None, texts):
            text += text_of(call.api, found)
            said, thinks = said_in(text)
            said = said.lstrip()
            text = f"{said}<think>{text[-THOUGHT_TAG_CHARS:]}" if thinks else said  # of a thought its end alone
            said = said[:OPENING_CHARS]
            if (sentence := first_sentence(said)) is not None or len(said) == OPENING_CHARS:
                return held, sentence or said
        if num_lines > MAX_HELD_LINES:
            break
    return held, said
