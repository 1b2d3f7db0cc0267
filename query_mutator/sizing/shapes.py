"""What operations make of shapes, worked out once for each kind of call: like layers are most of a large model.

FakeTensorMode works out the shapes of every call afresh, or with a key that takes longer than that. Here a call is
known by its operation, the types and layouts of its tensors and its other arguments; what came of it is made again.
Calls that depend on more (data, constants, sparse or complex tensors, layouts that change in place) go the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_HARD_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_HARD_NAMES = ("set_", "resize", "lift", "_resize")


class _TooHard(Exception):
    """The call's shapes depend on more than its key holds."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a call gave: one of its arguments, a view of one, or a new one."""

    argument: int | None
    layout: tuple[Any, ...] | None  # None when it is the argument itself


@dataclass(frozen=True, slots=True)
class _Outcome:
    """All that a call gave."""

    outputs: tuple[_Output | None, ...]
    pack: Callable[[list[Any]], Any]


class ShapeMemory:
    """Carries operations on fake tensors out, those of known kinds without working their shapes out again."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Any, _Outcome | None] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what `func` gives for fake tensors."""
        if _only_writes(func):
            return None
        tensors: list[FakeTensor] = []
        try:
            key = (func, _kind(args, tensors), _kind(kwargs, tensors), torch.get_default_dtype())
            self._adopt(tensors)
            if not _is_simple(func):
                return func(*args, **kwargs)
            outcome = self._known[key]
        except (_TooHard, TypeError):  # TypeError: an argument that cannot be part of a key
            return func(*args, **kwargs)
        except KeyError:
            return self._remembered(func, args, kwargs, key, tensors)
        return func(*args, **kwargs) if outcome is None else self._again(outcome, tensors)

    def _adopt(self, tensors: list[FakeTensor]) -> None:
        """Take in what `copy.deepcopy` made: it has a copy of the mode too, and views of it would be copies."""
        for tensor in tensors:
            if tensor.fake_mode is not self.mode:
                tensor.fake_mode = self.mode

    def _remembered(self, func: Any, args: Any, kwargs: Any, key: Any, tensors: list[FakeTensor]) -> Any:
        result = func(*args, **kwargs)
        try:
            changed = (_kind(args, []), _kind(kwargs, [])) != key[1:3]
            self._known[key] = None if changed else _outcome(result, tensors)
        except _TooHard:
            self._known[key] = None
        return result

    def _again(self, outcome: _Outcome, tensors: list[FakeTensor]) -> Any:
        with in_kernel_invocation_manager(self.mode):
            made = [None if output is None else self._made(output, tensors) for output in outcome.outputs]
        return outcome.pack(made)

    def _made(self, output: _Output, tensors: list[FakeTensor]) -> Tensor:
        if output.layout is None:
            return tensors[output.argument or 0]
        dtype, shape, stride, offset, device = output.layout
        if output.argument is None:
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            elem = torch.as_strided(tensors[output.argument], shape, stride, offset)
        return FakeTensor(self.mode, elem, device)


@cache
def _is_simple(func: Any) -> bool:
    """Return whether shapes follow from the arguments' shapes alone, and stay as they are in arguments."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return not _HARD_TAGS & set(func.tags) and not _name(func).startswith(_HARD_NAMES)


@cache
def _only_writes(func: Any) -> bool:
    """Return whether a call does nothing but change lists of tensors in place, which leaves shapes as they are."""
    return isinstance(func, OpOverload) and _name(func).startswith("_foreach_") and not func._schema.returns


def _name(func: OpOverload) -> str:
    return str(func._schema.name).partition("::")[2]


def _kind(value: Any, tensors: list[FakeTensor]) -> Any:
    """Return what of an argument decides on shapes; its tensors are added to `tensors` in order."""
    if isinstance(value, FakeTensor):
        tensors.append(value)
        return _layout(value)
    if isinstance(value, (list, tuple)):
        return tuple([_kind(part, tensors) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _kind(part, tensors)) for name, part in value.items()])
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _TooHard
    return type(value), value


def _layout(tensor: FakeTensor) -> tuple[Any, ...]:
    if tensor.constant is not None or tensor.layout is not torch.strided or tensor.dtype.is_complex:
        raise _TooHard
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.fake_device


def _outcome(result: Any, tensors: list[FakeTensor]) -> _Outcome:
    if result is None or isinstance(result, Tensor):
        return _Outcome(outputs=(_output(result, tensors),), pack=lambda made: made[0])
    if not isinstance(result, (list, tuple)):
        raise _TooHard
    outputs = tuple(_output(one, tensors) for one in result)
    new = [one.untyped_storage() for one, output in zip(result, outputs, strict=True) if output and _is_new(output)]
    if len(set(map(id, new))) < len(new):  # parts of one storage
        raise _TooHard
    return _Outcome(outputs=outputs, pack=type(result))


def _is_new(output: _Output) -> bool:
    return output.argument is None


def _output(one: Any, tensors: list[FakeTensor]) -> _Output | None:
    if one is None:
        return None
    if not isinstance(one, FakeTensor):
        raise _TooHard
    layout, storage = _layout(one), one.untyped_storage()
    for place, tensor in enumerate(tensors):
        if tensor is one:
            return _Output(argument=place, layout=None)
        if tensor.untyped_storage() is storage:
            if tensor.dtype != one.dtype:
                raise _TooHard
            return _Output(argument=place, layout=layout)
    if one.storage_offset() or storage.nbytes() != _bytes(one):
        raise _TooHard
    return _Output(argument=None, layout=layout)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a new tensor of this layout takes."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
