"""Gradient-boosted symmetric trees: all nodes of a level are split at the same threshold of the same column.

    n rows, F columns, T trees, D levels, k columns drawn for a tree, C cells: the intervals of all these columns

Symmetric trees are CatBoost's (Prokhorenkova et al. 2018, arXiv:1706.09516): D thresholds and 2^D values, so that a row
is scored without a walk. They are grown from histograms as LightGBM's are (Ke et al. 2017): one count of errors over
nodes and cells has the gain of every split. An unknown value (NaN) is below all others. Files of strangers hold the
arrays, so `from_arrays` checks each. docs/log.md compares them with scikit-learn's trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from query_mutator.confidence.scorers import LARGEST, Arrays, real_array
from query_mutator.errors import CheckpointError
from query_mutator.types import DoubleArray, IntArray

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
