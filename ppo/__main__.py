"""Train PPO on a gymnasium environment, evaluate it and print the result: `python -m ppo --env CartPole-v1`."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from ppo.config import PPOConfig
from ppo.fields import DEFAULTS, Ge, Le, defaults, docs_of, function_of, whole_numbers

if TYPE_CHECKING:
    from ppo.algorithm import PPO

logger = logging.getLogger("ppo")

# Far from the seeds of the training environments (seed + i).
EVAL_SEED_OFFSET = 1_000_000


@dataclass(frozen=True, kw_only=True)
@defaults(num_env_steps=200_000, num_processes=8, num_steps=64, gamma=0.98, clip_vloss=False, lr=1e-3)
class Args(PPOConfig):
    """Train PPO on any gymnasium environment with discrete actions; the defaults solve CartPole-v1.

    Value clipping is off by default, because returns in the hundreds, such as CartPole's, change a lot.
    """

    env: Annotated[str, Parameter(alias=("--env-id", "--env-name"))] = "CartPole-v1"
    """Id of a registered gymnasium environment."""
    torch_threads: Annotated[int, Ge(1), Le(1024)] = 1
    """Torch threads; small networks are fastest with one."""
    eval_episodes: Annotated[int, Ge(1), Le(10**6)] = 100
    """Episodes to evaluate the trained greedy policy."""
    save: Annotated[Path | None, Parameter(alias="--out")] = None
    """Checkpoint to write after training."""
    resume: Path | None = None
    """Checkpoint to resume from; environments start new episodes."""
    json: str | None = None
    """Write the result as JSON to this file; - prints it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, path, start in (
            ("--save", self.save, b"PK.{28}[^/]*/data.pkl"),
            ("--json", self.json, b'{\n  "env":'),
        ):
            file = Path(path or "-")
            if (
                str(file) != "-"
                and file.exists()
                and not (file.is_file() and re.match(start, file.read_bytes(), re.DOTALL))
            ):
                raise ValueError(f"{flag} {path} exists and was not written by this command; choose another file")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, build, train, evaluate, report; invalid input prints one line and exits with code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run(parse(argv))
    except (ValueError, ModuleNotFoundError) as error:
        says = str(error)
        if isinstance(error, ModuleNotFoundError):
            says = f'this needs {error.name}: pip install "query-mutator[train]"'
        print(f"python -m ppo: {says}", file=sys.stderr)
        sys.exit(2)


def parse(argv: Sequence[str] | None = None) -> Args:
    """Return the flags of a command line; ValueError of one line for invalid ones."""
    app = App(
        "python -m ppo",
        help=Args.__doc__,
        help_format="plaintext",
        version=version("query-mutator"),
        config=whole_numbers,
        default_parameter=DEFAULTS,
    )
    app.default(function_of(Args, {name: {"help": text} for name, (text, _) in docs_of(Args).items()}))
    try:
        given = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ValueError(str(error)) from None
    if given is None:  # of --help or --version
        raise SystemExit(0)
    return Args(**given)


def run(args: Args) -> dict[str, Any]:
    """Train and evaluate; print and return the result."""
    import torch

    from ppo.algorithm import PPO
    from ppo.checkpoint import load_checkpoint, save_checkpoint
    from ppo.collect import NotFiniteError, first_episode_returns

    torch.set_num_threads(args.torch_threads)
    envs = make_envs(args.env, args.num_processes)
    ppo = PPO(envs.single_observation_space.shape[0], int(envs.single_action_space.n), args)
    if args.resume:
        ppo.load_state_dict(load_checkpoint(args.resume))
    started, updates = time.perf_counter(), ppo.updates_done
    try:
        train(ppo, envs, args)
    except NotFiniteError as error:
        if args.save is None or ppo.updates_done == updates:
            raise
        save_checkpoint(args.save, ppo.state_dict())
        steps = ppo.updates_done * args.rollout_steps
        raise ValueError(f"{error}; {args.save} has the policy after {steps} steps, for --resume") from None
    train_s = time.perf_counter() - started
    if args.save:
        logger.info("saved %s", save_checkpoint(args.save, ppo.state_dict()))
    fresh = make_envs(args.env, args.eval_episodes)
    returns = first_episode_returns(ppo.frozen, fresh, seed=args.seed + EVAL_SEED_OFFSET).tolist()
    result = {
        "env": args.env,
        "seed": args.seed,
        "env_steps": args.total_steps,
        "eval_episodes": len(returns),
        "mean_return": sum(returns) / len(returns),
        "min_return": min(returns),
        "train_s": round(train_s, 2),
    }
    told = "{env} seed {seed}: mean return {mean_return:.1f} (lowest {min_return:.1f}) over {eval_episodes} episodes"
    print(f"{told.format_map(result)} after {args.total_steps} steps in {train_s:.1f} s")
    if args.json == "-":
        print(json.dumps(result))
    elif args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def make_envs(env: str, num_envs: int) -> Any:
    """Return `num_envs` copies of `env` as one vector environment with flat observations; ValueError if it fails.

    With SAME_STEP the last step of an episode returns the first observation of the next, so no step is wasted.
    """
    import gymnasium as gym
    from gymnasium.spaces import Box, Discrete

    try:
        probe = gym.make(env)
    except (gym.error.Error, ImportError, ValueError) as error:
        raise ValueError(f"cannot make the environment {env!r}: {error}") from error
    observations, actions = probe.observation_space, probe.action_space
    probe.close()
    if not isinstance(actions, Discrete) or actions.start:
        raise ValueError(f"{env} has the action space {actions}; needed are Discrete actions that start at 0")
    flat = isinstance(observations, Box) and len(observations.shape) == 1
    return gym.make_vec(
        env,
        num_envs=num_envs,
        vectorization_mode="sync",
        wrappers=() if flat else (gym.wrappers.FlattenObservation,),
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )


def train(ppo: PPO, envs: Any, args: Args) -> None:
    """Collect and update for all steps of the run, with a progress bar."""
    from tqdm import tqdm

    from ppo.collect import RolloutCollector
    from ppo.rollout import RolloutBuffer

    if args.total_steps != args.num_env_steps:
        logger.info("%d steps are rounded up to %d, a whole number of rollouts", args.num_env_steps, args.total_steps)
    collector = RolloutCollector(envs, seed=args.seed)
    buffer = RolloutBuffer(args.num_steps, args.num_processes, envs.single_observation_space.shape[0])
    returns: list[float] = []
    with tqdm(total=args.total_steps, unit="step", initial=ppo.updates_done * args.rollout_steps) as bar:
        while ppo.updates_done < args.num_updates:
            returns = (returns + collector.collect(ppo, buffer))[-100:]
            stats = ppo.update(buffer, collector.obs)
            buffer.reset()
            bar.update(args.rollout_steps)
            mean = sum(returns) / max(len(returns), 1)
            bar.set_postfix_str(f"return {mean:.1f}, entropy {stats['losses/entropy']:.2f}", refresh=False)


if __name__ == "__main__":
    main()
