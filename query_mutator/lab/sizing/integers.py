"""Keep the data of small integer tensors while a step is tracked on tensors without data.

Lengths, masks made of lengths and positions decide how large other tensors become. They are made of constants, so they
can be real while everything else is fake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

__all__ = ["run_keeping_integers"]

_MOST_NUMBERS = 2**20
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
_ATEN = torch.ops.aten
_PACK, _PACK_BACKWARD = _ATEN._pack_padded_sequence.default, _ATEN._pack_padded_sequence_backward.default
_INDEX = _ATEN.index.Tensor


def run_keeping_integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
