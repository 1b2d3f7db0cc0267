"""Several machines: sweeps, evaluations and rollouts over Ray (https://docs.ray.io), with the extra `[ray]`.

`connected` connects to the cluster of `--ray-address`, to a running one, else to a local one for this command; `jobs`
runs a sweep's trials as Ray tasks, `rollouts` collects rollouts in Ray actors. Nothing imports Ray until a command asks
for `--engine ray`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from query_mutator.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["connected"]

_ANSWERS_WITHIN_S = 5.0  # ray.init waits for minutes at an address where nothing listens
_ADVICE = "start one with `ray start --head`, or leave the address out for a local one"


@contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """Yield `ray`, connected to `address`, by default RAY_ADDRESS, else a running cluster, else a new local one.

    Disconnects at the end, and ends a cluster that it started. UsageError without ray, where no cluster answers,
    and for several machines without a token.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs the package ray; pip install 'query-mutator[ray]'") from None
    address = address or os.environ.get("RAY_ADDRESS") or None
    _check_listens(address)
    # ray.init replaces the handler of SIGTERM, which ends the process with everything it opened.
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    try:
        with _on_loopback(address):
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise UsageError(f"no Ray cluster at {address or 'any address'} ({why}); {_ADVICE}") from None
    finally:
        _restore(handler)
    try:
        _check_token(ray)
        yield ray
    finally:
        ray.shutdown()
        _restore(handler)


@contextmanager
def _on_loopback(address: str | None) -> Iterator[None]:
    """Make a cluster that is started here listen on 127.0.0.1 alone, as Ray does on macOS and Windows."""
    from ray._private import ray_constants, services

    is_new = address == "local" or (address is None and services.find_bootstrap_address(None) is None)
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not is_new
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_token(ray: Any) -> None:
    """Raise for a cluster of several machines without a token: whoever reaches its ports runs code on it."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1 and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UsageError(
            f"the Ray cluster of {len(machines)} machines has no token, so that anyone who reaches it runs code there; "
            "make one with `ray get-auth-token --generate`, set RAY_AUTH_MODE=token for every `ray start` and command"
        )


def _check_listens(address: str | None) -> None:
    """Raise for HOST:PORT where nothing listens."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d{1,5})", address or "")
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), _ANSWERS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"no Ray cluster at {address} ({why}); {_ADVICE}") from None


def _restore(handler: Any) -> None:
    with contextlib.suppress(ValueError, TypeError):  # not the main thread, or a handler that Python did not set
        signal.signal(signal.SIGTERM, handler)
