"""Score plans on the questions of a task from remembered calls: a rewrite or an answer is asked for once.

    plan -> (missing calls, all plans and questions in one pool) -> a PlanResult per question, as the environment gives

`PlanScores.gather` plays plans and makes the missing calls; what one plan asked, the others know.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Asked, Attempt, QuestionMemory, Rewriting
from query_mutator.env.flow import Call, Flow, Need, map_needs
from query_mutator.env.scheduling import PooledScheduler
from query_mutator.env.task import Task
from query_mutator.evaluation.outcomes import check_failures, count_rewrites
from query_mutator.learners.plan import Plan, PlanPlayer, plan_task
from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce, request_key
from query_mutator.llm.retry import RetryPolicy
from query_mutator.llm.store import Cache, Store
from query_mutator.session.play import Played, play
from query_mutator.types import ASK, Completion, ErrorInfo

Rows = Sequence[int]  # indices of questions


class Caller(Protocol):
    """Makes model calls (`Evaluator`)."""

    client: Client
    retry_policy: RetryPolicy
    batch_size: int
    max_failure_rate: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan's answer to a question, and the calls that the plan makes for it; with an `error` it is unscored."""

    attempt: Attempt | None
    calls: int
    error: ErrorInfo | None = None

    @property
    def success(self) -> float:
        """Return whether the answer is right; 0 for a reward without the part `right`."""
        return 0.0 if self.attempt is None else self.attempt.reward.success

    @property
    def score(self) -> float:
        """Return the answer's reward."""
        return 0.0 if self.attempt is None else self.attempt.reward.score


class PlanScores:
    """Remembered calls on the questions of a task, and the results of plans that follow from them."""

    def __init__(self, caller: Caller, task: Task, *, on_call: Callable[[], None] = lambda: None) -> None:
        """Start without a call; `on_call` is called after each call that is made."""
        self.task = plan_task(Plan(), task)
        self.calls = 0
        self._caller = caller
        self._client = Cache(Coalesce(caller.client), run=Store(None))  # for plans that play at once
        self._on_call = on_call
        self._memories = [QuestionMemory() for _ in task.questions]
        self._replies: dict[str, Completion | None] = {}  # by request: questions may share texts; None: in flight
        self._results: dict[Plan, dict[int, PlanResult]] = {}
        self._tasks: dict[Plan, Task] = {}
        self._ask = self.task.actions.index(ASK)

    def results(self, plan: Plan, rows: Rows) -> list[PlanResult]:
        """Return the results of a gathered plan on the questions `rows`."""
        known = self._results.get(plan, {})
        assert all(row in known for row in rows), f"{plan}: calls are missing; gather them first"
        return [known[row] for row in rows]

    def attempts(self, row: int) -> list[Attempt]:
        """Return all answers to a question so far, in whatever wording and form."""
        return list(self.answers(row).values())

    def answers(self, row: int) -> dict[Asked, Attempt]:
        """Return the same by what was asked."""
        attempts = self._memories[row].attempts
        return {asked: found for asked, found in attempts.items() if isinstance(found, Attempt)}

    @property
    def memories(self) -> dict[int, QuestionMemory]:
        """Return what was rewritten and answered so far, by question; failed calls are left out."""
        found = {row: self.answers(row) for row in range(len(self._memories))}
        return {
            row: QuestionMemory(
                attempts={**attempts},
                rewrites={key: one for key, one in self._memories[row].rewrites.items() if isinstance(one, Rewriting)},
            )
            for row, attempts in found.items()
            if attempts
        }

    @property
    def rewrites(self) -> dict[str, dict[str, Any]]:
        """Return by operator the rewrites so far, and how often a guard rejected one."""
        return count_rewrites(
            (self.task.actions[action], found.guard)
            for memory in self._memories
            for (action, text, _), found in memory.rewrites.items()
            if isinstance(found, Rewriting) and (found.guard or found.text != text)
        )

    def max_calls(self, plan: Plan, rows: Rows) -> int:
        """Return an upper bound on the calls that `gather` makes for a plan."""
        return sum(self._calls_left(plan, row) for row in rows)

    def gather(self, plans: Iterable[Plan], rows: Rows) -> None:
        """Make the calls that plans still need on the questions `rows`, in one pool.

        TooManyFailuresError when the calls of too many questions fail for good.
        """
        plans = list(plans)
        flows = 4 * self._caller.batch_size  # some of them embed and score
        parts = [plans[part::parts] for parts in [max(1, flows // max(1, len(rows)))] for part in range(parts)]
        waiting = (
            (row, part)
            for row in rows
            for part in parts
            if any(row not in self._results.get(plan, ()) for plan in part)
        )
        scheduler = PooledScheduler(
            client=self._client,
            encoder=self.task.encoder,
            retry_policy=self._caller.retry_policy,
            batch_size=self._caller.batch_size,
        )
        try:
            for row, part in itertools.islice(waiting, flows):
                scheduler.start(row, self._complete(part, row))
            while scheduler.in_progress:
                scheduler.finished()
                for row, part in itertools.islice(waiting, 1):
                    scheduler.start(row, self._complete(part, row))
        finally:
            scheduler.close()
        self._check_failures(plans, rows)

    def _check_failures(self, plans: Sequence[Plan], rows: Rows) -> None:
        """Raise TooManyFailuresError when too many questions are unscored under a plan."""
        for plan in plans:
            kinds: dict[str, int] = {}
            for result in self.results(plan, rows):
                if result.error is not None:
                    kinds[result.error.kind] = kinds.get(result.error.kind, 0) + 1
            check_failures(kinds, len(rows), max_failure_rate=self._caller.max_failure_rate)

    def _complete(self, plans: Sequence[Plan], row: int) -> Flow:
        """Play the plans that have no result on a question yet."""
        for plan in plans:
            if row not in self._results.get(plan, ()):
                engine, player = self._open(plan, row)
                yield from map_needs(self._play(player, engine, plan), self._once)

    def _open(self, plan: Plan, row: int) -> tuple[EpisodeEngine, PlanPlayer]:
        if plan not in self._tasks:
            self._tasks[plan] = plan_task(plan, self.task)
        task = self._tasks[plan]
        return EpisodeEngine.open(task, row, memory=self._memories[row], observes=False), PlanPlayer(plan, task)

    def _play(self, player: PlanPlayer, engine: EpisodeEngine, plan: Plan) -> Flow:
        """Play a plan on a question and keep the result."""
        played: Played = yield from play(player, engine)
        result = PlanResult(None if played.error else engine.submitted, engine.episode.calls, played.error)
        self._results.setdefault(plan, {})[engine.episode.index] = result

    def _once(self, need: Need) -> Flow:
        """Yield a need, but for a call whose equal was answered; return its result."""
        if not isinstance(need, Call):
            return (yield need)
        key = request_key(need.request)
        completion = self._replies.get(key)
        if completion is None:
            is_new = key not in self._replies
            self.calls += is_new
            self._replies[key] = None
            completion = yield need
            self._replies[key] = completion
            if is_new:
                self._on_call()
        return completion

    def _calls_left(self, plan: Plan, row: int) -> int:
        """Return the maximum calls of a plan on a question that are not remembered, 0 where its result is known."""
        if row in self._results.get(plan, ()):
            return 0
        engine, player = self._open(plan, row)
        flow = self._play(player, engine, plan)
        if next(flow, None) is None:
            return 0
        flow.close()
        action = player.action
        places = [place for place, item in enumerate(player.items) if item == action]
        rest = player.items[places[0] :] if places else [self._ask]
        answers = rest.count(self._ask) or 1
        rewrites = sum(item != self._ask and not self.task.is_local(item) for item in rest)
        return rewrites + answers * (1 + self.task.reward.asking)
