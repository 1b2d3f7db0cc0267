"""Sizes for collecting experience: memory of buffers and collectors, calls in flight for a model server.

C transitions kept, N environments, T steps of a rollout
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = [
    "CALLS_PER_STEP", "ENVIRONMENTS_PER_CALL", "PROCESS_BYTES", "cache_bytes", "cache_line", "replay_bytes",
    "rollout_bytes", "size_calls",
]  # fmt: skip

PROCESS_BYTES = 256 * 2**20  # an interpreter with PyTorch, started by spawn; forked ones share most of it
_ACTION_BYTES = 8  # a discrete action
CALLS_PER_STEP = 2  # a rewrite and the answer to it
ENVIRONMENTS_PER_CALL = 2  # so that one is nearly always ready when another's reply arrives


def replay_bytes(obs_bytes: int, *, capacity: int, prioritized: bool = False) -> int:
    """Return the bytes of a replay buffer as Stable-Baselines3 lays it out, with a sum tree of 8 bytes a node."""
    kept = 2 * obs_bytes + _ACTION_BYTES + 3 * 4  # reward, done, timeout
    tree = 16 * 2 ** math.ceil(math.log2(max(2, capacity))) if prioritized else 0
    return capacity * kept + tree


def rollout_bytes(obs_bytes: int, *, steps: int, num_envs: int) -> int:
    """Return the bytes of an on-policy rollout: observation, action and six floats for each step."""
    # reward, return, episode start, value, logprob, advantage
    return steps * num_envs * (obs_bytes + _ACTION_BYTES + 6 * 4)


def size_calls(slots: int, *, width: int | None, service_s: float) -> str:
    """Return the trainer's flags for a server with `slots` concurrent calls of `service_s` each, and what they allow.

    `width` is the number of calls that the probe sent at once: if as many slots were seen, there may be more. It is
    None for slots that the server reports.
    """
    count = "1 slot" if slots == 1 else f"{slots} slots"
    seen = f"{count} or more" if width is not None and slots >= width else count
    return (
        f"--batch-size {slots} --num-processes {ENVIRONMENTS_PER_CALL * slots}: "
        f"at most {slots / service_s / CALLS_PER_STEP:.3g} steps/s "
        f"(measured: {seen}, {service_s:.3g} s a call; {CALLS_PER_STEP} calls a step)"
    )


def cache_bytes(info: Mapping[str, object], *, num_ctx: int, slots: int) -> int | None:
    """Return the bytes of a model's attention caches (16 bit) from Ollama's `model_info`; None without its shapes."""
    found = {name.partition(".")[2]: value for name, value in info.items()}
    layers, width = _count(found.get("block_count")), _count(found.get("attention.key_length"))
    heads = found.get("attention.head_count_kv")
    if not width and (query_heads := _count(found.get("attention.head_count"))):
        width = _count(found.get("embedding_length")) // query_heads
    # some models have another number of heads in each layer; those with none keep no cache
    total_heads = sum(map(_count, heads)) if isinstance(heads, list) else layers * _count(heads)
    if not (layers and total_heads and width):
        return None
    # keys and values, 2 bytes each
    return 2 * 2 * total_heads * width * num_ctx * slots


def _count(value: object) -> int:
    """Return a number that a server reports as one of parts; 0 for anything that cannot be."""
    return value if isinstance(value, int) and 0 < value < 2**40 else 0


def cache_line(info: Mapping[str, object], *, num_ctx: int | None, slots: int) -> str:
    """Return the memory of the attention caches of all slots, in words."""
    if num_ctx is None:
        return "context unknown, and with it the memory of the attention caches; give --num-ctx"
    size = cache_bytes(info, num_ctx=num_ctx, slots=slots)
    if size is None:
        return "the server does not report the model's shapes, so the memory of its caches is unknown"
    return (
        f"attention caches: {size / 2**20:,.0f} MiB for {slots} slots of {num_ctx} tokens "
        "(estimated from the model's shapes, 16 bit; num_ctx x slots)"
    )
