"""What a vector of environments needs in addition to them: steps in flight, gymnasium's access, seeds, arrays.

N environments, n of them that finished a step, O observation
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from query_mutator.env.flow import Flow
from query_mutator.env.infos import infos_of
from query_mutator.env.scheduling import Scheduler
from query_mutator.registry import check_known
from query_mutator.types import FloatArray

#: gymnasium's five of one environment: observation [O], reward, terminated, truncated, info
StepResult = tuple[FloatArray, float, bool, bool, dict[str, Any]]
#: the same of n environments: observations [n, O], then arrays [n]
VectorStep = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class EnvList(VectorEnv[FloatArray, NDArray[np.int64], NDArray[Any]]):
    """A vector over a list of environments [N]: its spaces, and gymnasium's access to the single ones."""

    envs: Sequence[gym.Env[FloatArray, np.int64]]

    def __init__(self, envs: Sequence[gym.Env[FloatArray, np.int64]], autoreset_mode: AutoresetMode | str) -> None:
        super().__init__()
        first = envs[0]
        self.num_envs = len(envs)
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return what the method `name` of each environment returns, or each environment's attribute of this name."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in found)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute `name` of each environment."""
        return tuple(env.get_wrapper_attr(name) for env in self.envs)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment: one of a list or tuple of N values each, or the same in all."""
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"{len(each)} values for {self.num_envs} environments")
        for env, value in zip(self.envs, each, strict=True):
            env.set_wrapper_attr(name, value)

    def render(self) -> tuple[Any, ...]:
        """Return what each environment renders."""
        return tuple(env.render() for env in self.envs)


class FlowsInFlight:
    """The steps and resets that were started and not returned yet, by the environment's index, on one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._envs: set[int] = set()

    def start(self, index: int, flow: Flow, *, done: int) -> None:
        """Start the flow of an environment that has taken `done` steps."""
        self._envs.add(index)
        self.scheduler.start(index, flow, done=done)

    def next(self, *, deadline_s: float | None = None) -> tuple[int, Any]:
        """Return index and result of the next flow that finishes; errors of flows are raised here.

        After `deadline_s`, a time of `time.monotonic()`, raise TimeoutError.
        """
        index, result = self.scheduler.finished(deadline_s=deadline_s)
        assert isinstance(index, int)
        self._envs.discard(index)
        return index, result

    def finished(self, min_envs: int, *, timeout_s: float | None, max_envs: int | None) -> dict[int, StepResult]:
        """Wait for `min_envs` steps, at most `timeout_s` seconds; return up to `max_envs` that are finished."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, StepResult] = {}
        while self.scheduler.in_progress and len(results) != max_envs:
            try:
                index, result = self.next(deadline_s=deadline_s if len(results) < min_envs else 0.0)
            except TimeoutError:
                break
            results[index] = result
        return results

    def check_free(self, env_ids: Iterable[SupportsIndex]) -> list[int]:
        """Return the indices as ints; AlreadyPendingCallError if one is in the middle of a step or named twice."""
        indices: list[int] = []
        for index in map(operator.index, env_ids):
            if index in self._envs or index in indices:
                raise AlreadyPendingCallError(
                    f"environment {index} is in the middle of a step; recv() it first", "send"
                )
            indices.append(index)
        return indices

    def check_idle(self, name: str) -> None:
        """Raise AlreadyPendingCallError while steps are in flight: their results would be taken for others."""
        if self._envs:
            raise AlreadyPendingCallError(
                f"{name}() while {len(self._envs)} environments are in the middle of a step; recv() them first, "
                "or after an error close() this environment and make another",
                name,
            )


def stack_steps(results: Sequence[StepResult], *, obs_size: int) -> VectorStep:
    """Return the results of n environments as gymnasium's five arrays [n]."""
    columns: Iterable[Any] = zip(*results, strict=True) if results else [()] * 5
    obs, rewards, terminations, truncations, infos = columns
    return (
        np.array(obs, dtype=np.float32).reshape(-1, obs_size),
        np.array(rewards, dtype=np.float64),
        np.array(terminations, dtype=np.bool_),
        np.array(truncations, dtype=np.bool_),
        infos_of(infos),
    )


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return gymnasium's mode for its name or value; ValueError with the known ones for others."""
    known = {name: one for one in AutoresetMode for name in (one.name, one.value)}
    if isinstance(mode, AutoresetMode):
        return mode
    check_known("autoreset mode", mode, known)
    return known[mode]


def env_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Return a seed for each environment [N]: one number counts up, as gymnasium has it."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} environments")
    return list(seed)


def reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> NDArray[np.bool_]:
    """Return which environments [N] to reset: all, or those of `options["reset_mask"]`."""
    if not options or "reset_mask" not in options:
        return np.ones(num_envs, dtype=np.bool_)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must be a bool array of shape ({num_envs},) with at least one True")
    return mask


class FlowEnv(Protocol):
    """One environment, whose steps and resets are flows."""

    @property
    def has_ended(self) -> bool:
        """Return whether the episode is over."""

    def check_action(self, action: SupportsIndex) -> int:
        """Return the action as an int; ResetNeeded or InvalidAction if it cannot be taken."""

    def step_flow(self, action: int) -> Flow:
        """Yield the calls of one step; return gymnasium's five."""

    def reset_flow(self, *, seed: int | None = None) -> Flow:
        """Yield the calls of a reset; return (observation, info)."""


def step_with_autoreset(env: FlowEnv, action: SupportsIndex, mode: AutoresetMode) -> Flow:
    """Return the flow of a step as the autoreset mode has it; ResetNeeded or InvalidAction before it starts."""
    if mode is AutoresetMode.NEXT_STEP and env.has_ended:
        return _reset_in_place_of_step(env)
    number = env.check_action(action)
    return _step_and_reset(env, number) if mode is AutoresetMode.SAME_STEP else env.step_flow(number)


def reset_as_step(env: FlowEnv, seed: int | None) -> Flow:
    """Yield the calls of a reset; return it as a step without reward, with `reset` in its info."""
    obs, info = yield from env.reset_flow(seed=seed)
    return obs, 0.0, False, False, {"reset": True, **info}


def _reset_in_place_of_step(env: FlowEnv) -> Flow:
    obs, info = yield from env.reset_flow()
    return obs, 0.0, False, False, info


def _step_and_reset(env: FlowEnv, action: int) -> Flow:
    """Yield the calls of a step and, if the episode ends, those of the next reset."""
    obs, reward, terminated, truncated, info = yield from env.step_flow(action)
    if terminated or truncated:
        next_obs, next_info = yield from env.reset_flow()
        obs, info = next_obs, {"final_obs": obs, "final_info": info, **next_info}
    return obs, reward, terminated, truncated, info
