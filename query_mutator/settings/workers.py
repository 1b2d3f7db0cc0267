"""Where rollouts are collected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from query_mutator.bounds import Group, Threads

__all__ = ["Workers"]


@dataclass(frozen=True, kw_only=True)
class Workers(Group):
    """Rollout workers on a Ray cluster; see docs/how-to/use-rollout-workers.md."""

    engine: Literal["local", "ray"] = "local"
    """Where rollouts are collected: in this process, or by workers on a Ray cluster."""
    num_workers: Threads = 1
    """Rollout workers of --engine ray; each has its share of --num-processes and of --batch-size."""
    ray_address: str | None = None
    """Address of a Ray cluster, as 10.0.0.1:6379 or auto; by default RAY_ADDRESS, else one that ends with the run."""
    local_server_url: str | None = None
    """Address of a model server as each worker reaches it on its own machine, as http://127.0.0.1:11434; without it
    the workers share out the servers of --ollama-url."""
