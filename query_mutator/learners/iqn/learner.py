"""The IQN learner: the quantile function of the return for every action, its target, replay buffer and random streams.

    B samples of a gradient step, K quantiles of the prediction, J of its target
    n rows, D obs, A actions, H hidden, C cosines

    obs -> trunk -> [H]      tau -> cos(pi i tau), i < C -> [H]      their product -> value + advantage - mean advantage

`QuantileNetwork` trains with torch, `frozen.FrozenQuantiles` infers with numpy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ppo.algorithm import FlatAdam, usable_device
from ppo.frozen import action_streams
from ppo.policy import masked, orthogonal_linear
from query_mutator.learners.iqn.frozen import MASKED_VALUE, FrozenQuantiles
from query_mutator.learners.iqn.replay import NStep, Replay, Sample
from query_mutator.learners.learner import Learner, Steps, explored
from query_mutator.settings import IQNConfig
from query_mutator.types import FloatArray

GAIN = math.sqrt(2)  # of layers before a ReLU
REPLAY_STREAM, QUANTILE_STREAM = 3, 4  # in addition to those of ppo.algorithm


class QuantileNetwork(nn.Module):
    """Dueling implicit quantile network (Dabney et al., 2018; Wang et al., 2016); initial weights drawn from `seed`."""

    closed: Tensor
    frequencies: Tensor

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        num_cosines: int = 64,
        seed: int = 0,
        mask_columns: slice | None = None,
    ) -> None:
        """Take sizes; the A `mask_columns` of an observation are 1 where an action is not allowed."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        wide = hidden_sizes[-1]
        layer = partial(orthogonal_linear, generator=generator)
        self.trunk = nn.ModuleList(layer(*size, gain=GAIN) for size in pairwise([obs_dim, *hidden_sizes]))
        self.cosine = layer(num_cosines, wide, gain=GAIN)
        self.streams = layer(wide, 2 * wide, gain=GAIN)  # the value's half, the advantage's half
        self.value_head = layer(wide, 1, gain=1.0)
        # Nearly equal first advantages: the first best action is learned, not drawn.
        self.advantage_head = layer(wide, num_actions, gain=0.01)
        self.register_buffer("closed", masked(mask_columns, obs_dim, num_actions=num_actions))  # [A], or none
        self.register_buffer("frequencies", math.pi * torch.arange(num_cosines, dtype=torch.float32))  # [C]

    def forward(self, obs: Tensor, taus: Tensor) -> Tensor:
        """Return the return's quantiles [n, K, A] at `taus` [K] under observations [n, D]."""
        hidden = obs
        for layer in self.trunk:
            hidden = layer(hidden).relu()
        quantiles = self.cosine((taus[:, None] * self.frequencies).cos()).relu()  # [K, H]
        value, advantage = self.streams(hidden[:, None] * quantiles).relu().chunk(2, dim=-1)
        advantages = self.advantage_head(advantage)  # [n, K, A]
        quantile_values: Tensor = self.value_head(value) + advantages - advantages.mean(-1, keepdim=True)
        return quantile_values

    def mask(self, obs: Tensor) -> Tensor:
        """Return the penalty on the values [n, A] of masked actions; 0 without masking."""
        return MASKED_VALUE * obs[:, self.closed] if len(self.closed) else obs.new_zeros(())


def quantile_huber_loss(predicted: Tensor, target: Tensor, taus: Tensor, *, kappa: float) -> Tensor:
    """Return the loss [B] of `predicted` [B, K] at `taus` [K] against samples `target` [B, J] of the return.

    Mean over all K x J pairs of |tau - 1{error < 0}| x Huber(error) / kappa (Dabney et al., 2018, arXiv:1806.06923,
    whose sum over K is a mean here, so that the number of quantiles does not act as a step size).
    """
    errors = target[:, None, :] - predicted[:, :, None]  # [B, K, J]
    size = errors.abs()
    huber = torch.where(size <= kappa, 0.5 * errors.square(), kappa * (size - 0.5 * kappa)) / kappa
    weights = (taus[:, None] - (errors.detach() < 0).float()).abs()
    return (weights * huber).mean(dim=(1, 2))


class IQN(Learner):
    """Learns from observed steps as often as `replay_ratio` says; acts by the weights of the last sync."""

    def __init__(self, obs_dim: int, num_actions: int, config: IQNConfig, *, mask_columns: slice | None = None) -> None:
        """Take sizes and settings; `mask_columns` of an observation are 1 where an action is not allowed."""
        self.config = config
        self.device = usable_device(config.device)
        network = QuantileNetwork(
            obs_dim,
            num_actions,
            config.hidden_sizes,
            num_cosines=config.num_cosines,
            seed=config.seed,
            mask_columns=mask_columns,
        )
        self.network = network.to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = FlatAdam(self.network, lr=config.lr, max_grad_norm=config.max_grad_norm)
        self.replay = Replay(
            config.replay_size,
            obs_dim,
            alpha=config.per_alpha,
            rng=np.random.default_rng((config.seed, REPLAY_STREAM)),
        )
        self.nstep = NStep(config.num_processes, config.n_step, config.gamma)
        self.quantile_rng = torch.Generator().manual_seed(config.seed + QUANTILE_STREAM)
        self.rngs = action_streams(config.seed, config.num_processes)
        self._since: list[Tensor] = []  # statistics of the gradient steps since `update`
        self._ages: list[int] = []  # of the weights that chose, when their step came back
        self.sync_weights()

    # --- acting ------------------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """Return the share of actions that is drawn at random now."""
        config = self.config
        falls_over = max(1.0, config.epsilon_fraction * config.total_steps)
        left = max(0.0, 1.0 - self.env_steps / falls_over)
        return config.epsilon_end + (config.epsilon_start - config.epsilon_end) * left

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids`, which see obs [n, D]."""
        share = 1.0 if len(self.replay) < self.config.learning_starts else self.epsilon
        rngs, frozen = [self.rngs[env] for env in env_ids], self.frozen
        return explored(frozen.act(obs).actions, frozen.allowed(obs), rngs, share=share)

    def sync_weights(self) -> None:
        """Act by the current weights from now on."""
        state, quantiles = self.network.state_dict(), self.config.num_eval_quantiles
        self.frozen: FrozenQuantiles = FrozenQuantiles(state, num_quantiles=quantiles)
        self.version = self.gradient_steps  # of the acting weights

    # --- learning ----------------------------------------------------------------------------------------------------

    def observe(self, steps: Steps) -> None:
        """Store steps, at most one per environment."""
        self.replay.add(self.nstep.add(steps))
        self.env_steps += len(steps.env_ids)
        self._ages += (self.gradient_steps - steps.versions).tolist()

    @property
    def pending_updates(self) -> int:
        """Return the gradient steps due by the replay ratio."""
        if len(self.replay) < self.config.learning_starts:
            return 0
        due = self.config.replay_ratio * self.replay.added - self.samples_learned
        return max(0, int(due // self.config.train_batch_size))

    def learn(self) -> None:
        """Take one gradient step, update the target, and sync the weights when that is due."""
        config = self.config
        beta = config.per_beta + (1.0 - config.per_beta) * self._progress
        sample = self.replay.sample(config.train_batch_size, beta=beta).to(self.device)
        losses, errors, values, gaps = self._loss(sample)
        self.optimizer.lr = self._lr
        norms = self.optimizer.gradient_step((sample.weights * losses).mean())
        self.replay.set_errors(sample.slots, errors.cpu().numpy())
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(quick, config.target_tau)
        self._since.append(torch.stack((losses.detach().mean(), values.mean(), gaps.mean(), *norms)))
        self.gradient_steps += 1
        self.samples_learned += config.train_batch_size
        if self.gradient_steps % config.sync_every == 0:
            self.sync_weights()

    @property
    def _progress(self) -> float:
        return min(1.0, self.env_steps / max(1, self.config.total_steps))

    @property
    def _lr(self) -> float:
        return self.config.lr * (1.0 - self._progress if self.config.use_linear_lr_decay else 1.0)

    def _taus(self) -> Tensor:
        """Return quantiles [K] in pairs tau and 1 - tau, whose mean is a half; all samples of a step share them.

        So their embedding, otherwise half of the arithmetic, is computed for K rows instead of B x K.
        """
        half = torch.rand(self.config.num_quantiles // 2, generator=self.quantile_rng)
        return torch.cat((half, 1.0 - half)).to(self.device)

    # --- statistics and state --------------------------------------------------------------------------------------

    def update(self) -> dict[str, float]:
        """Finish a rollout: act by the latest weights, which are evaluated and saved, and return its statistics.

        Losses are means per sample.
        """
        self.updates_done += 1
        self.sync_weights()
        config, since = self.config, torch.stack(self._since).T if self._since else torch.zeros(5, 1)
        age = float(np.mean(self._ages)) if self._ages else 0.0
        self._since, self._ages = [], []
        loss, value, gap, before, after = since.cpu()
        return {
            "losses/td_loss": float(loss.mean()),
            "rl/avg_value": float(value.mean()),
            "rl/action_gap": float(gap.mean()),
            "losses/grad_norm": float(before.mean()),
            "grads/norm_before_clip_median": float(before.median()),
            "grads/norm_before_clip_max": float(before.max()),
            "grads/norm_after_clip_max": float(after.max()),
            "rl/epsilon": self.epsilon,
            "charts/learning_rate": self._lr,
            "perf/replay_ratio_requested": config.replay_ratio,
            "perf/replay_ratio_achieved": self.samples_learned / max(1, self.replay.added),
            "perf/updates_per_sample": self.gradient_steps / max(1, self.replay.added),
            "perf/weight_sync_age": age,
            "buffer/size": len(self.replay),
            "buffer/largest_priority": self.replay.largest_priority,
            "counters/target_updates": self.gradient_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, the replay buffer included, as tensors and plain types."""
        state = super().state_dict()
        state["rng"] |= {
            "replay": self.replay.rng.bit_generator.state,
            "quantiles": self.quantile_rng.get_state(),
        }
        return {
            **state,
            "policy": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "target": self.target.state_dict(),
            "replay": self.replay.state_dict(),
            "pending": self.nstep.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a network of other sizes or another number of environments."""
        super().load_state_dict(state)
        try:
            self.network.load_state_dict(state["policy"])
            self.target.load_state_dict(state["target"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint's network has other sizes: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.replay.load_state_dict(state["replay"])
        self.replay.rng.bit_generator.state = state["rng"]["replay"]
        self.nstep.load_state_dict(state["pending"])
        self.quantile_rng.set_state(state["rng"]["quantiles"])
        self.sync_weights()

    # --- one gradient step -------------------------------------------------------------------------------------------

    def _loss(self, sample: Sample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return losses, absolute errors of the mean return, values of the best action, gaps to the next [B each]."""
        taus = self._taus()
        quantiles = self.network(sample.obs, taus)  # [B, K, A]
        predicted = _of(quantiles, sample.actions)  # [B, K]
        with torch.no_grad():
            values = quantiles.mean(1) - self.network.mask(sample.obs)  # [B, A]
            best = values.topk(2, dim=1).values
            target = self._targets(sample)  # [B, J]
        losses = quantile_huber_loss(predicted, target, taus, kappa=self.config.kappa)
        errors = (target.mean(1) - predicted.detach().mean(1)).abs()
        return losses, errors, best[:, 0], best[:, 0] - best[:, 1]

    def _targets(self, sample: Sample) -> Tensor:
        """Return samples [B, J] of the return; the online network picks the next action, the target values it."""
        taus = self._taus()
        online = self.network(sample.next_obs, taus).mean(1) - self.network.mask(sample.next_obs)
        following = _of(self.target(sample.next_obs, self._taus()), online.argmax(1))
        return sample.returns[:, None] + sample.discounts[:, None] * following


def _of(quantiles: Tensor, actions: Tensor) -> Tensor:
    """Return the quantiles [B, K] of the chosen actions [B] among [B, K, A]."""
    return quantiles.gather(2, actions[:, None, None].expand(-1, quantiles.shape[1], 1)).squeeze(2)
