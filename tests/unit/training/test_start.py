"""What a run does before its first step: bounded by its length and the speed of its calls, unless it was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from query_mutator.bounds import group_of
from query_mutator.env.task import EpisodeRules
from query_mutator.training.config import TrainConfig
from query_mutator.training.estimate import Estimate, bounded, foreseen, random_episodes

PROJECT: dict[str, Any] = {"ask": "form", "plan_calls": 4000, "max_episode_steps": 12}


def started(*, is_live: bool = True, validation: int = 20, **flags: Any) -> tuple[TrainConfig, list[str]]:
    """Return what `bounded` makes of a run."""
    config = TrainConfig(**{**PROJECT, **flags})
    episodes = random_episodes(group_of(EpisodeRules, config), asked=5, local=0, forms=0)
    size = Estimate(
        config=config,
        num_actions=8,
        episodes=episodes,
        num_train=60,
        num_validation=validation,
        test=(),
        comparison_calls=0,
        compared=0,
    )
    return bounded(size, is_live=is_live)


def test_a_short_run_on_a_live_model_starts_at_once() -> None:
    config, [line] = started(num_env_steps=64, num_processes=4, num_steps=16)
    assert config.eval_interval == 0
    assert line == (
        "periodic evaluations: none; two of 20 questions exceed half of the 55 calls of training; "
        "--eval-questions N makes them"
    )


def test_periodic_evaluations_take_a_share_of_the_calls() -> None:
    for steps, every, questions in ((8192, 2, 73), (1024, 1, 27), (400_000, None, 120)):
        config, lines = started(validation=120, num_env_steps=steps)
        assert (config.eval_interval, config.eval_questions) == (every, questions)
        assert len(lines) == (every is not None)
    config, [line] = started(validation=120, num_env_steps=2048, num_steps=4)
    assert (config.eval_interval, config.eval_questions) == (32, 82)
    assert line.startswith("periodic evaluations: 2 x 82 questions, half of the 1,758 calls of training;")


@pytest.mark.parametrize(("steps", "answer_calls"), [(1024, 87), (100_000, 3000)])
def test_answers_to_learn_from_take_a_share_of_the_calls(steps: int, answer_calls: int) -> None:
    config, _ = started(num_env_steps=steps, answer="learned")
    assert config.answer_calls == answer_calls
    assert started(is_live=False, num_env_steps=steps, answer="learned")[0].answer_calls == answer_calls


@pytest.mark.parametrize("flags", [{"eval_interval": 1}, {"eval_questions": 30}])
def test_what_was_asked_for_is_done(flags: dict[str, Any]) -> None:
    config, _ = started(num_env_steps=64, **flags)
    assert {name: getattr(config, name) for name in flags} == flags
    assert config.plan_calls == 4000


def test_recorded_replies_leave_nothing_out() -> None:
    config, lines = started(is_live=False, num_env_steps=64)
    assert (config.plan_calls, config.eval_interval, config.eval_questions) == (4000, None, 120)
    assert not lines


def test_the_estimate_is_that_of_the_bounded_run() -> None:
    live = TrainConfig(**PROJECT, num_env_steps=512, encoder="hash", backend="ollama", target_model="m")
    assert "periodic evaluations: " in str(foreseen(live, None))
