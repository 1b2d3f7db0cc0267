"""Which items go into which batch: shuffle, sort within windows, cut at the budget, shuffle the batches.

n items, B batches. An item stays in one batch: one sample, an indivisible group of samples, or a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray, index_type, offsets_of, permutation, ranges_of, reach_of
from query_mutator.batching.core.config import BatchingConfig


class Items(NamedTuple):
    """Longest row [n], and where they matter number of rows [n] and tokens with a loss [n] of every item."""

    lengths: NDArray[Any]
    rows: NDArray[Any] | None = None
    loss: NDArray[Any] | None = None

    def take(self, index: IndexArray) -> Items:
        """Return these items alone."""
        return Items(*(None if column is None else column[index] for column in self))  # type: ignore[arg-type]


class Batches(NamedTuple):
    """Items in batch order [kept]; batch b has order[offsets[b]:offsets[b+1]], padded to max_len[b]."""

    order: IndexArray
    offsets: IndexArray
    max_len: IndexArray
    bucket: IndexArray


def fill_batches(items: Items, config: BatchingConfig, *, seed: tuple[int, ...]) -> Batches:
    """Return the batches of one epoch; the order of samples and of batches follows from `seed` alone.

    The padded rows of every item must fit the token budget on their own.
    """
    # 0, 1: separate random streams for samples and for batches (2 is for packs, 3 for mixtures, 4 for blocks)
    order = permutation(len(items.lengths), *seed, 0)
    batches = (_fill_buckets if config.is_predictable else _fill_windows)(items, order, config)
    if config.interleave_buckets:
        return _arrange(batches, permutation(len(batches.max_len), *seed, 1))
    return _arrange(batches, np.argsort(batches.bucket, kind="stable"))


def _fill_windows(items: Items, order: IndexArray, config: BatchingConfig) -> Batches:
    """Cut sorted windows; pool the remainders at the windows' ends and cut them in windows twice as wide."""
    parts: list[Batches] = []
    window = config.window
    while True:
        # 1. Sort every window by length, longest first, and cut it into batches.
        order = order[_window_sort(items.lengths[order], window)]
        here = items.take(order)
        edges = [*range(0, len(order), window), len(order)]
        starts, sizes, full = _cut(here, _longest_pads(here.lengths, config), edges, config)
        # 2. Keep full batches; the last window also keeps its remainder, unless drop_last.
        last = len(edges) <= 2
        taken = full if last and config.drop_last else full | last
        parts.append(_batches(order, here.lengths, starts[taken], sizes[taken], config))
        if last:
            return _join(parts)
        # 3. Repeat with the remainders of all windows.
        order = order[ranges_of(starts[~full], sizes[~full])]
        window *= 2  # one batch may hold a whole window, which then stays a remainder until the window is wider


def _fill_buckets(items: Items, order: IndexArray, config: BatchingConfig) -> Batches:
    """Cut every bucket in shuffled order, padded to the bucket."""
    assert config.bucket_pads is not None
    bounds = config.bucket_spec.upper_bounds
    buckets = np.searchsorted(bounds, items.lengths[order]).astype(np.int16)
    order = order[np.argsort(buckets, kind="stable")]
    here = items.take(order)
    edges = offsets_of(np.bincount(buckets, minlength=len(bounds))).tolist()
    starts, sizes, full = _cut(here, np.repeat(np.array(config.bucket_pads), np.diff(edges)), edges, config)
    taken = full if config.drop_last else np.ones(len(full), bool)
    return _batches(order, here.lengths, starts[taken], sizes[taken], config)


def _longest_pads(lengths: NDArray[Any], config: BatchingConfig) -> NDArray[Any]:
    """Return the padded length of a batch whose longest row has this length, for every length."""
    multiple = config.pad_multiple
    pads: NDArray[Any] = np.minimum((lengths + (multiple - 1)) // multiple * multiple, config.limit)
    return pads


def _window_sort(lengths: NDArray[Any], window: int) -> IndexArray:
    """Return positions that put every window of `lengths` in descending order; equal lengths keep their order."""
    count = len(lengths)
    whole = count // window * window
    order = np.empty(count, index_type(count))
    if whole:
        order[:whole] = _sort_rows(lengths[:whole].reshape(-1, window)).reshape(-1)
    if whole < count:
        order[whole:] = _sort_rows(lengths[None, whole:])[0] + whole
    return order


def _sort_rows(lengths: NDArray[Any]) -> IndexArray:
    """Return positions in the flattened array [w, window] that put each row in descending order."""
    rows, width = lengths.shape
    longest = int(lengths.max())
    bits = max(width - 1, 1).bit_length()
    # One sort of unique integers (length, then place) is several times faster than an argsort with ties.
    wide: Any = np.uint32 if longest.bit_length() + bits <= 32 else np.uint64
    keys: NDArray[Any] = (longest - lengths).astype(wide) << wide(bits)
    keys |= np.arange(width, dtype=wide)
    keys.sort(axis=1)
    keys &= wide((1 << bits) - 1)
    begins = np.arange(rows, dtype=index_type(lengths.size)) * width
    order: IndexArray = keys.astype(begins.dtype) + begins[:, None]
    return order


def _cut(
    items: Items, pads: NDArray[Any], edges: list[int], config: BatchingConfig
) -> tuple[IndexArray, IndexArray, NDArray[np.bool_]]:
    """Return start, size and fullness of the batches that fill the budget from the front of each stretch.

    A batch that begins at i is padded to pads[i], so pads must not rise within a stretch. A batch is full if the
    budget ended it, not the stretch.
    """
    end_of = _batch_ends(items, pads, config)
    starts: list[int] = []
    full: list[bool] = []
    for begin, end in pairwise(edges):
        position = begin
        while position < end:
            reach = end_of(position)
            starts.append(position)
            full.append(reach <= end)
            position = min(reach, end)
    index = np.array(starts, np.int64)
    return index, np.diff(index, append=edges[-1]), np.array(full, bool)


def _batch_ends(items: Items, pads: NDArray[Any], config: BatchingConfig) -> Callable[[int], int]:
    """Return a function of the position where a batch begins: where it ends at the latest."""
    budget = config.token_budget
    most = config.max_samples or budget
    if items.rows is None and config.loss_token_budget is None:
        pad_at = pads.item
        return lambda i: i + max(1, min(budget // pad_at(i), most))
    here = np.arange(len(pads), dtype=np.int64)
    rows = np.minimum(budget // pads, most)
    reach = here + rows if items.rows is None else reach_of(items.rows, rows)
    if items.loss is not None and config.loss_token_budget is not None:
        reach = np.minimum(reach, reach_of(items.loss, config.loss_token_budget))
    return np.maximum(reach, here + 1).item


def _batches(
    order: IndexArray, lengths: NDArray[Any], starts: IndexArray, sizes: IndexArray, config: BatchingConfig
) -> Batches:
    """Return batches of stretches of `order`; the first row of each is its longest, or any row of its bucket."""
    longest = lengths[starts]
    bucket = np.searchsorted(config.bucket_spec.upper_bounds, longest)
    pads = config.bucket_pads
    max_len = _longest_pads(longest, config) if pads is None else np.array(pads)[bucket]
    return Batches(order[ranges_of(starts, sizes)], offsets_of(sizes), max_len.astype(np.int64), bucket)


def _join(parts: list[Batches]) -> Batches:
    order, sizes, max_len, bucket = (
        np.concatenate(columns)
        for columns in zip(*((one.order, np.diff(one.offsets), one.max_len, one.bucket) for one in parts), strict=True)
    )
    return Batches(order, offsets_of(sizes), max_len, bucket)


def _arrange(batches: Batches, order: IndexArray) -> Batches:
    """Return the batches in another order."""
    sizes = np.diff(batches.offsets)[order]
    kept = batches.order[ranges_of(batches.offsets[:-1][order], sizes)]
    return Batches(kept, offsets_of(sizes), batches.max_len[order], batches.bucket[order])
