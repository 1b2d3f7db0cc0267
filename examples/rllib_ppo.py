"""RLlib's PPO on the environment of Query Mutator, by `tune.register_env`.

    pip install ray dm-tree lz4 ormsgpack tensorboardX
    python examples/rllib_ppo.py --iterations 8

The extra `ray[rllib]` asks for gymnasium 1.2.2; RLlib 2.60 works with the newer one that this package needs. RLlib
bootstraps from the last observation of a truncated episode, so `on_failure="truncate"` suits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import ray
from cyclopts import Parameter, run
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig

from rl_query_mutator_env import make_env


@dataclass(frozen=True, kw_only=True)
class Args:
    """Settings of a short training."""

    backend: str = "recorded"
    encoder: str = "hash"
    forms: str = "question_answer,statement"
    iterations: int = 8
    batch_size: int = 256
    """Environment steps of an iteration."""
    num_envs: int = 8
    seed: int = 1


def main(args: Annotated[Args, Parameter(name="*")] = Args()) -> None:
    """Parse, register the environment, train, print the mean return of each iteration."""
    tune.register_env("query-mutation", lambda settings: make_env(**settings))
    config = (
        PPOConfig()
        .environment(
            "query-mutation", env_config={"backend": args.backend, "encoder": args.encoder, "forms": args.forms}
        )
        .env_runners(num_env_runners=0, num_envs_per_env_runner=args.num_envs)
        .training(
            train_batch_size=args.batch_size, minibatch_size=args.batch_size // 4, num_epochs=4, gamma=0.9, lr=2e-3
        )
        .debugging(seed=args.seed)
    )
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    algorithm = config.build_algo()
    for iteration in range(args.iterations):
        found = algorithm.train()["env_runners"]
        steps = (iteration + 1) * args.batch_size
        print(f"{steps} steps, mean return {found['episode_return_mean']:.3f}", flush=True)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    run(main)
