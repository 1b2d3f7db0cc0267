"""Rollout workers of a run: their flags, and what each of them gets of environments, calls and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from query_mutator.cli.bounds import Bounds
from query_mutator.llm.backends import AUTO, BACKENDS, DEFAULT_BACKEND, EMBEDDED

if TYPE_CHECKING:
    from query_mutator.training.config import TrainConfig

__all__ = ["WorkerFlags", "check_workers", "dealt_out", "local_addresses", "shares"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """Rollout workers on a Ray cluster; see docs/how-to/use-rollout-workers.md."""

    BOUNDS: ClassVar[Bounds] = {"num_workers": (1, 1024)}

    engine: Literal["local", "ray"] = "local"
    """Where rollouts are collected: in this process, or by workers on a Ray cluster."""
    num_workers: int = 1
    """Rollout workers of --engine ray; each has its share of --num-processes and of --batch-size."""
    ray_address: str | None = None
    """Address of a Ray cluster, as 10.0.0.1:6379 or auto; by default RAY_ADDRESS, else one that ends with the run."""
    local_server_url: str | None = None
    """Address of a model server as each worker reaches it on its own machine, as http://127.0.0.1:11434; without it
    the workers share out the servers of --ollama-url."""


def check_workers(flags: TrainConfig, *, on_policy: bool) -> None:
    """Raise a ValueError for flags of workers that contradict others."""
    if flags.engine == "local":
        for name, is_given in (("num_workers", flags.num_workers > 1), ("local_server_url", flags.local_server_url)):
            if is_given:
                raise ValueError(f"--{name.replace('_', '-')} needs --engine ray")
        return
    if not on_policy:
        raise ValueError(
            f"--engine ray is for on-policy learners, whose policy is frozen during a rollout; --algo {flags.algo} "
            "learns while steps arrive, use --engine local"
        )
    if flags.max_policy_lag:
        raise ValueError("--engine ray waits for every rollout; leave out --max-policy-lag")
    if flags.num_workers > flags.num_processes:
        raise ValueError(f"--num-workers {flags.num_workers} is more than --num-processes {flags.num_processes}")
    calls, flag = (flags.batch_size, "--batch-size") if flags.use_batching else (1, "--no-batching")
    if flags.num_workers > calls:
        raise ValueError(f"--num-workers {flags.num_workers} is more than the {calls} calls in flight of {flag}")
    if flags.local_server_url and flags.backend == EMBEDDED:
        raise ValueError("--backend embedded starts a server in each worker; leave out --local-server-url")


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
