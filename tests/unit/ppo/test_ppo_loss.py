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
NAN = math.nan


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


def test_normalised_advantages_have_mean_0_and_deviation_1_or_no_nan_where_they_do_not_vary() -> None:
    advantages = normalized(torch.tensor([1.0, 2.0, 3.0, 10.0]))
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, rel=1e-6)
    for equal in (torch.tensor([3.0]), torch.full((4,), 3.0)):
        assert normalized(equal).isfinite().all()


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


THREE = {"rewards": column(1, 2, 3), "values": column(0.5, 1, 2), "next_value": 4.0}
ODD = {"rewards": column(1, 99, 3), "values": column(0.5, -7, 2), "next_value": 4.0, "valid": flags(1, 0, 1)}
CUT = {"truncations": flags(0, 1, 0), "final_values": column(0, 10, 0)}


def gae(*, rewards: Tensor, values: Tensor, next_value: float = 0.0, **more: Tensor) -> tuple[list[float], list[float]]:
    never = torch.zeros(rewards.shape, dtype=torch.bool)
    ends = more.get("terminations", never), more.get("truncations", never)
    final_values = more.get("final_values", torch.zeros_like(rewards))
    following = torch.tensor([next_value])
    advantages, returns = compute_gae(
        rewards, values, *ends, final_values, following, more.get("valid"), gamma=GAMMA, gae_lambda=LAMBDA
    )
    return advantages.squeeze(1).tolist(), returns.squeeze(1).tolist()


@pytest.mark.parametrize(
    ("steps", "advantages", "values"),
    [
        # delta 2 = 3 + .9*4 - 2 = 4.6; delta 1 = 2 + .9*2 - 1 = 2.8; delta 0 = 1 + .9*1 - .5 = 1.4; gamma*lambda = .45
        (THREE, [1.4 + 0.45 * (2.8 + 0.45 * 4.6), 2.8 + 0.45 * 4.6, 4.6], [0.5, 1, 2]),
        # The second step terminates: delta 1 = 2 - 1; the third belongs to the next episode.
        (THREE | {"terminations": flags(0, 1, 0)}, [1.4 + 0.45 * 1, 1, 4.6], [0.5, 1, 2]),
        # It is truncated: delta 1 = 2 + .9*10 - 1 = 10, whatever the next episode's first value is.
        (THREE | CUT, [1.4 + 0.45 * 10, 10, 4.6], [0.5, 1, 2]),
        (THREE | CUT | {"terminations": flags(0, 1, 0)}, [1.4 + 0.45 * 1, 1, 4.6], [0.5, 1, 2]),  # both: terminated
        # An invalid step: delta 0 = 1 + .9*2 - .5, from the step before straight to the step after.
        (ODD, [2.3 + 0.45 * 4.6, 0, 4.6], [0.5, 0, 2]),
        # Cut at an invalid step: delta 0 = 1 + .9*10 - .5, of where the episode was cut, not of the next episode.
        (ODD | CUT, [9.5, 0, 4.6], [0.5, 0, 2]),
        (ODD | {"terminations": flags(1, 0, 0)}, [0.5, 0, 4.6], [0.5, 0, 2]),  # after an episode's end
        ({"rewards": column(NAN, NAN), "values": column(1, 1), "valid": flags(0, 0)}, [0, 0], [0, 0]),
    ],
)
def test_advantages_and_returns_by_hand(steps: dict[str, Any], advantages: list[float], values: list[float]) -> None:
    found, returns = gae(**steps)
    assert found == pytest.approx(advantages)
    assert returns == pytest.approx(np.add(advantages, values).tolist())


@pytest.mark.parametrize("last", [1, 2, 3])
def test_invalid_last_steps_leave_the_bootstrap_to_the_step_before(last: int) -> None:
    whole, _ = gae(rewards=column(1, 2), values=column(0.5, 1), next_value=4)
    rewards, values = column(1, 2, *[99] * last), column(0.5, 1, *[-7] * last)
    advantages, _ = gae(rewards=rewards, values=values, next_value=4, valid=flags(1, 1, *[0] * last))
    assert advantages == whole + [0] * last


def test_environments_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    rewards, values, final_values = (torch.from_numpy(rng.normal(size=(20, 5)).astype(np.float32)) for _ in range(3))
    terminations, truncations, valid = (torch.from_numpy(rng.random((20, 5)) < share) for share in (0.1, 0.1, 0.8))
    next_values = torch.from_numpy(rng.normal(size=5).astype(np.float32))
    steps = (rewards, values, terminations, truncations, final_values, next_values, valid)
    together = compute_gae(*steps, gamma=GAMMA, gae_lambda=LAMBDA)
    for n in range(5):
        alone = compute_gae(*(one[..., n : n + 1] for one in steps), gamma=GAMMA, gae_lambda=LAMBDA)
        assert all(torch.equal(whole[:, n : n + 1], part) for whole, part in zip(together, alone, strict=True))


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


def test_an_environment_past_its_quota_or_named_twice_is_refused_and_nothing_is_written() -> None:
    buffer = lock_step()
    with pytest.raises(ValueError, match=r"\[2\] have taken all their 4 steps"):
        buffer.add([2], **the_step(9, np.array([2])))
    buffer.reset()
    with pytest.raises(ValueError, match="named twice"):
        buffer.add([1, 1], **the_step(0, np.array([1, 1])))
    buffer.add([2], **the_step(0, np.array([2])))
    assert buffer.cursor.tolist() == [0, 0, 1]


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
