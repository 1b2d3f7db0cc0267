"""What a run does before its first step, what it restores, and its callbacks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ppo.config import PPOConfig
from query_mutator.bounds import group_of
from query_mutator.data import Split
from query_mutator.env.episode import EpisodeRules
from query_mutator.errors import EXIT_USAGE, UsageError
from query_mutator.learners.learner import PPOLearner, Steps
from query_mutator.session.task import split_dataset
from query_mutator.settings import IQNConfig, Learning, TaskSettings
from query_mutator.training.callbacks import CALLBACKS, Callback, CallbackList, RunView
from query_mutator.training.config import Estimate, TrainConfig, bounded, calls_per_step, estimate
from query_mutator.training.loop import TrainingLoop, envs_seed
from query_mutator.training.run_folder import FREE, differences, resumed_models
from query_mutator.types import Question

PROJECT: dict[str, Any] = {"ask": "form", "plan_calls": 4000, "max_episode_steps": 12}
FIELDS = {"observation": 0, "reward": 1}
QUESTION = Question(id="q", text="why?")
HOOKS = ("on_training_start", "on_step", "on_rollout_end", "on_log", "on_update_end", "on_training_end", "close")


def started(*, is_live: bool = True, validation: int = 20, **flags: Any) -> tuple[TrainConfig, list[str]]:
    """Return what `bounded` makes of a run."""
    config = TrainConfig(**{**PROJECT, **flags})
    per_step = sum(calls_per_step(group_of(EpisodeRules, config), asked=5, local=0, forms=0))
    split = Split(train=(QUESTION,) * 60, validation=(QUESTION,) * validation)
    size = Estimate(config=config, split=split, calls=math.ceil(config.total_steps * per_step))
    found = bounded(size, is_live=is_live)
    return found.config, list(found.decided)


def test_a_short_run_on_a_live_model_starts_at_once() -> None:
    config, [line] = started(num_env_steps=64, num_processes=4, num_steps=16)
    assert config.eval_interval == 0
    assert line == (
        "periodic evaluations: none (two, of 20 questions, exceed half of the 48 calls of training); "
        "--eval-questions N makes them"
    )


def test_periodic_evaluations_take_a_share_of_the_calls() -> None:
    for steps, every, questions in ((8192, 2, 37), (1024, 2, 21), (400_000, None, 120)):
        config, lines = started(validation=120, num_env_steps=steps)
        assert (config.eval_interval, config.eval_questions) == (every, questions)
        assert len(lines) == (every is not None)
    config, [line] = started(validation=120, num_env_steps=2048, num_steps=4)
    assert (config.eval_interval, config.eval_questions) == (32, 42)
    assert line.startswith("periodic evaluations: 2 x 42 questions, half of the 1,536 calls of training;")


@pytest.mark.parametrize(("steps", "answer_calls"), [(1024, 76), (100_000, 3000)])
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


@pytest.mark.parametrize(("steps", "given", "searches"), [(512, {}, 0), (4096, {}, 1), (512, {"plan_calls": 90}, 1)])
def test_the_estimate_is_that_of_the_bounded_run(steps: int, given: dict[str, Any], searches: int) -> None:
    live = TrainConfig(ask="form", num_env_steps=steps, encoder="hash", backend="ollama", target_model="m", **given)
    size = estimate(live, split_dataset(live), is_live=True)
    assert "periodic evaluations: " in str(size)
    assert ("--no-evaluate" in str(size)) == (not given)
    calls, compared = size.comparison
    assert (bool(size.config.plan_calls), compared >= 20) == (bool(searches), True)
    assert (calls <= max(size.calls, 2500)) == (not given)


def test_a_servers_address_of_workers_is_that_of_evaluations() -> None:
    config = TrainConfig(engine="ray", local_server_url="http://127.0.0.1:11434")
    assert resumed_models(config, None).ollama_url == ("http://127.0.0.1:11434",)


def test_adjacent_seeds_share_no_environment() -> None:
    assert abs(envs_seed(1) - envs_seed(2)) > 1000


@pytest.mark.parametrize("group", [TaskSettings, PPOConfig, IQNConfig, Learning])
def test_no_setting_of_what_is_learned_may_change(group: Any) -> None:
    where = {"max_pending_updates", "ray_address", "local_server_url"}  # it is computed, which may change
    assert {one.name for one in dataclasses.fields(group)} & FREE - where == set()


def test_a_changed_seed_is_named_and_a_changed_batch_size_is_not() -> None:
    before = dataclasses.asdict(TrainConfig(seed=1, batch_size=8))
    assert differences(TrainConfig(seed=1, batch_size=16), before) == []
    assert differences(TrainConfig(seed=2, batch_size=8), before) == ["seed: then 1, now 2"]


class Lockstep:
    """Two environments, numbers 4 and 5 of a run; one of their numbers in step 11 is not finite."""

    num_envs = 2
    single_observation_space = SimpleNamespace(shape=(1,))

    def __init__(self, what: str) -> None:
        self.what, self.steps = what, -1

    def send_reset(self, *, seed: int) -> None: ...

    def send(self, actions: Any, env_ids: Any) -> None: ...

    def step_ids(self, env_ids: Any) -> list[tuple[int, int]]:
        return [(4 + int(env), self.steps) for env in env_ids]

    def recv(self, max_envs: int, *, waits: bool) -> tuple[Any, ...]:
        self.steps += 1
        found: tuple[Any, ...] = (np.zeros((2, 1), dtype=np.float32), np.zeros(2))
        none, last = np.zeros(2, dtype=np.bool_), np.zeros((2, 1), dtype=np.float32)
        bad = last if self.what == "last observation" else found[FIELDS[self.what]]
        if self.steps == 11:
            bad[1] = math.nan
        final_obs = np.empty(2, dtype=object)
        final_obs[:] = list(last)
        reset = np.full(2, self.steps == 0)
        infos = {"env_id": np.arange(2), "reset": reset, "valid": ~none, "step_cost": np.zeros(2)}
        return (*found, none, ~reset, {**infos, "final_obs": final_obs})


@pytest.mark.parametrize("what", [*FIELDS, "last observation"])
def test_training_stops_before_a_number_that_is_not_finite_reaches_the_weights(what: str) -> None:
    config = PPOConfig(num_processes=2, num_steps=4, num_mini_batch=1)
    learner = PPOLearner(1, 3, config, mask_columns=None)
    envs = Lockstep(what)
    loop = TrainingLoop(envs, learner, None, seed=1, num_steps=4, on_steps=lambda infos, steps: None)
    for _ in range(2):
        loop.collect()
        loop.update()
    with pytest.raises(UsageError, match=f"environment 5, step 11: the {what} has the value nan; correct") as caught:
        loop.collect()
    assert caught.value.exit_code == EXIT_USAGE
    assert all(weight.isfinite().all() for weight in learner.state_dict()["policy"].values())


class Recorder(Callback):
    """Records which hooks are called on which callback."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda *args, hook=hook: calls.append((name, hook)))


def no_steps() -> Steps:
    return Steps(*(np.zeros(0, kind) for kind in "ififf???ii"))


def test_every_hook_reaches_ours_then_those_of_plugins(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    CALLBACKS.add("theirs", lambda: Recorder("theirs", calls))
    callbacks, run = CallbackList([Recorder("ours", calls)]), RunView(config=TrainConfig(), folder=tmp_path)
    for hook in HOOKS[:-1]:
        callbacks.call(hook, run, *((no_steps(), []) if hook == "on_step" else ()))
    callbacks.close(None)
    assert calls == [(name, hook) for hook in HOOKS for name in ("ours", "theirs")]
