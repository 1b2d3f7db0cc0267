"""The IQN learner: network, target, replay buffer and every random stream.

B samples of a gradient step, K quantiles of the prediction, J of its target, A actions, D obs
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo.algorithm import usable_device
from ppo.descent import FlatAdam
from ppo.frozen import ACTION_STREAM, restore_streams
from query_mutator.learners.iqn.frozen import FrozenQuantiles
from query_mutator.learners.iqn.network import QuantileNetwork, quantile_huber_loss
from query_mutator.learners.iqn.replay import NStep, Replay, Sample
from query_mutator.learners.learner import Steps, counts_of, restore_counts
from query_mutator.settings.learner import IQNConfig
from query_mutator.types import FloatArray

REPLAY_STREAM, QUANTILE_STREAM = 3, 4  # in addition to those of ppo.algorithm


class IQN:
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
        env_seeds = range(config.seed, config.seed + config.num_processes)
        self.action_rngs = [np.random.default_rng((seed, ACTION_STREAM)) for seed in env_seeds]
        self.updates_done = self.env_steps = self.gradient_steps = self.samples_learned = 0
        self._since: list[Tensor] = []  # statistics of the gradient steps since `stats`
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
        """Return actions [n] in environments `env_ids`, which see obs [n, D]; safe while another thread learns."""
        rngs = [self.action_rngs[env] for env in env_ids]
        epsilon = 1.0 if len(self.replay) < self.config.learning_starts else self.epsilon
        return self.frozen.act(obs, rngs, epsilon=epsilon).actions

    def sync_weights(self) -> None:
        """Act by the current weights from now on."""
        self.frozen: FrozenQuantiles = self.network.frozen(num_quantiles=self.config.num_eval_quantiles)
        self.version = self.gradient_steps  # of the acting weights

    # --- learning ----------------------------------------------------------------------------------------------------

    def observe(self, steps: Steps) -> None:
        """Store steps, at most one per environment."""
        self.replay.add(self.nstep.add(steps))
        self.env_steps += len(steps.env_ids)
        self._ages += (self.gradient_steps - steps.versions).tolist()

    def forget_pending(self) -> None:
        """Drop steps that wait for further rewards: the environments were reset."""
        self.nstep.forget()

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
        sample = self.replay.sample(config.train_batch_size, beta=beta)
        step = self._loss(sample)
        self.optimizer.lr = self._lr
        norms = self.optimizer.gradient_step((sample.weights.to(self.device) * step.losses).mean())
        self.replay.set_errors(sample.slots, step.errors.cpu().numpy())
        self._move_target()
        self._since.append(torch.stack((step.losses.detach().mean(), step.values.mean(), step.gaps.mean(), *norms)))
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
        """Finish a rollout: act by the latest weights, which are evaluated and saved, and return the statistics."""
        self.updates_done += 1
        self.sync_weights()
        return self.stats()

    def stats(self) -> dict[str, float]:
        """Return the statistics since the last call under their metric keys; losses are means per sample."""
        config, since = self.config, torch.stack(self._since).T if self._since else torch.zeros(5, 1)
        age = float(np.mean(self._ages)) if self._ages else 0.0
        self._since, self._ages = [], []
        loss, value, gap, before, after = since.cpu()
        learned = {
            "losses/td_loss": float(loss.mean()),
            "rl/avg_value": float(value.mean()),
            "rl/action_gap": float(gap.mean()),
            "losses/grad_norm": float(before.mean()),
            "grads/norm_before_clip_median": float(before.median()),
            "grads/norm_before_clip_max": float(before.max()),
            "grads/norm_after_clip_max": float(after.max()),
        }
        return {
            **learned,
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
        return {
            "policy": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {
                "replay": self.replay.rng.bit_generator.state,
                "quantiles": self.quantile_rng.get_state(),
                "actions": [rng.bit_generator.state for rng in self.action_rngs],
            },
            "target": self.target.state_dict(),
            "replay": self.replay.state_dict(),
            "pending": self.nstep.state_dict(),
            **counts_of(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a network of other sizes or another number of environments."""
        restore_streams(self.action_rngs, state["rng"]["actions"])
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
        restore_counts(self, state)
        self.sync_weights()

    # --- one gradient step -------------------------------------------------------------------------------------------

    def _loss(self, sample: Sample) -> _Step:
        sample = sample.to(self.device)
        taus = self._taus()
        quantiles = self.network(sample.obs, taus)  # [B, K, A]
        predicted = _of(quantiles, sample.actions)  # [B, K]
        with torch.no_grad():
            values = quantiles.mean(1) - self.network.mask(sample.obs)  # [B, A]
            best = values.topk(2, dim=1).values
            target = self._targets(sample)  # [B, J]
        losses = quantile_huber_loss(predicted, target, taus, kappa=self.config.kappa)
        errors = (target.mean(1) - predicted.detach().mean(1)).abs()
        return _Step(losses, errors, values=best[:, 0], gaps=best[:, 0] - best[:, 1])

    def _targets(self, sample: Sample) -> Tensor:
        """Return samples [B, J] of the return; the online network picks the next action, the target values it."""
        taus = self._taus()
        online = self.network(sample.next_obs, taus).mean(1) - self.network.mask(sample.next_obs)
        following = _of(self.target(sample.next_obs, self._taus()), online.argmax(1))
        return sample.returns[:, None] + sample.discounts[:, None] * following

    def _move_target(self) -> None:
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(quick, self.config.target_tau)


class _Step(NamedTuple):
    """Intermediate results of a gradient step."""

    losses: Tensor  # [B]
    errors: Tensor  # [B] of the mean return, absolute
    values: Tensor  # [B] of the best action
    gaps: Tensor  # [B] to the second best


def _of(quantiles: Tensor, actions: Tensor) -> Tensor:
    """Return the quantiles [B, K] of the chosen actions [B] among [B, K, A]."""
    return quantiles.gather(2, actions[:, None, None].expand(-1, quantiles.shape[1], 1)).squeeze(2)
