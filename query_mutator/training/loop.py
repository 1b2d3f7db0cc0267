"""The middle of the trainer: collect a rollout and learn.

    N environments, n of them ready, O observation

A rollout's only barrier is its end: every environment takes `num_steps` steps. The quota is per environment, because
stopping at a total count would over-sample short (refused) episodes. Between rollouts nothing is in flight, so a
checkpoint holds a whole state. Every action is stored before its step starts, and a resumed run takes the
actions it finds there: where acting is not deterministic, the last bits of a probability could lead to another action.

On-policy: the policy is frozen during a rollout and every environment has its own random stream, so the data equal
those of lock-step. Off-policy: gradient steps are taken while calls are in flight and no step has finished, and before
further steps are taken once more than `max_pending_updates` are due. A run that was killed goes through the same
episodes and never repeats a completed call; its learner may see the steps in another order, which makes no difference
to one that learns in `update` alone, whatever the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.collect import NotFiniteError, require_finite
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.env.vector import of_step, rows_of
from query_mutator.errors import UsageError
from query_mutator.learners.learner import Learner, Steps, last_obs
from query_mutator.llm.client import DEFAULT_POLICY
from query_mutator.llm.store import Store
from query_mutator.types import ASK, SUBMIT, ChatRequest, Completion, FloatArray

GROUP_ENVS = 16  # received at once: when hundreds are ready, the first must not wait for the last

Received = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

#: Callback for finished steps, with their infos.
OnSteps = Callable[[dict[str, Any], Steps], None]


def envs_seed(seed: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    It is not `seed` itself: runs with adjacent seeds would share most environments and not be independent repeats.
    """
    return int(np.random.SeedSequence([seed, 0]).generate_state(1)[0])


class TrainingLoop:
    """Collects a rollout, and learns from it meanwhile or at its end, as the learner does.

    Holds the current observations [N, O]; resets the environments, a `BatchedQueryMutationEnv`, if `obs` is None;
    `seed` is that of the first.
    """

    def __init__(
        self,
        envs: Any,
        learner: Learner,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        on_steps: OnSteps,
        store: Store | None = None,
        max_pending_updates: int = 8,
    ) -> None:
        self._envs, self._learner, self._store, self._on_steps = envs, learner, store, on_steps
        num_envs, (obs_dim,) = envs.num_envs, envs.single_observation_space.shape or (0,)
        self._reset_seed = seed if obs is None else None
        self._obs = np.zeros((num_envs, obs_dim), dtype=np.float32) if obs is None else obs
        self._num_steps, self._max_pending_updates = num_steps, max_pending_updates
        self._steps_taken = np.zeros(num_envs, dtype=np.int64)  # [N] since the present rollout started
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._versions = np.zeros(num_envs, dtype=np.int64)  # of the policy that chose the action
        self._began, self._training_s, self._waited_s = time.perf_counter(), 0.0, 0.0

    def collect(self) -> None:
        """Take `num_steps` steps in every environment, and the gradient steps that are due."""
        began = time.perf_counter()
        self._take_steps()
        self._waited_s = time.perf_counter() - began - self._training_s

    def update(self) -> dict[str, float]:
        """Finish the rollout; return its statistics and where the learner's time went, under their metric keys."""
        began = time.perf_counter()
        stats = self._learner.update()
        now = time.perf_counter()
        self._training_s += now - began
        of_s = max(1e-9, now - self._began)
        shares = {
            "perf/learner_share_training": self._training_s / of_s,
            "perf/learner_share_waiting": self._waited_s / of_s,
        }
        self._began, self._training_s = now, 0.0
        return {**stats, **shares}

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began

    def _take_steps(self) -> None:
        self._start()
        while (self._steps_taken < self._num_steps).any():
            pending = self._learner.pending_updates
            if pending <= self._max_pending_updates:
                received = self._envs.recv(max_envs=GROUP_ENVS, waits=not pending)
                if len(received[1]):
                    self._receive(received)
                    continue
            self._learn()
        while self._learner.pending_updates:
            self._learn()
        self._steps_taken[:] = 0

    def _start(self) -> None:
        if self._reset_seed is None:
            self._send(np.arange(self._envs.num_envs))
            return
        self._envs.send_reset(seed=self._reset_seed)
        self._reset_seed = None

    def _receive(self, received: Received) -> None:
        """Hand over finished steps [n] and start the next ones; a reset is not a step."""
        ready, infos = received[4]["env_id"], received[4]
        self._require_finite("reward", ready, received[1])
        self._require_finite("observation", ready, received[0])
        stepped = ~infos.get("reset", np.zeros(len(ready), dtype=np.bool_))
        if stepped.all():
            self._step(ready, received)
        elif stepped.any():
            columns = [column[stepped] for column in received[:4]]
            self._step(ready[stepped], (*columns, rows_of(infos, stepped)))
        self._obs[ready] = received[0]
        self._send(ready[self._steps_taken[ready] < self._num_steps])

    def _step(self, envs: NDArray[np.int64], received: Received) -> None:
        """Hand finished steps [n] to the learner: what was received, and what led to it."""
        next_obs, rewards, terminations, truncations, infos = received
        steps = Steps(
            env_ids=envs,
            obs=self._obs[envs],
            actions=self._actions[envs],
            rewards=rewards,
            next_obs=last_obs(next_obs, terminations | truncations, infos),
            terminations=terminations,
            truncations=truncations,
            valid=of_step(infos, "valid"),
            versions=self._versions[envs],
            calls=of_step(infos, "step_cost"),
        )
        self._require_finite("last observation", envs, steps.next_obs)
        self._learner.observe(steps)
        self._on_steps(infos, steps)
        self._steps_taken[envs] += 1

    def _require_finite(self, what: str, envs: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Raise a UsageError unless what environments returned is finite."""
        try:
            require_finite(what, values, lambda row: self._envs.step_ids(envs[row : row + 1])[0])
        except NotFiniteError as error:
            raise UsageError(str(error)) from None

    def _send(self, envs: NDArray[np.int64]) -> None:
        """Choose actions in these environments and start their steps."""
        if not len(envs):
            return
        self._versions[envs] = self._learner.version
        actions = self._learner.act(self._obs[envs], envs.tolist())
        if self._store is not None:
            actions = np.array(self._store.replay(self._envs.step_ids(envs), actions.tolist()), dtype=np.int64)
        self._actions[envs] = actions
        self._envs.send(actions, envs)


# --- steps that cost no call: random episodes on the questions whose answers P(right) was learned from ---------------

_STREAM = 5  # of random numbers, in addition to those of the learners


def recall(learner: Learner, task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> None:
    """Have a learner with a method `recall`, which takes steps of another policy, learn from what is known."""
    take = getattr(learner, "recall", None)
    if take is not None and (steps := known_steps(task, answers, seed=seed)) is not None:
        take(steps)


def known_steps(task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> Steps | None:
    """Return the steps [n] of a random episode on each of some questions, by number; None if there are none.

    Actions are drawn from the allowed ones that need no call whose result is not known.
    """
    rng, taken = np.random.default_rng((seed, _STREAM)), list[tuple[Any, ...]]()
    if task.rules.policy_asks:
        for episode, question in enumerate(answers):
            engine = EpisodeEngine.open(task, question, memory=answers[question])
            taken += [(episode, *step) for step in _steps(engine, answers[question], rng)]
    return Steps(*map(np.array, zip(*taken, strict=True))) if taken else None


def _steps(engine: EpisodeEngine, memory: QuestionMemory, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of Steps after the first, until the episode ends or needs a call."""
    task, episode = engine.task, engine.episode
    episode.call_price, ended = float(rng.choice(task.rules.call_price)), False
    while not ended:
        allowed = [action for action, is_allowed in enumerate(engine.action_mask()) if is_allowed]
        choices = [action for action in allowed if _is_known(action, engine, memory)]
        if not choices:
            return
        action = int(rng.choice(choices))
        obs, worth, cost = engine.observe(), engine.worth, engine.cost
        error = run_flow(engine.act(action), client=_NoModel(), encoder=task.encoder, retry_policy=DEFAULT_POLICY)
        if error is not None:  # a call whose result is not known
            return
        cost = engine.cost - cost
        reward = engine.worth - worth - episode.call_price * cost
        ended = engine.is_over
        yield obs, action, reward, engine.observe(), ended, False, True, 0, cost


def _is_known(action: int, engine: EpisodeEngine, memory: QuestionMemory) -> bool:
    """Return whether an action makes no call, or asks what has a known answer."""
    task, episode, name, form = engine.task, engine.episode, engine.task.actions[action], engine.task.form_of(action)
    if action < len(task.operators):
        return task.is_local(action) or engine.wording(action) in memory.rewrites
    if form is not None:
        return (episode.text, form.name) in memory.attempts
    asks = name == ASK or (name == SUBMIT and episode.best is None)
    return not asks or episode.asked in memory.attempts


class _NoModel:
    """A client that makes no call."""

    def complete(self, request: ChatRequest) -> Completion:
        """Return a failed completion."""
        return Completion.failed("not_asked", "its result is not known")

    def close(self) -> None:
        """Do nothing."""
