"""Other libraries' learners on the embedded default, at equal steps, with and without failing calls.

    python benchmarks/other_trainers.py                                      six learners, eight seeds, 0 and 20 %
    python benchmarks/other_trainers.py --learners ours,maskable --seeds 1 2 --json table.json

All PPOs have the trainer's hyperparameters: 16 environments x 32 steps, lr 2e-3 falling to 0, gamma 0.9, 4 epochs of 4
minibatches. Success and mean return are those of the greedy policy on the questions of validation fold 0, none of which
was trained on, over a server without failures. A failing call is never retried (`max_retries=0`): the step fails for
good. Ours masks it, the others get `on_failure="truncate"`. Calls are memoised, as in `benchmarks/learning.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.stats import t as student
from torch import nn

from benchmarks.learning import World, task_settings, train
from examples import cleanrl_ppo
from query_mutator.embedded.faults import FaultPlan
from query_mutator.encoder.documents import cache_dir
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import always, by_policy
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.files import write_json
from query_mutator.learners.learner import Acted, InferencePolicy
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.settings.models import ModelSettings
from query_mutator.training.config import TrainConfig, parse_config
from query_mutator.types import SUBMIT, ChatRequest, Completion
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv


class Failing:
    """Fails a share of the calls of a client, as the embedded server's FaultPlan draws them."""

    def __init__(self, client: Client, share: float, *, seed: int) -> None:
        self.client, self.plan = client, FaultPlan(share, seed=seed)

    def complete(self, request: ChatRequest) -> Completion:
        """Return a failure or the client's reply."""
        if self.plan.pick(f"{request.model} {request.messages}".encode()):
            return Completion.failed("server", "scripted fault")
        return self.client.complete(request)

    def close(self) -> None:
        """Leave the client open for the next training."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training: task, flags of our trainer, and environments whose calls may fail."""

    world: World
    task: Task
    config: TrainConfig
    client: Client

    def make_env(
        self, task: Task, *, on_failure: Any = "mask", client: Any = None, **settings: Any
    ) -> QueryMutationEnv:
        """Return an environment whose calls are not retried; its client is that of this training."""
        retry = RetryPolicy(max_retries=0)
        return QueryMutationEnv(task, client=self.client, retry_policy=retry, on_failure=on_failure, **settings)

    def vector_env(self, autoreset_mode: str = "SAME_STEP") -> BatchedQueryMutationEnv:
        """Return the environments of a learner that knows nothing of failed calls."""
        envs = [self.make_env(self.task, env_id=i, on_failure="truncate") for i in range(self.config.num_processes)]
        return BatchedQueryMutationEnv(envs, self.config.batch_size, autoreset_mode=autoreset_mode)


Learn = Callable[[Setup], InferencePolicy]


class Predict:
    """A policy for inference from a function of observations [n, D] to actions [n]."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self.predict = predict

    def act(self, obs: Any, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> Acted:
        """Return the actions."""
        return Acted(np.asarray(self.predict(obs), dtype=np.int64))


# --- learners --------------------------------------------------------------------------------------------------------


def learn_ours(setup: Setup) -> InferencePolicy:
    """Train our PPO, which masks actions and failed steps."""
    return train(setup.world.system, setup.task, setup.config, make_env=setup.make_env).policy


def _sb3_settings(config: TrainConfig) -> dict[str, Any]:
    return {
        "n_steps": config.num_steps,
        "batch_size": config.rollout_steps // config.num_mini_batch,
        "n_epochs": config.ppo_epoch,
        "learning_rate": lambda left: left * config.lr,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "clip_range": config.clip_param,
        "clip_range_vf": config.clip_param,
        "ent_coef": config.entropy_coef,
        "vf_coef": config.value_loss_coef / 2,  # of the whole squared error
        "seed": config.seed,
        "device": "cpu",
    }


def learn_sb3_ppo(setup: Setup) -> InferencePolicy:
    """Train Stable-Baselines3's PPO, which knows no mask."""
    from stable_baselines3 import PPO

    from query_mutator.adapters.sb3 import GymVecEnv

    envs = GymVecEnv(setup.vector_env())
    model = PPO("MlpPolicy", envs, **_sb3_settings(setup.config)).learn(setup.config.total_steps)
    envs.close()
    return Predict(lambda obs: model.predict(obs, deterministic=True)[0])


def learn_maskable_ppo(setup: Setup) -> InferencePolicy:
    """Train sb3-contrib's MaskablePPO; the mask is in the observation too."""
    from sb3_contrib import MaskablePPO

    from query_mutator.adapters.sb3 import GymVecEnv

    envs = GymVecEnv(setup.vector_env())
    model = MaskablePPO("MlpPolicy", envs, **_sb3_settings(setup.config)).learn(setup.config.total_steps)
    envs.close()
    closed = setup.task.observer.slices["closed"]
    return Predict(lambda obs: model.predict(obs, deterministic=True, action_masks=obs[:, closed] == 0)[0])


def learn_sb3_dqn(setup: Setup) -> InferencePolicy:
    """Train Stable-Baselines3's DQN, one gradient step for each step."""
    from stable_baselines3 import DQN

    from query_mutator.adapters.sb3 import GymVecEnv

    envs, config = GymVecEnv(setup.vector_env()), setup.config
    model = DQN(
        "MlpPolicy",
        envs,
        learning_rate=5e-4,
        buffer_size=config.total_steps,
        learning_starts=config.num_processes * 16,
        batch_size=64,
        gamma=config.gamma,
        train_freq=1,
        gradient_steps=-1,
        target_update_interval=256,
        exploration_fraction=0.5,
        seed=config.seed,
        device="cpu",
    ).learn(config.total_steps)
    envs.close()
    return Predict(lambda obs: model.predict(obs, deterministic=True)[0])


def learn_cleanrl(setup: Setup, *, bootstrap: bool = True) -> InferencePolicy:
    """Train the loop of examples/cleanrl_ppo.py."""
    config, envs = setup.config, setup.vector_env()
    args = cleanrl_ppo.Args(seed=config.seed, total_timesteps=config.total_steps, bootstrap=bootstrap)
    agent = cleanrl_ppo.train(envs, args)
    envs.close()
    return Predict(lambda obs: agent.actor(torch.as_tensor(obs)).argmax(-1))


def learn_torchrl(setup: Setup) -> InferencePolicy:
    """Train with torchrl's collector, GAE and clipped loss."""
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    config = setup.config
    torch.manual_seed(config.seed)
    env = GymWrapper(setup.vector_env("DISABLED"), categorical_action_encoding=True)
    env.set_seed(config.seed)
    nets = cleanrl_ppo.Agent(setup.task.observer.size, len(setup.task.actions))
    actor = ProbabilisticActor(
        TensorDictModule(nets.actor, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        spec=env.action_spec,
    )
    critic = ValueOperator(nets.critic, in_keys=["observation"])
    gae = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=config.clip_param,
        entropy_coeff=config.entropy_coef,
        critic_coeff=config.value_loss_coef / 2,
        loss_critic_type="l2",
        normalize_advantage=True,
        clip_value=True,
    )
    optimizer = torch.optim.Adam(nets.parameters(), lr=config.lr, eps=1e-5)
    collector = Collector(env, actor, frames_per_batch=config.rollout_steps, total_frames=config.total_steps)
    for update, data in enumerate(collector):
        optimizer.param_groups[0]["lr"] = config.lr * (1 - update / config.num_updates)
        with torch.no_grad():
            batch = gae(data).reshape(-1)
        for _ in range(config.ppo_epoch):
            for rows in torch.randperm(len(batch)).chunk(config.num_mini_batch):
                optimizer.zero_grad()
                losses = loss(batch[rows])
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(nets.parameters(), config.max_grad_norm)
                optimizer.step()
    collector.shutdown()
    return Predict(lambda obs: nets.actor(torch.as_tensor(obs)).argmax(-1))


LEARNERS: Mapping[str, Learn] = {
    "ours": learn_ours,
    "maskable": learn_maskable_ppo,
    "sb3-ppo": learn_sb3_ppo,
    "sb3-dqn": learn_sb3_dqn,
    "torchrl": learn_torchrl,
    "cleanrl": learn_cleanrl,
    "cleanrl-no-bootstrap": lambda setup: learn_cleanrl(setup, bootstrap=False),
}


# --- table -----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A training: success in percent and mean return on validation questions, seconds of the training."""

    success: float
    mean_return: float
    seconds: float


def summary(outcomes: Sequence[Outcome], task: Task, seconds: float = 0.0) -> Result:
    """Return the figures of a policy; an episode's return is final score - baseline score - prices."""
    price = task.rules.call_price[0]
    returns = [one.score - one.scores[0] - price * (one.calls - 1) for one in outcomes]
    success = 100 * float(np.mean([one.success for one in outcomes]))
    return Result(success, float(np.mean(returns)), seconds)


def run_one(world: World, name: str, seed: int, share: float, steps: int) -> Result:
    """Train one learner with one seed and score its greedy policy."""
    argv = f"--backend embedded --batch-size 8 --num-env-steps {steps} --validation-fold 0 --seed {seed}"
    config = parse_config(argv.split())
    settings = task_settings(config)
    task = world.task_of(settings)
    client = Failing(world.system.calls.client, share, seed=seed)
    started = time.perf_counter()
    policy = LEARNERS[name](Setup(world=world, task=task, config=config, client=client))
    seconds = time.perf_counter() - started
    return summary(world.validate(settings, by_policy(policy)), task, seconds)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over seeds (Student's t)."""
    half = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(np.mean(values) - half), float(np.mean(values) + half)


def row(name: str, share: float, results: Sequence[Result]) -> str:
    """Return a row of the Markdown table."""
    success, returns = ([result[column] for result in results] for column in (0, 1))
    (low, high), (low_return, high_return) = interval(success), interval(returns)
    return (
        f"| {name} | {share:.0%} | {np.mean(success):.1f} ({low:.1f} to {high:.1f}) "
        f"| {np.mean(returns):.3f} ({low_return:.3f} to {high_return:.3f}) "
        f"| {np.mean([result.seconds for result in results]):.1f} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each learner and share of failing calls as soon as it is there; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", default=",".join(LEARNERS), help="with commas")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1 + 1000 * index for index in range(8)])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.2], help="of failing calls")
    parser.add_argument("--steps", type=int, default=2048, help="of all environments together")
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "learning", help="folder of replies and embeddings")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Result]]] = {}
    world = World(ModelSettings(backend="embedded", encoder=arguments.encoder), arguments.store)
    print("| learner | failing calls | success, % | mean return | seconds |\n|---|---|---|---|---|", flush=True)
    with world.system:
        settings = task_settings(parse_config(["--backend", "embedded", "--validation-fold", "0"]))
        task = world.task_of(settings)
        identity = summary(world.validate(settings, always([task.actions.index(SUBMIT)])), task)
        print(f"| no rewrite | - | {identity.success:.1f} | {identity.mean_return:.3f} | - |", flush=True)
        for name in arguments.learners.split(","):
            for share in arguments.shares:
                results = [run_one(world, name, seed, share, arguments.steps) for seed in arguments.seeds]
                found.setdefault(name, {})[str(share)] = results
                print(row(name, share, results), flush=True)
    if arguments.json is not None:
        rows = {
            name: {share: [one._asdict() for one in many] for share, many in by.items()} for name, by in found.items()
        }
        write_json(arguments.json, {"steps": arguments.steps, "seeds": arguments.seeds, "results": rows})


if __name__ == "__main__":
    main()
