"""The processes that train together: who each is, and how gradients and sums are shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed

from query_mutator.batching.distributed.config import DistributedConfig


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[DistributedConfig]:
    """Join the process group that the launcher describes, and leave it at the end; alone there is none."""
    config = DistributedConfig.from_env()
    if not config.is_distributed:
        yield config
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    config.set_global()
    try:
        yield config
    finally:
        distributed.destroy_process_group()


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the gradients of all ranks, in place; a rank without any adds zeros."""
    if not distributed.is_initialized():
        return
    waiting = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        waiting.append(distributed.all_reduce(parameter.grad, async_op=True))
    for one in waiting:
        one.wait()


def summed(numbers: Iterable[float], device: torch.device) -> list[float]:
    """Return the sums of these numbers over all ranks."""
    values = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(values)
    return [float(value) for value in values.tolist()]
