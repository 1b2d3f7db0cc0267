"""Demonstrations in hindsight: a teacher's episodes without the rewrites that changed nothing.

    T steps, N envs, D observation, A operators; a form always has an effect

A plan requests every rewrite, as it cannot know which ones change a question. Afterwards it is known: where a rewrite
changed nothing, the demonstrated action becomes the next one that had an effect, and the observation before that one
is of an episode in which the others were not requested. The policy learns which rewrite a question needs next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.observation import Observer
from query_mutator.types import BoolArray, FloatArray

__all__ = ["Relabel", "relabel"]

#: Changes observations [T, N, D] and actions [T, N] in place, given the last steps of episodes [T, N].
Relabel = Callable[[FloatArray, NDArray[np.int64], BoolArray], None]


def relabel(
    obs: FloatArray,
    actions: NDArray[np.int64],
    ends: BoolArray,
    *,
    observer: Observer,
    num_operators: int,
    max_steps: int,
) -> None:
    """Change observations [T, N, D] and actions [T, N] in place; `ends` [T, N] are True at the last step of an episode.

    A rewrite in the last row is left as it is: its effect is not in the rollout.
    """
    has_effect = (actions >= num_operators) | ends | _changes_text(obs, observer)  # [T, N]
    for env in range(actions.shape[1]):
        skipped: list[int] = []  # operators of the episode that had no effect
        applied: set[int] = set()  # those that had one, if at another attempt
        since = 0  # the row after the last effect
        for row in range(len(actions)):
            if not has_effect[row, env]:
                skipped.append(int(actions[row, env]))
                continue
            _forget(obs[row, env], skipped, applied, observer, max_steps=max_steps)
            applied.add(int(actions[row, env]))
            actions[since:row, env] = actions[row, env]
            since = row + 1
            if ends[row, env]:
                skipped, applied = [], set()


def _changes_text(obs: FloatArray, observer: Observer) -> BoolArray:
    """Return whether the next row is of another wording [T, N]; False in the last row."""
    shown = obs[:, :, observer.slices["question"]]
    changes = np.zeros(obs.shape[:2], dtype=np.bool_)
    changes[:-1] = (shown[1:] != shown[:-1]).any(axis=2)
    return changes


def _forget(
    row: FloatArray, skipped: Sequence[int], applied: Collection[int], observer: Observer, *, max_steps: int
) -> None:
    """Change an observation [D] to that of an episode in which these operators were not requested in vain."""
    unused = np.array([name for name in skipped if name not in applied], dtype=np.int64)
    for name in ("used", "closed"):
        row[observer.slices[name].start + unused] = 0.0
    row[observer.slices["progress"].start] -= len(skipped) / max_steps
