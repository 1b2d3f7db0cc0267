"""Environment steps per second of `ppo` and of Stable-Baselines3's PPO, side by side, in one process on the CPU.

Both train on CartPole-v1 with the same networks (separate actor and critic, two tanh layers of 64), the same
hyper-parameters and as many plain single environments stepped one after the other: SB3 with `make_vec_env`
(DummyVecEnv) as its users run it, ours with gymnasium's SyncVectorEnv. Repeats alternate between the two, so that
whatever else the machine does meets both; figures are medians over repeats, the ratio is the median of each repeat's
own ratio. Needs `pip install stable-baselines3`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from cyclopts import Parameter, run

from ppo.__main__ import make_envs
from ppo.algorithm import PPO
from ppo.collect import RolloutCollector
from ppo.config import PPOConfig
from ppo.rollout import RolloutBuffer

Train = Callable[[int], None]  # trains for so many rollouts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one comparison."""

    num_envs: int
    num_steps: int
    epochs: int
    num_mini_batch: int


SETTINGS = {
    "trainer": Setting(num_envs=16, num_steps=32, epochs=4, num_mini_batch=4),  # train_query_mutator.py's defaults
    "cartpole": Setting(num_envs=8, num_steps=64, epochs=4, num_mini_batch=4),  # python -m ppo's defaults
    "sb3": Setting(num_envs=1, num_steps=2048, epochs=10, num_mini_batch=32),  # SB3's defaults: minibatches of 64
}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Compare the speed of `ppo` with that of Stable-Baselines3's PPO on CartPole-v1."""

    settings: tuple[Literal["trainer", "cartpole", "sb3"], ...] = ("trainer", "cartpole", "sb3")
    """Sizes to compare at."""
    threads: tuple[int, ...] = (1, 2)
    """Torch threads to compare with."""
    repeats: int = 5
    """Alternating repeats per row."""
    steps: int = 4096
    """Environment steps per repeat, rounded up to whole rollouts."""
    vector_entry_point: bool = False
    """Show a row with CartPole's own vector environment too (ours only: SB3 cannot use it)."""
    json: Path | None = None
    """File for the figures as JSON."""


def main(args: Annotated[Args, Parameter(name="*")] = Args()) -> None:
    """Parse, measure row by row, print the table, write the JSON."""
    rows = []
    for name in args.settings:
        for threads in args.threads:
            print(f"measuring {name}, {threads} thread(s) ...", file=sys.stderr)
            rows.append(compare(name, threads, args))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def compare(name: str, threads: int, args: Args) -> dict[str, Any]:
    """Return one row: medians of steps per second, and of the repeats' ratios."""
    torch.set_num_threads(threads)
    setting = SETTINGS[name]
    rollouts = -(-args.steps // (setting.num_envs * setting.num_steps))
    trainers = {"ppo": ours(setting, rollouts, "sync"), "sb3": sb3(setting)}
    if args.vector_entry_point:
        trainers["ppo_vector_entry_point"] = ours(setting, rollouts, "vector_entry_point")
    rates: dict[str, list[float]] = {who: [] for who in trainers}
    for train in trainers.values():
        train(1)
    for _ in range(args.repeats):
        for who, train in trainers.items():
            started = time.perf_counter()
            train(rollouts)
            taken_s = time.perf_counter() - started
            rates[who].append(rollouts * setting.num_envs * setting.num_steps / taken_s)
    ratios = [mine / theirs for mine, theirs in zip(rates["ppo"], rates["sb3"], strict=True)]
    return {
        "setting": name,
        **asdict(setting),
        "threads": threads,
        **{f"{who}_steps_per_s": round(statistics.median(values), 1) for who, values in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_lowest": round(min(ratios), 3),
    }


def ours(setting: Setting, rollouts: int, kind: str) -> Train:
    """Return a function that trains our PPO; SB3's value loss is the whole squared error, so its weight is twice."""
    config = PPOConfig(
        num_env_steps=rollouts * setting.num_envs * setting.num_steps,
        num_processes=setting.num_envs,
        num_steps=setting.num_steps,
        ppo_epoch=setting.epochs,
        num_mini_batch=setting.num_mini_batch,
        lr=3e-4,
        use_linear_lr_decay=False,
        clip_vloss=False,
        entropy_coef=0.0,
        value_loss_coef=1.0,
    )
    envs = make_envs("CartPole-v1", setting.num_envs) if kind == "sync" else own_vector_env(setting.num_envs)
    ppo = PPO(4, 2, config)
    collector = RolloutCollector(envs, seed=config.seed)
    buffer = RolloutBuffer(setting.num_steps, setting.num_envs, 4)

    def train(rollouts: int) -> None:
        for _ in range(rollouts):
            collector.collect(ppo, buffer)
            ppo.update(buffer, collector.obs)
            buffer.reset()

    return train


def own_vector_env(num_envs: int) -> Any:
    """Return CartPole's vectorised implementation."""
    import gymnasium as gym

    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point")


def sb3(setting: Setting) -> Train:
    """Return a function that trains Stable-Baselines3's PPO."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    rollout_steps = setting.num_envs * setting.num_steps
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=setting.num_envs, seed=1),
        n_steps=setting.num_steps,
        batch_size=rollout_steps // setting.num_mini_batch,
        n_epochs=setting.epochs,
        learning_rate=3e-4,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        device="cpu",
        seed=1,
    )

    def train(rollouts: int) -> None:
        model.learn(rollouts * rollout_steps, reset_num_timesteps=False)

    return train


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    import gymnasium
    import stable_baselines3

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
        "stable_baselines3": stable_baselines3.__version__,
    }


if __name__ == "__main__":
    run(main)
