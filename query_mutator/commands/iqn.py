"""Train IQN on a gymnasium environment, evaluate it and print the result: `python -m query_mutator.learners.iqn`.

N envs, D obs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from ppo.__main__ import evaluate, make_envs, report
from query_mutator.bounds import Million, Threads, defaults
from query_mutator.cli.console import note, progress
from query_mutator.cli.flags import parse_flags
from query_mutator.cli.outputs import JsonFlags, Output, holding, write_report
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors, encode
from query_mutator.learners.learner import Steps
from query_mutator.settings.learner import IQNConfig

if TYPE_CHECKING:
    from query_mutator.learners.iqn.learner import IQN

PROG = "python -m query_mutator.learners.iqn"


@dataclass(frozen=True, kw_only=True)
@defaults(
    num_env_steps=40_000, train_batch_size=64, replay_ratio=32.0, learning_starts=1000, lr=2e-3, sync_every=4,
    per_alpha=0.0, epsilon_fraction=0.2,
)  # fmt: skip
class Args(IQNConfig, JsonFlags):
    """Train IQN on any gymnasium environment with discrete actions; the defaults solve CartPole-v1."""

    env: Annotated[str, Parameter(alias=("--env-id", "--env-name"))] = "CartPole-v1"
    """Environment, as gymnasium registers it."""
    torch_threads: Threads = 1
    """Threads of torch; networks this small are fastest with one."""
    eval_episodes: Million = 100
    """Episodes in which the trained policy is evaluated, greedily."""
    save: Annotated[str | None, Parameter(alias="--out"), Output(holding(b"/data.pkl"))] = None
    """Checkpoint to write after training."""


def main(argv: Sequence[str]) -> int:
    """Parse, build, train, evaluate, report; return the exit code."""
    run(parse_flags(Args, argv, prog=PROG))
    return 0


def run(args: Args) -> dict[str, Any]:
    """Train and evaluate; print and return the result."""
    import torch

    from ppo.checkpoint import save_checkpoint
    from query_mutator.learners.iqn.learner import IQN

    torch.set_num_threads(args.torch_threads)
    try:
        envs = make_envs(args.env, args.num_processes)
        learner = IQN(envs.single_observation_space.shape[0], int(envs.single_action_space.n), args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    began = time.perf_counter()
    train(learner, envs, args)
    train_s = time.perf_counter() - began
    if args.save:
        with disk_errors(args.save):
            note(f"saved {save_checkpoint(args.save, learner.state_dict())}")
    returns, steps = evaluate(learner.frozen, args), learner.env_steps
    result = report(args, returns, env_steps=steps, gradient_steps=learner.gradient_steps, train_s=train_s)
    if args.json == "-":
        print(encode(result).decode())
    elif args.json:
        write_report(args.json, result)
    return result


def train(learner: IQN, envs: Any, args: Args) -> None:
    """Step all environments, and after each step make the gradient steps that the replay ratio asks for."""
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
            ends = terminations, truncations
            learner.observe(Steps(env_ids, obs, actions, rewards, last, *ends, valid, versions, np.zeros_like(env_ids)))
            obs = next_obs
            while learner.pending_updates:
                learner.learn()
            bar.update(args.num_processes)
    learner.sync_weights()
