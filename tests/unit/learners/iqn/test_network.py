"""The quantile network: torch and numpy agree, masked actions, sizes read off the weights; the loss by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from query_mutator.learners.iqn.frozen import FrozenQuantiles, drawn
from query_mutator.learners.iqn.network import QuantileNetwork, quantile_huber_loss


@pytest.fixture
def network() -> QuantileNetwork:
    return QuantileNetwork(7, 3, (16, 8), num_cosines=5, seed=3, mask_columns=slice(4, 7))


@pytest.fixture
def obs() -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    rows[:, 4:] = 0
    rows[2, 5] = rows[3, 4] = rows[3, 6] = 1
    return rows


def test_acting_in_numpy_gives_the_means_torch_gives(network: QuantileNetwork, obs: np.ndarray) -> None:
    taus = (torch.arange(12) + 0.5) / 12
    rows = torch.from_numpy(obs)
    wanted = network(rows, taus).mean(1) - network.mask(rows)
    np.testing.assert_allclose(network.frozen(num_quantiles=12).q_values(obs), wanted.detach().numpy(), atol=1e-5)


def test_masked_actions_are_never_taken(network: QuantileNetwork, obs: np.ndarray) -> None:
    frozen = network.frozen()
    rngs = [np.random.default_rng(seed) for seed in range(6)]
    for _ in range(50):
        actions = frozen.act(obs, rngs, epsilon=1.0).actions
        assert actions[2] != 1
        assert actions[3] == 1
    assert frozen.act(obs, greedy=True).actions[3] == 1


def test_random_actions_are_even_over_the_open_ones() -> None:
    is_open = np.array([[True, False, True, True]])
    uniform = (np.arange(9) + 0.5) / 9
    actions = [int(drawn(is_open, np.array([point]))[0]) for point in uniform]
    assert actions == [0, 0, 0, 2, 2, 2, 3, 3, 3]


def test_epsilon_is_the_share_of_random_actions(network: QuantileNetwork, obs: np.ndarray) -> None:
    rows = np.repeat(obs[:1], 2000, axis=0)
    rngs = [np.random.default_rng(seed) for seed in range(2000)]
    acted = network.frozen().act(rows, rngs, epsilon=0.3).actions
    best = network.frozen().act(rows[:1], greedy=True).actions[0]
    assert (acted != best).mean() == pytest.approx(0.3 * 2 / 3, abs=0.03)


def test_the_value_does_not_depend_on_which_actions_have_which_advantage(network: QuantileNetwork) -> None:
    """Dueling: advantages are taken relative to their mean, so a constant added to all changes nothing."""
    rows, taus = torch.ones(2, 7), torch.tensor([0.3, 0.7])
    before = network(rows, taus)
    with torch.no_grad():
        network.advantage_head.bias += 5.0
    torch.testing.assert_close(network(rows, taus), before)


def test_the_network_comes_back_from_its_weights_alone(network: QuantileNetwork, obs: np.ndarray) -> None:
    again = FrozenQuantiles({name: tensor.numpy() for name, tensor in network.state_dict().items()})
    np.testing.assert_array_equal(again.q_values(obs), network.frozen().q_values(obs))


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="not the weights of a quantile network"):
        FrozenQuantiles({"actor_head.bias": torch.zeros(3)})


def test_masked_columns_must_match_the_actions() -> None:
    with pytest.raises(ValueError, match="2 mask columns"):
        QuantileNetwork(5, 3, mask_columns=slice(0, 2))


def test_quantile_huber_loss_by_hand() -> None:
    predicted, target = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0]])
    # errors 1 and -1; Huber at kappa 1 is 0.5 for both; weights |0.25 - 0| and |0.75 - 1|
    loss = quantile_huber_loss(predicted, target, torch.tensor([0.25, 0.75]), kappa=1.0)
    assert loss.tolist() == [pytest.approx((0.25 * 0.5 + 0.25 * 0.5) / 2)]
    # beyond kappa it is linear: kappa * (|error| - kappa / 2) / kappa = 0.75 at kappa 0.5
    loss = quantile_huber_loss(predicted, target, torch.tensor([0.25, 0.75]), kappa=0.5)
    assert loss.tolist() == [pytest.approx(0.25 * 0.75)]


def test_the_loss_is_a_mean_per_sample_whatever_the_batch() -> None:
    predicted, target, taus = torch.rand(1, 4), torch.rand(1, 6), torch.rand(4)
    one = quantile_huber_loss(predicted, target, taus, kappa=1.0).mean()
    many = quantile_huber_loss(predicted.expand(64, 4), target.expand(64, 6), taus, kappa=1.0).mean()
    torch.testing.assert_close(one, many)


def test_quantiles_of_a_known_distribution_are_learned() -> None:
    """Returns are 0 or 1 with even chance: quantiles below 0.5 are 0, those above are 1."""
    network = QuantileNetwork(1, 1, (32,), num_cosines=16, seed=0)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        taus = torch.rand(8, generator=generator)
        predicted = network(torch.ones(32, 1), taus)[:, :, 0]
        target = torch.randint(0, 2, (32, 8), generator=generator).float()
        optimizer.zero_grad()
        quantile_huber_loss(predicted, target, taus, kappa=0.01).mean().backward()
        optimizer.step()
    low, high = network(torch.ones(1, 1), torch.tensor([0.2, 0.8]))[0, :, 0].tolist()
    assert low == pytest.approx(0.0, abs=0.15)
    assert high == pytest.approx(1.0, abs=0.15)
