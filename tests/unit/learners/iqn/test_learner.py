"""IQN: what is replayed with which priority, n-step returns, the network against its loss by hand, runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ppo.__main__ import make_envs
from ppo.collect import first_episode_returns
from query_mutator.learners.iqn import FrozenQuantiles
from query_mutator.learners.iqn.learner import (
    IQN,
    SMALLEST_ERROR,
    NStep,
    QuantileNetwork,
    Replay,
    Transition,
    quantile_huber_loss,
)
from query_mutator.learners.learner import Steps, explored, last_obs
from query_mutator.settings import IQNConfig

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


def stepped(env_ids: np.ndarray, **fields: object) -> Steps:
    """Return steps that came back; those that no field says otherwise are valid and end nothing."""
    zeros = np.zeros(len(env_ids), dtype=np.int64)
    plain = {"terminations": zeros > 0, "truncations": zeros > 0, "valid": zeros == 0, "versions": zeros}
    return Steps(env_ids=env_ids, calls=zeros, **{**plain, **fields})  # type: ignore[arg-type]


def walk(iqn: IQN, count: int, *, seed: int = 0, ends: bool = True) -> None:
    """Take `count` steps in every environment: action 2 pays 1, others nothing; episodes are one step long."""
    rng = np.random.default_rng(seed)
    env_ids = np.arange(NUM_ENVS)
    for _ in range(count):
        obs = rng.normal(size=(NUM_ENVS, OBS_DIM)).astype(np.float32)
        actions = iqn.act(obs, env_ids.tolist())
        paid, versions = (actions == 2).astype(float), np.full(NUM_ENVS, iqn.version)
        ended = np.full(NUM_ENVS, ends)
        iqn.observe(
            stepped(
                env_ids, obs=obs, actions=actions, rewards=paid, next_obs=obs, terminations=ended, versions=versions
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
    assert iqn.frozen.q_values(obs).max(axis=1).mean() == pytest.approx(1.0, abs=0.15)


def test_the_replay_ratio_asked_for_is_achieved() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, CONFIG)
    walk(iqn, 50)
    stats = iqn.update()
    assert stats["perf/replay_ratio_requested"] == 8.0
    assert stats["perf/replay_ratio_achieved"] == pytest.approx(8.0, abs=16 / 200)
    assert iqn.gradient_steps == 8 * 200 // 16
    assert stats["perf/updates_per_sample"] == pytest.approx(0.5)
    assert stats["counters/target_updates"] == iqn.gradient_steps


def test_nothing_is_learned_before_there_is_enough_and_weights_act_from_when_they_are_synced() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, sync_every=3))
    walk(iqn, 7)
    assert (len(iqn.replay), iqn.gradient_steps, iqn.version) == (28, 0, 0)
    walk(iqn, 1)
    assert (iqn.gradient_steps, iqn.version) == (8 * 32 // 16, 15)


def test_actions_are_random_before_there_is_enough_whatever_epsilon() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, epsilon_start=0.0, epsilon_end=0.0, replay_ratio=1e-9))
    obs = np.zeros((NUM_ENVS, OBS_DIM), dtype=np.float32)
    before = {action for _ in range(20) for action in iqn.act(obs, range(NUM_ENVS)).tolist()}
    walk(iqn, 8)
    after = {action for _ in range(20) for action in iqn.act(obs, range(NUM_ENVS)).tolist()}
    assert (before, len(after)) == ({0, 1, 2}, 1)


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


def test_age_is_counted_in_gradient_steps_and_clipping_is_measured() -> None:
    iqn = IQN(OBS_DIM, NUM_ACTIONS, replace(CONFIG, sync_every=1000, max_grad_norm=1e-3))
    walk(iqn, 9)  # the last steps were chosen by the first weights, and came back after all gradient steps but two
    age, stats = (iqn.gradient_steps - 2) / 9, iqn.update()
    assert stats["perf/weight_sync_age"] == pytest.approx(age)
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
    np.testing.assert_allclose(
        FrozenQuantiles(network.state_dict(), num_quantiles=12).q_values(obs), wanted.detach().numpy(), atol=1e-5
    )


def test_masked_actions_are_never_taken(network: QuantileNetwork, obs: np.ndarray) -> None:
    frozen = FrozenQuantiles(network.state_dict())
    rngs = [np.random.default_rng(seed) for seed in range(6)]
    for _ in range(50):
        actions = explored(frozen.act(obs).actions, frozen.allowed(obs), rngs, share=1.0)
        assert actions[2] != 1
        assert actions[3] == 1
    assert frozen.act(obs, greedy=True).actions[3] == 1


def test_a_random_share_is_even_over_the_allowed_actions() -> None:
    rngs = [np.random.default_rng(seed) for seed in range(4000)]
    allowed = np.tile([True, False, True, True], (4000, 1))
    counts = np.bincount(explored(np.zeros(4000, dtype=np.int64), allowed, rngs, share=0.3), minlength=4)
    assert counts / 4000 == pytest.approx([0.8, 0, 0.1, 0.1], abs=0.02)


def test_the_value_does_not_depend_on_which_actions_have_which_advantage(network: QuantileNetwork) -> None:
    """Dueling: advantages are taken relative to their mean, so a constant added to all changes nothing."""
    rows, taus = torch.ones(2, 7), torch.tensor([0.3, 0.7])
    before = network(rows, taus)
    with torch.no_grad():
        network.advantage_head.bias += 5.0
    torch.testing.assert_close(network(rows, taus), before)


def test_other_weights_are_refused_and_masked_columns_that_do_not_match_the_actions() -> None:
    with pytest.raises(ValueError, match="not the weights of a quantile network"):
        FrozenQuantiles({"actor_head.bias": torch.zeros(3)})
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


def test_a_short_run_balances_the_pole_far_longer_than_chance() -> None:
    """Chance keeps it up for 22 steps."""
    envs = make_envs("CartPole-v1", 8)
    config = IQNConfig(
        num_env_steps=4000,
        hidden_sizes=(32, 32),
        train_batch_size=64,
        replay_ratio=16.0,
        learning_starts=200,
        lr=2e-3,
        per_alpha=0.0,
        sync_every=4,
        epsilon_fraction=0.2,
    )
    learner, env_ids, none = IQN(4, 2, config), np.arange(8), np.zeros(8, dtype=np.int64)
    obs = envs.reset(seed=1)[0]
    while learner.env_steps < 4000:
        actions = learner.act(obs, env_ids.tolist())
        next_obs, rewards, *ends, infos = envs.step(actions)
        last = last_obs(next_obs, ends[0] | ends[1], infos)
        learner.observe(Steps(env_ids, obs, actions, rewards, last, *ends, none == 0, none, none))
        obs = next_obs
        while learner.pending_updates:
            learner.learn()
    learner.update()
    assert first_episode_returns(learner.frozen, make_envs("CartPole-v1", 20), seed=1_000_001).mean() > 80
    assert learner.gradient_steps == pytest.approx(4000 * 16 / 64, abs=10)


def transition(number: int) -> Transition:
    obs = np.full(2, number, dtype=np.float32)
    return Transition(obs, number % 3, float(number), obs + 1, 0.5)


def replay_of(count: int, *, capacity: int = 8, alpha: float = 1.0) -> Replay:
    replay = Replay(capacity, 2, alpha=alpha, rng=np.random.default_rng(0))
    replay.add([transition(number) for number in range(count)])
    return replay


def test_a_sample_holds_whole_transitions_and_the_oldest_make_room() -> None:
    sample = replay_of(5).sample(16, beta=0.4)
    assert sample.obs[:, 0].tolist() == sample.returns.tolist()
    assert (sample.next_obs[:, 0] == sample.obs[:, 0] + 1).all()
    assert (sample.actions == sample.returns.long() % 3).all()
    assert sample.weights.tolist() == [1.0] * 16  # all are new and equally likely
    replay = replay_of(11)
    assert len(replay) == 8
    assert set(replay.sample(64, beta=0.4).returns.tolist()) == set(map(float, range(3, 11)))


@pytest.mark.parametrize(
    ("alpha", "errors", "added", "counts", "weights"),
    [
        (1.0, [1.0, 2.0, 3.0, 4.0], 0, [100, 200, 300, 400], [1.0, 1 / 2, 1 / 3, 1 / 4]),
        (0.0, [0.1, 2.0, 30.0, 400.0], 0, [100] * 4, [1.0] * 4),  # evenly whatever the errors
        (1.0, [1.0, 6.0], 1, [100, 600, 600], [1.0, 1 / 6, 1 / 6]),  # a new one has the largest priority there was
    ],
)
def test_draws_follow_priorities_and_weights_undo_them(
    alpha: float, errors: list[float], added: int, counts: list[int], weights: list[float]
) -> None:
    replay = replay_of(len(errors), capacity=4, alpha=alpha)
    replay.set_errors(np.arange(len(errors)), np.array(errors) - SMALLEST_ERROR)
    replay.add([transition(2)] * added)
    sample = replay.sample(sum(counts), beta=1.0)
    assert np.bincount(sample.slots).tolist() == pytest.approx(counts, abs=1)
    found = {int(slot): float(weight) for slot, weight in zip(sample.slots, sample.weights, strict=True)}
    assert found == pytest.approx(dict(enumerate(weights)))


def row_of(number: int) -> np.ndarray:
    return np.array([number], dtype=np.float32)


def one_step(env: int, i: int, reward: float, *, end: str = "", valid: bool = True) -> Steps:
    """Action i in one environment, which sees i and leads to i + 1."""
    terminated, truncated = np.array([end == "terminated"]), np.array([end == "truncated"])
    step = {"obs": row_of(i)[None], "actions": np.array([i]), "rewards": np.array([reward]), "valid": np.array([valid])}
    return stepped(
        np.array([env]), **step, next_obs=row_of(i + 1)[None], terminations=terminated, truncations=truncated
    )


def steps(nstep: NStep, *rewards: float, end: str = "", failed: tuple[int, ...] = (), env: int = 0) -> list[Transition]:
    """Take a step for each reward, action i seeing i and leading to i + 1; `end` is how the last one ended."""
    done: list[Transition] = []
    for i, reward in enumerate(rewards):
        last = i == len(rewards) - 1
        done += nstep.add(one_step(env, i, reward, end=end if last else "", valid=i not in failed))
    return done


def rounded(transitions: list[Transition]) -> list[tuple[int, float, int, float]]:
    return [(int(t.obs[0]), round(t.n_return, 6), int(t.next_obs[0]), round(t.discount, 6)) for t in transitions]


@pytest.mark.parametrize(
    ("n", "rewards", "more", "found"),
    [
        (2, [1.0, 2.0, 4.0], {}, [(0, 2.0, 2, 0.25), (1, 4.0, 3, 0.25)]),  # two are summed, the third is looked up
        (3, [1.0, 2.0], {"end": "terminated"}, [(0, 2.0, 2, 0.0), (1, 2.0, 2, 0.0)]),  # no future
        (3, [1.0, 2.0], {"end": "truncated"}, [(0, 2.0, 2, 0.25), (1, 2.0, 2, 0.5)]),  # it would have gone on
        (2, [1.0, 99.0, 2.0, 4.0], {"failed": (1,)}, [(0, 2.0, 3, 0.25), (2, 4.0, 4, 0.25)]),  # as if it had not been
        (3, [1.0, 99.0], {"end": "truncated", "failed": (1,)}, [(0, 1.0, 2, 0.5)]),
    ],
)
def test_returns_of_n_steps_by_hand(
    n: int, rewards: list[float], more: dict[str, Any], found: list[tuple[int, float, int, float]]
) -> None:
    transitions = steps(NStep(1, n, 0.5), *rewards, **more)
    assert rounded(transitions) == found
    assert [transition.action for transition in transitions] == [row[0] for row in found]


def test_episodes_and_environments_do_not_mix() -> None:
    nstep = NStep(1, 3, 0.5)
    steps(nstep, 1.0, end="terminated")
    assert rounded(steps(nstep, 5.0, 5.0, end="terminated")) == [(0, 7.5, 2, 0.0), (1, 5.0, 2, 0.0)]
    nstep = NStep(2, 2, 0.5)
    assert steps(nstep, 1.0, env=0) == steps(nstep, 7.0, env=1) == []
    assert rounded(nstep.add(one_step(0, 1, 2.0))) == [(0, 2.0, 2, 0.25)]


def test_steps_that_wait_are_in_its_state() -> None:
    first, second = NStep(1, 3, 0.5), NStep(1, 3, 0.5)
    steps(first, 1.0, 2.0)
    second.load_state_dict(first.state_dict())
    (whole,) = second.add(one_step(0, 2, 4.0))
    assert whole.n_return == pytest.approx(1.0 + 1.0 + 1.0)
