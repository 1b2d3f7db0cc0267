"""GAE, the loss and the buffer against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo.config import PPOConfig
from ppo.gae import compute_gae
from ppo.loss import clipped_policy_loss, clipped_value_loss, normalized, ppo_loss
from ppo.rollout import Batch, RolloutBuffer

GAMMA, LAMBDA = 0.9, 0.5
T, N, D = 4, 3, 2


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
    total, policy_loss, value_loss, entropy, log_ratio = ppo_loss(logits, values, batch, PPOConfig(norm_adv=False))
    assert policy_loss.item() == pytest.approx(-3)  # ratio 1, mean advantage 3
    assert value_loss.item() == pytest.approx((1 + 4) / 4)
    assert entropy.item() == pytest.approx(math.log(4))
    assert total.item() == pytest.approx(-3 - 0.01 * math.log(4) + 0.5 * 1.25)
    assert log_ratio.tolist() == pytest.approx([0, 0], abs=1e-6)


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


def the_step(t: int, envs: NDArray[np.int64]) -> dict[str, Any]:
    """Return made-up columns that name the step (t, n) they belong to."""
    number = 10 * t + envs
    return {
        "obs": np.stack([number, -number], axis=1),
        "actions": number,
        "logprobs": -number / 100,
        "values": number + 0.5,
        "rewards": number * 2,
        "terminations": number % 4 == 0,
        "truncations": number % 5 == 0,
        "final_values": number / 8,
        "valid": number % 3 != 0,
    }


def lock_step() -> RolloutBuffer:
    buffer = RolloutBuffer(T, N, D)
    for t in range(T):
        buffer.add(**the_step(t, np.arange(N)))
    return buffer


def columns(buffer: RolloutBuffer) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(buffer).items() if isinstance(value, torch.Tensor)}


def test_every_column_lands_where_it_belongs() -> None:
    buffer = lock_step()
    assert buffer.full
    for name, column in columns(buffer).items():
        expected = np.stack([the_step(t, np.arange(N))[name] for t in range(T)])
        np.testing.assert_array_equal(column.numpy(), expected.astype(column.numpy().dtype))


@pytest.mark.parametrize("seed", range(5))
def test_out_of_order_collection_gives_the_same_buffer(seed: int) -> None:
    rng, buffer = np.random.default_rng(seed), RolloutBuffer(T, N, D)
    while not buffer.full:
        behind = np.flatnonzero(buffer.cursor < T)
        envs = rng.permutation(behind)[: rng.integers(1, len(behind) + 1)]
        rows = [the_step(int(buffer.cursor[n]), np.array([n])) for n in envs]
        buffer.add(envs.tolist(), **{name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    wanted = columns(lock_step())
    assert all(torch.equal(column, wanted[name]) for name, column in columns(buffer).items())


def test_an_environment_past_its_quota_is_refused_and_nothing_is_written() -> None:
    buffer = lock_step()
    with pytest.raises(ValueError, match=r"\[2\] have taken all their 4 steps"):
        buffer.add([2], **the_step(9, np.array([2])))
    buffer.reset()
    buffer.add([2], **the_step(0, np.array([2])))
    assert buffer.cursor.tolist() == [0, 0, 1]


def test_an_environment_named_twice_is_refused() -> None:
    buffer = RolloutBuffer(T, N, D)
    with pytest.raises(ValueError, match="named twice"):
        buffer.add([1, 1], **the_step(0, np.array([1, 1])))
    assert buffer.cursor.tolist() == [0, 0, 0]


def test_steps_are_valid_unless_said_otherwise_in_every_rollout() -> None:
    buffer = lock_step()
    buffer.reset()
    step = the_step(0, np.arange(N))
    del step["valid"], step["final_values"]
    buffer.add(**step)
    assert buffer.valid[0].all()
    assert (buffer.final_values[0] == 0).all()


def test_a_batch_holds_the_valid_steps_only() -> None:
    buffer = lock_step()
    batch = buffer.batch(buffer.values + 1, buffer.values + 2)
    numbers = [10 * t + n for t in range(T) for n in range(N) if (10 * t + n) % 3]
    assert batch.actions.tolist() == numbers
    assert batch.obs.tolist() == [[k, -k] for k in numbers]
    assert batch.advantages.tolist() == [k + 1.5 for k in numbers]
    assert batch.returns.tolist() == [k + 2.5 for k in numbers]
    assert len(numbers) == int(buffer.valid.sum())


@pytest.mark.parametrize(("rows", "parts", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1])])
def test_minibatches_cover_every_row_once(rows: int, parts: int, sizes: list[int]) -> None:
    batch = Batch(torch.zeros(rows, D), torch.arange(rows), *(torch.zeros(rows) for _ in range(4)))
    minibatches = batch.split(parts)
    assert [len(minibatch.actions) for minibatch in minibatches] == sizes
    assert torch.cat([minibatch.actions for minibatch in minibatches]).tolist() == list(range(rows))
