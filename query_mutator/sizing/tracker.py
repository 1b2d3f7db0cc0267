"""Track every storage that a training step allocates and frees, without allocating memory.

Under FakeTensorMode tensors have shapes and no data. The tracker sees each operation's results, counts a storage when
it first appears and subtracts it when its last tensor is gone, as an allocator would.

    B samples, C channels, k k kernel, H W of a convolution's output
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["BLOCK_BYTES", "Ledger", "StorageTracker"]

logger = logging.getLogger(__name__)

MODEL_PHASES = ("build", "inputs", "forward", "backward")  # with code of the model
BLOCK_BYTES = 512  # CUDA's allocator returns multiples of this
_ATEN = torch.ops.aten
_DEVICE, _NUMBER = torch.ops.prim.device.default, _ATEN._local_scalar_dense.default
_FORWARD, _BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_NNPACK_BATCH, _NNPACK_KERNEL = 16, 17  # NNPACK runs convolutions from this batch on, below this kernel size


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


@dataclass(slots=True)
class Ledger:
    """Live bytes, their peak in each phase, and every block allocated and freed, in order."""

    rounding: int = BLOCK_BYTES
    live: int = 0
    phase: str = "build"
    peaks: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[int, int]] = field(default_factory=list)  # (number of the block, +bytes or -bytes)
    blocks: int = 0

    def allocate(self, size: int) -> int:
        """Count a block; return its number."""
        size = -(-size // self.rounding) * self.rounding
        self.blocks += 1
        self.live += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        self.trace.append((self.blocks, size))
        return self.blocks

    def free(self, number: int, size: int) -> None:
        """Subtract a block."""
        size = -(-size // self.rounding) * self.rounding
        self.live -= size
        self.trace.append((number, -size))


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages in a ledger, and floating-point operations; enter it inside the FakeTensorMode `mode`.

    `scratch` counts the columns that a CPU's convolutions unroll, too.
    """

    def __init__(self, ledger: Ledger, mode: FakeTensorMode, *, scratch: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._mode, self._scratch = ledger, mode, scratch
        self._seen = WeakIdKeyDictionary()
        self.flops = 0  # of matrix products, convolutions and attention

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count peaks for this phase while inside."""
        before, self.ledger.phase = self.ledger.phase, name
        self.ledger.peaks[name] = max(self.ledger.peaks.get(name, 0), self.ledger.live)
        yield
        self.ledger.phase = before

    @staticmethod
    def _should_skip_dynamo() -> bool:
        return False  # nothing is compiled here, and the default wraps every operation, which is slow

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages of its results."""
        if func is _DEVICE:  # called many times for each operation
            return args[0].device
        if func is _NUMBER:  # .item(): there is no data to read
            if self.ledger.phase in MODEL_PHASES:  # Adam reads its step count, which changes no size
                _warn_of_guesses()
            kind = args[0].dtype
            return 1.0 if kind.is_floating_point else True if kind is torch.bool else 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor):  # copy.deepcopy copies the mode too, and views across modes are copies
                leaf.fake_mode = self._mode
        result = func(*args, **(kwargs or {}))
        if (count := _FLOPS.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        if self._scratch and (size := _scratch_bytes(func, args, result)):
            self.ledger.free(self.ledger.allocate(size), size)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        number = self.ledger.allocate(size)
        self._seen[storage] = number
        weakref.finalize(storage, self.ledger.free, number, size)


@cache
def _warn_of_guesses() -> None:
    logger.warning("the training step calls .item() on a tensor, which has no data here; assuming 1")


def _scratch_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes of im2col columns that a CPU's own 2-D convolution needs while it runs: B C k k H W numbers.

    Rules read from what PyTorch's profiler counts with oneDNN off; transposed convolutions and the copies that groups
    make are left out. A GPU's workspaces are for `qm size calibrate`.
    """
    if func is _FORWARD:
        out = result
    elif func is _BACKWARD and args[10][1]:  # only the gradient of the weights needs columns
        out, args = args[0], args[1:]
    else:
        return 0
    x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    pointwise = set(weight.shape[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if transposed or x.dim() != 4 or pointwise:
        return 0
    sample: int = math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * x.element_size()  # of one sample and group
    if set(dilation) != {1}:
        return sample
    nnpack = bool(torch.backends.nnpack.is_available())  # type: ignore[no-untyped-call]
    if nnpack and len(x) >= _NNPACK_BATCH and max(weight.shape[2:]) < _NNPACK_KERNEL and groups == 1:
        return sample if func is _BACKWARD else 0
    return sample * len(x)
