"""Policy and its frozen copy: the same numbers, sampling by inverse CDF, rows that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ppo.frozen import ActOutput, FrozenPolicy
from ppo.policy import Policy

OBS_DIM, NUM_ACTIONS = 7, 5


def a_policy(seed: int = 3) -> Policy:
    """Return a policy whose actor prefers some actions, as one that has learned does."""
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=seed)
    with torch.no_grad():
        policy.actor_head.weight.mul_(100)
    return policy


def observations(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, OBS_DIM)).astype(np.float32)


def streams(rows: int) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(rows)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_the_frozen_policy_gives_torchs_numbers(rows: int, deterministic: bool) -> None:
    policy, obs = a_policy(), observations(rows)
    acted = policy.frozen(deterministic=deterministic).act(obs, streams(rows))
    logits, values = policy(torch.from_numpy(obs))
    chosen = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(acted.actions))
    np.testing.assert_allclose(acted.values, values.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(acted.logprobs, chosen.detach().numpy(), atol=2e-6)
    np.testing.assert_array_equal(policy.frozen(deterministic=deterministic).get_value(obs), acted.values)


def test_the_first_policy_is_nearly_uniform_and_orthogonal() -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=0)
    logits, _ = policy(torch.from_numpy(observations(64)))
    assert logits.softmax(-1).sub(1 / NUM_ACTIONS).abs().max() < 0.02
    for weight in policy.state_dict()["hidden.1.weight"]:  # [32, 16]: columns of one length, at right angles
        torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(16), atol=1e-5, rtol=0)
    assert all((p == 0).all() for name, p in policy.named_parameters() if name.endswith("bias"))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = Policy(3, 2, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    second, other = Policy(3, 2, seed=5).state_dict(), Policy(3, 2, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["hidden.0.weight"], other["hidden.0.weight"])


def test_actions_come_as_often_as_they_are_likely() -> None:
    policy, obs = a_policy(), observations(1)
    rng = np.random.default_rng(0)
    draws = 20_000
    acted = policy.frozen().act(np.repeat(obs, draws, axis=0), [rng] * draws)
    shares = np.bincount(acted.actions, minlength=NUM_ACTIONS) / draws
    expected = policy(torch.from_numpy(obs))[0].softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(shares, expected, atol=0.02)
    assert 0.05 < expected.max() < 0.95


def test_greedy_takes_the_most_probable_action_and_draws_nothing() -> None:
    policy, obs = a_policy(), observations(8)
    acted = policy.frozen().act(obs, (), greedy=True)
    np.testing.assert_array_equal(acted.actions, policy(torch.from_numpy(obs))[0].argmax(-1).numpy())


def test_one_uniform_number_is_drawn_per_row() -> None:
    rngs, twins = streams(4), streams(4)
    a_policy().frozen().act(observations(4), rngs)
    for twin in twins:
        twin.random()
    assert [rng.bit_generator.state for rng in rngs] == [twin.bit_generator.state for twin in twins]


def test_certain_actions_are_never_missed() -> None:
    policy = a_policy()
    with torch.no_grad():
        policy.actor_head.bias.copy_(torch.tensor([-1e4, 1e4, -1e4, -1e4, -1e4]))
    acted = policy.frozen().act(observations(500), streams(500))
    assert (acted.actions == 1).all()
    assert (acted.logprobs == 0).all()


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(11)), st.lists(st.integers(1, 4), min_size=11, max_size=11))
def test_deterministic_acting_does_not_depend_on_the_grouping(order: list[int], sizes: list[int]) -> None:
    frozen, obs = a_policy().frozen(deterministic=True), observations(11)
    together = frozen.act(obs, streams(11))
    rngs = streams(11)
    apart = ActOutput(np.zeros(11, np.int64), np.zeros(11, np.float32), np.zeros(11, np.float32))
    while order:
        group, order = order[: sizes[0]], order[sizes[0] :]
        sizes = sizes[1:]
        acted = frozen.act(obs[group], [rngs[i] for i in group])
        for whole, part in zip(apart, acted, strict=True):
            whole[group] = part
        np.testing.assert_array_equal(frozen.get_value(obs[group]), acted.values)
    for one, other in zip(together, apart, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_frozen_policy_stays_as_it_was() -> None:
    policy, obs = a_policy(), observations(3)
    frozen = policy.frozen()
    before = frozen.get_value(obs)
    with torch.no_grad():
        policy.critic_head.bias.add_(1)
    np.testing.assert_array_equal(frozen.get_value(obs), before)
    np.testing.assert_allclose(policy.frozen().get_value(obs), before + 1, atol=1e-6)


@pytest.mark.parametrize("hidden_sizes", [(8,), (64, 64), (8, 4, 6)])
def test_a_policy_is_rebuilt_from_its_weights_alone(hidden_sizes: tuple[int, ...]) -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, hidden_sizes, seed=1)
    twin = Policy.from_state_dict(policy.state_dict())
    obs = torch.from_numpy(observations(4))
    assert all(torch.equal(one, other) for one, other in zip(policy(obs), twin(obs), strict=True))


@pytest.mark.parametrize("state", [{}, {"a": torch.zeros(2)}, {"hidden.0.weight": 3}])
def test_other_contents_are_not_taken_for_a_policy(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the weights of an actor-critic"):
        Policy.from_state_dict(state)
    with pytest.raises(ValueError, match="not the weights of an actor-critic"):
        FrozenPolicy(state)


@pytest.mark.parametrize("deterministic", [False, True])
def test_masked_actions_are_not_taken(deterministic: bool) -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=3, mask_columns=slice(2, 7))
    obs = observations(400)
    obs[:, 2:] = np.random.default_rng(1).random((400, NUM_ACTIONS)) < 0.6
    obs[:, 2] = 0  # one stays open
    acted = policy.frozen(deterministic=deterministic).act(obs, streams(400))
    assert not obs[np.arange(400), 2 + acted.actions].any()
    logits, _ = policy(torch.from_numpy(obs))
    chosen = logits.log_softmax(-1).gather(1, torch.from_numpy(acted.actions)[:, None]).squeeze(1)
    np.testing.assert_allclose(acted.logprobs, chosen.detach().numpy(), atol=1e-5)


def test_masked_columns_are_saved_with_the_weights() -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=3, mask_columns=slice(2, 7))
    again = Policy.from_state_dict(policy.state_dict())
    assert again.closed.tolist() == [2, 3, 4, 5, 6]


def test_as_many_columns_as_actions() -> None:
    with pytest.raises(ValueError, match="4 mask columns for 5 actions"):
        Policy(OBS_DIM, NUM_ACTIONS, mask_columns=slice(3, 7))
