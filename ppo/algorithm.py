"""The PPO algorithm: epochs of minibatch gradient steps over a rollout, and the state they update.

T steps, N envs, D obs, A actions; B valid steps of a rollout; P numbers in all parameters together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ppo.config import PPOConfig
from ppo.frozen import SHUFFLE_STREAM, ActOutput, FloatArray, FrozenPolicy, action_streams, restore_streams
from ppo.gae import compute_gae
from ppo.loss import ppo_loss
from ppo.policy import Policy
from ppo.rollout import Batch, RolloutBuffer

BETAS, EPS = (0.9, 0.999), 1e-5  # of Adam


class FlatAdam:
    """Adam with global gradient clipping on one flat tensor, of which the parameters of `module` become views.

    Kingma and Ba (2015), arXiv:1412.6980, algorithm 1. `module` must stay on its device. For a small network the cost
    is the number of calls, not arithmetic. With torch's fused Adam and `clip_grad_norm_` a gradient step of
    the default networks takes 27 to 47 % longer (docs/log.md), and creating it loads torch's compiler, 1.2 s of
    processor time.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        max_grad_norm: float,
    ) -> None:
        self.lr, self.max_grad_norm = lr, max_grad_norm
        self._parameters = list(module.parameters())
        self._flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])  # [P]
        pieces = torch.split(self._flat, [parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.data = piece.view_as(parameter)
        self._steps = 0
        self._mean, self._square = torch.zeros_like(self._flat), torch.zeros_like(self._flat)  # [P] of gradients

    def gradient_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Take one gradient step on `loss`; return the norms of its gradient before and after it is clipped."""
        gradients = torch.autograd.grad(loss, self._parameters)
        gradient = torch.cat([piece.flatten() for piece in gradients])  # [P]
        norm: Tensor = torch.linalg.vector_norm(gradient)
        gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        after: Tensor = torch.linalg.vector_norm(gradient)
        self._adam(gradient)
        return norm, after

    @torch.no_grad()
    def _adam(self, gradient: Tensor) -> None:
        first, second = BETAS
        self._steps += 1
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = self._square.sqrt().mul_((1 - second**self._steps) ** -0.5).add_(EPS)
        self._flat.addcdiv_(self._mean, root, value=-self.lr / (1 - first**self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state: tensors and plain types."""
        return {"steps": self._steps, "lr": self.lr, "mean": self._mean.clone(), "square": self._square.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._steps, self.lr = int(state["steps"]), float(state["lr"])
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])


def ppo_update(
    policy: Policy, optimizer: FlatAdam, batch: Batch, config: PPOConfig, rng: np.random.Generator
) -> dict[str, float]:
    """Train for `ppo_epoch` epochs on `batch`, shuffled by `rng`; return means over all minibatches.

    `counters/updates` and `counters/samples_learned` count this call only. Stops after an epoch whose mean approximate
    KL divergence exceeds `target_kl`. An empty batch changes nothing.
    """
    scalars: list[Tensor] = []  # of each minibatch: losses, entropy, gradient norms
    log_ratios: list[Tensor] = []
    for _ in range(config.ppo_epoch if len(batch.actions) else 0):
        first = len(log_ratios)
        order = torch.from_numpy(rng.permutation(len(batch.actions))).to(batch.actions.device)
        for minibatch in batch.take(order).split(config.num_mini_batch):
            logits, values = policy(minibatch.obs)
            total, *terms, log_ratio = ppo_loss(logits, values, minibatch, config)
            norms = optimizer.gradient_step(total)
            scalars.append(torch.stack((*terms, *norms)).detach())
            log_ratios.append(log_ratio.detach())
        if config.target_kl is not None and _approx_kl(torch.cat(log_ratios[first:])) > config.target_kl:
            break
    return _stats(scalars, log_ratios, batch, clip_param=config.clip_param)


def _approx_kl(log_ratio: Tensor) -> float:
    """Return the low-variance, non-negative estimate (ratio - 1) - log ratio (joschu.net/blog/kl-approx.html)."""
    return float((log_ratio.expm1() - log_ratio).mean())


def _stats(scalars: list[Tensor], log_ratios: list[Tensor], batch: Batch, *, clip_param: float) -> dict[str, float]:
    rows = torch.stack(scalars) if scalars else torch.zeros(1, 5)
    means, norms = rows.mean(0).tolist(), rows[:, 3]
    log_ratio = torch.cat(log_ratios) if log_ratios else torch.zeros(1)
    return {
        "losses/policy_loss": means[0],
        "losses/value_loss": means[1],
        "losses/entropy": means[2],
        "losses/approx_kl": _approx_kl(log_ratio),
        "losses/old_approx_kl": float(-log_ratio.mean()),
        "losses/clipfrac": float((log_ratio.expm1().abs() > clip_param).float().mean()),
        "losses/explained_variance": explained_variance(batch.values, batch.returns),
        "losses/grad_norm": means[3],
        "grads/norm_before_clip_median": float(norms.median()),
        "grads/norm_before_clip_max": float(norms.max()),
        "grads/norm_after_clip_max": float(rows[:, 4].max()),
        "counters/updates": len(scalars),
        "counters/samples_learned": len(log_ratio) if scalars else 0,
        "rl/avg_value": float(batch.values.mean()) if len(batch.values) else 0.0,
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - var(returns - values) / var(returns); 0 where the returns do not vary."""
    variance = returns.var(correction=0) if len(returns) else torch.zeros(())
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0


def usable_device(name: str) -> torch.device:
    """Return the torch device called `name`; ValueError if it is unavailable."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used ({reason}); try --device cpu") from error


class PPO:
    """Policy, optimizer, schedule and every random stream; the caller owns the environments."""

    def __init__(self, obs_dim: int, num_actions: int, config: PPOConfig, *, mask_columns: slice | None = None) -> None:
        """Take sizes and settings; `mask_columns` of an observation are 1 where an action is not allowed."""
        self.config = config
        self.device = usable_device(config.device)
        self.policy = Policy(obs_dim, num_actions, config.hidden_sizes, seed=config.seed, mask_columns=mask_columns).to(
            self.device
        )
        self.optimizer = FlatAdam(self.policy, lr=config.lr, max_grad_norm=config.max_grad_norm)
        self.updates_done = self.gradient_steps = self.samples_learned = 0
        self.shuffle_rng = np.random.default_rng((config.seed, SHUFFLE_STREAM))
        self.action_rngs = action_streams(config.seed, config.num_processes)
        self.frozen = self._freeze()

    def _freeze(self) -> FrozenPolicy:
        return self.policy.frozen(deterministic=self.config.deterministic)

    def act(self, obs: FloatArray, env_ids: Sequence[int] | None = None, *, greedy: bool = False) -> ActOutput:
        """Return actions in environments `env_ids` (None: all) for observations [n, D]."""
        rngs = self.action_rngs if env_ids is None else [self.action_rngs[i] for i in env_ids]
        return self.frozen.act(obs, rngs, greedy=greedy)

    def get_value(self, obs: FloatArray) -> FloatArray:
        """Return the critic's values [n] of observations [n, D]."""
        return self.frozen.get_value(obs)

    def update(self, buffer: RolloutBuffer, next_obs: FloatArray) -> dict[str, float]:
        """Learn from a full buffer and the observations after it, `next_obs` [N, D]; return the statistics."""
        # 1. Advantages of the rollout
        advantages, returns = compute_gae(
            buffer.rewards,
            buffer.values,
            buffer.terminations,
            buffer.truncations,
            buffer.final_values,
            torch.from_numpy(self.get_value(next_obs)),
            buffer.valid,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )
        # 2. One batch of all valid steps
        left = 1.0 - self.updates_done / self.config.num_updates if self.config.use_linear_lr_decay else 1.0
        self.optimizer.lr = self.config.lr * max(left, 0.0)
        batch = buffer.batch(advantages, returns).to(self.device)
        # 3. Epochs of minibatches, then act by the new weights
        stats = ppo_update(self.policy, self.optimizer, batch, self.config, self.shuffle_rng)
        self.updates_done += 1
        self.frozen = self._freeze()
        self.gradient_steps += int(stats.pop("counters/updates"))
        self.samples_learned += int(stats.pop("counters/samples_learned"))
        return {**stats, "charts/learning_rate": self.optimizer.lr}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as tensors and plain types."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates_done": self.updates_done,
            "counts": {"gradient_steps": self.gradient_steps, "samples_learned": self.samples_learned},
            "rng": {
                "shuffle": self.shuffle_rng.bit_generator.state,
                "actions": [rng.bit_generator.state for rng in self.action_rngs],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError if sizes of the policy or the number of environments differ."""
        restore_streams(self.action_rngs, state["rng"]["actions"])
        try:
            self.policy.load_state_dict(state["policy"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint's policy has other sizes: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates_done = int(state["updates_done"])
        for name, count in state["counts"].items():
            setattr(self, name, int(count))
        self.shuffle_rng.bit_generator.state = state["rng"]["shuffle"]
        self.frozen = self._freeze()
