"""Pages of other addresses that may call the proxy: it answers for itself, and the upstream sees no `Origin`.

The upstream checks origins too, by its own address: a page that the proxy allows, its own page among them, might be
refused there. What the proxy refuses is decided by `embedded.access`, as Ollama does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from query_mutator.apply.proxy.upstream import Header
from query_mutator.embedded.access import Access

__all__ = ["PREFLIGHT", "cors_headers", "without_origin"]

PREFLIGHT = "access-control-request-method"  # the header by which a browser asks before it sends
_PREFIX = b"access-control-"
_EXPOSED: Header = (
    b"access-control-expose-headers", b"x-qm-decision, x-qm-operators, x-qm-form, x-qm-calls, x-qm-overhead-ms",
)  # fmt: skip


def cors_headers(access: Access, headers: Sequence[Header]) -> list[Header]:
    """Return what lets the page that sent a request read its reply; nothing for a client without `Origin`.

    Only for requests that `access` does not refuse.
    """
    named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    lines = [line.partition(": ") for line in access.headers(named).splitlines()]
    found = [(name.lower().encode(), value.encode("latin-1")) for name, _, value in lines]
    return [*found, _EXPOSED] if found else []


def without_origin(headers: Iterable[Header]) -> list[Header]:
    """Return headers without those of the exchange between a browser and a server."""
    return [pair for pair in headers if pair[0].lower() != b"origin" and not pair[0].lower().startswith(_PREFIX)]
