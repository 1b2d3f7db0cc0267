"""Calls in flight and environments for a server, from what a probe measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CALLS_PER_STEP = 2  # a rewrite and the answer to it
ENVIRONMENTS_PER_CALL = 2  # so that one is nearly always ready when another's reply comes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsAdvice:
    """Flags for the trainer, the most steps a second they can give, and what that rests on."""

    batch_size: int
    num_processes: int
    steps_per_s: float
    why: str

    def __str__(self) -> str:
        return (
            f"--batch-size {self.batch_size} --num-processes {self.num_processes}: "
            f"at most {self.steps_per_s:.3g} steps/s ({self.why})"
        )


def size_calls(
    slots: int | None, *, width: int, service_s: float | None, calls_per_step: float = CALLS_PER_STEP
) -> CallsAdvice | None:
    """Return the flags for a server that works on `slots` calls at once, `service_s` each; None when that is unknown.

    `width` is how many calls the probe sent together: as many slots may be more. Calls beyond the slots only wait.
    """
    if slots is None or not service_s:
        return None
    more = slots >= width
    seen = f"{slots} slots or more" if more else f"{slots} slots"
    why = f"measured: {seen}, {service_s:.3g} s a call; {calls_per_step:g} calls a step"
    rate = slots / service_s / calls_per_step
    return CallsAdvice(batch_size=slots, num_processes=ENVIRONMENTS_PER_CALL * slots, steps_per_s=rate, why=why)


def cache_bytes(info: Mapping[str, object], *, num_ctx: int, slots: int) -> int | None:
    """Return the bytes of a model's attention caches (16 bit), from Ollama's account of it; None when it lacks them."""
    found = {name.partition(".")[2]: value for name, value in info.items()}
    layers, heads = found.get("block_count"), found.get("attention.head_count_kv")
    width = found.get("attention.key_length")
    if width is None and found.get("attention.head_count"):
        width = int(str(found.get("embedding_length", 0))) // int(str(found["attention.head_count"]))
    if not (layers and heads and width):
        return None
    return 2 * 2 * int(str(layers)) * int(str(heads)) * int(str(width)) * num_ctx * slots


def cache_line(info: Mapping[str, object], *, num_ctx: int | None, slots: int) -> str:
    """Return in words what the attention caches of all slots take."""
    size = None if num_ctx is None else cache_bytes(info, num_ctx=num_ctx, slots=slots)
    if size is None:
        return "the server does not tell the model's shapes, so the memory of its caches is not known"
    return (
        f"attention caches: {size / 2**20:,.0f} MiB for {slots} slots of {num_ctx} tokens "
        "(estimated from the model's shapes, 16 bit; num_ctx x slots)"
    )
