"""Fitted Q iteration with boosted trees, for calls that are expensive: every step is learned from again and again.

    n steps, D obs, A actions, K models

    gain - price * calls + max Q(next obs, allowed actions) -> trees, fitted again and again

The value of an action is that of what follows it (Ernst et al., 2005, "Tree-based batch mode reinforcement learning").
A step's price is known apart from its gain, so one fit covers all prices: each time steps are given other prices. The K
models of the last iteration are fitted to resampled episodes (Osband et al., 2016, arXiv:1602.04621).

    n rows, F columns, T trees, D levels, k columns drawn for a tree, C cells: the intervals of all these columns

The trees are symmetric, CatBoost's (Prokhorenkova et al. 2018, arXiv:1706.09516): all nodes of a level are split at the
same threshold of the same column, D thresholds and 2^D values, so that a row is scored without a walk. They are grown
from histograms as LightGBM's are (Ke et al. 2017): one count of errors over nodes and cells has the gain of every
split. An unknown value (NaN) is below all others. Files of strangers hold the arrays, so `from_arrays` checks each.
docs/log.md compares them with scikit-learn's trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ppo.frozen import InferencePolicy, action_streams
from query_mutator.confidence.scorers import LARGEST, Arrays, real_array
from query_mutator.env.episode import PRICE_SCALE
from query_mutator.errors import CheckpointError
from query_mutator.learners.learner import Acted, Learner, Steps, explored
from query_mutator.settings import DirectConfig
from query_mutator.types import DoubleArray, FloatArray, IntArray

_BLOCK = 64  # rows scored at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Boosting:
    """How trees are fitted."""

    trees: int
    learning_rate: float
    depth: int = 6
    column_share: float = 0.3  # of the columns, drawn for each tree
    intervals: int = 64  # of a column, at most
    penalty: float = 10.0  # of the squares of leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostedTrees:
    """Trees fitted to values by least squares."""

    column: IntArray  # [T, D]
    threshold: DoubleArray  # [T, D]: the bit of a level is 1 above it
    value: DoubleArray  # [T, 2^D], by the bits, that of the first level lowest
    baseline: float

    @classmethod
    def fit(cls, columns: DoubleArray, targets: DoubleArray, *, how: Boosting, seed: int) -> Self:
        """Fit to targets [n] of rows [n, F]."""
        rng = np.random.default_rng(seed)
        binned = _Binned(columns, how.intervals)
        baseline = float(targets.mean())
        scores = np.full(len(targets), baseline)
        number = how.trees if len(binned.column) else 0  # no column varies: the baseline is all
        column = np.empty((number, how.depth), dtype=np.int64)
        threshold, value = np.empty((number, how.depth)), np.empty((number, 1 << how.depth))
        for tree in range(number):
            drawn = rng.choice(len(binned.column), max(1, round(how.column_share * len(binned.column))), replace=False)
            growth = _Growth(binned, drawn, targets - scores, how)
            column[tree], threshold[tree] = growth.splits()
            value[tree] = growth.leaf_values()
            scores += value[tree][growth.node]
        return cls(column=column, threshold=threshold, value=value, baseline=baseline)

    def predict(self, columns: DoubleArray) -> DoubleArray:
        """Return the values [n] of rows [n, F]."""
        bits, first = 1 << np.arange(self.column.shape[1]), np.arange(len(self.value)) * self.value.shape[1]
        found = np.empty(len(columns))
        for start in range(0, len(columns), _BLOCK):
            rows = slice(start, start + _BLOCK)
            leaf = (columns[rows].take(self.column, axis=1) > self.threshold) @ bits  # [block, T]
            found[rows] = self.baseline + self.value.take(first + leaf).sum(axis=1)
        return found

    @classmethod
    def mean_of(cls, parts: Sequence[Self]) -> Self:
        """Return trees that predict the mean of several sets; one pass takes less than several."""
        return cls(
            column=np.concatenate([part.column for part in parts]),
            threshold=np.concatenate([part.threshold for part in parts]),
            value=np.concatenate([part.value for part in parts]) / len(parts),
            baseline=float(np.mean([part.baseline for part in parts])),
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return columns, thresholds and values of the trees, and the baseline [1]."""
        baseline = np.array([self.baseline])
        return {"column": self.column, "threshold": self.threshold, "value": self.value, "baseline": baseline}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the trees in arrays; CheckpointError unless they are trees over this number of columns."""
        value = real_array(arrays, "value", shape=(None, None))
        trees, leaves = value.shape
        shape = (trees, leaves.bit_length() - 1)
        column = real_array(arrays, "column", shape=shape)
        if leaves != 1 << shape[1] or not np.isin(column, np.arange(columns)).all():
            raise CheckpointError(f"the trees have {leaves} leaves each, or a column that is not one of {columns}")
        return cls(
            column=column.astype(np.int64),
            threshold=real_array(arrays, "threshold", shape=shape),
            value=value,
            baseline=float(real_array(arrays, "baseline", shape=(1,))[0]),
        )


class _Binned:
    """Columns as numbers of intervals, without those that do not vary."""

    def __init__(self, columns: DoubleArray, intervals: int) -> None:
        numbers, self.cuts, self.column = [], [], []
        for column, values in enumerate(columns.T):
            known = values[~np.isnan(values)]
            distinct = np.unique(known)
            if len(distinct) > intervals:
                distinct = np.unique(np.quantile(known, np.linspace(0, 1, intervals), method="lower"))
            middles = np.clip((distinct[1:] + distinct[:-1]) / 2, -LARGEST, LARGEST)
            cuts = np.append(-LARGEST, middles)  # interval 0 has the unknown values
            number = np.where(np.isnan(values), 0, np.searchsorted(cuts, values))
            if np.ptp(number):
                numbers.append(number)
                self.cuts.append(cuts)
                self.column.append(column)
        self.numbers = np.array(numbers, dtype=np.int64)  # [F, n]
        self.sizes = np.array([len(cuts) + 1 for cuts in self.cuts], dtype=np.int64)  # [F]


class _Growth:
    """One tree while it grows level by level."""

    def __init__(self, binned: _Binned, drawn: IntArray, errors: DoubleArray, how: Boosting) -> None:
        """Take the columns drawn [k], and what the trees so far leave of the targets [n]."""
        self._binned, self._drawn, self._how, self._errors = binned, drawn, how, errors
        sizes = binned.sizes[drawn]
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self._place = np.repeat(np.arange(len(drawn)), sizes)  # [C], the column of each cell
        self._cells = binned.numbers[drawn] + self._starts[:, None]  # [k, n]
        self.node = np.zeros(len(errors), dtype=np.int64)  # [n]

    def splits(self) -> tuple[list[int], list[float]]:
        """Return the column and threshold of each level; afterwards `node` has the leaf of each row."""
        columns, thresholds = [], []
        sums = self._sums(slice(None), nodes=1)  # [2, nodes, C]
        for level in range(self._how.depth):
            total = sums[:, :, : self._ends[0], None].sum(axis=2)
            left = sums.cumsum(axis=2) - total * self._place  # a column's cells sum up to the total
            gain = (self._gain(left) + self._gain(total - left)).sum(axis=0)
            gain[self._ends - 1] = -np.inf  # a column's last cell: nothing is right of it
            best = int(gain.argmax())
            place = self._place[best]
            is_right = self._cells[place] > best
            columns.append(self._binned.column[self._drawn[place]])
            thresholds.append(float(self._binned.cuts[self._drawn[place]][best - self._starts[place]]))
            if level < self._how.depth - 1:  # the smaller side is counted, the other is what remains
                right_is_small = 2 * np.count_nonzero(is_right) <= len(is_right)
                small = self._sums(np.flatnonzero(is_right == right_is_small), nodes=1 << level)
                sides = (sums - small, small) if right_is_small else (small, sums - small)
                sums = np.concatenate(sides, axis=1)
            self.node += is_right.astype(np.int64) << level
        return columns, thresholds

    def leaf_values(self) -> DoubleArray:
        """Return the shrunk mean errors [2^D] by the learning rate."""
        errors, rows = (np.bincount(self.node, of, 1 << self._how.depth) for of in (self._errors, None))
        return np.asarray(self._how.learning_rate * errors / (rows + self._how.penalty))

    def _sums(self, rows: slice | IntArray, *, nodes: int) -> DoubleArray:
        """Return the sums of the errors of some rows, and their number, by node and cell [2, nodes, C]."""
        cells = self._cells[:, rows] + len(self._place) * self.node[rows]
        errors = np.broadcast_to(self._errors[rows], cells.shape).ravel()
        found = [np.bincount(cells.ravel(), of, nodes * len(self._place)) for of in (errors, None)]
        return np.stack(found).reshape(2, nodes, -1).astype(np.float64, copy=False)

    def _gain(self, sums: DoubleArray) -> DoubleArray:
        return np.asarray(sums[0] ** 2 / (sums[1] + self._how.penalty))


# --- the method ------------------------------------------------------------------------------------------------------

ITERATIONS = 5  # fits to values of the one before
GROWTH = 1.2  # of the steps, after which the models are fitted again
FEWEST = 64  # steps to fit to
MOST_ROWS = 20_000  # of a fit, drawn from the steps that are kept
MOST_KEPT = 100_000  # the latest steps
PRICES = (0.0025, 0.25)  # between which half of the steps get one
_COLUMNS = ("obs", "next_obs", "actions", "gains", "calls", "ended", "episodes")
_ARRAYS = ("column", "threshold", "value", "baseline")
_TREES = Boosting(trees=60, learning_rate=0.2, column_share=0.5, intervals=32)


class FrozenValues:
    """A snapshot of the models for inference; without one, actions are random."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Load the state dict of a policy; ValueError for other arrays."""
        try:
            self.state = {name: np.asarray(array) for name, array in state.items()}
            self._masked = self.state["masked"]
            self.num_actions = len(self._masked)
            self._obs_dim = int(self.state["obs_dim"])
            count = len({name.partition("/")[0] for name in self.state if "/" in name})
            arrays = [{name: self.state[f"{number}/{name}"] for name in _ARRAYS} for number in range(count)]
            columns = self._obs_dim + self.num_actions
            self.models = [BoostedTrees.from_arrays(each, columns=columns) for each in arrays]
            self._mean = BoostedTrees.mean_of(self.models) if self.models else None
        except (KeyError, TypeError, OverflowError, CheckpointError) as error:
            raise ValueError(f"these are not the trees of a direct method: {error}") from error
        is_whole = self._masked.dtype.kind in "iu" and self._masked.ndim == 1 and self.num_actions
        if not is_whole or not 0 <= int(self._masked.min()) <= int(self._masked.max()) < self._obs_dim:
            raise ValueError("these are not the trees of a direct method: its mask is of other columns")

    def values(self, obs: FloatArray) -> DoubleArray:
        """Return the values [K, n, A] of actions for observations [n, D], -inf for masked ones."""
        return np.array([values_of(model.predict, obs, self._masked) for model in self.models])

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator] = (), *, greedy: bool = False) -> Acted:
        """Return the actions of largest mean value for observations [n, D]; nothing is random."""
        if self._mean is None:
            return Acted(np.asarray(obs)[:, self._masked].argmin(axis=1))
        return Acted(values_of(self._mean.predict, obs, self._masked).argmax(axis=1))


class DirectMethod(Learner):
    """All steps so far, and the models fitted to them; everything is learned in `update`."""

    deterministic = True

    def __init__(self, obs_dim: int, num_actions: int, config: DirectConfig, *, mask_columns: slice) -> None:
        """Take sizes and settings; `mask_columns` of an observation are 1 where an action is not allowed."""
        self.config = config
        masked = np.array(range(obs_dim)[mask_columns], dtype=np.int64)
        self.frozen: FrozenValues = FrozenValues({"masked": masked, "obs_dim": np.array(obs_dim)})
        # With --ask form the price is the last column of an observation.
        self._price = obs_dim - 1 if masked.max() < obs_dim - 1 else None
        self.rngs = action_streams(config.seed, config.num_processes)
        self._steps: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._episodes = np.arange(config.num_processes)  # the number of each environment's episode
        self._fitted_to = 0  # environment steps at the last fit
        # What is being fitted: models, and the values that they are fitted to.
        self._fitting: Future[tuple[FrozenValues, DoubleArray]] | None = None

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved trees for inference."""
        return FrozenValues(state)

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids`, which see obs [n, D]: by its own model, or at random."""
        frozen, masked = self.frozen, self.frozen.state["masked"]
        actions = np.zeros(len(env_ids), dtype=np.int64)
        for row, env in enumerate(env_ids if frozen.models else ()):
            score = frozen.models[env % len(frozen.models)].predict
            actions[row] = values_of(score, obs[row : row + 1], masked).argmax()
        share = self.config.random_share if frozen.models else 1.0
        return explored(actions, obs[:, masked] <= 0, [self.rngs[env] for env in env_ids], share=share)

    def recall(self, steps: Steps) -> None:
        """Fit the models to steps that another policy took before the training; `env_ids` number their episodes."""
        self._keep(steps, steps.env_ids)
        self._episodes += int(steps.env_ids.max()) + 1
        self._begin_fit()
        self._take_fit()

    def observe(self, steps: Steps) -> None:
        """Keep finished steps, at most one per environment."""
        self.env_steps += len(steps.env_ids)
        self._keep(steps, self._episodes[steps.env_ids])
        self._episodes[steps.env_ids[steps.ended]] += self.config.num_processes

    def _keep(self, steps: Steps, episodes: NDArray[np.int64]) -> None:
        gains = steps.rewards + self._prices_of(steps.obs) * steps.calls
        calls = steps.calls.astype(np.float64)
        columns = (steps.obs, steps.next_obs, steps.actions, gains, calls, steps.ended, episodes)
        for name, column in zip(_COLUMNS, columns, strict=True):
            self._steps[name].append(np.asarray(column)[steps.valid])

    def _prices_of(self, obs: FloatArray) -> DoubleArray:
        if self._price is None:
            return np.zeros(len(obs))
        return np.asarray(obs)[:, self._price].astype(np.float64) / PRICE_SCALE

    def update(self) -> dict[str, float]:
        """Finish a rollout: act by the models that were fitted meanwhile, and fit again to enough new steps.

        A fit takes seconds, in which calls are made: the models fitted to the steps so far act from the end of the next
        rollout on, however fast the fit is. It is waited for at once where there are no models yet, and at the end of
        the training. Returns statistics of the models that act from now on.
        """
        self.updates_done += 1
        stats = self._take_fit()
        if self.env_steps >= GROWTH * self._fitted_to:
            self._begin_fit()
        if not self.frozen.models or self.env_steps >= self.config.total_steps:
            stats |= self._take_fit()
        return stats

    def _begin_fit(self) -> None:
        """Fit models to the steps so far in a thread, if there are enough."""
        self._merge()
        if len(self._steps["actions"]) == 0 or len(self._steps["actions"][0]) < FEWEST:
            return
        self._fitted_to = self.env_steps
        steps = {name: parts[0] for name, parts in self._steps.items()}
        fitter = ThreadPoolExecutor(1, thread_name_prefix="qm-fit")
        self._fitting = fitter.submit(self._fit, steps)
        fitter.shutdown(wait=False)  # the fit is waited for at exit: a daemon would end inside a library

    def _take_fit(self) -> dict[str, float]:
        """Act by the models that are being fitted, if any, from now on; return statistics."""
        if self._fitting is None:
            return {}
        self.frozen, targets = self._fitting.result()
        self._fitting = None
        self.gradient_steps += ITERATIONS - 1 + self.config.num_models
        self.samples_learned += ITERATIONS * len(targets)
        self.version += 1
        return {"rl/avg_value": float(targets.mean())}

    def _merge(self) -> None:
        """Join the latest steps in the order of their episodes, whatever the order in which they arrived."""
        if self._steps["episodes"]:
            kept = np.concatenate(self._steps["episodes"]).argsort(kind="stable")[-MOST_KEPT:]
            self._steps = {name: [np.concatenate(parts)[kept]] for name, parts in self._steps.items()}

    def _fit(self, steps: Mapping[str, NDArray[Any]]) -> tuple[FrozenValues, DoubleArray]:
        """Return models fitted to steps, and the values [n] that they were fitted to."""
        rng = np.random.default_rng((self.config.seed, self.gradient_steps))
        count = len(steps["actions"])
        if count > MOST_ROWS:
            drawn = rng.choice(count, MOST_ROWS, replace=False)
            steps = {name: column[drawn] for name, column in steps.items()}
        num_actions, masked = self.frozen.num_actions, self.frozen.state["masked"]
        obs, next_obs = steps["obs"].astype(np.float64), steps["next_obs"].astype(np.float64)
        chosen, own_prices = np.eye(num_actions)[steps["actions"]], self._prices_of(steps["obs"])
        model: BoostedTrees | None = None
        for number in range(ITERATIONS):
            prices = self._with_prices(own_prices, obs, next_obs, rng)
            targets = steps["gains"] - prices * steps["calls"]
            if model is not None:
                goes_on = ~steps["ended"]
                targets[goes_on] += values_of(model.predict, next_obs[goes_on], masked).max(axis=1)
            rows = np.hstack([obs, chosen])
            if number < ITERATIONS - 1:
                model = BoostedTrees.fit(rows, targets, how=_TREES, seed=number)
        state = {name: self.frozen.state[name] for name in ("masked", "obs_dim")}
        for number in range(self.config.num_models):
            times = rng.poisson(1.0, size=int(steps["episodes"].max()) + 1)[steps["episodes"]]
            drawn = np.repeat(np.arange(len(rows)), times if times.any() else 1)
            trees = BoostedTrees.fit(rows[drawn], targets[drawn], how=_TREES, seed=number)
            state |= {f"{number}/{name}": array for name, array in trees.to_arrays().items()}
        return FrozenValues(state), np.asarray(targets)

    def _with_prices(
        self, own: DoubleArray, obs: DoubleArray, next_obs: DoubleArray, rng: np.random.Generator
    ) -> DoubleArray:
        """Give half of the steps other prices than their own, in both observations; return the prices [n].

        The logarithm of another price is uniform.
        """
        if self._price is None:
            return own
        low, high = map(math.log, PRICES)
        prices = np.where(rng.random(len(obs)) < 0.5, np.exp(rng.uniform(low, high, size=len(obs))), own)
        obs[:, self._price] = next_obs[:, self._price] = PRICE_SCALE * prices
        return prices

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as arrays and plain types."""
        self._merge()
        steps = {name: parts[0] for name, parts in self._steps.items() if parts}
        return {
            **super().state_dict(),
            "policy": self.frozen.state,
            "optimizer": {
                "steps": steps,
                "episodes": self._episodes.tolist(),
                "fitted_to": self._fitted_to,
                "is_fitting": self._fitting is not None,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for other sizes."""
        policy, saved = FrozenValues(state["policy"]), state["optimizer"]
        sizes = [(len(one.state["masked"]), int(one.state["obs_dim"])) for one in (policy, self.frozen)]
        if sizes[0] != sizes[1]:
            raise ValueError("the checkpoint's learner has other observations or actions")
        super().load_state_dict(state)
        self.frozen, self._fitted_to = policy, int(saved["fitted_to"])
        self._steps = {name: [np.array(saved["steps"][name])] if saved["steps"] else [] for name in _COLUMNS}
        self._episodes = np.array(saved["episodes"], dtype=np.int64)
        if saved["is_fitting"]:
            self._begin_fit()


def values_of(
    score: Callable[[DoubleArray], DoubleArray], obs: FloatArray | DoubleArray, masked: NDArray[np.int64]
) -> DoubleArray:
    """Return the values [n, A] of actions for observations [n, D] by `score`, -inf for masked ones.

    `score` takes rows [m, D + A], an observation with an action; `masked` are the columns [A] of the mask.
    """
    rows, actions = np.nonzero(np.less_equal(obs[:, masked], 0))
    values = np.full((len(obs), len(masked)), -np.inf)
    if len(rows):
        values[rows, actions] = score(np.hstack([np.asarray(obs)[rows], np.eye(len(masked))[actions]]))
    return values
