"""Learning from steps that an earlier policy took: weights, ratio, and nothing changed when there is no lag."""

from __future__ import annotations

import pytest
import torch

from ppo.algorithm import corrected
from ppo.policy import Policy
from ppo.rollout import Batch

OBS_DIM, ACTIONS, STEPS = 3, 4, 8


def batch_of(policy: Policy, *, off_by: torch.Tensor) -> Batch:
    """Return steps whose behaviour log-probabilities are today's minus `off_by` [B]."""
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(STEPS, OBS_DIM, generator=generator)
    actions = torch.randint(ACTIONS, (STEPS,), generator=generator)
    with torch.no_grad():
        today = policy(obs)[0].log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    advantages = torch.randn(STEPS, generator=generator)
    return Batch(obs, actions, today - off_by, torch.zeros(STEPS), advantages, torch.zeros(STEPS))


def test_without_a_lag_every_step_counts_in_full() -> None:
    policy = Policy(OBS_DIM, ACTIONS)
    batch = batch_of(policy, off_by=torch.zeros(STEPS))
    same, mean = corrected(policy, batch, norm_adv=False)
    torch.testing.assert_close(same.advantages, batch.advantages)
    torch.testing.assert_close(same.logprobs, batch.logprobs)
    assert mean == pytest.approx(1.0)


def test_weight_is_todays_probability_over_that_of_the_time_and_at_most_one() -> None:
    policy = Policy(OBS_DIM, ACTIONS)
    off_by = torch.tensor([-1.0, 1.0] * (STEPS // 2))  # now likelier by e^-1, by e
    batch = batch_of(policy, off_by=off_by)
    weighed, mean = corrected(policy, batch, norm_adv=False)
    weights = torch.tensor([torch.e**-1, 1.0] * (STEPS // 2))
    torch.testing.assert_close(weighed.advantages, weights * batch.advantages)
    torch.testing.assert_close(weighed.logprobs, batch.logprobs + off_by)  # the ratio begins at 1
    assert mean == pytest.approx(float(weights.mean()))


def test_advantages_are_normalised_before_they_are_weighed() -> None:
    policy = Policy(OBS_DIM, ACTIONS)
    weighed, _ = corrected(policy, batch_of(policy, off_by=torch.zeros(STEPS)), norm_adv=True)
    assert float(weighed.advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(weighed.advantages.std()) == pytest.approx(1, abs=1e-4)
