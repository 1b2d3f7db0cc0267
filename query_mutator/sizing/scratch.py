"""Memory that a CPU's own convolutions take while they run, where oneDNN is off: pictures unrolled into columns.

    B samples, C channels, k k kernel, H W of what comes out: B C k k H W numbers

Rules read from what PyTorch's profiler counts; transposed convolutions, and copies that groups make, are left out. A
GPU's workspaces are another matter: `qm size calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_NNPACK_BATCH, _NNPACK_KERNEL = 16, 17  # from this batch on, and below this kernel, another library takes over


def scratch_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that an operation takes besides what comes of it; 0 for all but convolutions of pictures."""
    if func is _FORWARD:
        x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
        return 0 if transposed else _columns(x, weight, result, stride, padding, dilation, groups, backward=False)
    if func is _BACKWARD:
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args[:11]
        if transposed or not wanted[1]:  # it is the weights' gradient that needs columns
            return 0
        return _columns(x, weight, grad, stride, padding, dilation, groups, backward=True)
    return 0


def _columns(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    backward: bool,
) -> int:
    if x.dim() != 4 or (set(weight.shape[2:]) == {1} and set(stride) == {1} and set(padding) == {0}):
        return 0
    one = math.prod(weight.shape[1:]) * math.prod(out.shape[2:]) * x.element_size()  # of a sample and a group
    dilated = set(dilation) != {1}
    there = bool(torch.backends.nnpack.is_available())  # type: ignore[no-untyped-call]
    large = there and len(x) >= _NNPACK_BATCH and max(weight.shape[2:]) < _NNPACK_KERNEL
    if dilated or (large and groups == 1):
        return one if backward or dilated else 0
    return one * len(x)
