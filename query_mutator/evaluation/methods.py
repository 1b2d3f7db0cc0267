"""Run methods on questions: every method and question is one episode, and all episodes share one pool of calls.

Equal calls of different methods are made once, and counted for each method as if it had made its own: the pool keeps
the replies of an evaluation, and the client shares calls in flight. Methods advance through their questions at the same
pace, so that an interrupted evaluation has the same questions of all; long episodes start earlier, so that no slot
waits for them at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Self

import numpy as np

from query_mutator.cli.console import progress
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import Call, Flow, Need, map_needs
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.llm.cache import Cache, is_repeatable, request_key
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy
from query_mutator.llm.store import Store
from query_mutator.reading import is_refusal
from query_mutator.session.models import OpenModels
from query_mutator.session.play import FailureWindow, Played, Player, in_pool, play
from query_mutator.types import Completion, ErrorInfo

IN_PROGRESS = 4  # episodes in progress for each call in flight: some of them embed and score


@dataclass(frozen=True, kw_only=True)
class Job:
    """A method on the questions of a task."""

    name: str
    task: Task
    player: Player  # of every question


#: Outcomes by the job's name and the question's index.
Found = dict[str, dict[int, Outcome]]


@dataclass(kw_only=True)
class Evaluator:
    """Runs methods on the questions of a task with `batch_size` calls in flight.

    A question whose calls fail for good is an Outcome with an error. Once more than `max_failure_rate` of the last 100
    questions of a job failed, its other questions are not asked.
    """

    client: Client
    batch_size: int
    retry_policy: RetryPolicy = DEFAULT_POLICY
    max_failure_rate: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.client, Cache) and self.client.run):
            self.client = Cache(self.client, run=Store(None))

    @classmethod
    def of(cls, models: OpenModels, *, max_failure_rate: float) -> Self:
        """Return the evaluator over open models."""
        return cls(
            client=models.calls.eval_client,
            batch_size=models.settings.calls_in_flight,
            retry_policy=models.retry_policy,
            max_failure_rate=max_failure_rate,
        )

    def run(self, task: Task, player: Player, *, name: str = "") -> list[Outcome]:
        """Return one outcome per question, in the task's order."""
        found: Found = {}
        self.run_all([Job(name=name, task=task, player=player)], found, title=name)
        return list(found[name].values())

    def run_all(self, jobs: Sequence[Job], found: Found, *, title: str, calls: set[object] | None = None) -> None:
        """Put the outcomes of all jobs into `found`, in the order of their questions, and their calls into `calls`.

        What is there when it is interrupted can be used. At least one job must have a question. Equal calls and retries
        are one call; replies that were stored count too.
        """
        waiting = in_turn(jobs, batch_size=self.batch_size)
        windows = {job.name: FailureWindow(self.max_failure_rate, unit="questions") for job in jobs}
        for job in jobs:
            found[job.name] = {}

        flows = (
            ((job, index), metered(outcome_flow(job.task, index, job.player), calls))
            for job, index in waiting
            if index not in found[job.name]
        )
        encoder, at_once = jobs[0].task.encoder, IN_PROGRESS * self.batch_size
        with (
            progress(title, len(waiting)) as bar,
            closing(in_pool(self, encoder, lambda: next(flows, None), at_once=at_once)) as finished,
        ):
            for (job, index), outcome in finished:
                outcomes = found[job.name]
                outcomes[index] = outcome
                try:
                    windows[job.name].add(np.array([outcome.error is None]))
                except TooManyFailuresError as failure:
                    error = ErrorInfo(kind="not_asked", message=str(failure))
                    for left, question in enumerate(job.task.questions):
                        outcomes.setdefault(left, Outcome(question_id=question.id, error=error))
                bar.update()
        found |= {job.name: dict(sorted(found[job.name].items())) for job in jobs}


def in_turn(jobs: Sequence[Job], *, batch_size: int) -> list[tuple[Job, int]]:
    """Return the questions of all jobs in the order in which they are started, each job's in a random one.

    A question is due at its place among those of its job, less the steps of its episode, as seen from the end.
    """
    length = sum(len(job.task.questions) * job.task.rules.max_episode_steps for job in jobs) / batch_size
    due = []
    for job in jobs:
        count, steps = len(job.task.questions), job.task.rules.max_episode_steps
        order = np.random.default_rng(count).permutation(count).tolist()  # the same for all jobs
        due += [(place / count * length - steps, job, index) for place, index in enumerate(order)]
    return [(job, index) for _, job, index in sorted(due, key=lambda one: one[0])]


def metered(flow: Flow, calls: set[object] | None = None) -> Flow:
    """Yield the needs of an episode; return its outcome with what it cost, however its calls were answered.

    `calls` gets its calls.
    """
    made: list[Completion] = []

    def add(need: Need) -> Flow:
        if isinstance(need, Call) and calls is not None:
            calls.add(request_key(need.request) if is_repeatable(need.request) else object())
        result = yield need
        if isinstance(need, Call) and need.request.purpose != "judge":  # a judge is a cost of the evaluation
            made.append(result)
        return result

    outcome: Outcome = yield from map_needs(flow, add)
    return replace(
        outcome,
        calls=len(made) if outcome.error else outcome.calls,
        tokens=sum(reply.prompt_tokens + reply.completion_tokens for reply in made),
        reply_tokens=sum(reply.completion_tokens for reply in made),
        seconds=sum(reply.latency_s for reply in made),
    )


def outcome_flow(task: Task, index: int, player: Player) -> Flow:
    """Play a question of a task; return its Outcome. The first call that fails for good ends it."""
    engine = EpisodeEngine.open(task, index, observes=player.observes)
    engine.episode.call_price = median_low(task.rules.call_price)
    played: Played = yield from play(player, engine)
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
        price=engine.spent,
        steps=tuple(episode.names),
        rewrites=tuple(step.text for step in played.steps),
        guards=tuple(step.guard for step in played.steps),
        asked=tuple(attempt.text for attempt in attempts),
        forms=tuple(attempt.form for attempt in attempts),
        answers=tuple(attempt.answer for attempt in attempts),
        models=tuple(task.model_of(attempt.form) for attempt in attempts) if task.prices else (),
        logprobs=tuple(attempt.logprob for attempt in attempts),
        is_cut=bool(chosen.cut),
        parts=tuple(attempt.reward.parts for attempt in attempts),
        scores=tuple(attempt.reward.score for attempt in attempts),
        fits=tuple(attempt.fit for attempt in attempts if task.embeds_answers),
        submitted=list(episode.known).index(chosen.asked),
        why=engine.why(),
    )
