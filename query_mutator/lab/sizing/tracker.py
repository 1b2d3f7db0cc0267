"""Track every storage that a training step allocates and frees, without allocating memory.

Under FakeTensorMode tensors have shapes and no data. The tracker sees each operation's results, counts a storage when
it first appears and subtracts it when its last tensor is gone, as an allocator would.

    T steps, B samples, I inputs and H units of a recurrent layer
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from query_mutator.lab.sizing.integers import run_keeping_integers
from query_mutator.lab.sizing.scratch import Probe

__all__ = ["BLOCK_BYTES", "GUESSES", "Ledger", "StorageTracker"]

logger = logging.getLogger(__name__)

MODEL_PHASES = ("build", "inputs", "forward", "backward")  # with code of the model
GUESSES = ((1.0, True, 1), (-1e6, False, 2), (1e6, True, 3))  # what .item() returns: a float, a bool, an integer
BLOCK_BYTES = 512  # CUDA's allocator returns multiples of this
_ATEN = torch.ops.aten
_ADD, _INDEX_PUT = _ATEN.add.Tensor, _ATEN.index_put.default
_DEVICE, _NUMBER = torch.ops.prim.device.default, _ATEN._local_scalar_dense.default


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = grad.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _lstm_flops(x: Tensor, of_inputs: Tensor, of_units: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * (of_inputs.numel() + of_units.numel())  # 2 T B (4 H I + 4 H H)


def _lstm_backward_flops(*args: Any, **kwargs: Any) -> int:
    return 2 * _lstm_flops(*args, **kwargs)  # gradients of inputs and of weights


_FLOPS = {
    **flop_registry,
    _ATEN.mkldnn_rnn_layer: _lstm_flops,
    _ATEN.mkldnn_rnn_layer_backward: _lstm_backward_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


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
    """Counts storages in a ledger, and floating-point operations; enter it inside the FakeTensorMode `mode`.

    `probe` learns the scratch of operations on a CPU. Small tensors of integers that no fake tensor enters keep their
    data, as lengths of sequences decide sizes. `.item()` of a tensor without data returns one of the guesses.
    """

    def __init__(self, ledger: Ledger, mode: FakeTensorMode, *, probe: Probe | None = None, guess: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._mode, self._probe, self._guess = ledger, mode, probe, guess
        self._seen, self._workspaces = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._deferred: list[
            UntypedStorage
        ] = []  # results of what real code does in place, counted at the next operation
        self._call = (0, 0)  # the Python frame and its instruction that ran the last operation
        self.guessed = False
        self.flops = 0  # of matrix products, convolutions, recurrent layers and attention

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
        result = run_keeping_integers(func, args, kwargs) if keep else func(*args, **kwargs)
        if (count := _FLOPS.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        cost = None if self._probe is None else self._probe.cost(func, args, kwargs, self._workspaces)
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
