"""Array helpers: stretches laid end to end, and permutations that stay the same in every numpy release."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[Any]  # int32 where the numbers fit: half the memory, faster to gather by


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """Return the smaller of int32 and int64 that holds `count`."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def permutation(count: int, *seed: int) -> IndexArray:
    """Return 0..count-1 in an order that depends on all seed numbers."""
    # SeedSequence joins the 32-bit words of its numbers, so [2**32, 0] would be [0, 1]: higher words follow the others.
    high = [number >> 32 for number in seed]
    words = [*(number % 2**32 for number in seed), *high, 1] if any(high) else seed
    # The raw words of a bit generator never change, unlike Generator.permutation; the low bits make them unique.
    raw = np.random.PCG64(np.random.SeedSequence(words)).random_raw(count)
    mask = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= mask
    return keys.astype(index_type(count))


def offsets_of(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return where stretches of these sizes [k] begin and end when laid end to end, int64 [k + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def ranges_of(starts: IndexArray, sizes: IndexArray) -> IndexArray:
    """Return start..start+size-1 of every pair, one after the other."""
    offsets = offsets_of(sizes)
    kind = index_type(max(int(starts.max(initial=0)) + int(sizes.max(initial=0)), int(offsets[-1])))
    ranges: IndexArray = np.arange(offsets[-1], dtype=kind) + np.repeat((starts - offsets[:-1]).astype(kind), sizes)
    return ranges


def sums_of(values: NDArray[Any], begins: NDArray[Any]) -> NDArray[np.int64]:
    """Return the sum of every stretch of `values` that begins at `begins` and ends where the next one begins."""
    return np.add.reduceat(values, begins, dtype=np.int64) if len(begins) else np.empty(0, np.int64)


def reach_of(amounts: NDArray[Any], allowed: NDArray[Any] | np.int64 | int) -> IndexArray:
    """Return for every i the largest j such that amounts[i:j] sums to at most allowed[i]."""
    total = offsets_of(amounts)
    return np.searchsorted(total, total[:-1] + allowed, side="right") - 1
