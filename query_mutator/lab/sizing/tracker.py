"""Track every storage that a training step allocates and frees, without allocating memory.

Under FakeTensorMode tensors have shapes and no data. The tracker sees each operation's results, counts a storage when
it first appears and subtracts it when its last tensor is gone, as an allocator would.

scratch     convolutions, recurrent layers and FFTs take more than their results, as library, processor and shapes
            demand: on a CPU such an operation is run once per signature, and PyTorch's profiler says what it allocated
integers    lengths, masks and positions are made of constants and decide other tensors' sizes: they keep their data
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "BLOCK_BYTES", "GUESSES", "PROBE_BYTES", "Ledger", "StorageTracker", "onednn", "peak_of",
    "recorded_allocations",
]  # fmt: skip

logger = logging.getLogger(__name__)

MODEL_PHASES = ("build", "inputs", "forward", "backward")  # with code of the model
GUESSES = ((1.0, True, 1), (-1e6, False, 2), (1e6, True, 3))  # what .item() returns: a float, a bool, an integer
BLOCK_BYTES = 512  # CUDA's allocator returns multiples of this
_ATEN = torch.ops.aten
_ADD, _INDEX_PUT = _ATEN.add.Tensor, _ATEN.index_put.default
_DEVICE, _NUMBER = torch.ops.prim.device.default, _ATEN._local_scalar_dense.default
PROBE_BYTES = 2**30  # most bytes of an operation's inputs and results that are allocated to learn its scratch
_RNN, _RNN_BACKWARD = _ATEN.mkldnn_rnn_layer, _ATEN.mkldnn_rnn_layer_backward
_CONVOLUTIONS = {_ATEN.convolution: (0,), _ATEN.convolution_backward: (0, 1)}  # arguments whose first size is the batch
_WITH_SCRATCH = {*_CONVOLUTIONS, _RNN, _RNN_BACKWARD, _ATEN._fft_r2c, _ATEN._fft_c2r, _ATEN._fft_c2c}
_MOST_NUMBERS = 2**20
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
_PACK, _PACK_BACKWARD = _ATEN._pack_padded_sequence.default, _ATEN._pack_padded_sequence_backward.default
_INDEX = _ATEN.index.Tensor


@dataclass(slots=True)
class Ledger:
    """Live bytes, their peak in each phase, and every block allocated and freed, in order."""

    rounding: int = BLOCK_BYTES
    live: int = 0
    phase: str = "build"
    peaks: dict[str, int] = field(default_factory=dict)
    lows: dict[str, int] = field(default_factory=dict)  # peaks if scratch takes the least that it may
    trace: list[tuple[int, int]] = field(default_factory=list)  # (number of the block, +bytes or -bytes)
    blocks: int = 0

    def allocate(self, size: int) -> int:
        """Count a block; return its number."""
        size = -(-size // self.rounding) * self.rounding
        self.blocks += 1
        self.live += size
        self.note_peak()
        self.trace.append((self.blocks, size))
        return self.blocks

    def note_peak(self, low: int = 0, high: int = 0) -> None:
        """Raise the phase's peaks to what is live now, plus scratch of `low` to `high` bytes."""
        for peaks, scratch in ((self.lows, low), (self.peaks, high)):
            peaks[self.phase] = max(peaks.get(self.phase, 0), self.live + scratch)

    def free(self, number: int, size: int) -> None:
        """Subtract a block."""
        size = -(-size // self.rounding) * self.rounding
        self.live -= size
        self.trace.append((number, -size))


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages in a ledger; enter it inside the FakeTensorMode `mode`.

    With `on_cpu` the scratch of operations counts. Small tensors of integers that no fake tensor enters keep their
    data, as lengths of sequences decide sizes. `.item()` of a tensor without data returns one of the guesses.
    """

    def __init__(self, ledger: Ledger, mode: FakeTensorMode, *, on_cpu: bool = False, guess: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._mode, self._on_cpu, self._guess = ledger, mode, on_cpu, guess
        self._seen, self._workspaces = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._deferred: list[UntypedStorage] = []  # of what real code does in place, counted at the next operation
        self._call = (0, 0)  # the Python frame and its instruction that ran the last operation
        self.guessed = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count peaks for this phase while inside."""
        before, self.ledger.phase = self.ledger.phase, name
        self.ledger.note_peak()
        yield
        self._count_deferred()
        self.ledger.phase = before

    @staticmethod
    def _should_skip_dynamo() -> bool:
        return False  # nothing is compiled here, and the default wraps every operation, which is slow

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages of its results."""
        if func is _DEVICE:  # called many times for each operation
            return args[0].device
        if func is _NUMBER:  # .item()
            return self._number(args[0])
        self._count_deferred()
        kwargs, in_place = kwargs or {}, self._is_in_place(func, args)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor):  # copy.deepcopy copies the mode too, and views across modes are copies
                leaf.fake_mode = self._mode
        keep = self.ledger.phase != "build"  # a model may be copied, which works on fake tensors alone
        result = _run_keeping_integers(func, args, kwargs) if keep else func(*args, **kwargs)
        cost = _cost(func, args, kwargs, self._workspaces) if self._on_cpu else None
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if in_place:
            self._deferred.append(result.untyped_storage())
            return result
        for at, leaf in enumerate(results):
            storage = leaf.untyped_storage()
            if cost is not None and cost.results and not storage.nbytes():
                self._workspaces[storage] = cost.results[at]
            self._count(storage)
        if cost is not None:
            self.ledger.note_peak(cost.low, cost.high)
        return result

    def _is_in_place(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether real tensors are changed in place here, where fake ones have a result of their own.

        It holds for sums of gradients, gradients of indexing and the bias of a linear layer. A result that is counted
        once the tensor is gone that real code would change takes as much. The bias is added in the
        same Python call as the product.
        """
        before, frame = self._call, sys._getframe(2)
        self._call = (id(frame), frame.f_lasti)
        by_autograd = self.ledger.phase == "backward" and not torch.is_grad_enabled()  # enabled in recomputed forwards
        if func is not _ADD or not all(isinstance(part, Tensor) for part in args[:2]):
            return by_autograd and func is _INDEX_PUT
        one, other = args[:2]
        if by_autograd:
            apart = one.untyped_storage() is not other.untyped_storage()
            return apart and one.shape == other.shape and not one._is_view()  # a view's base keeps the storage
        return bool(one.dim() > other.dim() == 1 and before == self._call)

    def _count_deferred(self) -> None:
        while self._deferred:
            self._count(self._deferred.pop())

    def _count(self, storage: UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes() or self._workspaces.get(storage, 0)  # type: ignore[no-untyped-call]
        number = self.ledger.allocate(size)
        self._seen[storage] = number
        weakref.finalize(storage, self.ledger.free, number, size)

    def _number(self, tensor: Tensor) -> float | bool | int:
        """Return the number if it is known, or a guess; an optimizer's step count changes no size."""
        known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        if self.ledger.phase in MODEL_PHASES:
            self.guessed = True
            _warn_of_guesses()
        dtype = tensor.dtype
        kind = 0 if dtype.is_floating_point else 1 if dtype is torch.bool else 2
        return GUESSES[self._guess][kind]


@cache
def _warn_of_guesses() -> None:
    logger.warning("the model's code calls .item() on a tensor, which has no data here; assuming 1")


# --- scratch of operations on a CPU ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes of scratch while an operation runs, at least and at most, and of each result's storage."""

    low: int
    high: int
    results: tuple[int, ...]


_known_costs: dict[Any, Cost] = {}  # by operation and signature, for all estimates


def _cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], workspaces: Any) -> Cost | None:
    """Return the cost of an operation, None if it needs no scratch; `workspaces` has their sizes by storage."""
    if func.overloadpacket not in _WITH_SCRATCH:
        return None
    described = tree_map(lambda leaf: _described(leaf, workspaces), (tuple(args), dict(kwargs)))
    key = (func, torch.backends.mkldnn.enabled, torch.is_grad_enabled(), repr(described))
    if key not in _known_costs:
        _known_costs[key] = _measured(func, *described)
    return _known_costs[key]


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


# --- integers that keep their data -----------------------------------------------------------------------------------


def _run_keeping_integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on fake tensors, or on real ones if they and its results are small and hold integers."""
    if func is _PACK and _is_real(args[1]):
        return _pack(args[0], args[1])
    if func is _PACK_BACKWARD and _is_real(args[2]):
        return args[0].new_empty([int(size) for size in args[1]])
    if func is _INDEX and isinstance(args[0], FakeTensor):
        args = (args[0], [part for mask in args[1] for part in _as_indices(mask)])
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(leaf, FakeTensor) for leaf in given):
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not results or not all(_is_small_integer(leaf) for leaf in results):
        return result
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _pack(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed rows, without data, and the number of sequences that are still running at each step."""
    with unset_fake_temporarily():
        steps = torch.arange(int(lengths.max()))
        running = (lengths[None] > steps[:, None]).sum(1)
        rows = int(lengths.sum())
    return padded.new_empty(rows, *padded.shape[2:]), running


def _as_indices(mask: Tensor | None) -> Sequence[Tensor | None]:
    if mask is None or mask.dtype is not torch.bool or not _is_real(mask):
        return [mask]
    with unset_fake_temporarily():
        return mask.nonzero().unbind(1)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)


def _is_small_integer(leaf: Tensor) -> bool:
    return leaf.dtype in _INTEGERS and leaf.device.type == "cpu" and leaf.numel() <= _MOST_NUMBERS
