"""Which items go into which batch: shuffle, sort within windows, cut at the budget, shuffle the batches.

n items, B batches. An item is what stays together: one sample, an indivisible group of them, or a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[Any]  # int32 where the numbers fit: half the memory, faster to gather by


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSettings:
    """What decides the batches; every item's padded rows must fit `token_budget` on their own."""

    token_budget: int  # rows times padded length, at most
    limit: int  # no row is longer, padded or not
    bounds: tuple[int, ...]  # longest length of each bucket
    bucket_pads: tuple[int, ...] | None = None  # padded length of each bucket; None pads to the longest of the batch
    pad_multiple: int = 8
    window: int = 4096
    drop_last: bool = False
    interleave: bool = True
    max_samples: int | None = None
    loss_token_budget: int | None = None


class Items(NamedTuple):
    """Longest row [n], and where they matter number of rows [n] and tokens with a loss [n] of every item."""

    lengths: NDArray[Any]
    rows: NDArray[Any] | None = None
    loss: NDArray[Any] | None = None

    def take(self, index: IndexArray) -> Items:
        """Return these items alone."""
        return Items(*(None if column is None else column[index] for column in self))  # type: ignore[arg-type]


class Batches(NamedTuple):
    """Items in batch order [kept]; batch b holds order[offsets[b]:offsets[b+1]], padded to max_len[b]."""

    order: IndexArray
    offsets: IndexArray
    max_len: IndexArray
    bucket: IndexArray


def permutation(count: int, *seed: int) -> IndexArray:
    """Return 0..count-1 in an order that depends on all seed numbers and stays the same in every numpy release."""
    # raw words of a bit generator are fixed for good, unlike Generator.permutation; the low bits make them unique
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    mask = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= mask
    return keys.astype(_index_type(count))


def _index_type(count: int) -> type[np.signedinteger[Any]]:
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def fill_batches(items: Items, settings: FillSettings, *, seed: tuple[int, ...]) -> Batches:
    """Return the batches of one epoch; the order of samples and of batches follows from `seed` alone."""
    order = permutation(len(items.lengths), *seed, 0)
    if settings.bucket_pads is None:
        batches = _fill_windows(items, order, settings)
    else:
        batches = _fill_buckets(items, order, settings)
    if settings.interleave:
        return _arrange(batches, permutation(len(batches.max_len), *seed, 1))
    return _arrange(batches, np.argsort(batches.bucket, kind="stable"))


def _fill_windows(items: Items, order: IndexArray, settings: FillSettings) -> Batches:
    """Cut sorted windows; what is left at the windows' ends is pooled and goes through windows twice as wide."""
    parts: list[Batches] = []
    window = settings.window
    while len(order):
        order = order[_window_sort(items.lengths[order], window)]
        here = items.take(order)
        edges = [*range(0, len(order), window), len(order)]
        starts, sizes, full = _cut(here, _longest_pads(here.lengths, settings), edges, settings)
        last = len(edges) == 2
        taken = full if last and settings.drop_last else full | last
        parts.append(_batches(order, here.lengths, starts[taken], sizes[taken], settings))
        order = order[:0] if last else order[ranges_of(starts[~full], sizes[~full])]
        window *= 2  # a window that one batch could hold leaves everything: only a wider one ends
    return _join(parts)


def _fill_buckets(items: Items, order: IndexArray, settings: FillSettings) -> Batches:
    """Cut every bucket in shuffled order, padded to the bucket."""
    assert settings.bucket_pads is not None
    buckets = np.searchsorted(np.array(settings.bounds), items.lengths[order]).astype(np.int16)
    order = order[np.argsort(buckets, kind="stable")]
    here = items.take(order)
    edges = [0, *np.cumsum(np.bincount(buckets, minlength=len(settings.bounds))).tolist()]
    pads = np.repeat(np.array(settings.bucket_pads), np.diff(edges))
    starts, sizes, full = _cut(here, pads, edges, settings)
    taken = full if settings.drop_last else np.ones(len(full), bool)
    return _batches(order, here.lengths, starts[taken], sizes[taken], settings)


def _longest_pads(lengths: NDArray[Any], settings: FillSettings) -> NDArray[Any]:
    """Return the padded length of a batch whose longest row has this length, for every length."""
    multiple = settings.pad_multiple
    pads: NDArray[Any] = np.minimum((lengths + (multiple - 1)) // multiple * multiple, settings.limit)
    return pads


def _window_sort(lengths: NDArray[Any], window: int) -> IndexArray:
    """Return positions that put every window of `lengths` in descending order, equal lengths as they come."""
    count = len(lengths)
    whole = count // window * window
    order = np.empty(count, _index_type(count))
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
    # one sort of unique whole numbers (length, then place) is several times faster than an argsort with ties
    wide: Any = np.uint32 if longest.bit_length() + bits <= 32 else np.uint64
    keys: NDArray[Any] = (longest - lengths).astype(wide) << wide(bits)
    keys |= np.arange(width, dtype=wide)
    keys.sort(axis=1)
    keys &= wide((1 << bits) - 1)
    begins = np.arange(rows, dtype=_index_type(lengths.size)) * width
    order: IndexArray = keys.astype(begins.dtype) + begins[:, None]
    return order


def _cut(
    items: Items, pads: NDArray[Any], edges: list[int], settings: FillSettings
) -> tuple[IndexArray, IndexArray, NDArray[np.bool_]]:
    """Return start, size and fullness of the batches that fill the budget from the front of each stretch.

    A batch that begins at i is padded to pads[i], so pads must not rise within a stretch. It is full when the
    budget ended it, not the stretch.
    """
    reach_of = _reaches(items, pads, settings)
    starts: list[int] = []
    full: list[bool] = []
    for begin, end in pairwise(edges):
        position = begin
        while position < end:
            reach = reach_of(position)
            starts.append(position)
            full.append(reach <= end)
            position = min(reach, end)
    index = np.array(starts, np.int64)
    return index, np.diff(index, append=edges[-1]), np.array(full, bool)


def _reaches(items: Items, pads: NDArray[Any], settings: FillSettings) -> Callable[[int], int]:
    """Return the function that says where a batch that begins at i ends at the latest."""
    most = settings.max_samples or settings.token_budget
    if items.rows is None and settings.loss_token_budget is None:
        budget, pad_at = settings.token_budget, pads.item
        return lambda i: i + max(1, min(budget // pad_at(i), most))
    here = np.arange(len(pads), dtype=np.int64)
    rows = np.minimum(settings.token_budget // pads, most)
    reach = here + rows if items.rows is None else _reach(items.rows, rows)
    if items.loss is not None and settings.loss_token_budget is not None:
        reach = np.minimum(reach, _reach(items.loss, np.int64(settings.loss_token_budget)))
    return np.maximum(reach, here + 1).item


def _reach(amounts: NDArray[Any], allowed: NDArray[Any] | np.int64) -> IndexArray:
    """Return for every i the largest j such that amounts[i:j] sums to at most allowed[i]."""
    total = offsets_of(amounts)
    return np.searchsorted(total, total[:-1] + allowed, side="right") - 1


def ranges_of(starts: IndexArray, sizes: IndexArray) -> IndexArray:
    """Return start..start+size-1 of every pair, one after the other."""
    offsets = offsets_of(sizes)
    kind = _index_type(max(int(starts.max(initial=0)) + int(sizes.max(initial=0)), int(offsets[-1])))
    ranges: IndexArray = np.arange(offsets[-1], dtype=kind) + np.repeat((starts - offsets[:-1]).astype(kind), sizes)
    return ranges


def _batches(
    order: IndexArray, lengths: NDArray[Any], starts: IndexArray, sizes: IndexArray, settings: FillSettings
) -> Batches:
    """Return batches of stretches of `order`; the first row of each is its longest, or any of its bucket."""
    longest = lengths[starts]
    bucket = np.searchsorted(np.array(settings.bounds), longest)
    if settings.bucket_pads is None:
        max_len = _longest_pads(longest, settings)
    else:
        max_len = np.array(settings.bucket_pads)[bucket]
    return Batches(order[ranges_of(starts, sizes)], offsets_of(sizes), max_len.astype(np.int64), bucket)


def offsets_of(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return where stretches of these sizes [k] begin and end when laid end to end, int64 [k + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _join(parts: list[Batches]) -> Batches:
    if not parts:
        empty = np.empty(0, np.int64)
        return Batches(empty, np.zeros(1, np.int64), empty, empty)
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Batches(
        np.concatenate([part.order for part in parts]),
        offsets_of(sizes),
        np.concatenate([part.max_len for part in parts]),
        np.concatenate([part.bucket for part in parts]),
    )


def _arrange(batches: Batches, order: IndexArray) -> Batches:
    """Return the batches in another order."""
    sizes = np.diff(batches.offsets)[order]
    kept = batches.order[ranges_of(batches.offsets[:-1][order], sizes)]
    return Batches(kept, offsets_of(sizes), batches.max_len[order], batches.bucket[order])
