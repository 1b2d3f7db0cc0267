"""Train IQN on a gymnasium environment, evaluate it, and print what came of it: `python -m query_mutator.iqn`.

N envs, D obs
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from tyro.conf import arg

from ppo.__main__ import EVAL_SEED_OFFSET, make_envs
from query_mutator.cli.console import note, progress
from query_mutator.cli.flags import parse_flags
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.iqn.config import IQNConfig

if TYPE_CHECKING:
    from query_mutator.iqn.learner import IQN

PROG = "python -m query_mutator.iqn"


@dataclass(frozen=True, kw_only=True)
class Args(IQNConfig):
    """Train IQN on any gymnasium environment with discrete actions; the defaults solve CartPole-v1."""

    env: Annotated[str, arg(aliases=["--env-id", "--env-name"])] = "CartPole-v1"
    """Environment, as gymnasium registers it."""
    total_steps: Annotated[int, arg(aliases=["--num-env-steps", "--total-timesteps"])] = 40_000
    """Environment steps to train for; schedules end there."""
    train_batch_size: int = 64
    """Transitions in one gradient step."""
    replay_ratio: float = 32.0
    """Times a transition is learned from on average."""
    learning_starts: int = 1000
    """Transitions to gather before the first gradient step."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 2e-3
    """Adam's step size at the start."""
    sync_every: int = 4
    """Gradient steps between two hand-overs of weights to those that act."""
    per_alpha: float = 0.0
    """How strongly replay prefers transitions with large errors; 0 draws evenly."""
    epsilon_fraction: float = 0.2
    """Share of the run over which random actions become rare."""
    torch_threads: int = 1
    """Threads torch computes with; networks this small are fastest with one."""
    eval_episodes: int = 100
    """Episodes the trained policy is evaluated on, greedily."""
    save: str | None = None
    """Checkpoint to write after training."""
    json: str | None = None
    """File for the result as JSON."""


def main(argv: Sequence[str]) -> int:
    """Parse, build, train, evaluate, report; return the exit code."""
    run(parse_flags(Args, argv, prog=PROG))
    return 0


def run(args: Args) -> dict[str, Any]:
    """Train and evaluate as `args` say; return and print the result."""
    import torch

    from ppo.checkpoint import save_checkpoint
    from query_mutator.iqn.learner import IQN

    torch.set_num_threads(args.torch_threads)
    envs = _envs(args.env, args.num_processes)
    learner = IQN(envs.single_observation_space.shape[0], int(envs.single_action_space.n), args)
    began = time.perf_counter()
    train(learner, envs, args)
    train_s = time.perf_counter() - began
    if args.save:
        with disk_errors(args.save):
            note(f"saved {save_checkpoint(args.save, learner.state_dict())}")
    return report(args, learner, evaluate(learner, args), train_s=train_s)


def _envs(env: str, num_envs: int) -> Any:
    try:
        return make_envs(env, num_envs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def train(learner: IQN, envs: Any, args: Args) -> None:
    """Step all environments side by side and learn after each step what the replay ratio asks for."""
    from query_mutator.env.steps import Steps

    env_ids = np.arange(args.num_processes)
    obs = np.array(envs.reset(seed=args.seed)[0], dtype=np.float32)  # [N, D]
    with progress("training", args.total_steps, unit="step") as bar:
        while learner.env_steps < args.total_steps:
            versions = np.full(args.num_processes, learner.version)
            actions = learner.act(obs, env_ids.tolist())
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            next_obs = np.array(next_obs, dtype=np.float32)
            last = next_obs.copy()
            for env in np.flatnonzero(terminations | truncations):
                last[env] = infos["final_obs"][env]
            valid = np.ones(args.num_processes, dtype=np.bool_)
            learner.observe(Steps(env_ids, obs, actions, rewards, last, terminations, truncations, valid, versions))
            obs = next_obs
            while learner.pending_updates:
                learner.learn()
            bar.update(args.num_processes)
    learner.sync_weights()


def evaluate(learner: IQN, args: Args) -> list[float]:
    """Return the greedy policy's returns in `eval_episodes` episodes of fresh environments."""
    from ppo.collect import first_episode_returns

    envs = _envs(args.env, args.eval_episodes)
    returns = first_episode_returns(learner.frozen, envs, seed=args.seed + EVAL_SEED_OFFSET)
    return [float(episode_return) for episode_return in returns]


def report(args: Args, learner: IQN, returns: list[float], *, train_s: float) -> dict[str, Any]:
    """Print the result, write it if asked to, and return it."""
    result = {
        "env": args.env,
        "seed": args.seed,
        "env_steps": learner.env_steps,
        "gradient_steps": learner.gradient_steps,
        "eval_episodes": len(returns),
        "mean_return": sum(returns) / len(returns),
        "min_return": min(returns),
        "train_s": round(train_s, 2),
    }
    print(
        f"{args.env} seed {args.seed}: mean return {result['mean_return']:.1f} (lowest {result['min_return']:.1f}) "
        f"over {len(returns)} episodes after {learner.env_steps} steps, {learner.gradient_steps} gradient steps "
        f"in {train_s:.1f} s"
    )
    if args.json:
        with disk_errors(args.json):
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
