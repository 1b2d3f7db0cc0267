"""Play an episode: `play(policy, engine)` is the one loop over steps of a policy that is no longer learning.

    engine = EpisodeEngine.open(task, 0)                            # question 0 of the task
    flow = play(script([3, 7]), engine)                             # or greedy(policy), ...
    played = run_flow(flow, client=client, encoder=task.encoder, retry_policy=RetryPolicy())
    print(played.stopped, engine.submitted.answer, engine.episode.calls)

`play` is a flow: it yields calls and embeddings, and does no I/O and no waiting. `env.scheduling.run_flow` drives it in
a thread, `PooledScheduler` many of them at once, `run_flow_async` with asyncio. Evaluation, plan search, `Rewriter`,
the proxy and `qm batch` play their episodes here; an environment, whose actions come from outside, takes steps of the
same engine.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder import CachedEncoder
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Asked
from query_mutator.env.scheduling import Call, Flow, Need, PooledScheduler, map_needs
from query_mutator.errors import TooManyFailuresError
from query_mutator.learners import PlanPolicy, Policy
from query_mutator.llm.cache import CallTotals
from query_mutator.llm.client import Client, RetryPolicy
from query_mutator.types import AS_IS, ASK, CONTROLS, Completion, ErrorInfo

#: What ended an episode before its policy did: a limit, or a call that failed for good.
Stopped = Literal["max_calls", "deadline", "error"]

UNANSWERED_SHARE = 0.5  # of the time that a deadline leaves: then the first question to the target is asked

WINDOW_STEPS = 100
MAX_CUT_SHARE = 0.05  # of the replies, below which there is no line about it


@dataclass(frozen=True, slots=True)
class Player:
    """Picks the actions of an episode; one that `observes` reads `engine.observe()`, so wordings are embedded."""

    choose: Callable[[EpisodeEngine], int]
    observes: bool = False


def greedy(policy: Policy) -> Player:
    """Return the player that takes a policy's most probable action, or a plan's next one."""
    if isinstance(policy, PlanPolicy):
        return Player(policy)
    return Player(lambda engine: int(policy.act(engine.observe()[None], (), greedy=True).actions[0]), observes=True)


def script(actions: Sequence[int]) -> Player:
    """Return the player that takes a fixed sequence of actions."""
    return Player(lambda engine: actions[engine.episode.steps])


def uniform(*, seed: int) -> Player:
    """Return the player that picks uniformly among all actions; each step of question i is seeded by itself."""

    def choose(engine: EpisodeEngine) -> int:
        rng = np.random.default_rng([seed, engine.episode.index, engine.episode.steps])
        return int(rng.integers(len(engine.task.actions)))

    return Player(choose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action of the policy."""

    operator: str  # or "ask", "undo", "submit"
    text: str  # the wording after it
    form: str = AS_IS  # in which the target would get it
    answer: str | None  # the target's answer to this wording, None if it was not asked
    guard: str | None = None  # that rejected the rewrite; then the wording stays

    @property
    def asked(self) -> Asked:
        """Return wording and form."""
        return self.text, self.form


@dataclass(slots=True, kw_only=True)
class Played:
    """Result of an episode: its steps, what stopped it before the policy ended it, and the failed call, if one did."""

    steps: list[Step] = field(default_factory=list)
    stopped: Stopped | None = None
    error: ErrorInfo | None = None


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


def play(
    player: Player,
    engine: EpisodeEngine,
    *,
    limits: Limits | None = None,
    first_answer: str | None = None,
    asks_at_end: bool = True,
    asks_when_stopped: bool = False,
) -> Flow:
    """Yield the needs of an episode from its beginning to its end; return how it was Played.

    `first_answer` is the target's answer to the original question, if it is known; else, where the rules ask the
    original, it is asked. Without `asks_at_end` an episode that asks once leaves that to the
    caller: it ends with a form, or at submit. With `asks_when_stopped` an episode that a limit or a failed call ends
    before its first answer asks its current wording.
    """
    task, played, clock = engine.task, Played(), _Clock(engine, limits or Limits())
    ended = False
    if first_answer is not None:
        played.error = yield from engine.add_first(Completion(text=first_answer))
    elif not task.rules.policy_asks:
        played.error = yield from clock.bound(engine.ask_original(), clock.ends_at)
    while not (ended or played.stopped or played.error):
        action = player.choose(engine)
        played.stopped = clock.reached(action)
        if played.stopped is None:
            ended = yield from _step(action, engine, played, clock, asks_at_end=asks_at_end)
    if asks_when_stopped and not ended and engine.submitted is None and task.rules.policy_asks:
        failed = yield from clock.bound(engine.ask(), clock.ends_at)
        played.error = failed or played.error
    if played.error is not None and not clock.is_late(played.error):
        played.stopped = "error"
    elif not ended:
        played.stopped = played.stopped or "deadline"
    return played


def _step(action: int, engine: EpisodeEngine, played: Played, clock: _Clock, *, asks_at_end: bool) -> Flow:
    """Take one action and note it; return whether it ended the episode."""
    episode, name = engine.episode, engine.task.actions[action]
    known = len(episode.known)
    error = yield from clock.bound(engine.act(action, asks_at_end=asks_at_end), clock.rewriting_ends_at)
    if error is not None:
        if clock.is_late(error):
            played.stopped = "deadline"
        else:
            played.error = error
        return False
    is_new = len(episode.known) > known
    played.steps.append(
        Step(
            operator=name,
            text=episode.text,
            form=episode.form,
            answer=episode.answer if is_new else None,
            guard=engine.guard,
        )
    )
    is_asked_outside = not asks_at_end and engine.task.form_of(action) is not None
    return is_asked_outside or engine.is_over


class _Clock:
    """The limits of an episode that has begun."""

    def __init__(self, engine: EpisodeEngine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self._started = time.monotonic()

    def reached(self, action: int) -> Stopped | None:
        """Return which limit an action would exceed, None if it is within both."""
        ends_at, max_calls = self.rewriting_ends_at(), self._limits.max_calls
        if ends_at is not None and time.monotonic() >= ends_at:
            return "deadline"
        if max_calls is not None and self._engine.episode.calls + self._calls_of(action) > max_calls:
            return "max_calls"
        return None

    def ends_at(self) -> float | None:
        """Return the deadline, a time of `time.monotonic()`."""
        return None if self._limits.deadline_s is None else self._started + self._limits.deadline_s

    def rewriting_ends_at(self) -> float | None:
        """Return when to stop rewriting: without an answer early enough to ask for one."""
        if self._limits.deadline_s is None:
            return None
        share = UNANSWERED_SHARE if self._engine.submitted is None else 1.0
        return self._started + share * self._limits.deadline_s

    def bound(self, flow: Flow, ends_at: Callable[[], float | None]) -> Flow:
        """Yield the needs of `flow` with a deadline on its calls; return its result."""

        def bounded(need: Need) -> Flow:
            deadline = ends_at()
            if isinstance(need, Call) and deadline is not None:
                if time.monotonic() >= deadline:
                    return Completion.failed("timeout", "the deadline was reached")
                need = replace(need, request=replace(need.request, deadline=deadline))
            return (yield need)

        return flow if self._limits.deadline_s is None else map_needs(flow, bounded)

    def is_late(self, error: ErrorInfo) -> bool:
        """Return whether a call failed because of the deadline."""
        ends_at = self.rewriting_ends_at()
        return error.kind == "timeout" and ends_at is not None and time.monotonic() >= ends_at

    def _calls_of(self, action: int) -> int:
        """Return the maximum calls of an action, with the call to the target that must follow it without an answer."""
        engine, task = self._engine, self._engine.task
        episode, name = engine.episode, task.actions[action]
        calls, asks = 0, name == ASK
        if name not in CONTROLS:
            may_change = engine.may_change(action)
            calls = int(may_change and not task.is_local(action))
            asks = may_change and (task.form_of(action) is not None or not task.rules.policy_asks)
            calls += asks
        elif name == ASK:
            calls = episode.current is None
        return calls + (engine.submitted is None and not asks)


def cut_line(totals: CallTotals) -> list[str]:
    """Return a line about replies that ended at the token limit, if their share is above 5 %."""
    if totals.cut_share <= MAX_CUT_SHARE:
        return []
    return [
        f"{totals.cut_share:.0%} of the replies ({totals.cut_replies}) ended at the token limit and were scored as "
        "they are; raise --target-max-tokens or --mutator-max-tokens, or lower it for a model that never stops itself"
    ]


def check_failures(kinds: Mapping[str, int], asked: int, *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when more than this share of the questions asked is unscored, `kinds` by reason."""
    failed = sum(kinds.values())
    if failed > max_failure_rate * asked:
        raise TooManyFailuresError(
            f"calls failed for good in {failed} of {asked} questions of the evaluation, most often "
            f"{max(kinds, key=lambda kind: kinds[kind])!r}; check the server, or allow more with --max-failure-rate"
        )


class Caller(Protocol):
    """Makes the model calls of flows (`Evaluator`)."""

    client: Client
    retry_policy: RetryPolicy
    batch_size: int
    max_failure_rate: float


def in_pool(
    caller: Caller, encoder: CachedEncoder, next_flow: Callable[[], tuple[Any, Flow] | None], *, at_once: int
) -> Generator[tuple[Any, Any], None, None]:
    """Run flows, each with a key, `at_once` of them at a time; yield the key and the result of each as it ends.

    `next_flow` returns None while there is none to start. Close the iterator: it stops what runs.
    """
    scheduler = PooledScheduler(
        client=caller.client, encoder=encoder, retry_policy=caller.retry_policy, batch_size=caller.batch_size
    )
    started = itertools.count()
    try:
        while True:
            while scheduler.in_progress < at_once and (waiting := next_flow()) is not None:
                scheduler.start(*waiting, done=next(started))
            if not scheduler.in_progress:
                return
            yield scheduler.finished()
    finally:
        scheduler.close()


@dataclass(slots=True)
class FailureWindow:
    """Counts invalid steps among the last `size`; raises TooManyFailuresError above `max_rate`.

    `why` returns the most common failure for the message.
    """

    max_rate: float
    size: int = WINDOW_STEPS
    why: Callable[[], str] = str
    unit: str = "steps"
    failed: deque[bool] = field(default_factory=deque)

    def add(self, valid: NDArray[np.bool_]) -> None:
        """Count steps; `valid` [n] is False for those whose calls failed."""
        self.failed = deque([*self.failed, *(~valid).tolist()], maxlen=self.size)
        count = sum(self.failed)
        if len(self.failed) == self.size and count > self.max_rate * self.size:
            raise TooManyFailuresError(
                f"calls failed for good in {count} of the last {self.size} {self.unit}{self.why()}; check the server, "
                f"or allow more with --max-failure-rate"
            )
