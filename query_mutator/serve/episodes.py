"""Run the policy on one question with asynchronous calls: the mutator rewrites, the client's own request asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from query_mutator.encoder import Encoder
from query_mutator.env.episode import Episode
from query_mutator.env.flow import Call, Encode, Flow
from query_mutator.env.steps import FloatArray
from query_mutator.env.task import operator_names
from query_mutator.llm.client import Client
from query_mutator.rewards import cosine
from query_mutator.serve.guards import rewrite_problem
from query_mutator.types import ASK, ChatRequest, Completion, ErrorInfo

__all__ = ["Ask", "Budget", "EpisodeEnv", "Episodes", "Rewritten"]

#: Asks the target a wording; raises if the upstream fails.
Ask = Callable[[str], Awaitable[Completion]]


class EpisodeEnv(Protocol):
    """One episode of the environment, on a question without a known answer."""

    episode: Episode | None
    last_error: ErrorInfo | None

    def reset_flow(self, *, seed: int | None = None, options: dict[str, int] | None = None) -> Flow:
        """Yield the calls of a reset; return (observation, info)."""

    def step_flow(self, action: int) -> Flow:
        """Yield the calls of one step; return gymnasium's five."""


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
    """Runs episodes of one policy. `lowest_meaning`: a rewrite whose cosine with the question is lower is not used."""

    def __init__(
        self,
        make_env: Callable[[str], EpisodeEnv],
        choose: Callable[[FloatArray], int],
        *,
        client: Client,
        encoder: Encoder,
        actions: Sequence[str],
        lowest_meaning: float,
    ) -> None:
        self._make_env, self._choose = make_env, choose
        self._client, self._encoder = client, encoder
        self._operators = frozenset(operator_names(actions))
        self._ask_action = actions.index(ASK) if ASK in actions else None
        self._lowest_meaning = lowest_meaning

    async def rewrite(self, question: str, budget: Budget) -> Rewritten:
        """Return the wording that the policy would ask first, or the question if it must not be asked."""
        return await self._run(question, None, budget)

    async def answer(self, question: str, ask: Ask, budget: Budget, *, free: frozenset[str] = frozenset()) -> Rewritten:
        """Return the wording whose answer the policy submits; asking those in `free` costs no call."""
        return await self._run(question, ask, budget, free)

    async def _run(
        self, question: str, ask: Ask | None, budget: Budget, free: frozenset[str] = frozenset()
    ) -> Rewritten:
        env = await asyncio.to_thread(self._make_env, question)
        found = Rewritten(text=question)
        try:
            async with asyncio.timeout(budget.seconds):
                try:
                    await self._drive(_episode(env, self._choose), found, ask, budget, free)
                except _Stopped:
                    if ask is not None and self._ask_action is not None and _is_unasked(env.episode):
                        await self._drive(env.step_flow(self._ask_action), found, ask, budget, free)
        except (TimeoutError, _Stopped):
            pass
        episode = env.episode
        if episode is None:
            return found
        if ask is None:
            found.text = episode.text
        elif episode.best is not None:
            found.text = episode.best.text
        found.operators = tuple(name for name in episode.names if name in self._operators)
        found.problem = self._problem(question, found.text, episode)
        if found.problem is not None:
            found.text = question
        return found

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
                result = await asyncio.to_thread(self._encoder.encode, list(need.texts))
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


def _episode(env: EpisodeEnv, choose: Callable[[FloatArray], int]) -> Flow:
    obs, _ = yield from env.reset_flow(options={"question": 0})
    ended = False
    while not ended:
        obs, _, terminated, truncated, _ = yield from env.step_flow(choose(obs))
        ended = terminated or truncated or env.last_error is not None


def _is_unasked(episode: Episode | None) -> bool:
    return episode is not None and episode.current is None
