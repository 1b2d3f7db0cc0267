"""What each rollout worker of a run gets of environments, calls and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from query_mutator.llm.backends import AUTO, BACKENDS, DEFAULT_BACKEND

if TYPE_CHECKING:
    from query_mutator.training.config import TrainConfig

__all__ = ["dealt_out", "local_addresses", "shares"]

T = TypeVar("T")


def shares(total: int, parts: int) -> list[int]:
    """Return `total` in nearly equal parts, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def dealt_out(items: Sequence[T], parts: int) -> list[tuple[T, ...]]:
    """Return the items of each part, dealt out in turn; with fewer items than parts several parts share one."""
    if len(items) < parts:
        return [(items[part % len(items)],) if items else () for part in range(parts)]
    return [tuple(items[part::parts]) for part in range(parts)]


def local_addresses(flags: TrainConfig) -> Mapping[str, tuple[str, ...]]:
    """Return --local-server-url under the flag of its backend for the evaluations, unless they have other servers."""
    if not flags.local_server_url or flags.ollama_url or flags.openai_url:
        return {}
    kind = BACKENDS.get(DEFAULT_BACKEND if flags.backend == AUTO else flags.backend)
    return {kind.url_flag: (flags.local_server_url,)}
