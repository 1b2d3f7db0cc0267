"""What a vector of environments needs in addition to them: steps in flight, and what gymnasium passes to it.

N environments, n of them that finished a step, O observation
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from query_mutator.env.flow import Flow
from query_mutator.env.scheduling import Scheduler
from query_mutator.registry import check_known
from query_mutator.types import FloatArray

#: gymnasium's five of one environment: observation [O], reward, terminated, truncated, info
StepResult = tuple[FloatArray, float, bool, bool, dict[str, Any]]
#: the same of n environments: observations [n, O], then arrays [n]
VectorStep = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


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
