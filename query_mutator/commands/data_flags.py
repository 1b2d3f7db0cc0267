"""Flags that several commands of `qm data` share: a length cache, a plan, a tokenizer, the edges of buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.batching import LengthCache
from query_mutator.bounds import Count
from query_mutator.cli.common import JsonFlags, parse_edges

__all__ = ["BatchPlanFlags", "CacheFlags", "EdgeFlags", "TokenizerFlags"]

OVERFLOW_MAX = 2048


@dataclass(frozen=True, kw_only=True)
class CacheFlags(JsonFlags):
    """Base of the commands that read a length cache."""

    cache: Annotated[str, arg(aliases=["-c"])]
    """Length cache, as `qm data lengths build` writes it."""

    def load(self) -> LengthCache:
        """Return the cache."""
        return LengthCache.load_sync(self.cache)


@dataclass(frozen=True, kw_only=True)
class BatchPlanFlags(JsonFlags):
    """Base of the commands that read a batch plan."""

    plan: Annotated[str, arg(aliases=["-p"])]
    """Folder of the plan."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags(JsonFlags):
    """Base of the commands that tokenize."""

    tokenizer: Annotated[str, arg(aliases=["-t"])]
    """Tokenizer: a folder, a hub id, or bytes."""


@dataclass(frozen=True, kw_only=True)
class EdgeFlags(JsonFlags):
    """Base of the commands that form buckets."""

    bucket_edges: str = "128,256,512"
    """Longest length of each bucket, as a,b,c."""
    overflow_max: Count | None = None
    """Longest length allowed, by default 2048 or the last edge if that is longer; samples between the last edge and
    this length form one more bucket."""

    def __post_init__(self) -> None:
        last = self.edges[-1]
        if self.overflow_max is not None and self.overflow_max < last:
            raise ValueError(
                f"--overflow-max {self.overflow_max} is below the last of --bucket-edges, {last}; raise it"
            )

    @property
    def edges(self) -> tuple[int, ...]:
        """Return the edges; ValueError unless they are whole numbers above 0 that increase."""
        return parse_edges(self.bucket_edges)

    @property
    def longest(self) -> int:
        """Return the longest length allowed."""
        return max(OVERFLOW_MAX, self.edges[-1]) if self.overflow_max is None else self.overflow_max
