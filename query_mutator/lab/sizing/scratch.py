"""Learn what an operation takes in addition to its results, by running it once on real tensors of the same shapes.

Convolutions, recurrent layers and FFTs reorder, unroll and pad as the library, the processor and the shapes demand,
which no shape function knows. On a CPU such an operation is run once per signature, and PyTorch's profiler says what
was allocated; oneDNN allocates through PyTorch's allocator too, so its share is included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["PROBE_BYTES", "Cost", "Probe", "onednn", "peak_of", "recorded_allocations"]

PROBE_BYTES = 2**30  # most bytes of an operation's inputs and results that are allocated to learn its scratch
_ATEN = torch.ops.aten
_RNN, _RNN_BACKWARD = _ATEN.mkldnn_rnn_layer, _ATEN.mkldnn_rnn_layer_backward
_CONVOLUTIONS = {_ATEN.convolution: (0,), _ATEN.convolution_backward: (0, 1)}  # arguments whose first size is the batch
_WITH_SCRATCH = {*_CONVOLUTIONS, _RNN, _RNN_BACKWARD, _ATEN._fft_r2c, _ATEN._fft_c2r, _ATEN._fft_c2c}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes of scratch while an operation runs, at least and at most, and of each result's storage."""

    low: int
    high: int
    results: tuple[int, ...]


@dataclass(slots=True)
class Probe:
    """Runs operations that need scratch on real tensors, once per signature."""

    known: dict[Any, Cost] = field(default_factory=dict)

    def cost(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], workspaces: Any) -> Cost | None:
        """Return the cost of an operation, None if it needs no scratch; `workspaces` has their sizes by storage."""
        if func.overloadpacket not in _WITH_SCRATCH:
            return None
        described = tree_map(lambda leaf: _described(leaf, workspaces), (tuple(args), dict(kwargs)))
        key = (func, torch.backends.mkldnn.enabled, torch.is_grad_enabled(), repr(described))
        if key not in self.known:
            self.known[key] = _measured(func, *described)
        return self.known[key]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor without its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)))

    def first(self, batch: int) -> _Shape:
        return _Shape((batch, *self.size[1:]), self.stride, self.dtype)


def _described(leaf: Any, workspaces: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.numel() == 0 and (size := workspaces.get(leaf.untyped_storage())):  # fake tensors do not know its size
        return _Shape((size // leaf.element_size(),), (1,), leaf.dtype)
    return _Shape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, _Shape):
        return leaf
    return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype).zero_()


def _measured(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Cost:
    """Run the operation; one that is too large runs on fewer samples, where its scratch may or may not grow with B."""
    shapes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Shape)]
    too_large = 3 * sum(shape.nbytes for shape in shapes) / PROBE_BYTES  # results and scratch are about as large again
    where = _CONVOLUTIONS.get(func.overloadpacket, ())
    if too_large <= 1 or not where:
        return _run(func, args, kwargs)
    batch = args[where[0]].size[0]
    part = max(1, int(batch / too_large))
    small = tuple(arg.first(part) if at in where else arg for at, arg in enumerate(args))
    found = _run(func, small, kwargs)
    return Cost(low=found.low, high=found.high * batch // part, results=())


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Cost:
    with unset_fake_temporarily():  # oneDNN's LSTM keeps a workspace only while gradients are enabled
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        with recorded_allocations() as sizes:
            results = [leaf for leaf in tree_leaves(func(*real_args, **real_kwargs)) if isinstance(leaf, Tensor)]
        stored = tuple(result.untyped_storage().nbytes() for result in results)
    scratch = max(0, peak_of(sizes) - sum(stored))
    return Cost(low=scratch, high=scratch, results=stored)


@contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Switch oneDNN on or off inside the block; torch.backends.mkldnn.flags warns of Intel GPUs."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def recorded_allocations() -> Iterator[list[int]]:
    """Yield a list that has, after the block, what PyTorch allocated (+) and freed (-) on the CPU, in order."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its library prints when it starts and stops
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield sizes
    events = profiler.profiler.kineto_results.events()
    sizes += [event.nbytes() for event in events if event.name() == "[memory]"]


def peak_of(sizes: Sequence[int]) -> int:
    """Return the most bytes live at once."""
    return max(accumulate(sizes, initial=0))
