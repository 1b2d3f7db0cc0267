"""Emulate CUDA on a CPU: the caching allocator, and the operations that autocast leaves in fp32.

The allocator keeps freed blocks, splits them, and requests large segments from the driver:

    up to 1 MiB     from segments of 2 MiB
    below 10 MiB    from segments of 20 MiB
    larger          a segment of the size itself, rounded up to 2 MiB

Rules read from PyTorch's CUDACachingAllocator, for one stream and without expandable segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["FULL_PRECISION", "MIB", "CachingAllocator", "CudaFullPrecision", "reserved_peak"]

MIB = 2**20
_SMALL, _MIDDLE = 1 * MIB, 10 * MIB


Block = tuple[int, int]  # address, size


class CachingAllocator:
    """Best fit among the free blocks of a pool; splits blocks that are too large and merges free neighbors."""

    def __init__(self) -> None:
        self.reserved = 0
        self._address = 0  # of the next segment
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # small or not: size, then address
        self._starts: dict[int, int] = {}  # of free blocks: address -> size
        self._ends: dict[int, int] = {}  # address after a free block -> its address

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes."""
        small = size <= _SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, 0))
        address, found = self._take(pool[at], small) if at < len(pool) else self._segment(size, small)
        if found - size < (512 if small else _SMALL):
            return address, found
        self._keep((address + size, found - size), small)
        return address, size

    def release(self, block: Block, *, small: bool) -> None:
        """Keep a block for reuse, merged with its free neighbors."""
        address, size = block
        if address in self._ends:
            address, before = self._take((self._starts[self._ends[address]], self._ends[address]), small)
            size += before
        if address + size in self._starts:
            size += self._take((self._starts[address + size], address + size), small)[1]
        self._keep((address, size), small)

    def _segment(self, size: int, small: bool) -> Block:
        rounded = -(-size // (2 * MIB)) * 2 * MIB
        segment = 2 * MIB if small else 20 * MIB if size < _MIDDLE else rounded
        self.reserved += segment
        address, self._address = self._address, self._address + segment + 1  # a gap: segments do not merge
        return address, segment

    def _keep(self, block: Block, small: bool) -> None:
        address, size = block
        bisect.insort(self._free[small], (size, address))
        self._starts[address], self._ends[address + size] = size, address

    def _take(self, entry: tuple[int, int], small: bool) -> Block:
        size, address = entry
        pool = self._free[small]
        del pool[bisect.bisect_left(pool, entry)]
        del self._starts[address], self._ends[address + size]
        return address, size


def reserved_peak(trace: Sequence[tuple[int, int]]) -> int:
    """Return the bytes the allocator reserves for a trace of (block, +bytes) and (block, -bytes)."""
    allocator, blocks = CachingAllocator(), {}
    for number, size in trace:
        if size > 0:
            blocks[number] = allocator.allocate(size)
        elif size < 0 and number in blocks:
            allocator.release(blocks.pop(number), small=-size <= _SMALL)
    return allocator.reserved


#: PyTorch's "CUDA ops that can autocast to float32". A CPU's list differs; with it a model in 16 bit is sized too
#: small, because on CUDA softmax, norms and losses keep fp32 tensors for the backward pass.
FULL_PRECISION = frozenset(
    {
        torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax, F.softmax, F.log_softmax, F.layer_norm,
        F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div, F.normalize,
        F.binary_cross_entropy_with_logits, F.cosine_similarity, F.softplus, torch.exp, torch.log, torch.pow, torch.sum,
        torch.cumsum, torch.prod, torch.rsqrt, torch.norm, torch.nn.functional.softmin, Tensor.exp, Tensor.log,
        Tensor.pow, Tensor.__pow__, Tensor.sum, Tensor.cumsum, Tensor.prod, Tensor.rsqrt, Tensor.norm,
    }
)  # fmt: skip


class CudaFullPrecision(TorchFunctionMode):
    """While active, run the operations of FULL_PRECISION in fp32, whatever the device."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; if it is on the list, widen its half-precision tensors first."""
        kwargs = kwargs or {}
        if func not in FULL_PRECISION:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value
