"""The decisions of a policy on one question, as a flow: it yields calls and embeddings, does no I/O and no waiting.

    flow = rewrite_flow(task, policy)     # the task is that of one question
    need = flow.send(None)                # a Call (to mutator or target), Encode or Prepare; send its result, and so on
    ...                                   # StopIteration.value is the Rewrite

`env.scheduling.run_flow` drives it in a thread, `PooledScheduler` many of them at once, `env.async_flow` with asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Literal

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Attempt, why_submitted
from query_mutator.env.flow import Call, Flow, Need, through
from query_mutator.env.task import Task
from query_mutator.operators import local_rewrite
from query_mutator.rewriter.records import Rewrite, Step, Stopped
from query_mutator.training.learner import InferencePolicy
from query_mutator.types import ASK, CONTROLS, SUBMIT, Completion, ErrorInfo

__all__ = ["Limits", "Mode", "rewrite_flow"]

#: "full": as the policy was trained; "blind": all rewrites first, then one question to the target.
Mode = Literal["full", "blind"]

UNANSWERED_SHARE = 0.5  # of the time that a deadline leaves: then the first question to the target is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one question; the best answer so far is submitted when one is reached."""

    max_calls: int | None = None  # to both models, retries aside
    deadline_s: float | None = None  # seconds from the start

    def __post_init__(self) -> None:
        if self.max_calls is not None and self.max_calls < 1:
            raise ValueError(f"max_calls={self.max_calls} must be at least 1: the question is asked once")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError(f"deadline_s={self.deadline_s} must be above 0")


def rewrite_flow(
    task: Task,
    policy: InferencePolicy,
    *,
    limits: Limits | None = None,
    call_price: float | None = None,
    first_answer: str | None = None,
    asks_at_end: bool = True,
) -> Flow:
    """Yield the needs of the policy on the question of `task`; return the Rewrite.

    `call_price` is what the policy is told a call costs, by default the middle one of its training. `first_answer` is
    the target's answer to the original question, if it is known. Without `asks_at_end` a policy that asks once leaves
    that to the caller: the Rewrite has the wording to ask and no answer, and counts no call for it.
    """
    return _Decisions(task, policy, limits or Limits(), asks_at_end=asks_at_end).run(call_price, first_answer)


class _Decisions:
    """The state of one question between two actions."""

    def __init__(self, task: Task, policy: InferencePolicy, limits: Limits, *, asks_at_end: bool) -> None:
        self.task, self.policy, self.limits, self.asks_at_end = task, policy, limits, asks_at_end
        self.engine = EpisodeEngine.open(task, 0)
        self.steps: list[Step] = []
        self.started = time.monotonic()

    def run(self, call_price: float | None, first_answer: str | None) -> Flow:
        """Yield the needs; return the Rewrite."""
        engine = self.engine
        engine.episode.call_price = median_low(self.task.call_price) if call_price is None else call_price
        error: ErrorInfo | None = None
        if first_answer is not None:
            error = yield from engine.add_first(first_answer)
        elif self.task.ask == "every_step":
            error = yield from self._in_time(engine.ask_original(), self._ends_at)
        stopped: Stopped | None = None
        while error is None and stopped is None:
            stopped, error = yield from self._step()
        if stopped != "policy" and engine.submitted is None and self.asks_at_end and self.task.ask == "policy":
            # Nothing was asked: the present wording is, whatever stopped the rewriting.
            failed = yield from self._in_time(engine.ask(), self._ends_at)
            error = failed if failed is not None else error
        return self._rewrite(
            "error" if error is not None and not self._is_late(error) else stopped or "deadline", error
        )

    def _step(self) -> Flow:
        """Take the policy's next action; return why it was the last, or None, and the error of a failed call."""
        engine, task = self.engine, self.task
        action = int(self.policy.act(engine.observe()[None], (), greedy=True).actions[0])
        reached = self._reached(action)
        if reached is not None:
            return reached, None
        before, known = engine.episode.text, len(engine.episode.known)
        acted = engine.act(action, asks_at_end=self.asks_at_end)
        error = yield from self._in_time(acted, self._rewriting_ends_at)
        if error is not None:
            return ("deadline" if self._is_late(error) else None), (None if self._is_late(error) else error)
        episode = engine.episode
        is_new = len(episode.known) > known
        self.steps.append(
            Step(
                operator=task.actions[action],
                text=episode.text,
                is_changed=episode.text != before,
                answer=episode.answer if is_new else None,
            )
        )
        ended = task.actions[action] == SUBMIT or episode.steps >= task.max_episode_steps
        return ("policy" if ended else None), None

    # --- limits ----------------------------------------------------------------------------------------------------

    def _reached(self, action: int) -> Stopped | None:
        """Return which limit an action would exceed, None if it is within both."""
        ends_at = self._rewriting_ends_at()
        if ends_at is not None and time.monotonic() >= ends_at:
            return "deadline"
        most = self.limits.max_calls
        return "max_calls" if most is not None and self.engine.episode.calls + self._calls_of(action) > most else None

    def _calls_of(self, action: int) -> int:
        """Return the most calls of an action, with the question to the target that must follow if it has no answer."""
        task, episode, name = self.task, self.engine.episode, self.task.actions[action]
        calls = 0
        if name not in CONTROLS:
            context = task.context(episode.index, episode.answer)
            may_change = task.would_change(action, episode.text, context)
            calls = int(may_change and local_rewrite(task.operators[action]) is None)
            calls += may_change and task.ask == "every_step"
        elif name == ASK:
            calls = episode.current is None
        if name == SUBMIT or episode.steps + 1 >= task.max_episode_steps:
            calls += self._calls_of_round_trip()
        return calls + (self.engine.submitted is None and name != ASK)

    def _calls_of_round_trip(self) -> int:
        answers = {attempt.answer for attempt in self.engine.episode.known.values() if attempt.answers}
        return len(answers) if self.task.answer == "round_trip" and len(answers) > 1 else 0

    def _ends_at(self) -> float | None:
        return None if self.limits.deadline_s is None else self.started + self.limits.deadline_s

    def _rewriting_ends_at(self) -> float | None:
        """Return when to stop rewriting: without an answer early enough to ask for one."""
        if self.limits.deadline_s is None:
            return None
        share = UNANSWERED_SHARE if self.engine.submitted is None else 1.0
        return self.started + share * self.limits.deadline_s

    def _in_time(self, flow: Flow, ends_at: Callable[[], float | None]) -> Flow:
        """Yield the needs of `flow` with a deadline on its calls; return its result."""

        def bounded(need: Need) -> Flow:
            deadline = ends_at()
            if isinstance(need, Call) and deadline is not None:
                if time.monotonic() >= deadline:
                    return Completion.failed("timeout", "the deadline was reached")
                need = replace(need, request=replace(need.request, deadline=deadline))
            return (yield need)

        return through(flow, bounded)

    def _is_late(self, error: ErrorInfo) -> bool:
        """Return whether a call failed because of the deadline."""
        ends_at = self._rewriting_ends_at()
        return error.kind == "timeout" and ends_at is not None and time.monotonic() >= ends_at

    # --- result ----------------------------------------------------------------------------------------------------

    def _rewrite(self, stopped: Stopped, error: ErrorInfo | None) -> Rewrite:
        episode, chosen = self.engine.episode, self.engine.submitted
        return Rewrite(
            question=episode.original,
            text=episode.text if chosen is None else chosen.text,
            answer=None if chosen is None else chosen.answer,
            steps=tuple(self.steps),
            calls=episode.calls,
            seconds=time.monotonic() - self.started,
            why="" if chosen is None else self._why(chosen, stopped),
            stopped=stopped,
            error=error,
        )

    def _why(self, chosen: Attempt, stopped: Stopped) -> str:
        rule = self.task.answer
        if rule == "round_trip" and stopped != "policy":
            rule = "best"
        why = why_submitted(list(self.engine.episode.known.values()), chosen, rule)
        ends = {"max_calls": "max_calls was reached", "deadline": "the deadline was reached", "error": "a call failed"}
        return why if stopped == "policy" else f"{why}; {ends[stopped]}"
