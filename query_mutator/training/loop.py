"""The middle of the trainer: collect and update, for on-policy and off-policy learners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.infos import of_step
from query_mutator.env.steps import Steps, last_obs
from query_mutator.types import FloatArray

__all__ = ["ActionJournal", "AsyncVectorEnv", "OnSteps", "TrainingLoop", "make_steps"]

Received = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

#: Callback for finished steps, with their infos.
OnSteps = Callable[[dict[str, Any], Steps], None]


class AsyncVectorEnv(Protocol):
    """Vectorized environments whose steps are sent and received separately (`BatchedQueryMutationEnv`)."""

    num_envs: int

    @property
    def single_observation_space(self) -> Any:
        """Return the observation space of one environment."""

    def reset(self, *, seed: int | None = None) -> tuple[FloatArray, dict[str, Any]]:
        """Reset all environments."""

    def send(self, actions: Iterable[SupportsIndex], env_ids: Iterable[SupportsIndex]) -> None:
        """Start a step in each of `env_ids`."""

    def send_reset(self, *, seed: int | None = None) -> None:
        """Start a reset in every environment."""

    def recv(self, min_envs: int = 1, timeout_s: float | None = None, *, max_envs: int | None = None) -> Received:
        """Wait for finished steps; `infos["env_id"]` has their environments."""

    def step_ids(self, env_ids: Iterable[SupportsIndex]) -> list[tuple[int, int]]:
        """Return each environment's number in the run and the steps it has taken."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all environments."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> FloatArray | None:
        """Restore states; return the observations [N, O], None before the first reset."""

    def close(self) -> None:
        """Close the environments."""


class ActionJournal(Protocol):
    """Actions of a run, so that a resumed run takes them again (see `query_mutator.session.journal`)."""

    def replay(self, steps: Sequence[tuple[int, int]], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the recorded actions [n] of steps (environment, step), and record `chosen` [n] where none are."""


class TrainingLoop(Protocol):
    """Collects a rollout and learns from it."""

    def collect(self) -> None:
        """Take `num_steps` steps in every environment; an off-policy learner learns meanwhile."""

    def update(self) -> dict[str, float]:
        """Finish the rollout and return its statistics under their metric keys."""

    def close(self) -> None:
        """Stop background threads; idempotent."""


def make_steps(
    received: Received,
    *,
    env_ids: NDArray[np.int64],
    obs: FloatArray,
    actions: NDArray[np.int64],
    versions: NDArray[np.int64],
) -> Steps:
    """Return finished steps [n] for the learner: what was received, and what led to it."""
    next_obs, rewards, terminations, truncations, infos = received
    return Steps(
        env_ids=env_ids,
        obs=obs,
        actions=actions,
        rewards=rewards,
        next_obs=last_obs(next_obs, terminations | truncations, infos),
        terminations=terminations,
        truncations=truncations,
        valid=of_step(infos, "valid"),
        versions=versions,
        calls=of_step(infos, "step_calls"),
    )
