"""ppo_update and PPO: what one update does, what it reports, that a run can stop and resume; Adam as torch has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo.algorithm import PPO, FlatAdam
from ppo.checkpoint import load_checkpoint, save_checkpoint
from ppo.config import PPOConfig
from ppo.policy import Policy
from ppo.rollout import RolloutBuffer

CONFIG = PPOConfig(num_env_steps=400, num_processes=4, num_steps=10, num_mini_batch=2, ppo_epoch=3, lr=1e-2, seed=7)
OBS_DIM, NUM_ACTIONS = 3, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bandit_rollout(ppo: PPO, *, invalid: float = 0.0, seed: int = 0) -> tuple[RolloutBuffer, np.ndarray[Any, Any]]:
    """Fill a buffer from one-step episodes in which action 2 pays 1 and the others nothing; some steps fail."""
    rng = np.random.default_rng(seed)
    steps, envs = ppo.config.num_steps, ppo.config.num_processes
    buffer = RolloutBuffer(steps, envs, OBS_DIM)
    for _ in range(steps):
        obs = rng.normal(size=(envs, OBS_DIM)).astype(np.float32)
        acted = ppo.act(obs)
        buffer.add(
            obs=obs,
            actions=acted.actions,
            logprobs=acted.logprobs,
            values=acted.values,
            rewards=acted.actions == 2,
            terminations=True,
            truncations=False,
            valid=rng.random(envs) >= invalid,
        )
    return buffer, rng.normal(size=(envs, OBS_DIM)).astype(np.float32)


def weights(ppo: PPO) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in ppo.policy.parameters()]


def test_updates_make_the_paying_action_likelier() -> None:
    ppo = PPO(OBS_DIM, NUM_ACTIONS, CONFIG)
    for update in range(CONFIG.num_updates):
        stats = ppo.update(*bandit_rollout(ppo, seed=update))
    obs = np.random.default_rng(99).normal(size=(200, OBS_DIM)).astype(np.float32)
    assert (ppo.act(obs, greedy=True).actions == 2).mean() > 0.95
    assert stats["losses/entropy"] < math.log(3)


def test_the_first_updates_statistics() -> None:
    ppo = PPO(OBS_DIM, NUM_ACTIONS, replace(CONFIG, lr=1e-5))
    stats = ppo.update(*bandit_rollout(ppo))
    losses = "approx_kl clipfrac entropy explained_variance grad_norm old_approx_kl policy_loss value_loss"
    norms = "norm_after_clip_max norm_before_clip_max norm_before_clip_median"
    wanted = {f"losses/{name}" for name in losses.split()} | {f"grads/{name}" for name in norms.split()}
    assert set(stats) == wanted | {"charts/learning_rate", "rl/avg_value"}
    assert all(isinstance(value, float) and math.isfinite(value) for value in stats.values())
    assert stats["losses/entropy"] == pytest.approx(math.log(3), rel=0.01)
    assert stats["losses/approx_kl"] >= 0
    assert 0 <= stats["losses/clipfrac"] <= 1
    assert stats["grads/norm_before_clip_median"] <= stats["grads/norm_before_clip_max"]
    assert stats["grads/norm_after_clip_max"] <= CONFIG.max_grad_norm * 1.001


def test_gradient_steps_and_samples_are_counted_and_kept() -> None:
    ppo = PPO(OBS_DIM, NUM_ACTIONS, CONFIG)
    buffer, next_obs = bandit_rollout(ppo)
    ppo.update(buffer, next_obs)
    again = PPO(OBS_DIM, NUM_ACTIONS, CONFIG)
    again.load_state_dict(ppo.state_dict())
    for one in (ppo, again):
        assert one.gradient_steps == CONFIG.ppo_epoch * CONFIG.num_mini_batch
        assert one.samples_learned == CONFIG.ppo_epoch * int(buffer.valid.sum())
    unmoved = PPO(OBS_DIM, NUM_ACTIONS, replace(CONFIG, ppo_epoch=1, num_mini_batch=1))
    stats = unmoved.update(*bandit_rollout(unmoved))
    divergence = [stats[f"losses/{name}"] for name in ("approx_kl", "old_approx_kl", "clipfrac")]
    assert divergence == pytest.approx([0, 0, 0], abs=1e-6)


def test_a_reached_target_kl_ends_the_passes() -> None:
    def passes(target_kl: float | None) -> float:
        ppo = PPO(OBS_DIM, NUM_ACTIONS, replace(CONFIG, ppo_epoch=5, lr=0.1, target_kl=target_kl))
        ppo.update(*bandit_rollout(ppo))
        return float(ppo.optimizer.state_dict()["steps"]) / CONFIG.num_mini_batch

    assert passes(None) == 5
    assert passes(1e-4) == 1
    assert passes(1e4) == 5


@pytest.mark.parametrize(("decays", "shares"), [(True, [1, 0.75, 0.5, 0.25]), (False, [1, 1, 1, 1])])
def test_the_step_size_falls_linearly_to_one_update_before_zero_or_stays(decays: bool, shares: list[float]) -> None:
    ppo = PPO(OBS_DIM, NUM_ACTIONS, replace(CONFIG, num_env_steps=160, use_linear_lr_decay=decays))
    rates = [ppo.update(*bandit_rollout(ppo))["charts/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1e-2 * share for share in shares])


def test_invalid_steps_leave_no_trace_in_weights_or_statistics() -> None:
    """Whatever stands in the invalid steps, the update is the same."""
    outcomes = []
    for junk in (0.0, 1e6, float("nan")):
        ppo = PPO(OBS_DIM, NUM_ACTIONS, CONFIG)
        buffer, next_obs = bandit_rollout(ppo, invalid=0.3)
        assert 0 < int(buffer.valid.sum()) < CONFIG.rollout_steps
        for column in (buffer.obs, buffer.rewards, buffer.values, buffer.logprobs):
            column[~buffer.valid] = junk
        outcomes.append((ppo.update(buffer, next_obs), weights(ppo)))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_rollout_without_a_valid_step_changes_nothing_and_one_is_enough_for_a_finite_update() -> None:
    ppo = PPO(OBS_DIM, NUM_ACTIONS, CONFIG)
    before = weights(ppo)
    stats = ppo.update(*bandit_rollout(ppo, invalid=1.1))
    assert weights(ppo) == before
    buffer, next_obs = bandit_rollout(ppo, invalid=1.1)
    buffer.valid[3, 1] = True
    assert all(math.isfinite(value) for value in [*stats.values(), *ppo.update(buffer, next_obs).values()])
    assert all(parameter.isfinite().all() for parameter in ppo.policy.parameters())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_loaded_run_goes_on_to_the_same_weights(tmp_path: Path, deterministic: bool) -> None:
    config = replace(CONFIG, deterministic=deterministic)
    whole = PPO(OBS_DIM, NUM_ACTIONS, config)
    for update in range(4):
        if update == 2:
            path = save_checkpoint(tmp_path / "two.pt", whole.state_dict())
        whole.update(*bandit_rollout(whole, seed=update))
    resumed = PPO(OBS_DIM, NUM_ACTIONS, replace(config, seed=8))
    resumed.load_state_dict(load_checkpoint(path))
    for update in range(2, 4):
        resumed.update(*bandit_rollout(resumed, seed=update))
    assert resumed.updates_done == whole.updates_done == 4
    assert weights(resumed) == weights(whole)


def test_a_state_of_other_sizes_says_so() -> None:
    state = PPO(OBS_DIM, NUM_ACTIONS, CONFIG).state_dict()
    with pytest.raises(ValueError, match="other sizes"):
        PPO(OBS_DIM + 1, NUM_ACTIONS, CONFIG).load_state_dict(state)
    with pytest.raises(ValueError, match="try num_processes=4"):
        PPO(OBS_DIM, NUM_ACTIONS, replace(CONFIG, num_processes=8)).load_state_dict(state)


def a_loss(policy: Policy, step: int) -> torch.Tensor:
    obs = torch.randn(32, 5, generator=torch.Generator().manual_seed(step))
    logits, values = policy(obs)
    return (logits[:, 0] - obs[:, 0]).square().mean() + (values - 3).square().mean()


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e6])
def test_it_takes_torchs_steps(max_grad_norm: float) -> None:
    ours, torchs = Policy(5, 3, (8, 8), seed=1), Policy(5, 3, (8, 8), seed=1)
    flat = FlatAdam(ours, lr=1.0, max_grad_norm=max_grad_norm)
    flat.lr = 1e-2
    adam = torch.optim.Adam(torchs.parameters(), lr=1e-2, eps=1e-5)
    for step in range(20):
        norms = flat.gradient_step(a_loss(ours, step))
        adam.zero_grad()
        a_loss(torchs, step).backward()
        wanted = torch.nn.utils.clip_grad_norm_(torchs.parameters(), max_grad_norm)
        adam.step()
        torch.testing.assert_close(norms[0], wanted, rtol=1e-4, atol=0)
        torch.testing.assert_close(norms[1], wanted.clamp(max=max_grad_norm), rtol=1e-4, atol=0)
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
