"""Run methods on questions: every method and question is one episode, and all episodes share one pool of calls.

Equal calls of different methods are made once, and counted for each method as if it had made its own: the pool keeps
the replies of an evaluation, and the client shares calls in flight. Methods advance through their questions at the same
pace, so that an interrupted evaluation has the same questions of all; long episodes start earlier, so that no slot
waits for them at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Self

import numpy as np

from ppo.frozen import InferencePolicy
from query_mutator.cli.console import progress
from query_mutator.env.engine import FIRST_ANSWER_TRIES, EpisodeEngine
from query_mutator.env.scheduling import Call, Flow, Need, map_needs
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.llm.cache import Cache, is_repeatable, request_key
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy
from query_mutator.llm.store import Store
from query_mutator.rewards import is_refusal
from query_mutator.session.models import OpenModels
from query_mutator.session.play import (
    WINDOW_STEPS,
    FailureWindow,
    Played,
    Player,
    greedy,
    in_pool,
    play,
    script,
    uniform,
)  # fmt: skip
from query_mutator.types import Completion, ErrorInfo

IN_PROGRESS = 4  # episodes in progress for each call in flight: some of them embed and score
FIRST_PACE = 2.0  # of the jobs whose results others wait for, compared with the others


#: Returns the player of a question, given its index.
MakePlayer = Callable[[int], Player]


def always(actions: Sequence[int]) -> MakePlayer:
    """Return players that take a fixed sequence of actions."""
    return lambda _: script(actions)


def random_actions(*, seed: int) -> MakePlayer:
    """Return players that pick uniformly; question i has the random stream [seed, i]."""
    return lambda index: uniform(np.random.default_rng([seed, index]))


def by_policy(policy: InferencePolicy) -> MakePlayer:
    """Return players that take the policy's most probable action."""
    player = greedy(policy)
    return lambda _: player


@dataclass(frozen=True, kw_only=True)
class Job:
    """A method on the questions of a task; `is_first`: other jobs wait for its results."""

    name: str
    task: Task
    make: MakePlayer
    is_first: bool = False


#: Outcomes by the job's name and the question's index.
Found = dict[str, dict[int, Outcome]]
#: Returns the jobs that can start now that one more job is complete.
NextJobs = Callable[[], Sequence[Job]]


class Evaluator:
    """Runs methods on the questions of a task with `batch_size` calls in flight.

    A question whose calls fail for good is an Outcome with an error. Once more than `max_failure_rate` of the last 100
    questions of a job failed, its other questions are not asked.
    """

    def __init__(
        self,
        *,
        client: Client,
        batch_size: int,
        retry_policy: RetryPolicy = DEFAULT_POLICY,
        max_failure_rate: float = 1.0,
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        self.client: Client = client if isinstance(client, Cache) and client.run else Cache(client, run=Store(None))
        self.retry_policy = retry_policy
        self.batch_size = batch_size
        self.max_failure_rate = max_failure_rate
        self.progress = progress

    @classmethod
    def of(cls, models: OpenModels, *, max_failure_rate: float) -> Self:
        """Return the evaluator over open models, with a progress bar on the terminal."""
        return cls(
            client=models.calls.eval_client,
            batch_size=models.settings.calls_in_flight,
            retry_policy=models.retry_policy,
            max_failure_rate=max_failure_rate,
            progress=progress,
        )

    def run(self, task: Task, make: MakePlayer, *, name: str = "") -> list[Outcome]:
        """Return one outcome per question, in the task's order."""
        found: Found = {}
        self.run_all([Job(name=name, task=task, make=make)], found, title=name)
        return list(found[name].values())

    def run_all(
        self,
        jobs: Sequence[Job],
        found: Found,
        *,
        title: str,
        next_jobs: NextJobs = lambda: (),
        calls: set[object] | None = None,
    ) -> None:
        """Put the outcomes of all jobs into `found`, in the order of their questions, and their calls into `calls`.

        What is there when it is interrupted can be used. `next_jobs` is called whenever a job is complete. At least one
        job must have a question. Equal calls and retries are one call; replies that were stored count too.
        """
        queue = _Queue(found, batch_size=self.batch_size, max_failure_rate=self.max_failure_rate)
        total = queue.add(jobs)
        encoder, at_once = jobs[0].task.encoder, IN_PROGRESS * self.batch_size
        with (
            nullcontext() if self.progress is None else closing(self.progress(title, total)) as bar,
            closing(in_pool(self, encoder, lambda: queue.next_flow(calls), at_once=at_once)) as finished,
        ):
            for (name, index), outcome in finished:
                more = queue.add(next_jobs()) if queue.put(name, index, outcome) else 0
                if bar is not None:
                    bar.total += more
                    bar.update()


class _Queue:
    """The questions of all jobs that wait, by when they are due, in steps of one slot."""

    def __init__(self, found: Found, *, batch_size: int, max_failure_rate: float) -> None:
        self._jobs: dict[str, Job] = {}
        self._found, self._batch_size, self._max_failure_rate = found, batch_size, max_failure_rate
        self._waiting: dict[str, deque[int]] = {}
        self._windows: dict[str, FailureWindow] = {}
        self._length = 0.0  # of the whole evaluation

    def add(self, jobs: Sequence[Job]) -> int:
        """Add jobs, each with its questions in an order that is random and the same for all; return how many these are.

        A job without a question is left out.
        """
        total = 0
        for job in jobs:
            self._found[job.name] = {}
            if count := len(job.task.questions):
                total += count
                self._jobs[job.name] = job
                self._waiting[job.name] = deque(np.random.default_rng(count).permutation(count).tolist())
                self._windows[job.name] = FailureWindow(self._max_failure_rate, size=WINDOW_STEPS, unit="questions")
                self._length += count * job.task.rules.max_episode_steps / self._batch_size
        return total

    def next_flow(self, calls: set[object] | None) -> tuple[tuple[str, int], Flow] | None:
        """Return the episode that is due next, with its job and question; None while none waits."""
        due = min(((self._due(name), name) for name, rows in self._waiting.items() if rows), default=None)
        if due is None:
            return None
        name = due[1]
        index, job = self._waiting[name].popleft(), self._jobs[name]
        return (name, index), metered(outcome_flow(job.task, index, job.make(index)), calls)

    def put(self, name: str, index: int, outcome: Outcome) -> bool:
        """Add an outcome; return whether its job is complete."""
        found, questions = self._found[name], self._jobs[name].task.questions
        found[index] = outcome
        try:
            self._windows[name].add(np.array([outcome.error is None]))
        except TooManyFailuresError as failure:
            error = ErrorInfo(kind="not_asked", message=str(failure))
            found |= {left: Outcome(question_id=questions[left].id, error=error) for left in self._waiting[name]}
            self._waiting[name].clear()
        if len(found) < len(questions):
            return False
        self._found[name] = dict(sorted(found.items()))
        return True

    def _due(self, name: str) -> float:
        """Return when the next question of a job is due, in steps of one slot from the start of the evaluation."""
        job = self._jobs[name]
        part = 1 - len(self._waiting[name]) / len(job.task.questions)
        return part * self._length / (FIRST_PACE if job.is_first else 1.0) - job.task.rules.max_episode_steps


def metered(flow: Flow, calls: set[object] | None = None) -> Flow:
    """Yield the needs of an episode; return its outcome with what it cost, however its calls were answered.

    `calls` gets its calls.
    """
    made: list[tuple[str, Completion]] = []

    def add(need: Need) -> Flow:
        if isinstance(need, Call) and calls is not None:
            calls.add(request_key(need.request) if is_repeatable(need.request) else object())
        result = yield need
        if isinstance(need, Call) and need.request.purpose != "judge":  # a judge is a cost of the evaluation
            made.append((need.request.model, result))
        return result

    outcome: Outcome = yield from map_needs(flow, add)
    usage = dict[str, tuple[int, int]]()
    for model, reply in made:
        prompt, own = usage.get(model, (0, 0))
        usage[model] = prompt + reply.prompt_tokens, own + reply.completion_tokens
    return replace(
        outcome,
        calls=len(made) if outcome.error else outcome.calls,
        tokens=sum(map(sum, usage.values())),
        reply_tokens=sum(own for _, own in usage.values()),
        usage=usage,
        seconds=sum(reply.latency_s for _, reply in made),
    )


def outcome_flow(task: Task, index: int, player: Player) -> Flow:
    """Play a question of a task; return its Outcome. The first call that fails for good ends it."""
    engine = EpisodeEngine.open(task, index, observes=player.observes)
    engine.episode.call_price = median_low(task.rules.call_price)
    played: Played = yield from play(player, engine, first_tries=FIRST_ANSWER_TRIES)
    episode, chosen, question_id = engine.episode, engine.submitted, task.questions[index].id
    if played.error is not None:
        return Outcome(question_id=question_id, error=played.error)
    assert chosen is not None
    attempts = list(episode.known.values())
    return Outcome(
        question_id=question_id,
        success=chosen.reward.success,
        score=engine.score,
        refused=is_refusal(chosen.answer),
        calls=episode.calls,
        actions=tuple(episode.names),
        rewrites=tuple(step.text for step in played.steps),
        guards=tuple(step.guard for step in played.steps),
        asked=tuple(attempt.text for attempt in attempts),
        forms=tuple(attempt.form for attempt in attempts),
        answers=tuple(attempt.answer for attempt in attempts),
        is_cut=bool(chosen.cut),
        parts=tuple(attempt.reward.parts for attempt in attempts),
        scores=tuple(attempt.reward.score for attempt in attempts),
        fits=tuple(attempt.fit for attempt in attempts if task.embeds_answers),
        submitted=list(episode.known).index(chosen.asked),
        why=engine.why(),
    )
