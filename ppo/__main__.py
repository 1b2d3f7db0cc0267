"""Train PPO on a gymnasium environment, evaluate it, and print what came of it: `python -m ppo --env CartPole-v1`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ppo.config import PPOConfig

if TYPE_CHECKING:
    from ppo.algorithm import PPO

logger = logging.getLogger("ppo")

# Far from the seeds a training run gives its environments (seed + i).
EVAL_SEED_OFFSET = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Args(PPOConfig):
    """Train PPO on any gymnasium environment with discrete actions; the defaults solve CartPole-v1."""

    env: Annotated[str, tyro.conf.arg(aliases=["--env-id", "--env-name"])] = "CartPole-v1"
    """Environment, as gymnasium registers it."""
    num_env_steps: Annotated[int, tyro.conf.arg(aliases=["--total-timesteps"])] = 200_000
    """Environment steps to train for; rounded up to whole rollouts."""
    num_processes: Annotated[int, tyro.conf.arg(aliases=["--num-envs"])] = 8
    """Environments stepped side by side."""
    num_steps: int = 64
    """Steps each environment takes between two updates."""
    gamma: float = 0.98
    """Discount of a reward one step later."""
    clip_vloss: bool = False
    """Clip the value's change as well; returns in the hundreds, as CartPole's, need room to move."""
    lr: Annotated[float, tyro.conf.arg(aliases=["--learning-rate"])] = 1e-3
    """Adam's step size at the start."""
    torch_threads: int = 1
    """Threads torch computes with; networks this small are fastest with one."""
    eval_episodes: int = 100
    """Episodes the trained policy is evaluated on, greedily."""
    save: Path | None = None
    """Checkpoint to write after training."""
    resume: Path | None = None
    """Checkpoint to go on from; environments begin new episodes."""
    json: Path | None = None
    """File for the result as JSON."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, build, train, evaluate, report; a mistake is one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run(parse(argv))
    except ValueError as error:
        print(f"python -m ppo: {error}", file=sys.stderr)
        sys.exit(2)


def parse(argv: Sequence[str] | None = None) -> Args:
    """Return the flags of a command line; one that cannot be used is a ValueError of one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Args, args=argv, prog="python -m ppo", description=Args.__doc__)
    except SystemExit:
        if not box.getvalue():  # --help, which goes to stdout
            raise
    _title, *lines, _border = box.getvalue().splitlines()
    stripped = (line.strip("│─ ") for line in lines)
    raise ValueError(" ".join(line or ";" for line in stripped).replace(" ;", ";"))


def run(args: Args) -> dict[str, Any]:
    """Train and evaluate as `args` say; return and print the result."""
    import torch

    from ppo.algorithm import PPO
    from ppo.checkpoint import load_checkpoint, save_checkpoint

    torch.set_num_threads(args.torch_threads)
    envs = make_envs(args.env, args.num_processes)
    ppo = PPO(envs.single_observation_space.shape[0], int(envs.single_action_space.n), args)
    if args.resume:
        ppo.load_state_dict(load_checkpoint(args.resume))
    started = time.perf_counter()
    train(ppo, envs, args)
    train_s = time.perf_counter() - started
    if args.save:
        logger.info("saved %s", save_checkpoint(args.save, ppo.state_dict()))
    return report(args, evaluate(ppo, args), train_s=train_s)


def make_envs(env: str, num_envs: int) -> Any:
    """Return `num_envs` copies of `env` as one vector environment with flat observations; ValueError if it cannot be.

    A copy's last step already carries the next episode's first observation (SAME_STEP), so that none is wasted.
    """
    import gymnasium as gym
    from gymnasium.spaces import Box, Discrete

    try:
        probe = gym.make(env)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"cannot make the environment {env!r}: {error}") from error
    observations, actions = probe.observation_space, probe.action_space
    probe.close()
    if not isinstance(actions, Discrete) or actions.start:
        raise ValueError(f"{env} has the action space {actions}; needed are Discrete actions counted from 0")
    flat = isinstance(observations, Box) and len(observations.shape) == 1
    return gym.make_vec(
        env,
        num_envs=num_envs,
        vectorization_mode="sync",
        wrappers=() if flat else (gym.wrappers.FlattenObservation,),
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )


def train(ppo: PPO, envs: Any, args: Args) -> None:
    """Collect and update until the run's steps are done, with a progress bar."""
    from tqdm import tqdm

    from ppo.collect import RolloutCollector
    from ppo.rollout import RolloutBuffer

    if args.total_steps != args.num_env_steps:
        logger.info("%d steps are rounded up to %d, whole rollouts", args.num_env_steps, args.total_steps)
    collector = RolloutCollector(envs, seed=args.seed)
    buffer = RolloutBuffer(args.num_steps, args.num_processes, envs.single_observation_space.shape[0])
    returns: list[float] = []
    with tqdm(total=args.total_steps, unit="step", initial=ppo.updates_done * args.rollout_steps) as bar:
        while ppo.updates_done < args.num_updates:
            episodes = collector.collect(ppo, buffer)
            stats = ppo.update(buffer, collector.obs)
            buffer.reset()
            returns = (returns + [episode.episode_return for episode in episodes])[-100:]
            bar.update(args.rollout_steps)
            mean = sum(returns) / max(len(returns), 1)
            bar.set_postfix_str(f"return {mean:.1f}, entropy {stats['losses/entropy']:.2f}", refresh=False)


def evaluate(ppo: PPO, args: Args) -> list[float]:
    """Return the greedy policy's returns in `eval_episodes` episodes of fresh environments."""
    from ppo.collect import first_episode_returns

    envs = make_envs(args.env, args.eval_episodes)
    returns = first_episode_returns(ppo.frozen, envs, seed=args.seed + EVAL_SEED_OFFSET)
    return [float(episode_return) for episode_return in returns]


def report(args: Args, returns: list[float], *, train_s: float) -> dict[str, Any]:
    """Print the result, write it if asked to, and return it."""
    result = {
        "env": args.env,
        "seed": args.seed,
        "env_steps": args.total_steps,
        "eval_episodes": len(returns),
        "mean_return": sum(returns) / len(returns),
        "min_return": min(returns),
        "train_s": round(train_s, 2),
    }
    print(
        f"{args.env} seed {args.seed}: mean return {result['mean_return']:.1f} (lowest {result['min_return']:.1f}) "
        f"over {len(returns)} episodes after {args.total_steps} steps in {train_s:.1f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
