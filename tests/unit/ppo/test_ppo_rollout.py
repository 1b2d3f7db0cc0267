"""RolloutBuffer: the same contents in lock-step and out of order, quotas, and batches of valid steps only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ppo.rollout import Batch, RolloutBuffer

T, N, D = 4, 3, 2


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
