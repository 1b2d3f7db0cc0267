"""Mixtures: several data sets in one plan, in fixed proportions, deterministically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray, permutation
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthSource, LengthTable, as_lengths
from query_mutator.errors import UsageError

_SEPARATOR = "/"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Lengths of all data sets under ids "NAME/ID", the share of each in an epoch, and units per epoch (None: all)."""

    table: LengthTable
    names: tuple[str, ...]
    source: NDArray[np.int16]  # [n], number of the data set
    weights: NDArray[np.float64]  # [number of data sets], sums to 1
    epoch_samples: int | None

    @property
    def ids(self) -> IdTable:
        """The ids of all samples."""
        return self.table.ids

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The lengths of all samples."""
        return self.table.lengths


def mix_datasets(
    datasets: Mapping[str, LengthSource], weights: Mapping[str, float], *, epoch_samples: int | None = None
) -> Mixture:
    """Return a mixture, which a plan builder accepts instead of lengths.

    In an epoch of `epoch_samples` each data set has its share, whatever its size: a small one is repeated, all its
    samples once before any is repeated, and the next epoch continues where the last one ended.
    """
    if set(weights) != set(datasets):
        raise UsageError(f"weights are for {sorted(weights)}, the data sets are {sorted(datasets)}; name the same ones")
    if not datasets or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise UsageError("weights must not be negative, and one of them must be above 0")
    names = tuple(sorted(datasets))
    tables = {name: as_lengths(datasets[name]) for name in names}
    empty = [name for name in names if weights[name] > 0 and not len(tables[name])]
    if empty:
        raise UsageError(f"data set {empty[0]!r} is empty; leave it out or give it weight 0")
    ids = [f"{name}{_SEPARATOR}{one}" for name in names for one in tables[name].ids.to_list()]
    lengths = np.concatenate([tables[name].lengths for name in names])
    source = np.repeat(np.arange(len(names), dtype=np.int16), [len(tables[name]) for name in names])
    table = LengthTable(ids=IdTable.from_list(ids), lengths=lengths)
    order = table.ids.canonical_order()
    if order is not None:
        table, source = table.take(order), source[order]
    shares = np.array([weights[name] for name in names], np.float64)
    return Mixture(table=table, names=names, source=source, weights=shares / shares.sum(), epoch_samples=epoch_samples)


def draw_epoch(source: NDArray[np.int16], mixture: Mixture, *, seed: int, epoch: int) -> IndexArray:
    """Return the items of an epoch, given each item's data set [n]; an item may occur more than once."""
    quotas = _quotas(mixture.weights, mixture.epoch_samples or len(source))
    parts = [
        _stream(np.flatnonzero(source == number), quota, seed=(seed, 3, number), skip=epoch * quota)
        for number, quota in enumerate(quotas)
        if quota
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _stream(items: IndexArray, count: int, *, seed: tuple[int, ...], skip: int) -> IndexArray:
    """Return items skip .. skip+count-1 of an endless sequence of shuffles of `items`."""
    if not len(items):
        raise UsageError("a data set of the mixture has no samples left after the over-long policy")
    # Shuffle number k of the endless sequence covers its items k*n .. (k+1)*n-1; make only the shuffles needed.
    first, last = skip // len(items), (skip + count - 1) // len(items)
    rounds = np.concatenate([items[permutation(len(items), *seed, number)] for number in range(first, last + 1)])
    begin = skip - first * len(items)
    return rounds[begin : begin + count]


def _quotas(weights: NDArray[np.float64], total: int) -> list[int]:
    """Return integers that sum to `total`, nearest to the weights (largest remainders)."""
    exact = weights * total
    quotas = np.floor(exact).astype(np.int64)
    remainders = np.argsort(-(exact - quotas), kind="stable")
    quotas[remainders[: total - int(quotas.sum())]] += 1
    return [int(quota) for quota in quotas]
