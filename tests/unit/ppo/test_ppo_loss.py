"""ppo_loss: clipping worked by hand, gradients that stop where they should, invalid steps without a trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ppo.loss import clipped_policy_loss, clipped_value_loss, normalized, ppo_loss
from ppo.policy import Policy
from ppo.rollout import Batch, RolloutBuffer

LOSS = {"clip_param": 0.2, "clip_vloss": True, "norm_adv": True, "entropy_coef": 0.01, "value_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.1, 2.0, 2.2, 2.0),  # inside the range: as it is
        (1.5, 2.0, 2.4, 0.0),  # better than trusted: capped at 1.2
        (0.5, 2.0, 1.0, 2.0),  # worse: not capped, so that it can recover
        (0.5, -2.0, -1.6, 0.0),  # better than trusted: capped at 0.8
        (1.5, -2.0, -3.0, -2.0),  # worse: not capped
    ],
)
def test_the_ratio_is_clipped_where_it_would_flatter(
    ratio: float, advantage: float, objective: float, slope: float
) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    loss = clipped_policy_loss(ratios, torch.tensor([advantage]), clip_param=0.2)
    assert loss.item() == pytest.approx(-objective)
    assert torch.autograd.grad(loss, ratios)[0].item() == pytest.approx(-slope)


@pytest.mark.parametrize(
    ("value", "old", "target", "error"),
    [
        (1.1, 1.0, 2.0, 0.9),  # inside the range
        (1.9, 1.0, 2.0, 0.8),  # moved 0.9 towards the target, counted as 0.2
        (0.0, 1.0, 2.0, 2.0),  # moved away: counted whole
    ],
)
def test_the_value_is_clipped_where_it_would_flatter(value: float, old: float, target: float, error: float) -> None:
    arguments = torch.tensor([value]), torch.tensor([old]), torch.tensor([target])
    assert clipped_value_loss(*arguments, clip_param=0.2).item() == pytest.approx(error**2 / 2, rel=1e-5)
    assert clipped_value_loss(*arguments, clip_param=None).item() == pytest.approx((value - target) ** 2 / 2)


def test_normalised_advantages_have_mean_0_and_deviation_1() -> None:
    advantages = normalized(torch.tensor([1.0, 2.0, 3.0, 10.0]))
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("advantages", [torch.tensor([3.0]), torch.full((4,), 3.0)])
def test_advantages_that_do_not_vary_give_no_nan(advantages: Tensor) -> None:
    assert normalized(advantages).isfinite().all()


def test_the_terms_add_up() -> None:
    logits, values = torch.zeros(2, 4), torch.tensor([1.0, 3.0])
    batch = Batch(
        obs=torch.zeros(2, 1),
        actions=torch.tensor([0, 1]),
        logprobs=torch.full((2,), math.log(0.25)),
        values=values,
        advantages=torch.tensor([1.0, 5.0]),
        returns=torch.tensor([2.0, 5.0]),
    )
    terms = ppo_loss(logits, values, batch, **{**LOSS, "norm_adv": False})  # type: ignore[arg-type]
    assert terms.policy_loss.item() == pytest.approx(-3)  # ratio 1, mean advantage 3
    assert terms.value_loss.item() == pytest.approx((1 + 4) / 4)
    assert terms.entropy.item() == pytest.approx(math.log(4))
    assert terms.total.item() == pytest.approx(-3 - 0.01 * math.log(4) + 0.5 * 1.25)
    assert terms.log_ratio.tolist() == pytest.approx([0, 0], abs=1e-6)


def test_loss_and_gradients_equal_those_of_the_valid_subset() -> None:
    torch.manual_seed(0)
    policy, buffer = Policy(3, 4, (8,)), RolloutBuffer(6, 2, 3)
    for t in range(6):
        buffer.add(
            obs=torch.randn(2, 3),
            actions=torch.randint(4, (2,)),
            logprobs=torch.randn(2) - 1,
            values=torch.randn(2),
            rewards=torch.randn(2),
            terminations=False,
            truncations=False,
            valid=[t != 2, t not in (0, 5)],
        )
    advantages, returns = torch.randn(6, 2), torch.randn(6, 2)
    valid = buffer.valid.flatten()
    columns = (buffer.obs, buffer.actions, buffer.logprobs, buffer.values, advantages, returns)
    subset = Batch(*(column.flatten(0, 1)[valid] for column in columns))
    buffer.obs[~buffer.valid] = float("nan")
    outcomes = []
    for batch in (subset, buffer.batch(advantages, returns)):
        terms = ppo_loss(*policy(batch.obs), batch, **LOSS)  # type: ignore[arg-type]
        outcomes.append([*terms, *torch.autograd.grad(terms.total, list(policy.parameters()))])
    assert len(subset.actions) == 9
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
