"""Who may call the server: the checks of Ollama against web pages that a browser on this machine shows.

A page of another site can send requests to a server on the loopback address (its `Origin` header shows that), and with
DNS rebinding it can even read the replies (its `Host` header has the site's name).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

__all__ = ["DEFAULT_ORIGINS", "Access"]

DEFAULT_ORIGINS = (
    *(f"{scheme}://{host}{port}" for host in ("localhost", "127.0.0.1", "0.0.0.0") for scheme in ("http", "https")
      for port in ("", ":*")),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)  # fmt: skip
#: Ends of host names that are never those of a public site.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
PREFLIGHT_S = 12 * 3600  # for which a browser remembers what it may send


class Access:
    """The checks of one server; `bound` are the addresses it listens on, pages of `origins` may call it."""

    def __init__(self, *, bound: Sequence[str], origins: Sequence[str] = DEFAULT_ORIGINS) -> None:
        self._checks_host = all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in bound)
        self._origins = tuple(origin.lower() for origin in origins)

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Return why the client that sent these headers (names in lower case) may not call, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._checks_host and not is_local(host):
            return f"host {host!r} is not this machine; call the server by its address, as 127.0.0.1"
        if origin is None or origin in (f"http://{host}", f"https://{host}"):
            return None
        if any(fnmatchcase(origin.lower(), pattern) for pattern in self._origins):
            return None
        return f"origin {origin!r} is not allowed; start the server with it in --origins or OLLAMA_ORIGINS"

    def headers(self, headers: Mapping[str, str]) -> str:
        """Return the headers that let a page of an allowed origin read the reply, and send what it asks to send."""
        origin = headers.get("origin")
        if origin is None:
            return ""
        lines = [f"Access-Control-Allow-Origin: {origin}", "Vary: Origin"]
        if "access-control-request-method" in headers:
            wanted = headers.get("access-control-request-headers", "")
            lines += [
                "Access-Control-Allow-Methods: GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS",
                *([f"Access-Control-Allow-Headers: {wanted}"] if wanted else []),
                f"Access-Control-Max-Age: {PREFLIGHT_S}",
            ]
        return "".join(f"{line}\r\n" for line in lines)


@lru_cache(maxsize=256)
def is_local(host: str) -> bool:
    """Return whether a Host header names this machine or a local network; a client without the header may call."""
    name = host[: host.find("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", socket.gethostname().lower()) or name.endswith(LOCAL_SUFFIXES)
    return address.is_loopback or address.is_private or address.is_unspecified
