"""The policy on one question of a client: the mutator rewrites, and the client's own request asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from query_mutator.apply import Limits, Rewrite, Rewriter
from query_mutator.apply.proxy.queue import Place
from query_mutator.apply.proxy.requests import ChatCall
from query_mutator.env.async_flow import run_flow_async
from query_mutator.env.flow import Flow
from query_mutator.forms import Framed
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.rewards import cosine
from query_mutator.types import AS_IS, CONTROLS, ChatRequest, Completion, Message

__all__ = ["Ask", "Episodes", "Rewritten"]

#: Asks the target; raises if the upstream fails.
Ask = Callable[[Framed], Awaitable[Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The wording to ask, or whose answer to return, in its form; `problem` says why it is the original one."""

    text: str
    form: str = AS_IS
    framed: Framed  # messages and options that ask it
    operators: tuple[str, ...] = ()
    calls: int = 0  # to the mutator
    problem: str | None = None  # the guard that the rewrites failed, or "meaning"
    rejected: tuple[tuple[str, str], ...] = ()  # operator and guard of rewrites that were not used


class Episodes:
    """Runs episodes of one policy. `lowest_meaning`: a rewrite whose cosine with the question is lower is not used."""

    def __init__(self, rewriter: Rewriter, *, lowest_meaning: float) -> None:
        self._rewriter, self._lowest_meaning = rewriter, lowest_meaning
        # Of its own: that of asyncio has a thread or two for each core, and encodes.
        self._callers = ThreadPoolExecutor(rewriter.models.settings.batch_size, thread_name_prefix="qm-rewrite")

    def close(self) -> None:
        """Start no more calls; those in flight end with the client."""
        self._callers.shutdown(wait=False, cancel_futures=True)

    @property
    def can_be_blind(self) -> bool:
        """Return whether the policy rewrites without looking at an answer."""
        return "blind" in self._rewriter.modes

    @property
    def reads_logprobs(self) -> bool:
        """Return whether the policy submits by a P(right) that reads the log probability of an answer."""
        return self._rewriter.task.calls.logprobs

    async def rewrite(
        self, call: ChatCall, limits: Limits, *, place: Place, usable: Callable[[Framed], bool] | None = None
    ) -> Rewritten:
        """Return the wording that a blind policy would ask in place of a call's question, or that if it must not be.

        `place` holds a slot for each call to the mutator; `usable` are the requests to ask with, by default those that
        the call takes.
        """
        flow = await asyncio.to_thread(
            self._rewriter.flow,
            call.question or "",
            mode="blind",
            limits=limits,
            asks_at_end=False,
            usable=usable or call.takes,
        )
        return await self._run(call, flow, _never, place)

    async def answer(
        self, call: ChatCall, ask: Ask, limits: Limits, *, place: Place, first_answer: str | None = None
    ) -> Rewritten:
        """Return the wording whose answer the policy submits to a call's question.

        `first_answer` is to the question, if it is known. A policy that decides when to ask does not see it: it would
        submit it in the place of asking what it rewrote.
        """
        question = call.question or ""
        if self._rewriter.task.rules.policy_asks:
            first_answer = None
        flow = await asyncio.to_thread(
            self._rewriter.flow, question, limits=limits, first_answer=first_answer, usable=call.takes
        )
        return await self._run(call, flow, ask, place)

    async def _run(self, call: ChatCall, flow: Flow, ask: Ask, place: Place) -> Rewritten:
        question = call.question or ""
        calls, client, models = 0, self._rewriter.models.calls.eval_client, self._rewriter.models

        async def complete(request: ChatRequest) -> Completion:
            nonlocal calls
            if request.purpose == "target":
                return await ask(self._framed(request.messages, request.options, request.temperature))
            calls += 1
            if options := call.runner_options(request.model):
                request = replace(request, options={**request.options, **options})
            async with place(request.model):
                return await complete_in_thread(client, request, self._callers)

        found: Rewrite = await run_flow_async(
            flow, complete=complete, encoder=models.encoder, retry_policy=models.retry_policy
        )
        framed = self._framed(found.messages, found.options, found.temperature)
        form = AS_IS if framed.text == found.text else found.form  # a form that is not usable leaves the wording
        kept = Rewritten(text=question, framed=Framed.user(question), calls=calls, rejected=found.rejected)
        if (found.text, form) == (question, AS_IS):
            return replace(kept, problem=found.rejected[0][1] if found.rejected else None)
        if not await asyncio.to_thread(self._keeps_meaning, question, found.text):
            return replace(kept, problem="meaning")
        others = {*CONTROLS, *(each.name for each in self._rewriter.task.forms)}
        used = tuple(name for name in found.operators if name not in others)
        return replace(kept, text=found.text, form=form, framed=framed, operators=used)

    def _framed(self, messages: Sequence[Message], options: Mapping[str, Any], temperature: float) -> Framed:
        """Return what a form asks for; a temperature that is that of all calls in training is none of its own."""
        is_own = temperature != self._rewriter.task.calls.temperature
        return Framed(messages=tuple(messages), options=options, temperature=temperature if is_own else None)

    def _keeps_meaning(self, question: str, text: str) -> bool:
        """Return whether a wording is close enough to the question to replace it."""
        if self._lowest_meaning <= -1:
            return True
        return cosine(*self._rewriter.models.encoder.encode([question, text])) >= self._lowest_meaning


async def _never(framed: Framed) -> Completion:
    raise AssertionError(f"a blind policy asked {framed!r}")
