"""The IQN learner: the quantile function of the return for every action, its target, replay buffer and random streams.

    B samples of a gradient step, K quantiles of the prediction, J of its target
    n rows, D obs, A actions, H hidden, C cosines

    obs -> trunk -> [H]      tau -> cos(pi i tau), i < C -> [H]      their product -> value + advantage - mean advantage

Steps of many environments become n-step transitions, whose replay is prioritized (arXiv:1511.05952):

    return      r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount    gamma^k, or 0 where the episode was terminated: the weight of the value of `next_obs`

k is n, or fewer at an episode's end. A step that failed for good (`valid=False`) is skipped as if it had not
happened: the chain runs from the step before it to the step after it.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ppo.algorithm import FlatAdam, usable_device
from ppo.frozen import action_streams
from ppo.policy import masked, orthogonal_linear
from query_mutator.learners.iqn import MASKED_VALUE, FrozenQuantiles
from query_mutator.learners.learner import Learner, Steps, explored
from query_mutator.settings import IQNConfig
from query_mutator.stats import WeightedSampler
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


# --- the replay buffer -----------------------------------------------------------------------------------------------


class Transition(NamedTuple):
    """An observation, the action on it, the rewards that followed, and where that led."""

    obs: FloatArray  # [D]
    action: int
    n_return: float
    next_obs: FloatArray  # [D]
    discount: float


@dataclass(slots=True)
class _Pending:
    """A step that has fewer than n rewards so far."""

    obs: FloatArray
    action: int
    n_return: float = 0.0
    length: int = 0


class NStep:
    """Hold the steps of each environment that wait for rewards."""

    def __init__(self, num_envs: int, n: int, gamma: float) -> None:
        self.n, self.gamma = n, gamma
        self._pending: list[deque[_Pending]] = [deque() for _ in range(num_envs)]

    def add(self, steps: Steps) -> list[Transition]:
        """Return the transitions that these steps complete, at most one step of each environment."""
        done: list[Transition] = []
        for row, env in enumerate(steps.env_ids.tolist()):
            pending = self._pending[env]
            # 1. the reward counts for this step and for those that wait
            if steps.valid[row]:
                pending.append(_Pending(steps.obs[row], int(steps.actions[row])))
                for one in pending:
                    one.n_return += self.gamma**one.length * float(steps.rewards[row])
                    one.length += 1
            # 2. at an episode's end all are complete, otherwise the one with n rewards
            terminated, ended = steps.terminations[row], steps.terminations[row] or steps.truncations[row]
            while pending and (ended or pending[0].length == self.n):
                one = pending.popleft()
                discount = 0.0 if terminated else self.gamma**one.length
                done.append(Transition(one.obs, one.action, one.n_return, steps.next_obs[row], discount))
        return done

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the waiting steps as arrays and plain types."""
        return [[asdict(one) for one in pending] for pending in self._pending]

    def load_state_dict(self, state: list[list[Mapping[str, Any]]]) -> None:
        """Resume from a `state_dict`."""
        self._pending = [
            deque(_Pending(**{**one, "obs": np.array(one["obs"])}) for one in pending) for pending in state
        ]


SMALLEST_ERROR = 1e-3  # so that a transition that is predicted well is still drawn sometimes


class Sample(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, D]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] n-step
    next_obs: Tensor  # [B, D]
    discounts: Tensor  # [B] weight of the value of next_obs
    weights: Tensor  # [B] importance weights, the largest is 1
    slots: NDArray[np.int64]  # [B] for `set_errors`

    def to(self, device: torch.device) -> Sample:
        """Return the sample with its tensors on `device`."""
        return self._replace(**{name: getattr(self, name).to(device) for name in self._fields if name != "slots"})


class Replay:
    """The last `capacity` transitions. New ones get the largest priority so far, so that each is drawn soon."""

    def __init__(self, capacity: int, obs_dim: int, *, alpha: float, rng: np.random.Generator) -> None:
        self.capacity, self.alpha, self.rng = capacity, alpha, rng
        self._columns: dict[str, NDArray[Any]] = {  # in the order of a Transition; rows take memory once they are set
            "obs": np.zeros((capacity, obs_dim), dtype=np.float32),
            "actions": np.zeros(capacity, dtype=np.int64),
            "returns": np.zeros(capacity, dtype=np.float32),
            "next_obs": np.zeros((capacity, obs_dim), dtype=np.float32),
            "discounts": np.zeros(capacity, dtype=np.float32),
        }
        self._sampler = WeightedSampler()  # of priority^alpha
        self.largest_priority = 1.0  # so far
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, transitions: Sequence[Transition]) -> None:
        """Append transitions; once the replay is full, each replaces the oldest one."""
        if not transitions:
            return
        slots = (self.added + np.arange(len(transitions))) % self.capacity
        for column, values in zip(self._columns.values(), zip(*transitions, strict=True), strict=True):
            column[slots] = values
        self._sampler.update(slots, np.full(len(slots), self.largest_priority**self.alpha))
        self.added += len(slots)

    def sample(self, size: int, *, beta: float) -> Sample:
        """Draw `size` transitions in proportion to priority^alpha, one from each of `size` equal shares of the sum."""
        shares = (np.arange(size) + self.rng.random(size)) / size
        slots = self._sampler.find(shares * self._sampler.total)
        chances = self._sampler[slots] / self._sampler.total
        weights = (len(self) * chances) ** -beta
        return Sample(
            **{name: torch.from_numpy(column[slots]) for name, column in self._columns.items()},
            weights=torch.from_numpy((weights / weights.max()).astype(np.float32)),
            slots=slots,
        )

    def set_errors(self, slots: NDArray[np.int64], errors: NDArray[np.floating[Any]]) -> None:
        """Set the priorities of transitions in `slots` [B] to their absolute errors [B]."""
        priorities = errors.astype(np.float64) + SMALLEST_ERROR
        self.largest_priority = max(self.largest_priority, float(priorities.max(initial=0.0)))
        self._sampler.update(slots, priorities**self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions and their priorities: arrays and plain types."""
        size = len(self)
        return {
            **{name: column[:size].copy() for name, column in self._columns.items()},
            "priorities": self._sampler[np.arange(size)],
            "largest": self.largest_priority,
            "added": self.added,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise ValueError for one of another size."""
        size = len(state["actions"])
        if size > self.capacity or size != min(state["added"], self.capacity):
            raise ValueError(f"the checkpoint's replay holds {size} transitions; use replay_size={max(1, size)}")
        for name, column in self._columns.items():
            column[:size] = state[name]
        self.largest_priority, self.added = float(state["largest"]), int(state["added"])
        self._sampler.update(np.arange(size), np.array(state["priorities"]))
