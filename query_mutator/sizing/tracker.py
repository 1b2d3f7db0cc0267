"""Follows every storage that tensors of a training step take and give back, without any memory being taken.

Under FakeTensorMode tensors have shapes and no data. This mode sees each operation's results, counts a storage when it
first appears and takes it off when the last tensor that uses it is gone, as an allocator would.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from query_mutator.sizing.scratch import scratch_bytes
from query_mutator.sizing.shapes import ShapeMemory

logger = logging.getLogger(__name__)

#: CUDA's allocator hands out multiples of this
BLOCK_BYTES = 512
_ATEN = torch.ops.aten
_DEVICE, _NUMBER = torch.ops.prim.device.default, _ATEN._local_scalar_dense.default


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = grad.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_FLOPS = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
_GUESSES = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0, torch.float16: 1.0, torch.bfloat16: 1.0}


@dataclass(slots=True)
class Ledger:
    """Live bytes now and at most, by phase, and every block taken (+) and given back (-), in order."""

    rounding: int = BLOCK_BYTES
    live: int = 0
    phase: str = "build"
    peaks: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[int, int]] = field(default_factory=list)  # number of the block, its bytes; -bytes when given back
    blocks: int = 0

    @property
    def peak(self) -> int:
        """Return the most bytes that were live at once."""
        return max(self.peaks.values(), default=0)

    def take(self, size: int) -> int:
        """Count a block; return its number."""
        size = -(-size // self.rounding) * self.rounding
        self.blocks += 1
        self.live += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        self.trace.append((self.blocks, size))
        return self.blocks

    def give_back(self, number: int, size: int) -> None:
        """Take a block off."""
        size = -(-size // self.rounding) * self.rounding
        self.live -= size
        self.trace.append((number, -size))


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages in a ledger while it is active; enter it inside the FakeTensorMode given."""

    def __init__(self, ledger: Ledger, mode: FakeTensorMode, *, scratch: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._shapes, self._scratch = ledger, ShapeMemory(mode), scratch
        self._seen = WeakIdKeyDictionary()
        self.flops = 0  # of matrix products, convolutions and attention

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While inside, peaks count for this phase."""
        before, self.ledger.phase = self.ledger.phase, name
        self.ledger.peaks[name] = max(self.ledger.peaks.get(name, 0), self.ledger.live)
        yield
        self.ledger.phase = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and saying so for every operation takes long

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry the operation out and count the storages of its results."""
        if func is _DEVICE:  # asked many times for each operation
            return args[0].device
        if func is _NUMBER:  # a number is asked for, and there is none
            return self._guess(args[0])
        result = self._shapes.call(func, args, kwargs or {})
        if (count := _FLOPS.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        if self._scratch and (size := scratch_bytes(func, args, result)):
            self.ledger.give_back(self.ledger.take(size), size)
        return result

    def _guess(self, tensor: Tensor) -> float | int | bool:
        _warn_of_guesses()
        return _GUESSES.get(tensor.dtype, 1)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        number = self.ledger.take(size)
        self._seen[storage] = number
        weakref.finalize(storage, self.ledger.give_back, number, size)


@cache
def _warn_of_guesses() -> None:
    logger.warning("the model's code asks for a number of a tensor; sized as if it were 1")
