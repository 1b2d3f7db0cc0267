"""CUDA's autocast on another device: operations that stay in 32 bit there are brought back to it.

The list is that of PyTorch's "CUDA ops that can autocast to float32"; a CPU's list is another one. Without it a model
in 16 bit is sized too small: softmax, norms and losses keep tensors of 32 bit for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_HALF = (torch.float16, torch.bfloat16)
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
    """While active, operations of the list are carried out in 32 bit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry `func` out, its half-precision tensors widened first when it is on the list."""
        kwargs = kwargs or {}
        if func not in FULL_PRECISION:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
