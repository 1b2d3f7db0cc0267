"""Answer a request to a virtual model in one of two modes, at the temperature of the training.

gate    ask the question; stream an answer whose first sentence does not refuse, else let the policy rewrite
full    the policy rewrites and asks as trained; its submitted answer is sent whole, or streams if the policy asks once

Every answer comes from the client's own request with a changed question, which keeps its options, system prompt and
loaded model. A form of more than one text is only used without a conversation.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal

import orjson
from aiohttp import ClientResponse, web
from multidict import CIMultiDict

from query_mutator.apply import Limits, Rewrite, Rewriter
from query_mutator.apply.proxy import chat
from query_mutator.apply.proxy.chat import ChatCall, Names
from query_mutator.apply.proxy.feedback import Feedback, Reply
from query_mutator.apply.proxy.metrics import Metrics
from query_mutator.apply.proxy.upstream import Headers, Upstream, UpstreamError, UpstreamGone, end_to_end, slices
from query_mutator.env.scheduling import Flow, run_flow_async
from query_mutator.forms import Framed, whole_reply
from query_mutator.learners import PlanPolicy
from query_mutator.llm.http_server import REFUSALS
from query_mutator.llm.ollama import with_tag
from query_mutator.reading import first_sentence, is_refusal
from query_mutator.types import (
    AS_IS,
    CONTROLS,
    MAX_NAME_CHARS,
    THOUGHT_TAG_CHARS,
    ChatRequest,
    Completion,
    Json,
    Message,
    read_part,
    said_in,
    without_thought,
)

Mode = Literal["gate", "full"]
#: Asks a model, until a deadline if there is an answer already; raises if there is none and the upstream fails.
Ask = Callable[[ChatCall, Framed, float | None], Awaitable[Completion]]
Send = Callable[[Headers, AsyncIterator[bytes]], Awaitable[web.StreamResponse]]

HELD_CHARS = 240  # of a stream, unless its first sentence ends: a refusal says so by then
_FIRST_TAG = re.compile(r"<(/?)think", re.IGNORECASE)
MAX_HELD_LINES = 100_000  # of a stream that begins without text; a line is a token


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A client's request to a virtual model, and the decisions about it."""

    call: ChatCall
    path: str
    headers: Headers  # of the client, for the upstream
    send: Send  # headers and body of the reply
    key: str = ""  # that the client sent
    skips: bool = False  # whether the client asks to pass
    mode: str = "passed"
    started: float = field(default_factory=time.perf_counter)
    decision: str = "passed"
    operators: Sequence[str] = ()
    calls: int = 0
    reply: Reply = field(default_factory=Reply)
    answer: Completion | None = None  # as the policy read it
    form: str = AS_IS  # in which it was asked
    overhead_s: float = 0.0  # until the request that answers was sent

    @property
    def question(self) -> str:
        """Return the client's question."""
        return self.call.question or ""

    def elapsed_s(self) -> float:
        """Return the seconds since the request came."""
        return time.perf_counter() - self.started


class PolicyAnswerer:
    """Answers requests to virtual models with a policy; questions of more than `max_question_tokens` pass."""

    def __init__(
        self,
        rewriter: Rewriter,
        upstream: Upstream,
        metrics: Metrics,
        *,
        mode: Mode,
        limits: Limits,
        max_question_tokens: int = chat.MAX_QUESTION_TOKENS,
        names: Names = chat.EACH,
        feedback: Feedback | None = None,
    ) -> None:
        self._rewriter, self._upstream, self._metrics = rewriter, upstream, metrics
        self.names, self.feedback = names, feedback or Feedback(metrics)
        self._mode, self._limits, self._max_question_tokens = mode, limits, max_question_tokens
        self._asks_once = rewriter.asks_once  # without looking at an answer
        self._asks_logprobs = rewriter.task.calls.logprobs  # that P(right) reads
        self._temperature = rewriter.task.calls.temperature  # as evaluated
        self._refused: set[tuple[str, str]] = set()  # fields, with the arm whose server does not take them
        forms = {form.name for form in rewriter.task.forms if form.read is whole_reply}
        policy = rewriter.policy if mode == "full" else None
        self._keeps_format = isinstance(policy, PlanPolicy) and forms.issuperset(policy.plan.operators)
        self._thinkers: set[str] = set()  # models that close thoughts which they did not open: the prompt did

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """Send the reply; UpstreamError or UpstreamGone if the upstream gives none, HTTPNotFound for no model."""
        model, target = exchange.call.model, self._rewriter.task.calls.target_model
        missing = f"{model[:MAX_NAME_CHARS]!r}: the server has no such model to rewrite for; use "
        missing += repr(self.names.virtual(target))
        if self._upstream.takes_any_name and with_tag(exchange.call.upstream_model) != with_tag(target):
            raise web.HTTPNotFound(text=missing)
        try:
            return await self._answered(exchange)
        except UpstreamError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise web.HTTPNotFound(text=missing) from error

    async def _answered(self, exchange: Exchange) -> web.StreamResponse:
        if lacking := self._upstream.arms_without(exchange.path):
            raise web.HTTPBadRequest(text=f"{lacking[0]} has OpenAI's API alone; ask at /v1/chat/completions")
        reason = self._skip_reason(exchange)
        if reason is not None:
            exchange.decision = f"passed; {reason}"
            return await self._ask(exchange, exchange.call.body)
        exchange.mode = self._mode
        return await (self._gate(exchange) if self._mode == "gate" else self._full(exchange))

    async def rewrite(self, exchange: Exchange) -> Json:
        """Return the text to ask instead of a question, its operators and form, and why it is unchanged, if it is.

        Forms of more than one text are not used.
        """
        question = exchange.question
        problem = self._skip_reason(exchange) or (None if self._asks_once else "policy")
        if problem is None:
            framed = await self._act(exchange, usable=lambda framed: framed.text is not None)
            question, problem = framed.text or question, exchange.decision.partition("; ")[2] or None
        return {
            "question": question,
            "operators": list(exchange.operators),
            "form": exchange.form,
            "calls": exchange.calls,
            "problem": problem,
        }

    def _skip_reason(self, exchange: Exchange) -> str | None:
        if exchange.skips:
            return "asked"
        return chat.skip_reason(exchange.call, max_tokens=self._max_question_tokens, keeps_format=self._keeps_format)

    # --- the modes ---------------------------------------------------------------------------------------------------

    async def _gate(self, exchange: Exchange) -> web.StreamResponse:
        call, whole = exchange.call, None
        exchange.overhead_s = exchange.elapsed_s()
        async with self._opened(exchange, call.body) as response:
            if call.streams:
                lines = chat.read_lines(self._upstream.pieces(response))
                held, text = await _opening(lines, call, in_thought=call.upstream_model in self._thinkers)
            else:
                whole = await self._upstream.read_object(response)
                text = without_thought(chat.text_of(call.api, whole))
            if not is_refusal(text):
                exchange.decision = "kept"
                if whole is None:
                    return await self._send_stream(exchange, response, lines, held)
                return await self._send_whole(exchange, whole)
        # Here the call has ended: a refusal that was streaming is cut.
        return await self._full(exchange, first=text, whole=whole)

    async def _full(
        self, exchange: Exchange, *, first: str | None = None, whole: Json | None = None
    ) -> web.StreamResponse:
        """Send the policy's submitted answer; `first` is the answer to the question, if known, and `whole` its reply.

        A policy that asks once only rewrites, and the answer streams.
        """
        call, api = exchange.call, exchange.call.api
        if first is None and self._asks_once:
            framed = await self._act(exchange, usable=call.takes)
            return await self._ask(exchange, exchange.call.asking(framed))
        asked: dict[bytes, tuple[Completion, Json | None, float]] = {}  # answer, reply, when it was asked
        if first is not None:
            asked[call.key(Framed.user(exchange.question))] = Completion(text=first), whole, exchange.overhead_s

        async def ask(call: ChatCall, framed: Framed, deadline: float | None) -> Completion:
            key = call.key(framed)
            if key not in asked:
                sent_s = exchange.elapsed_s()
                left_s = max(0.0, deadline - time.monotonic()) if asked and deadline is not None else None
                try:
                    async with asyncio.timeout(left_s):
                        reply = await self._reply(exchange, call, framed)
                except (UpstreamGone, UpstreamError, TimeoutError) as error:
                    if not asked:
                        raise
                    kind = "timeout" if isinstance(error, TimeoutError) else "request"
                    return Completion.failed(kind, str(error))  # the best answer so far is sent
                asked[key] = chat.answer_of(api, reply), reply, sent_s
            return asked[key][0]

        known = None if self._rewriter.task.rules.policy_asks else first
        framed = await self._act(exchange, ask, first_answer=known, usable=call.takes)
        call = exchange.call
        exchange.answer, reply, sent_s = asked.get(call.key(framed), (None, None, 0.0))
        if reply is None:
            return await self._ask(exchange, call.asking(framed))
        exchange.overhead_s = sent_s
        return await self._send_whole(exchange, reply)

    async def _act(self, exchange: Exchange, ask: Ask | None = None, **settings: Any) -> Framed:
        """Let the policy act on a question, record it, and return the request for the answer that it submits.

        Without `ask` (for a policy that asks once) it only rewrites.
        """
        question, models = exchange.question, self._rewriter.models
        settings |= {"limits": self._limits, "asks_at_end": ask is not None}
        flow: Flow = await asyncio.to_thread(self._rewriter.flow, question, **settings)

        async def complete(request: ChatRequest) -> Completion:
            if request.purpose == "target":
                assert ask is not None
                framed = self._framed(request.messages, request.options, request.temperature)
                return await ask(self._call_of(exchange, request.model), framed, request.deadline)
            exchange.calls += 1
            self._metrics.count("qm_calls_total", purpose="rewrite")
            if options := exchange.call.runner_options(request.model):
                request = replace(request, options={**request.options, **options})
            with self._metrics.calling(request.model):
                return await self._rewriter.complete(request)

        found: Rewrite = await run_flow_async(
            flow, complete=complete, encoder=models.encoder, retry_policy=models.retry_policy
        )
        exchange.call, exchange.reply.p_right = self._call_of(exchange, found.model), found.p_right
        for operator, guard in found.rejected:
            self._metrics.count("qm_rejected_rewrites_total", operator=operator, guard=guard)
        framed = self._framed(found.messages, found.options, found.temperature)
        form = AS_IS if framed.text == found.text else found.form  # a form that is not usable leaves the wording
        if (found.text, form) == (question, AS_IS):
            exchange.decision = f"guarded; {found.rejected[0][1]}" if found.rejected else "kept"
            return Framed.user(question)
        others = {*CONTROLS, *(each.name for each in self._rewriter.task.forms)}
        exchange.decision, exchange.form = "rewritten", form
        exchange.operators = [name for name in found.operators if name not in others]
        return framed

    def _call_of(self, exchange: Exchange, model: str) -> ChatCall:
        """Return the client's request with the model that a form asks, if there are several."""
        return exchange.call.to(model) if self.names.first else exchange.call

    def _framed(self, messages: Sequence[Message], options: Mapping[str, Any], temperature: float) -> Framed:
        """Return the request of a form, without temperature unless the form overrides that of training."""
        is_own = temperature != self._rewriter.task.calls.temperature
        return Framed(messages=tuple(messages), options=options, temperature=temperature if is_own else None)

    # --- calls and replies -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self, exchange: Exchange, body: Json) -> AsyncIterator[ClientResponse]:
        """Send a request in the client's format, by default at the temperature of training; yield the reply's head."""
        exchange.calls += 1
        model = str(body["model"])
        arm = model if self.names.first else ""
        self._metrics.count("qm_calls_total", purpose="answer", **({"model": arm} if arm else {}))
        sets = (arm, "temperature") not in self._refused and exchange.mode != "passed"
        sent = exchange.call.with_options(body, {"temperature": self._temperature}) if sets else body
        async with AsyncExitStack() as stack:
            stack.enter_context(self._metrics.calling(model))
            try:
                post = self._upstream.post(exchange.path, sent, exchange.headers)
                response = await stack.enter_async_context(post)
            except UpstreamError as error:
                if sent == body or not _refuses(error, b"temperature"):
                    raise
                self._refused.add((arm, "temperature"))
                response = await stack.enter_async_context(self._upstream.post(exchange.path, body, exchange.headers))
            yield response

    async def _reply(self, exchange: Exchange, call: ChatCall, framed: Framed) -> Json:
        """Return the upstream's whole reply to a form of the question, with log probabilities if it gives them."""
        body, arm = call.asking(framed, stream=False), call.upstream_model if self.names.first else ""
        if self._asks_logprobs and (arm, "logprobs") not in self._refused:
            try:
                return await self._read(exchange, {**body, **chat.LOGPROBS})
            except UpstreamError as error:
                if not _refuses(error, b"logprob"):
                    raise
                self._refused.add((arm, "logprobs"))
        return await self._read(exchange, body)

    async def _read(self, exchange: Exchange, body: Json) -> Json:
        async with self._opened(exchange, body) as response:
            return await self._upstream.read_object(response)

    async def _ask(self, exchange: Exchange, body: Json) -> web.StreamResponse:
        """Send the upstream's answer as it arrives."""
        exchange.overhead_s = exchange.elapsed_s()
        if not exchange.call.streams:
            return await self._send_whole(exchange, await self._read(exchange, body))
        async with self._opened(exchange, body) as response:
            return await self._send_stream(exchange, response, chat.read_lines(self._upstream.pieces(response)))

    async def _send_stream(
        self,
        exchange: Exchange,
        response: ClientResponse,
        lines: AsyncIterator[list[bytes]],
        held: Iterable[list[bytes]] = (),
    ) -> web.StreamResponse:
        """Send lines held back and those that follow, under the client's model name."""
        call, said = exchange.call, list[str]()

        async def all_lines() -> AsyncIterator[list[bytes]]:
            for together in held:
                yield noted(together)
                await asyncio.sleep(0)  # a turn for others: nothing here waits for the upstream
            async for together in lines:
                yield noted(together)
            if exchange.mode != "passed":
                self._note(exchange, "".join(said))

        def noted(together: list[bytes]) -> list[bytes]:
            if exchange.mode != "passed" and len(said) < MAX_HELD_LINES:
                with suppress(UpstreamGone):
                    said.extend(chat.texts_of(call.api, together))
            return together

        body = chat.renamed_lines(all_lines(), call.model)
        return await self._send(exchange, end_to_end(response.headers, "content-length"), body)

    async def _send_whole(self, exchange: Exchange, reply: Json) -> web.StreamResponse:
        """Send a whole reply, as a stream if the client wants one."""
        call = exchange.call
        if call.streams:
            content_type, content = chat.STREAM_TYPES[call.api], b"".join(chat.as_stream(call, reply))
        else:
            content_type, content = "application/json", orjson.dumps({**reply, "model": call.model})
        if exchange.mode != "passed":
            self._note(exchange, chat.text_of(call.api, reply))
        return await self._send(exchange, CIMultiDict({"Content-Type": content_type}), slices(content))

    async def _send(
        self, exchange: Exchange, headers: CIMultiDict[str], body: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Send a reply that says in its headers what was done."""
        headers["X-QM-Decision"], headers["X-QM-Form"] = exchange.decision, exchange.form
        headers["X-QM-Operators"], headers["X-QM-Calls"] = ",".join(exchange.operators), str(exchange.calls)
        headers["X-QM-Overhead-Ms"] = f"{1000 * exchange.overhead_s:.1f}"
        if self.names.first:
            headers["X-QM-Model"] = exchange.call.upstream_model
        if exchange.mode != "passed":
            headers["X-QM-Id"] = self.feedback.name(exchange.reply, exchange.key)
        decision, _, reason = exchange.decision.partition("; ")
        labels = {"decision": decision, "mode": exchange.mode, **({"reason": reason} if reason else {})}
        self._metrics.count("qm_decisions_total", **labels)
        for operator in (*exchange.operators, *(() if exchange.form == AS_IS else (exchange.form,))):
            self._metrics.count("qm_rewrites_total", operator=operator)
        self._metrics.observe("qm_first_byte_seconds", exchange.elapsed_s(), mode=exchange.mode)
        response = await exchange.send(headers, body)
        self._metrics.observe("qm_request_seconds", exchange.elapsed_s(), mode=exchange.mode)
        return response

    def _note(self, exchange: Exchange, text: str) -> None:
        """Note whether a reply's model begins with a thought, and log it as `qm plan --from-logs` reads it."""
        model, read = exchange.call.upstream_model, exchange.answer
        if (tag := _FIRST_TAG.search(text)) and tag[1]:
            self._thinkers.add(model)
        self.feedback.record(
            exchange.reply,
            {
                "question": exchange.question,
                "form": exchange.form.partition("@")[0] if self.names.first else exchange.form,
                "model": model if self.names.first else None,
                "reply": read_part(text),
                "logprob": None if read is None else read.logprob,
                "cut": None if read is None or not read.model else read.hit_limit,
            },
        )


def _refuses(error: UpstreamError, field: bytes) -> bool:
    return error.status in REFUSALS and field in error.body.lower()


async def _opening(
    lines: AsyncIterator[list[bytes]], call: ChatCall, *, in_thought: bool
) -> tuple[list[list[bytes]], str]:
    """Return the lines up to the end of an answer's first sentence, or its first characters, and that text.

    Thoughts are held back and not part of the text; with `in_thought` the reply begins with one.
    """
    held: list[list[bytes]] = []
    text, said, num_lines, opening = "<think>" if in_thought else "", "", 0, ""
    async for together in lines:
        held.append(together)
        num_lines += len(together)
        for found in chat.texts_of(call.api, together):
            text += found
            opening += found if in_thought and len(opening) < HELD_CHARS else ""
            said, thinks = said_in(text)
            said = said.lstrip()
            text = f"{said}<think>{text[-THOUGHT_TAG_CHARS:]}" if thinks else said  # of a thought its end alone
            said = said[:HELD_CHARS]
            if (sentence := first_sentence(said)) is not None or len(said) == HELD_CHARS:
                return held, sentence or said
        if num_lines > MAX_HELD_LINES:
            break
    return held, said or opening  # which was no thought, as it did not end
