"""PPO in one file, in the manner of CleanRL's ppo.py, on the environment of Query Mutator.

    python examples/cleanrl_ppo.py --total-timesteps 4096

Where CleanRL's loop treats every end of an episode as terminal, this one bootstraps from the last observation of a
truncated episode (`--no-bootstrap`: as CleanRL). An episode is truncated where a call failed for good; without the
bootstrap use `--on-failure raise`, or a failed call looks like a state without a future.

T steps, N environments
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import torch
from cyclopts import Parameter, run
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical


@dataclass(frozen=True, kw_only=True)
class Args:
    """Settings under CleanRL's names."""

    backend: str = "recorded"
    encoder: str = "hash"
    forms: str = "question_answer,statement"
    on_failure: Literal["truncate", "raise"] = "truncate"
    seed: int = 1
    total_timesteps: int = 10_000
    learning_rate: float = 2e-3
    num_envs: int = 16
    num_steps: int = 32
    anneal_lr: bool = True
    gamma: float = 0.9
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    bootstrap: bool = True
    """Add the discounted value of the last observation to the reward of a truncated step."""


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Return a linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.constant_(linear.bias, 0.0)
    return linear


class Agent(nn.Module):
    """Actor and critic, two tanh layers of 64 each."""

    def __init__(self, obs_dim: int, num_actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(
            layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, num_actions, 0.01)
        )

    def value(self, obs: Tensor) -> Tensor:
        """Return values [n]."""
        values: Tensor = self.critic(obs).squeeze(-1)
        return values

    def act(self, obs: Tensor, actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return actions, log-probabilities, entropies and values [n]; draw the actions unless they are given."""
        probs: Any = Categorical(logits=self.actor(obs))
        actions = probs.sample() if actions is None else actions
        return actions, probs.log_prob(actions), probs.entropy(), self.value(obs)


Envs = VectorEnv[Any, Any, Any]
Rollout = dict[str, Tensor]


def train(envs: Envs, args: Args, log: Any = lambda line: None) -> Agent:
    """Train on environments whose autoreset mode is SAME_STEP."""
    torch.manual_seed(args.seed)
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))  # type: ignore[index,attr-defined]
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    num_updates = max(1, args.total_timesteps // (args.num_steps * args.num_envs))
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0])
    started = time.perf_counter()
    for update in range(num_updates):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - update / num_updates) * args.learning_rate
        rollout, obs = collect(envs, agent, obs, args)
        learn(agent, optimizer, rollout, args)
        steps = (update + 1) * args.num_steps * args.num_envs
        returns = list(getattr(envs, "return_queue", ()))
        log(f"{steps} steps, mean return {np.mean(returns or [np.nan]):.3f}, {time.perf_counter() - started:.0f} s")
    return agent


@torch.no_grad()
def collect(envs: Envs, agent: Agent, obs: Tensor, args: Args) -> tuple[Rollout, Tensor]:
    """Return a rollout of arrays [T, N] with advantages and returns, and the next observations."""
    rows: dict[str, list[Tensor]] = {name: [] for name in ("obs", "actions", "logprobs", "values", "rewards", "dones")}
    for _ in range(args.num_steps):
        actions, logprobs, _, values = agent.act(obs)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions.numpy())
        if args.bootstrap and truncations.any():
            last = torch.as_tensor(np.stack(infos["final_obs"][truncations]))
            rewards[truncations] += args.gamma * agent.value(last).numpy()
        dones = torch.as_tensor(terminations | truncations).float()
        step = (obs, actions, logprobs, values, torch.as_tensor(rewards).float(), dones)
        for name, row in zip(rows, step, strict=True):
            rows[name].append(row)
        obs = torch.as_tensor(next_obs)
    rollout = {name: torch.stack(row) for name, row in rows.items()}
    advantages, next_value, advantage = torch.zeros_like(rollout["rewards"]), agent.value(obs), torch.zeros(len(obs))
    for t in reversed(range(args.num_steps)):
        is_open = 1.0 - rollout["dones"][t]
        delta = rollout["rewards"][t] + args.gamma * next_value * is_open - rollout["values"][t]
        advantages[t] = advantage = delta + args.gamma * args.gae_lambda * is_open * advantage
        next_value = rollout["values"][t]
    return {**rollout, "advantages": advantages, "returns": advantages + rollout["values"]}, obs


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    """Take `update_epochs` passes over a rollout."""
    batch = {name: array.flatten(0, 1) for name, array in rollout.items()}  # [T * N, ...]
    for _ in range(args.update_epochs):
        for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
            optimizer.zero_grad()
            loss(agent, {name: array[rows] for name, array in batch.items()}, args).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def loss(agent: Agent, mb: Rollout, args: Args) -> Tensor:
    """Return PPO's loss on a minibatch."""
    _, logprobs, entropy, values = agent.act(mb["obs"], mb["actions"])
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (logprobs - mb["logprobs"]).exp()
    policy_loss = -torch.min(
        advantages * ratio, advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    ).mean()
    errors = (values - mb["returns"]) ** 2
    if args.clip_vloss:
        clipped = mb["values"] + (values - mb["values"]).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (clipped - mb["returns"]) ** 2)
    return policy_loss + args.vf_coef * 0.5 * errors.mean() - args.ent_coef * entropy.mean()


def main(args: Annotated[Args, Parameter(name="*")] = Args()) -> None:
    """Parse, build, train."""
    envs = gym.make_vec(
        "rl_query_mutator_env:QueryMutation-v0",
        num_envs=args.num_envs,
        backend=args.backend,
        forms=args.forms,
        encoder=args.encoder,
        on_failure=args.on_failure,
    )
    train(RecordEpisodeStatistics(envs), args, log=print)
    envs.close()


if __name__ == "__main__":
    run(main)
