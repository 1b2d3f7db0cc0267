"""Check the environment under gymnasium, Stable-Baselines3 and torchrl, each in a fresh venv with the wheel.

python scripts/check_peers.py                    all peers: build the wheel, make a venv for each, check
python scripts/check_peers.py --here torchrl     check in this interpreter, as tests/integration/test_peers.py does
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ID = "rl_query_mutator_env:QueryMutation-v0"
MAKE: dict[str, Any] = {"backend": "recorded", "encoder": "hash", "operators": "none", "forms": "statement"}


def check_gymnasium() -> None:
    """Play under gymnasium's checker and wrappers, alone and in each autoreset mode of a vector environment."""
    import gymnasium as gym
    from gymnasium.utils.env_checker import check_env
    from gymnasium.wrappers import RecordEpisodeStatistics

    env = gym.make(ID, **MAKE)
    check_env(env.unwrapped)
    recorded = RecordEpisodeStatistics(env)
    _, info = recorded.reset(seed=1)
    while "episode" not in info:
        info = recorded.step(recorded.action_space.sample(info["action_mask"]))[4]
    assert abs(info["episode"]["r"] - info["episode_return"]) < 1e-5
    assert info["episode"]["l"] == info["episode_length"]
    env.close()
    for mode in (gym.vector.AutoresetMode.SAME_STEP, gym.vector.AutoresetMode.NEXT_STEP):
        _check_vector_wrappers(mode)
    _check_reset_mask()


def _check_vector_wrappers(mode: Any) -> None:
    import gymnasium as gym
    import numpy as np
    from gymnasium.wrappers import vector as wrappers

    envs = gym.make_vec(ID, num_envs=3, autoreset_mode=mode, **MAKE)
    recorded = wrappers.RecordEpisodeStatistics(wrappers.ClipReward(envs, min_reward=-2.0, max_reward=2.0))
    same_step = mode is gym.vector.AutoresetMode.SAME_STEP  # where gymnasium's observation wrappers refuse to work
    normalized = wrappers.NormalizeReward(recorded if same_step else wrappers.NormalizeObservation(recorded))
    wrapped = wrappers.DictInfoToList(normalized)
    wrapped.reset(seed=2)
    ours: list[tuple[float, int]] = []
    for _ in range(30):
        *_, terminations, truncations, infos = wrapped.step(wrapped.action_space.sample())
        for row in np.flatnonzero(terminations | truncations):
            final = infos[row].get("final_info", infos[row])
            ours.append((float(final["episode_return"]), int(final["episode_length"])))
    assert len(ours) > 10
    assert np.allclose([total for total, _ in ours], list(recorded.return_queue), atol=1e-5)
    assert [length for _, length in ours] == list(recorded.length_queue)
    assert len(envs.call("render")) == len(envs.get_attr("episode")) == 3
    wrapped.close()


def _check_reset_mask() -> None:
    import gymnasium as gym
    import numpy as np

    envs = gym.make_vec(ID, num_envs=3, autoreset_mode="Disabled", **MAKE)
    envs.reset(seed=3)
    for _ in range(12):
        *_, terminations, truncations, _ = envs.step(envs.action_space.sample())
        if (ended := np.logical_or(terminations, truncations)).any():
            envs.reset(options={"reset_mask": ended})
    envs.close()


def check_sb3() -> None:
    """Run Stable-Baselines3's checker, and a short training of PPO and of sb3-contrib's MaskablePPO."""
    import gymnasium as gym
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.utils import get_action_masks
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_checker import check_env
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecMonitor

    from query_mutator.adapters.sb3 import GymVecEnv

    env = gym.make(ID, **MAKE)
    check_env(env.unwrapped)
    envs = make_vec_env(ID, n_envs=2, seed=0, env_kwargs=MAKE)
    adapted = VecMonitor(GymVecEnv(gym.make_vec(ID, num_envs=2, **MAKE)))
    settings: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 0, "device": "cpu"}
    PPO("MlpPolicy", envs, **settings).learn(32)
    PPO("MlpPolicy", adapted, **settings).learn(32)
    adapted.close()
    model = MaskablePPO("MlpPolicy", envs, **settings).learn(32)
    obs = envs.reset()
    for _ in range(10):
        masks = get_action_masks(envs)
        actions, _ = model.predict(obs, action_masks=masks)
        assert masks[range(2), actions].all()
        obs, _, _, infos = envs.step(actions)
        assert all("score" in info for info in infos)
    envs.close()
    env.close()


def check_torchrl() -> None:
    """Run torchrl's specs check and rollouts with every info key, with masked actions, and in a vector environment."""
    import gymnasium as gym
    from torchrl.collectors import Collector
    from torchrl.envs import ActionMask, GymEnv, GymWrapper, TransformedEnv, check_env_specs

    # GymEnv keeps the keyword `backend` for itself, so the settings go with an id.
    gym.register("Recorded-v0", entry_point="rl_query_mutator_env:make_env", kwargs=MAKE)
    named = GymEnv("Recorded-v0", categorical_action_encoding=True)
    check_env_specs(named)
    for data in Collector(named, None, frames_per_batch=16, total_frames=32):
        ended = data["next", "done"].squeeze(-1)
        assert ended.any()
        assert data["next", "observation"].isfinite().all()
        assert (data["observation"][1:] == data["next", "observation"][:-1]).all(-1)[~ended[:-1]].all()
    env = GymWrapper(gym.make(ID, **MAKE), categorical_action_encoding=True).auto_register_info_dict()
    check_env_specs(env)
    rollout = TransformedEnv(env, ActionMask()).rollout(20, break_when_any_done=False)
    chosen = rollout["action_mask"].gather(1, rollout["action"].unsqueeze(1))
    assert bool(chosen.all())
    assert {"score", "valid", "success", "episode_return", "question"} <= set(rollout["next"].keys())
    env.close()
    for mode in ("SameStep", "Disabled"):
        envs = GymWrapper(gym.make_vec(ID, num_envs=3, autoreset_mode=mode, **MAKE))
        if mode == "Disabled":
            envs = envs.auto_register_info_dict()
        check_env_specs(envs)
        steps = envs.rollout(20, break_when_any_done=False)
        assert steps["next", "done"].any()
        assert steps["next", "score"].shape == (3, 20)
        envs.close()


#: Peer -> what pip installs in addition to the wheel, and its check.
PEERS: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "gymnasium": ((), check_gymnasium),
    "sb3": (("stable-baselines3", "sb3-contrib"), check_sb3),
    "torchrl": (("tensordict", "torchrl"), check_torchrl),
}


def check_fresh(peer: str, wheel: Path, folder: Path) -> None:
    """Make a venv with the wheel and the peer, and run the peer's check there, away from the checkout."""
    venv.create(folder / peer, with_pip=True)
    python = str(folder / peer / "bin" / "python")
    pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}[train]", *PEERS[peer][0]], check=True)
    check = [python, "-I", str(Path(__file__).resolve()), "--here", peer]
    subprocess.run(check, cwd=folder, check=True)
    print(f"{peer}: passed in a venv with {', '.join((wheel.name, *PEERS[peer][0]))}", flush=True)


def main(argv: list[str]) -> None:
    """Check `--here PEER` in this interpreter, or the named peers (default: all) in fresh venvs."""
    if argv[:1] == ["--here"]:
        for peer in argv[1:]:
            PEERS[peer][1]()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"  # a copy: building leaves folders behind
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs"))
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", name, str(source)]
        subprocess.run(build, check=True)
        (wheel,) = folder.glob("*.whl")
        for peer in argv or PEERS:
            check_fresh(peer, wheel, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
