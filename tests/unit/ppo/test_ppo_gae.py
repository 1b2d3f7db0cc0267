"""compute_gae against steps worked by hand and against the definition written as a double sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo.gae import compute_gae

GAMMA, LAMBDA = 0.9, 0.5


def column(*numbers: float) -> Tensor:
    """Return one environment's steps as [T, 1]."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def flags(*steps: int) -> Tensor:
    return torch.tensor(steps, dtype=torch.bool)[:, None]


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    terminations: Tensor | None = None,
    truncations: Tensor | None = None,
    final_values: Tensor | None = None,
    next_value: float = 0.0,
    valid: Tensor | None = None,
) -> tuple[list[float], list[float]]:
    never = torch.zeros(rewards.shape, dtype=torch.bool)
    advantages, returns = compute_gae(
        rewards,
        values,
        never if terminations is None else terminations,
        never if truncations is None else truncations,
        torch.zeros_like(rewards) if final_values is None else final_values,
        torch.tensor([next_value]),
        valid,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
    )
    return advantages.squeeze(1).tolist(), returns.squeeze(1).tolist()


def test_three_steps_of_an_episode_that_goes_on() -> None:
    # delta 2 = 3 + .9*4 - 2 = 4.6;  delta 1 = 2 + .9*2 - 1 = 2.8;  delta 0 = 1 + .9*1 - .5 = 1.4;  gamma*lambda = .45
    advantages, returns = gae(column(1, 2, 3), column(0.5, 1, 2), next_value=4)
    assert advantages == pytest.approx([1.4 + 0.45 * (2.8 + 0.45 * 4.6), 2.8 + 0.45 * 4.6, 4.6])
    assert returns == pytest.approx([a + v for a, v in zip(advantages, (0.5, 1, 2), strict=True)])


def test_a_terminated_step_keeps_its_reward_and_nothing_after() -> None:
    # The second step terminates: delta 1 = 2 - 1; the third belongs to the next episode.
    advantages, _ = gae(column(1, 2, 3), column(0.5, 1, 2), terminations=flags(0, 1, 0), next_value=4)
    assert advantages == pytest.approx([1.4 + 0.45 * 1, 1, 4.6])


def test_a_truncated_step_bootstraps_from_its_final_observation() -> None:
    # delta 1 = 2 + .9*10 - 1 = 10, whatever the next episode's first value is.
    advantages, _ = gae(
        column(1, 2, 3), column(0.5, 1, 2), truncations=flags(0, 1, 0), final_values=column(0, 10, 0), next_value=4
    )
    assert advantages == pytest.approx([1.4 + 0.45 * 10, 10, 4.6])


def test_a_step_both_terminated_and_truncated_is_terminated() -> None:
    both = flags(0, 1, 0)
    advantages, _ = gae(
        column(1, 2, 3), column(0.5, 1, 2), terminations=both, truncations=both, final_values=column(0, 10, 0)
    )
    assert advantages[:2] == pytest.approx([1.4 + 0.45 * 1, 1])


def test_an_invalid_step_is_skipped_as_if_it_had_not_happened() -> None:
    whole = gae(column(1, 3), column(0.5, 2), next_value=4)
    skipped = gae(column(1, 99, 3), column(0.5, -7, 2), next_value=4, valid=flags(1, 0, 1))
    # delta 0 = 1 + .9*2 - .5: from the step before straight to the step after.
    assert whole[0] == pytest.approx([2.3 + 0.45 * 4.6, 4.6])
    for one, other in zip(whole, skipped, strict=True):
        assert [other[0], other[2]] == one
        assert other[1] == 0


def test_an_episode_truncated_at_an_invalid_step_bootstraps_the_step_before() -> None:
    # delta 0 = 1 + .9*10 - .5 = 9.5: the value of where the episode was cut, not of the next episode.
    advantages, returns = gae(
        column(1, 99, 3),
        column(0.5, -7, 2),
        truncations=flags(0, 1, 0),
        final_values=column(0, 10, 0),
        next_value=4,
        valid=flags(1, 0, 1),
    )
    assert advantages == pytest.approx([9.5, 0, 4.6])
    assert returns == pytest.approx([10, 0, 6.6])


def test_an_invalid_step_after_an_episodes_end_joins_nothing() -> None:
    advantages, _ = gae(
        column(1, 99, 3), column(0.5, -7, 2), terminations=flags(1, 0, 0), next_value=4, valid=flags(1, 0, 1)
    )
    assert advantages == pytest.approx([0.5, 0, 4.6])


@pytest.mark.parametrize("last", [1, 2, 3])
def test_invalid_last_steps_leave_the_bootstrap_to_the_step_before(last: int) -> None:
    whole, _ = gae(column(1, 2), column(0.5, 1), next_value=4)
    advantages, _ = gae(
        column(1, 2, *[99] * last), column(0.5, 1, *[-7] * last), next_value=4, valid=flags(1, 1, *[0] * last)
    )
    assert advantages == whole + [0] * last


def test_nothing_valid_gives_zeros() -> None:
    nan = float("nan")
    assert gae(column(nan, nan), column(1, 1), valid=flags(0, 0)) == ([0, 0], [0, 0])


def test_environments_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    arrays = [torch.from_numpy(rng.normal(size=(20, 5)).astype(np.float32)) for _ in range(3)]
    ends = [torch.from_numpy(rng.random((20, 5)) < p) for p in (0.1, 0.1)]
    valid = torch.from_numpy(rng.random((20, 5)) < 0.8)
    rewards, values, final_values = arrays
    next_values = torch.from_numpy(rng.normal(size=5).astype(np.float32))
    together = compute_gae(rewards, values, *ends, final_values, next_values, valid, gamma=GAMMA, gae_lambda=LAMBDA)
    for n in range(5):
        one = slice(n, n + 1)
        alone = compute_gae(
            rewards[:, one],
            values[:, one],
            ends[0][:, one],
            ends[1][:, one],
            final_values[:, one],
            next_values[one],
            valid[:, one],
            gamma=GAMMA,
            gae_lambda=LAMBDA,
        )
        assert all(torch.equal(whole[:, one], part) for whole, part in zip(together, alone, strict=True))


def test_lambda_one_is_the_discounted_return_less_the_value() -> None:
    rewards, values = torch.rand(6, 1), torch.rand(6, 1)
    never = torch.zeros(6, 1, dtype=torch.bool)
    advantages, returns = compute_gae(
        rewards, values, never, never, torch.zeros(6, 1), torch.tensor([2.0]), gamma=GAMMA, gae_lambda=1.0
    )
    discounted = [sum(GAMMA**k * float(r) for k, r in enumerate(rewards[t:])) + GAMMA ** (6 - t) * 2 for t in range(6)]
    assert returns.squeeze(1).tolist() == pytest.approx(discounted, rel=1e-5)
    assert (advantages + values).squeeze(1).tolist() == pytest.approx(discounted, rel=1e-5)
