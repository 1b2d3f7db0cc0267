"""A saved policy acts with numpy as its learner does with torch, and does not load it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo.config import PPOConfig
from ppo.policy import Policy
from query_mutator.learners import LEARNERS
from query_mutator.learners.direct import BoostedTrees, Boosting, values_of
from query_mutator.learners.iqn.learner import QuantileNetwork
from query_mutator.settings import IQNConfig

OBS_DIM, NUM_ACTIONS, MASK = 9, 4, slice(5, 9)
FLAGS = {"num_eval_quantiles": IQNConfig.num_eval_quantiles, "deterministic": PPOConfig.deterministic}
WITHOUT = """
import sys
import numpy as np
sys.modules |= {"torch": None}  # importing it raises
from query_mutator.learners import LEARNERS
with np.load(sys.argv[2]) as weights:
    policy = LEARNERS.get(sys.argv[1]).load_policy(weights, {"num_eval_quantiles": 32, "deterministic": False})
obs = np.load(sys.argv[3])
print(*policy.act(obs, (), greedy=True).actions.tolist())
"""
Choose = Callable[[np.ndarray], np.ndarray]


def observations() -> np.ndarray:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(200, OBS_DIM)).astype(np.float32)
    obs[:, MASK] = rng.random((200, NUM_ACTIONS)) < 0.3
    obs[:, MASK.stop - 1] = 0  # one action is always allowed
    return obs


def ppo() -> tuple[Mapping[str, Any], Choose]:
    policy = Policy(OBS_DIM, NUM_ACTIONS, seed=1, mask_columns=MASK)
    with torch.no_grad():
        policy.actor_head.weight.mul_(100)  # as one that has learned
    return policy.state_dict(), lambda obs: policy(torch.from_numpy(obs))[0].argmax(1).numpy()


def iqn() -> tuple[Mapping[str, Any], Choose]:
    network = QuantileNetwork(OBS_DIM, NUM_ACTIONS, seed=1, mask_columns=MASK)
    with torch.no_grad():
        weight = network.advantage_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        weight -= weight.mean(1, keepdim=True)
    count = FLAGS["num_eval_quantiles"]

    def choose(obs: np.ndarray) -> np.ndarray:
        rows, taus = torch.from_numpy(obs), (torch.arange(count) + 0.5) / count
        return (network(rows, taus).mean(1) - network.mask(rows)).argmax(1).numpy()

    return network.state_dict(), choose


def direct() -> tuple[Mapping[str, Any], Choose]:
    rng, masked = np.random.default_rng(2), np.arange(OBS_DIM)[MASK]
    rows = rng.normal(size=(600, OBS_DIM + NUM_ACTIONS))
    targets = rows[:, 0] * rows[:, OBS_DIM] + rows[:, OBS_DIM + 1]
    model = BoostedTrees.fit(rows, targets, how=Boosting(trees=60, learning_rate=0.2), seed=0)
    arrays = {f"0/{name}": array for name, array in model.to_arrays().items()}
    state = {"masked": masked, "obs_dim": np.array(OBS_DIM), **arrays}
    return state, lambda obs: values_of(model.predict, obs, masked).argmax(axis=1)


@pytest.mark.parametrize("made", [ppo, iqn, direct])
def test_a_saved_policy_takes_the_actions_of_its_learner_without_torch(
    made: Callable[[], tuple[Mapping[str, Any], Choose]], tmp_path: Path
) -> None:
    state, choose = made()
    obs, name = observations(), made.__name__
    with torch.no_grad():
        wanted = choose(obs).tolist()
    assert len(set(wanted)) == NUM_ACTIONS
    assert LEARNERS.get(name).load_policy(state, FLAGS).act(obs, (), greedy=True).actions.tolist() == wanted
    np.savez(tmp_path / "weights.npz", **{key: np.asarray(array) for key, array in state.items()})
    np.save(tmp_path / "obs.npy", obs)
    command = [sys.executable, "-c", WITHOUT, name, str(tmp_path / "weights.npz"), str(tmp_path / "obs.npy")]
    acted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [int(action) for action in acted.split()] == wanted
