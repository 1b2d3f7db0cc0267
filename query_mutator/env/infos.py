"""The info and the record of a step, and gymnasium's vectorized infos: one dict of arrays for n infos, and its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.engine import EpisodeEngine
from query_mutator.rewards import is_refusal
from query_mutator.types import ErrorInfo, StepRecord


def episode_info(engine: EpisodeEngine, *, valid: bool, step_calls: int | None = None) -> dict[str, Any]:
    """Return the info of an episode's current state: of what would be submitted now, and of the episode so far."""
    episode, submitted, first = engine.episode, engine.submitted, engine.episode.first
    return {
        "valid": valid,
        "score": engine.score,
        "baseline_score": math.nan if first is None else first.reward.score,
        "success": 0.0 if submitted is None else submitted.reward.success,
        "baseline_success": math.nan if first is None else first.reward.success,
        "refused": submitted is not None and is_refusal(submitted.answer),
        "calls": episode.calls,
        "step_calls": episode.calls if step_calls is None else step_calls,
        "asks": len(episode.known),
        "call_price": episode.call_price,
        "episode_return": episode.total_reward,
        "episode_length": episode.steps,
        "question": episode.index,
        "action_mask": np.array(engine.action_mask(), dtype=np.int8),  # int8 is what Discrete.sample takes
        "_text": {
            "question_id": engine.task.questions[episode.index].id,
            "rewrite": episode.text if submitted is None else submitted.text,
            "form": episode.form if submitted is None else submitted.form,
            "answer": "" if submitted is None else submitted.answer,
        },
    }


def step_record(
    engine: EpisodeEngine,
    operator: str,
    *,
    env: int,
    step: int,
    episode: int,
    reward: float,
    error: ErrorInfo | None,
    calls: int,
) -> StepRecord:
    """Return the transcript's record of a step that just ended; `env`, `step` and `episode` are numbers in the run."""
    question = engine.task.questions[engine.episode.index]
    first, current, submitted = engine.episode.first, engine.episode.current, engine.submitted
    opening = first if engine.episode.steps == 1 and not engine.task.rules.policy_asks else None
    return StepRecord(
        env=env,
        step=step,
        episode=episode,
        question_id=question.id,
        operator=operator,
        question=question.text,
        rewrite=engine.episode.text,
        form=engine.episode.form,
        answer="" if current is None else current.answer,
        baseline_score=None if first is None else first.reward.score,
        score=engine.score,
        parts={} if current is None else dict(current.reward.parts),
        reward=reward,
        valid=error is None,
        error=error,
        calls=calls,
        guard=engine.guard,
        submitted=None if submitted is None else [*engine.episode.known].index(submitted.asked),
        first_answer=None if opening is None else opening.answer,
        first_parts=None if opening is None else dict(opening.reward.parts),
        timing=engine.timing,
    )


def as_arrays(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info with its numbers as arrays of no dimension, which gymnasium, SB3 and torchrl's reader take."""
    return {key: value if isinstance(value, dict) else np.asarray(value) for key, value in info.items()}


def infos_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict of arrays [n] for n infos; `_key` [n] says which of them have the key, as gymnasium does."""
    from gymnasium.vector import VectorEnv

    vector, infos = VectorEnv[Any, Any, Any](), dict[str, Any]()
    vector.num_envs = len(rows)
    for index, info in enumerate(rows):
        infos = vector._add_info(infos, dict(info), index)
    return infos


def rows_of(infos: Mapping[str, Any], rows: NDArray[np.int64] | NDArray[np.bool_]) -> dict[str, Any]:
    """Return the given rows of every array of infos, nested dicts included."""
    return {key: rows_of(value, rows) if isinstance(value, dict) else value[rows] for key, value in infos.items()}


def of_step(infos: Mapping[str, Any], key: str) -> NDArray[Any]:
    """Return what the infos [n] of steps say, such as `valid` (no call failed for good) or `step_calls`.

    After the end of an episode it is in `final_info`: the rest is of the next one.
    """
    found: NDArray[Any] = infos[key]
    if "final_info" in infos:
        found = np.where(infos["_final_info"], infos["final_info"][key], found)
    return found
