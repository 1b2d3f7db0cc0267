"""Run the policy on one question with asynchronous calls: the mutator rewrites, the client's own request asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Episode
from query_mutator.env.flow import Call, Encode, Flow
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from query_mutator.rewards import cosine
from query_mutator.serve.guards import rewrite_problem
from query_mutator.training.learner import InferencePolicy
from query_mutator.types import CONTROLS, SUBMIT, ChatRequest, Completion, Question

__all__ = ["Ask", "Budget", "Episodes", "Rewritten"]

#: Asks the target a wording; raises if the upstream fails.
Ask = Callable[[str], Awaitable[Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an episode may cost: calls to mutator and target, and seconds."""

    calls: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Rewritten:
    """The wording to ask, or whose answer to return; `problem` says why it is the original one."""

    text: str
    operators: tuple[str, ...] = ()
    rewrites: int = 0  # calls to the mutator
    asks: int = 0  # calls to the target
    problem: str | None = None


class _Stopped(Exception):
    """The budget is spent, or the next call is the one that the caller makes."""


class Episodes:
    """Runs episodes of one policy, which chooses actions from observations [1, O].

    `lowest_meaning`: a rewrite whose cosine with the question is lower is not used.
    """

    def __init__(self, task: Task, policy: InferencePolicy, *, client: Client, lowest_meaning: float) -> None:
        self._task, self._policy, self._client, self._lowest_meaning = task, policy, client, lowest_meaning

    async def rewrite(self, question: str, budget: Budget) -> Rewritten:
        """Return the wording that the policy would ask first, or the question if it must not be asked."""
        return await self._run(question, None, budget)

    async def answer(self, question: str, ask: Ask, budget: Budget, *, free: frozenset[str] = frozenset()) -> Rewritten:
        """Return the wording whose answer the policy submits; asking those in `free` costs no call."""
        return await self._run(question, ask, budget, free)

    async def _run(
        self, question: str, ask: Ask | None, budget: Budget, free: frozenset[str] = frozenset()
    ) -> Rewritten:
        task = await asyncio.to_thread(self._task.on, [Question(id="0", text=question)])
        engine, found = EpisodeEngine.open(task, 0), Rewritten(text=question)
        try:
            async with asyncio.timeout(budget.seconds):
                try:
                    await self._drive(self._episode(engine), found, ask, budget, free)
                except _Stopped:
                    if ask is not None and engine.episode.current is None:  # what was rewritten last is not asked yet
                        await self._drive(engine.ask(), found, ask, budget, free)
        except (TimeoutError, _Stopped):
            pass
        episode, submitted = engine.episode, engine.submitted
        if ask is None:
            found.text = episode.text
        elif submitted is not None:
            found.text = submitted.text
        found.operators = tuple(name for name in episode.names if name not in CONTROLS)
        found.problem = self._problem(question, found.text, episode)
        if found.problem is not None:
            found.text = question
        return found

    def _episode(self, engine: EpisodeEngine) -> Flow:
        """Yield the needs of an episode, until it ends or a call fails for good."""
        if engine.task.ask == "every_step" and (yield from engine.ask_original()) is not None:
            return
        while engine.episode.steps < engine.task.max_episode_steps:
            action = int(self._policy.act(engine.observe()[None], (), greedy=True).actions[0])
            error = yield from engine.act(action)
            if error is not None or engine.task.actions[action] == SUBMIT:
                return

    def _problem(self, question: str, text: str, episode: Episode) -> str | None:
        """Return why a wording may not stand in for the question, None if it may."""
        if text == question:
            return None
        vector = episode.vectors.get(text)
        if vector is not None and cosine(episode.vectors[question], vector) < self._lowest_meaning:
            return "meaning"
        return rewrite_problem(question, text)

    async def _drive(self, flow: Flow, found: Rewritten, ask: Ask | None, budget: Budget, free: frozenset[str]) -> None:
        result: object = None
        while True:
            try:
                need = flow.send(result)
            except StopIteration:
                return
            if isinstance(need, Encode):
                result = await asyncio.to_thread(self._task.encoder.encode, list(need.texts))
            elif isinstance(need, Call):
                result = await self._call(need.request, found, ask, budget, free)
            else:
                result = None

    async def _call(
        self, request: ChatRequest, found: Rewritten, ask: Ask | None, budget: Budget, free: frozenset[str]
    ) -> Completion:
        wording = request.messages[-1].content
        is_target = request.purpose == "target"
        if is_target and ask is not None and wording in free:
            return await ask(wording)
        left = budget.calls - found.rewrites - found.asks
        if (is_target and ask is None) or left < (1 if is_target else 2):  # a rewrite needs a call that asks it
            raise _Stopped
        if is_target and ask is not None:
            found.asks += 1
            return await ask(wording)
        found.rewrites += 1
        return await asyncio.to_thread(self._client.complete, request)
