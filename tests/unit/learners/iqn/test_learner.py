"""IQN as a whole: it learns what pays, keeps to its replay ratio and schedules, and resumes from its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from query_mutator.learners.iqn.learner import IQN
from query_mutator.learners.iqn.replay import Sample
from query_mutator.learners.learner import Steps
from query_mutator.settings.learner import IQNConfig

OBS_DIM, NUM_ACTIONS, NUM_ENVS = 4, 3, 4
CONFIG = IQNConfig(
    num_env_steps=400,
    num_processes=NUM_ENVS,
    hidden_sizes=(16,),
    num_cosines=8,
    train_batch_size=16,
    replay_ratio=8.0,
    learning_starts=32,
    lr=1e-2,
    gamma=0.9,
)


def walk(iqn: IQN, count: int, *, seed: int = 0, ends: bool = True) -> None:
    """Take `count` steps in every environment: action 2 pays 1, others nothing; episodes are one step long."""
    rng = np.random.default_rng(seed)
    env_ids = np.arange(NUM_ENVS)
    for _ in range(count):
        obs = rng.normal(size=(NUM_ENVS, OBS_DIM)).astype(np.float32)
        actions = iqn.act(obs, env_ids.tolist())
        iqn.observe(
            Steps(
                env_ids=env_ids,
                obs=obs,
                actions=actions,
                rewards=(actions == 2).astype(float),
                next_obs=obs,
                terminations=np.full(NUM_ENVS, ends),
                truncations=np.zeros(NUM_ENVS, dtype=np.bool_),
                valid=np.ones(NUM_ENVS, dtype=np.bool_),
                versions=np.full(NUM_ENVS, iqn.version),
                calls=np.zeros(NUM_ENVS, dtype=np.int64),
            )
        )
        while iqn.pending_updates:
            iqn.learn()


def weights(iqn: IQN) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in iqn.network.parameters()]


def test_it_learns_the_paying_action_and_its_worth() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, CONFIG)
    walk(iqn, 100)
    obs = np.random.default_rng(9).normal(size=(200, OBS_DIM)).astype(np.float32)
    assert (iqn.frozen.act(obs, greedy=True).actions == 2).mean() > 0.95
    assert iqn.frozen.act(obs, greedy=True).values.mean() == pytest.approx(1.0, abs=0.15)


def test_the_replay_ratio_asked_for_is_achieved() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, CONFIG)
    walk(iqn, 50)
    stats = iqn.stats()
    assert stats["perf/replay_ratio_requested"] == 8.0
    assert stats["perf/replay_ratio_achieved"] == pytest.approx(8.0, abs=16 / 200)
    assert iqn.gradient_steps == 8 * 200 // 16
    assert stats["perf/updates_per_sample"] == pytest.approx(0.5)
    assert stats["counters/target_updates"] == iqn.gradient_steps


def test_nothing_is_learned_before_there_is_enough() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, CONFIG)
    walk(iqn, 7)
    assert (len(iqn.replay), iqn.gradient_steps) == (28, 0)
    walk(iqn, 1)
    assert iqn.gradient_steps == 8 * 32 // 16


def test_actions_are_random_before_there_is_enough_whatever_epsilon() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, epsilon_start=0.0, epsilon_end=0.0, replay_ratio=1e-9))
    obs = np.zeros((NUM_ENVS, OBS_DIM), dtype=np.float32)
    before = {action for _ in range(20) for action in iqn.act(obs, range(NUM_ENVS)).tolist()}
    walk(iqn, 8)
    after = {action for _ in range(20) for action in iqn.act(obs, range(NUM_ENVS)).tolist()}
    assert (before, len(after)) == ({0, 1, 2}, 1)


def test_the_importance_exponent_grows_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    iqn, betas = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, per_beta=0.4)), list[float]()

    def sample(size: int, *, beta: float) -> Sample:
        betas.append(beta)
        return draw(size, beta=beta)

    draw = iqn.replay.sample
    monkeypatch.setattr(iqn.replay, "sample", sample)
    walk(iqn, 100)
    assert betas == sorted(betas)
    assert (betas[0], betas[-1]) == (pytest.approx(0.4 + 0.6 * 32 / 400), 1.0)


def test_epsilon_falls_over_its_share_of_the_run() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, epsilon_start=0.8, epsilon_end=0.2, epsilon_fraction=0.5))
    assert iqn.epsilon == pytest.approx(0.8)
    walk(iqn, 25)
    assert iqn.epsilon == pytest.approx(0.5)
    walk(iqn, 75)
    assert iqn.epsilon == pytest.approx(0.2)


def test_the_target_follows_slowly() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, target_tau=0.25))
    walk(iqn, 8, ends=False)
    before = [parameter.clone() for parameter in iqn.target.parameters()]
    iqn.learn()
    for old, new, online in zip(before, iqn.target.parameters(), iqn.network.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online.detach())


def test_weights_act_from_the_weights_are_synced() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, sync_every=3, learning_starts=8))
    walk(iqn, 2)
    assert iqn.gradient_steps == 4
    assert iqn.version == 3


def test_age_is_counted_in_gradient_steps() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, sync_every=1000))
    walk(iqn, 8)
    iqn.stats()
    walk(iqn, 1)
    assert iqn.stats()["perf/weight_sync_age"] == iqn.gradient_steps - 2


def test_clipping_is_measured_not_assumed() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, max_grad_norm=1e-3))
    walk(iqn, 10)
    stats = iqn.stats()
    assert stats["grads/norm_after_clip_max"] == pytest.approx(1e-3, rel=1e-2)
    assert stats["grads/norm_before_clip_max"] > stats["grads/norm_before_clip_median"] > 1e-3


def test_it_goes_on_from_its_state_to_the_bit() -> None:
    first, second = IQN(OBS_DIM, NUM_ACTIONS, CONFIG), IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG))
    walk(first, 20, ends=False)
    second.load_state_dict(first.state_dict())
    for iqn in (first, second):
        walk(iqn, 20, seed=1)
    assert second.gradient_steps == first.gradient_steps
    assert all(torch.equal(one, other) for one, other in zip(weights(first), weights(second), strict=True))


def test_a_state_of_other_sizes_is_refused_in_one_line() -> None:
    state = IQN(OBS_DIM, NUM_ACTIONS, CONFIG).state_dict()
    with pytest.raises(ValueError, match="num_processes=4"):
        IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, num_processes=2)).load_state_dict(state)
    with pytest.raises(ValueError, match="other sizes"):
        IQN(OBS_DIM + 1, NUM_ACTIONS, CONFIG).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"train_batch_size": 0}, "train_batch_size=0 must be at least 1"),
        ({"replay_ratio": 0.0}, "replay_ratio=0.0 must be above 0"),
        ({"per_alpha": 1.5}, "per_alpha=1.5 must be between 0 and 1"),
        ({"num_quantiles": 7}, "must be even"),
        ({"learning_starts": 300, "replay_size": 200}, "try --replay-size 300"),
        ({"gamma": 1.1}, "gamma=1.1 must be between 0 and 1"),
        ({"hidden_sizes": ()}, "hidden_sizes needs at least one value"),
    ],
)
def test_settings_that_cannot_work_say_what_would(change: dict[str, object], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        replace(CONFIG, **change)  # type: ignore[arg-type]
