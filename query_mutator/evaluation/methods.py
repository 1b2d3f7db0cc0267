"""Run methods on questions: every method and question is one episode, and all episodes share one pool of calls.

Equal calls of different methods are made once, and counted for each method as if it had made its own: the pool keeps
the replies of an evaluation, and the client shares calls in flight. Methods advance through their questions at the same
pace, so that an interrupted evaluation has the same questions of all; long episodes start earlier, so that no slot
waits for them at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Self, cast

import numpy as np

from ppo.frozen import InferencePolicy
from query_mutator.cli.console import progress
from query_mutator.env.engine import FIRST_ANSWER_TRIES, EpisodeEngine
from query_mutator.env.scheduling import Call, Flow, Need, PooledScheduler, map_needs
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.llm.cache import Cache, is_repeatable, request_key
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy
from query_mutator.llm.store import Store
from query_mutator.rewards import is_refusal
from query_mutator.session.models import OpenModels
from query_mutator.session.play import WINDOW_STEPS, FailureWindow, Played, Player, Script, Uniform, greedy, play
from query_mutator.types import ChatRequest, Completion, ErrorInfo

IN_PROGRESS = 4  # episodes in progress for each call in flight: some of them embed and score
FIRST_PACE = 2.0  # of the jobs whose results others wait for, compared with the others


#: Returns the player of a question, given its index.
MakePlayer = Callable[[int], Player]


def always(actions: Sequence[int]) -> MakePlayer:
    """Return players that take a fixed sequence of actions."""
    return lambda _: Script(actions)


def uniform(*, seed: int) -> MakePlayer:
    """Return players that pick uniformly; question i has the random stream [seed, i]."""
    return lambda index: Uniform(np.random.default_rng([seed, index]))


def by_policy(policy: InferencePolicy) -> MakePlayer:
    """Return players that take the policy's most probable action."""
    player = greedy(policy)
    return lambda _: player


@dataclass(frozen=True, kw_only=True)
class Job:
    """A method on questions of a task, by default all; `is_first`: other jobs wait for its results."""

    name: str
    task: Task
    make: MakePlayer
    is_first: bool = False
    rows: Sequence[int] | None = None  # indices of the questions


#: Outcomes by the job's name and the question's index.
Found = dict[str, dict[int, Outcome]]
#: Returns the jobs that can start now that one more job is complete.
NextJobs = Callable[[], Sequence[Job]]


class SharedCalls:
    """How many calls the methods of an evaluation needed, equal ones and retries aside."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._others = 0  # calls that are never shared

    def add(self, request: ChatRequest) -> None:
        """Count a call that a method needs; replies that were stored count too."""
        if is_repeatable(request):
            self._keys.add(request_key(request))
        else:
            self._others += 1

    def __len__(self) -> int:
        return len(self._keys) + self._others


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
        shared: SharedCalls | None = None,
    ) -> None:
        """Put the outcomes of all jobs into `found`, in the order of their questions; what is there when it is
        interrupted can be used.

        Questions with an outcome there are not asked again. `next_jobs` is called whenever a job is complete. At least
        one job must have a question. `shared` has the calls of an earlier part of the evaluation.
        """
        shared = SharedCalls() if shared is None else shared
        scheduler = PooledScheduler(
            client=self.client,
            encoder=jobs[0].task.encoder,
            retry_policy=self.retry_policy,
            batch_size=self.batch_size,
        )
        queue = _Queue(found, batch_size=self.batch_size, max_failure_rate=self.max_failure_rate)
        total = queue.add(jobs)
        bar = self.progress(title, total) if self.progress else None

        def start(place: tuple[str, int]) -> None:
            name, index = place
            job = queue.jobs[name]
            scheduler.start(place, metered(outcome_flow(job.task, index, job.make(index)), shared), done=queue.started)

        try:
            while True:
                while scheduler.in_progress < IN_PROGRESS * self.batch_size and (place := queue.pop()) is not None:
                    start(place)
                if not scheduler.in_progress:
                    return
                place, outcome = cast(tuple[tuple[str, int], Outcome], scheduler.finished())
                if queue.put(*place, outcome):
                    _grow(bar, queue.add(next_jobs()))
                _grow(bar, 0, done=1)
        finally:
            if bar is not None:
                bar.close()
            scheduler.close()


class _Queue:
    """The questions of all jobs that wait, and the order in which they start."""

    def __init__(self, found: Found, *, batch_size: int, max_failure_rate: float) -> None:
        self.jobs: dict[str, Job] = {}
        self.started = 0
        self._found, self._batch_size, self._max_failure_rate = found, batch_size, max_failure_rate
        self._waiting: dict[str, deque[int]] = {}
        self._counts: dict[str, int] = {}  # of the questions that a job asks
        self._missing: dict[str, int] = {}  # of its outcomes
        self._windows: dict[str, FailureWindow] = {}
        self._length = 0.0  # of the whole evaluation, in steps of one slot

    def add(self, jobs: Sequence[Job]) -> int:
        """Add jobs, each with its questions in an order that is random and the same for all; return how many these are.

        A job without a question that is not in `found` is left out.
        """
        total = 0
        for job in jobs:
            known = self._found.setdefault(job.name, {})
            asked = range(len(job.task.questions)) if job.rows is None else job.rows
            rows = [row for row in asked if row not in known]
            if not rows:
                continue
            total += (count := len(rows))
            self.jobs[job.name], self._counts[job.name], self._missing[job.name] = job, count, count
            self._waiting[job.name] = deque(rows[place] for place in np.random.default_rng(count).permutation(count))
            self._windows[job.name] = FailureWindow(self._max_failure_rate, size=WINDOW_STEPS, unit="questions")
            self._length += count * job.task.rules.max_episode_steps / self._batch_size
        return total

    def pop(self) -> tuple[str, int] | None:
        """Return the job and question to start next, None when none is waiting."""
        due = min(((self._due(name), name) for name, waiting in self._waiting.items() if waiting), default=None)
        if due is None:
            return None
        self.started += 1
        return due[1], self._waiting[due[1]].popleft()

    def put(self, name: str, index: int, outcome: Outcome) -> bool:
        """Add an outcome; return whether its job is complete."""
        found, questions = self._found[name], self.jobs[name].task.questions
        found[index] = outcome
        self._missing[name] -= 1
        try:
            self._windows[name].add(np.array([outcome.error is None]))
        except TooManyFailuresError as failure:
            error = ErrorInfo(kind="not_asked", message=str(failure))
            found |= {left: Outcome(question_id=questions[left].id, error=error) for left in self._waiting[name]}
            self._missing[name] -= len(self._waiting[name])
            self._waiting[name].clear()
        if self._missing[name]:
            return False
        self._found[name] = dict(sorted(found.items()))
        return True

    def _due(self, name: str) -> float:
        """Return when the next question of a job is due, in steps of one slot from the start of the evaluation."""
        job = self.jobs[name]
        part = 1 - len(self._waiting[name]) / self._counts[name]
        return part * self._length / (FIRST_PACE if job.is_first else 1.0) - job.task.rules.max_episode_steps


def _grow(bar: Any, count: int, *, done: int = 0) -> None:
    if bar is not None:
        bar.total += count
        bar.update(done)


@dataclass(slots=True)
class _Usage:
    """What a method is charged for a question: the calls to mutator and target, however they were answered."""

    calls: int = 0
    tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    by_model: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, model: str, completion: Completion) -> None:
        self.calls += 1
        self.tokens += completion.prompt_tokens + completion.completion_tokens
        self.reply_tokens += completion.completion_tokens
        prompt, reply = self.by_model.get(model, (0, 0))
        self.by_model[model] = (prompt + completion.prompt_tokens, reply + completion.completion_tokens)
        self.seconds += completion.latency_s


def metered(flow: Flow, shared: SharedCalls | None = None) -> Flow:
    """Yield the needs of an episode; return its outcome with what it cost. `shared` gets its calls."""
    usage = _Usage()

    def add(need: Need) -> Flow:
        if isinstance(need, Call) and shared is not None:
            shared.add(need.request)
        result = yield need
        if isinstance(need, Call) and need.request.purpose != "judge":  # a judge is a cost of the evaluation
            usage.add(need.request.model, result)
        return result

    outcome: Outcome = yield from map_needs(flow, add)
    calls = usage.calls if outcome.error else outcome.calls
    return replace(
        outcome,
        calls=calls,
        tokens=usage.tokens,
        reply_tokens=usage.reply_tokens,
        usage=usage.by_model,
        seconds=usage.seconds,
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
