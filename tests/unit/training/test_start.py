"""What a run does before its first step: bounded by its length and the speed of its calls, unless it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from query_mutator.bounds import group_of
from query_mutator.env.rules import EpisodeRules
from query_mutator.training.config import TrainConfig
from query_mutator.training.estimate import Estimate
from query_mutator.training.random_play import random_play
from query_mutator.training.start import CallTime, bounded, foreseen

PROJECT: dict[str, Any] = {"ask": "form", "teacher": "auto", "plan_calls": 4000, "max_episode_steps": 12}
LIVE = "--teacher search --plan-calls N searches all the same"


def started(call_time: CallTime | None, *, validation: int = 20, **flags: Any) -> tuple[TrainConfig, Sequence[str]]:
    """Return what `bounded` makes of a run."""
    config = TrainConfig(**{**PROJECT, **flags})
    play = random_play(group_of(EpisodeRules, config), asked=5, local=0, forms=0)
    size = Estimate(
        config=config,
        num_actions=8,
        play=play,
        num_train=60,
        num_validation=validation,
        test=(),
        comparison_calls=0,
        compared=0,
    )
    return bounded(size, call_time=call_time)


def never() -> float:
    raise AssertionError("a run too short for a search measured its calls")


def test_a_short_run_on_a_live_model_starts_at_once() -> None:
    config, lines = started(never, num_env_steps=64, num_processes=4, num_steps=16)
    assert (config.teacher, config.eval_interval) == (None, 0)
    assert lines == [
        "periodic evaluations: none; two of 20 questions exceed half of the 55 calls of training; "
        "--eval-questions N makes them",
        f"teacher: none; a search takes 960 calls or more, half of the 55 of training are 27; {LIVE}",
    ]


@pytest.mark.parametrize(
    ("call_s", "plan_calls", "words"),
    [
        (0.2, 1315, "at most 1,315 calls (half of the 2,631 of training), about 4 min"),
        (0.9, 1000, "at most 1,000 calls (those of 15 min at 0.9 s a call), about 15 min"),
        (None, 1315, "at most 1,315 calls (half of the 2,631 of training)"),
    ],
)
def test_a_long_run_searches_for_a_share_of_its_calls(call_s: float | None, plan_calls: int, words: str) -> None:
    config, lines = started(lambda: call_s, num_env_steps=3072)
    assert (config.teacher, config.plan_calls) == ("search", plan_calls)
    assert lines[-1] == f"teacher: the best plan of a search with {words}"


def test_slow_calls_leave_no_time_for_a_search() -> None:
    config, lines = started(lambda: 2.0, num_env_steps=3072)
    assert config.teacher is None
    assert lines[-1].startswith(
        "teacher: none; a search takes 960 calls or more, those of 15 min at 2 s a call are 450;"
    )


def test_fewer_calls_than_the_bound_are_searched_with() -> None:
    config, lines = started(lambda: 0.1, num_env_steps=1024, plan_calls=200, eval_questions=5)
    assert (config.teacher, config.plan_calls, config.eval_questions) == ("search", 200, 5)
    assert lines == ["teacher: the best plan of a search with at most 200 calls (--plan-calls), about 20 s"]


def test_periodic_evaluations_take_a_share_of_the_calls() -> None:
    for steps, every, questions in ((8192, 2, 75), (1024, 1, 28), (400_000, None, 120)):
        config, lines = started(never, validation=120, num_env_steps=steps, teacher=None)
        assert (config.eval_interval, config.eval_questions) == (every, questions)
        assert len(lines) == (every is not None)
    config, [line] = started(never, validation=120, num_env_steps=2048, num_steps=4, teacher=None)
    assert (config.eval_interval, config.eval_questions) == (32, 84)
    assert line.startswith("periodic evaluations: 2 x 84 questions, half of the 1,754 calls of training;")


@pytest.mark.parametrize(("steps", "answer_calls"), [(1024, 87), (100_000, 3000)])
def test_answers_to_learn_from_take_a_share_of_the_calls(steps: int, answer_calls: int) -> None:
    config, _ = started(lambda: 0.1, num_env_steps=steps, teacher=None, answer="learned")
    assert config.answer_calls == answer_calls
    assert started(None, num_env_steps=steps, teacher=None, answer="learned")[0].answer_calls == answer_calls


@pytest.mark.parametrize("flags", [{"eval_interval": 1}, {"eval_questions": 30}, {"teacher": "search"}])
def test_what_was_asked_for_is_done(flags: dict[str, Any]) -> None:
    config, _ = started(lambda: 9.0, num_env_steps=64, **flags)
    assert {name: getattr(config, name) for name in flags} == flags
    assert config.plan_calls == 4000


def test_recorded_replies_leave_nothing_out() -> None:
    config, lines = started(None, num_env_steps=64)
    assert (config.teacher, config.plan_calls, config.eval_interval, config.eval_questions) == (
        "search",
        4000,
        None,
        120,
    )
    assert not lines


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"algo": "iqn"}, "--algo iqn cannot imitate a policy"),
        ({"ask": "every_step"}, "--teacher search finds a plan, which asks at its end"),
        ({"plan_calls": 0}, "--plan-calls 0 allows no search"),
    ],
)
def test_a_run_that_cannot_imitate_a_plan_has_no_teacher(flags: dict[str, Any], why: str) -> None:
    config, lines = started(None, **flags)
    assert config.teacher is None
    assert lines == [f"teacher: none; {why}"]


def test_the_estimate_is_that_of_the_bounded_run() -> None:
    live = TrainConfig(**PROJECT, num_env_steps=512, encoder="hash", backend="ollama", target_model="m")
    assert "teacher: none" in str(foreseen(live, None))
    embedded = TrainConfig(**PROJECT, num_env_steps=512, encoder="hash", backend="recorded")
    assert "to search for the teacher, at most" in str(foreseen(embedded, None))
