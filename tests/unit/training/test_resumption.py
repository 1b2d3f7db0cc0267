"""What may change when a run resumes, and the size of a run by its learner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ppo.config import PPOConfig
from query_mutator.learners.named import LEARNERS
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.learner import IQNConfig, Learning
from query_mutator.training.config import TrainConfig
from query_mutator.training.resume import FREE, differences


@pytest.mark.parametrize("group", [TaskSettings, PPOConfig, IQNConfig, Learning])
def test_no_setting_of_what_is_learned_may_change(group: Any) -> None:
    assert {one.name for one in dataclasses.fields(group)} & FREE == set()


def test_a_changed_seed_is_named_and_a_changed_batch_size_is_not() -> None:
    before = dataclasses.asdict(TrainConfig(seed=1, batch_size=8))
    assert differences(TrainConfig(seed=1, batch_size=16), before) == []
    assert differences(TrainConfig(seed=2, batch_size=8), before) == ["seed: then 1, now 2"]


def test_planned_gradient_steps_are_those_of_the_flags() -> None:
    ppo = TrainConfig(num_env_steps=1024, num_processes=8, num_steps=16, ppo_epoch=3, num_mini_batch=4)
    assert LEARNERS.get("ppo").planned_updates(ppo) == 8 * 3 * 4
    iqn = TrainConfig(
        algo="iqn", num_env_steps=1024, num_processes=8, num_steps=16, replay_ratio=4, train_batch_size=64
    )
    assert LEARNERS.get("iqn").planned_updates(iqn) == 4 * 1024 // 64
