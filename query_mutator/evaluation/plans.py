"""Score plans on the questions of a task from remembered calls: a rewrite or an answer is asked for once.

    plan -> (missing calls, all plans and questions in one pool) -> a PlanResult per question, as the environment gives

`PlanScores.gather` makes the missing calls, `PlanScores.results` replays plans without any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from query_mutator.env.episode import Attempt, Episode
from query_mutator.env.flow import Call, Encode, Flow
from query_mutator.env.observation import centered
from query_mutator.env.scheduling import PooledScheduler
from query_mutator.env.scoring import score_answer
from query_mutator.env.task import Task
from query_mutator.evaluation.outcomes import check_failures
from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import request_key
from query_mutator.llm.prompts import clean_rewrite
from query_mutator.llm.retry import RetryPolicy
from query_mutator.operators import local_rewrite
from query_mutator.rewards import cosine
from query_mutator.training.plans import Plan, next_item, plan_task
from query_mutator.types import ASK, AnswerRule, ChatRequest, Completion, ErrorInfo

__all__ = ["Caller", "PlanResult", "PlanScores"]

ROUND_TRIP = -1  # in place of an action: which question does an answer answer?

Rows = Sequence[int]  # indices of questions


class Caller(Protocol):
    """Makes model calls (`Evaluator`)."""

    client: Client
    retry_policy: RetryPolicy
    batch_size: int
    max_failure_rate: float


class Missing(NamedTuple):
    """The next call that a plan needs on a question, and the most calls it needs from there to its end."""

    action: int  # or ROUND_TRIP
    text: str
    answer: str | None  # to the text, for operators that use it; of a round trip
    calls_left: int


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


@dataclass(slots=True)
class _Memory:
    """What is known of one question."""

    rewrites: dict[tuple[int, str, bool], str | ErrorInfo] = field(default_factory=dict)  # by operator, text, answered
    attempts: dict[str, Attempt | ErrorInfo] = field(default_factory=dict)
    closeness: dict[str, float | ErrorInfo] = field(default_factory=dict)  # of the question told from an answer
    allowed: dict[tuple[int, str, bool], bool] = field(default_factory=dict)  # would the operator change the text


class PlanScores:
    """Remembered calls on the questions of a task, and the results of plans that follow from them."""

    def __init__(self, caller: Caller, task: Task, *, progress: Callable[[str, int], Any] | None = None) -> None:
        self.task = plan_task(Plan(), task)
        self.calls = 0
        self._caller = caller
        self._progress = progress
        self._memories = [_Memory() for _ in task.questions]
        self._replies: dict[str, Completion | None] = {}  # by request: questions may share texts; None: in flight
        self._results: dict[Plan, dict[int, PlanResult]] = {}
        self._ask = self.task.actions.index(ASK)
        self._local = [local_rewrite(operator) for operator in task.operators]

    def results(self, plan: Plan, rows: Rows) -> list[PlanResult]:
        """Return the results of a gathered plan on the questions `rows`."""
        found = [self._result(plan, row) for row in rows]
        assert not any(isinstance(result, Missing) for result in found), f"{plan}: calls are missing; gather them first"
        return cast(list[PlanResult], found)

    def most_calls(self, plan: Plan, rows: Rows) -> int:
        """Return an upper bound on the calls that `gather` makes for a plan."""
        found = [self._result(plan, row) for row in rows]
        return sum(result.calls_left for result in found if isinstance(result, Missing))

    def gather(self, plans: Iterable[Plan], rows: Rows, *, name: str = "plans") -> None:
        """Make the calls that plans still need on the questions `rows`, in one pool.

        TooManyFailuresError when the calls of too many questions fail for good.
        """
        plans = list(plans)
        waiting = (row for row in rows if any(isinstance(self._result(plan, row), Missing) for plan in plans))
        scheduler = PooledScheduler(
            client=self._caller.client,
            encoder=self.task.encoder,
            retry_policy=self._caller.retry_policy,
            batch_size=self._caller.batch_size,
        )
        bar = self._progress(name, len(rows)) if self._progress else None
        try:
            for row in itertools.islice(waiting, 4 * self._caller.batch_size):
                scheduler.start(row, self._complete(plans, row))
            while scheduler.in_progress:
                scheduler.finished()
                for row in itertools.islice(waiting, 1):
                    scheduler.start(row, self._complete(plans, row))
                if bar is not None:
                    bar.update()
        finally:
            if bar is not None:
                bar.close()
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
        """Yield the calls that plans need on a question, until none is missing."""
        for plan in plans:
            while isinstance(missing := self._result(plan, row), Missing):
                yield from self._make(missing, row)

    def _make(self, missing: Missing, row: int) -> Flow:
        """Yield the missing call and remember its result."""
        memory, task = self._memories[row], self.task
        if missing.action == ROUND_TRIP:
            assert missing.answer is not None
            memory.closeness[missing.answer] = yield from self._round_trip(missing.answer, row)
            return
        if missing.action == self._ask:
            memory.attempts[missing.text] = yield from self._attempt(missing.text, row)
            return
        operator, context = task.operators[missing.action], task.context(row, missing.answer)
        prompt = operator.render(missing.text, context=context)
        completion: Completion = yield from self._call(task.calls.mutator(prompt))
        found = completion.error or clean_rewrite(completion.text) or missing.text
        memory.rewrites[missing.action, missing.text, missing.answer is not None] = found

    def _attempt(self, text: str, row: int) -> Flow:
        """Yield the calls that ask the target `text`; return the Attempt, or the error of a call that failed."""
        completion: Completion = yield from self._call(self.task.calls.target(text))
        if completion.error is not None:
            return completion.error
        is_original = text == self.task.questions[row].text
        vectors = yield Encode((completion.text,) if is_original else (text, completion.text))
        if isinstance(vectors, ErrorInfo):
            return vectors
        if is_original:
            vectors = (self.task.question_vectors[row], *vectors)
        attempt = yield from score_answer(
            self.task, row, text=text, answer=completion.text, vectors=vectors, call=self._judge
        )
        return attempt

    def _round_trip(self, answer: str, row: int) -> Flow:
        """Yield the call for the question that an answer answers; return its cosine with the original, or the error."""
        completion: Completion = yield from self._call(self.task.round_trip(row, answer))
        if completion.error is not None:
            return completion.error
        vectors = yield Encode((completion.text,))
        return vectors if isinstance(vectors, ErrorInfo) else cosine(self.task.question_vectors[row], vectors[0])

    def _judge(self, request: ChatRequest, number: int) -> Call:
        """Return the call of a reward part that asks a model."""
        self.calls += 1
        return Call(request)

    def _call(self, request: ChatRequest) -> Flow:
        """Yield a call unless an equal request was answered; return the Completion."""
        key = request_key(request)
        completion = self._replies.get(key)
        if completion is None:
            self.calls += key not in self._replies  # the client makes equal calls in flight once
            self._replies[key] = None
            completion = yield Call(request)
            self._replies[key] = completion
        return completion

    def _result(self, plan: Plan, row: int) -> PlanResult | Missing:
        """Return the result of a plan on a question, or the first call that is not remembered."""
        known = self._results.setdefault(plan, {})
        if row in known:
            return known[row]
        result = self._replay(plan, row)
        if isinstance(result, PlanResult):
            known[row] = result
        return result

    def _replay(self, plan: Plan, row: int) -> PlanResult | Missing:
        """Take the plan's steps on a question from memory; state and rules are those of the environment."""
        episode = self._episode(row)
        items = [self.task.actions.index(name) for name in plan.items]
        was_used, is_masked = _used_in(episode), self._masked_in(episode)
        submits = False
        while not submits:
            action = None if _stops(plan, episode) else next_item(items, was_used=was_used, is_masked=is_masked)
            submits = action is None
            if action is None:
                if episode.best is not None:
                    break
                action = self._ask
            found = self._recall(episode, action)
            if found is None:
                left = _calls_left(items, action, self._ask)
                if plan.answer == "round_trip":
                    left += items.count(self._ask)
                return Missing(action, episode.text, episode.answer, left)
            if isinstance(found, ErrorInfo):
                return PlanResult(None, episode.calls, found)
            self._take(episode, action, found, plan.answer)
        if plan.answer == "round_trip":
            return self._told_apart(episode)
        return PlanResult(episode.last if plan.answer == "last" else episode.best, episode.calls)

    def _told_apart(self, episode: Episode) -> PlanResult | Missing:
        """Return the answer of an ended episode from which the mutator can best tell the question."""
        answers, closeness = episode.different_answers, self._memories[episode.index].closeness
        if len(answers) < 2:
            return PlanResult(episode.best, episode.calls)
        cosines: dict[str, float] = {}
        for number, answer in enumerate(answers):
            found = closeness.get(answer)
            if found is None:
                return Missing(ROUND_TRIP, episode.text, answer, len(answers) - number)
            episode.calls += 1
            if isinstance(found, ErrorInfo):
                return PlanResult(None, episode.calls, found)
            cosines[answer] = found
        return PlanResult(answers[max(cosines, key=lambda answer: cosines[answer])], episode.calls)

    def _episode(self, row: int) -> Episode:
        text = self.task.questions[row].text
        return Episode(index=row, original=text, text=text, vectors={}, used=[False] * len(self.task.operators))

    def _masked_in(self, episode: Episode) -> Callable[[int], bool]:
        """Return which actions are masked, as the task has it; local tests are remembered."""
        allowed = self._memories[episode.index].allowed

        def is_masked(action: int) -> bool:
            if action == self._ask or self.task.max_asks is not None:
                return not self.task.allows(action, episode)
            key = (action, episode.text, episode.current is not None)
            if key not in allowed:
                context = self.task.context(episode.index, episode.answer)
                allowed[key] = self.task.would_change(action, episode.text, context)
            return not allowed[key] or episode.was_tried(action)

        return is_masked

    def _recall(self, episode: Episode, action: int) -> str | Attempt | ErrorInfo | None:
        """Return what is known of an action's result, None without its call; local operators need none."""
        memory, key = self._memories[episode.index], (action, episode.text, episode.current is not None)
        if action == self._ask:
            return memory.attempts.get(episode.text)
        local = self._local[action]
        if local is not None and key not in memory.rewrites:
            context = self.task.context(episode.index, episode.answer)
            memory.rewrites[key] = local(episode.text, context=context) or episode.text
        return memory.rewrites.get(key)

    def _take(self, episode: Episode, action: int, found: str | Attempt, rule: AnswerRule) -> None:
        """Change the state as a step of the environment does."""
        if isinstance(found, Attempt):
            episode.calls += 1
            episode.add(found, rule)
            return
        episode.calls += self._local[action] is None
        episode.used[action] = True
        episode.tried.add((episode.text, action))
        episode.move(found, rule)


def _stops(plan: Plan, episode: Episode) -> bool:
    """Return whether the best answer fits well enough to stop, with the precision of an observation."""
    if plan.stop_fit is None or episode.best is None:
        return False
    return bool(np.float32(centered(episode.best.fit)) >= np.float32(centered(plan.stop_fit)))


def _used_in(episode: Episode) -> Callable[[int], bool]:
    return lambda action: action < len(episode.used) and episode.used[action]


def _calls_left(items: Sequence[int], action: int, ask: int) -> int:
    """Return the most calls from an action on: a submit without an answer makes one too."""
    if action not in items:
        return 1
    rest = list(items[items.index(action) :])
    return len(rest) + (ask not in rest)
