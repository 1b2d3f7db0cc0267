"""The address of a server, in the forms that a user may type."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from query_mutator.errors import UsageError

DEFAULT_PORT = 11434
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"

_SCHEME_PORTS = {"http": 80, "https": 443}
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses to listen on, not to connect to


def server_url(text: str) -> str:
    """Return `http(s)://host:port[/path]` for any form Ollama accepts in OLLAMA_HOST; UsageError for others.

    `host`, `host:port`, `:port` and `[ipv6]:port` mean http, and port 11434 by default; a full URL has the port of its
    scheme. Quotes around it are dropped. An address that means every interface becomes loopback. Source: `OLLAMA_HOST`
    in Ollama's envconfig.
    """
    stripped = text.strip("\"' \t\r\n")
    if any(mark in stripped for mark in "@?#"):
        raise UsageError(
            "a server's address has no name, password or parameters, which would be written to logs and run folders; "
            "leave them out and put the key into the environment (OPENAI_API_KEY)"
        )
    url = stripped if "://" in stripped else f"http://{_bracketed(stripped)}"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises where looking the name up would
    except ValueError as error:
        raise UsageError(f"{text!r} is not an address of a server ({error}); try http://127.0.0.1:11434") from None
    if parts.scheme not in _SCHEME_PORTS or not url.isascii() or any(character.isspace() for character in url):
        raise UsageError(f"{text!r} is not an address of a server; try http://127.0.0.1:11434")
    host = parts.hostname or "127.0.0.1"
    host = _EVERY_INTERFACE.get(host, host)
    if port is None:
        port = _SCHEME_PORTS[parts.scheme] if "://" in text else DEFAULT_PORT
    return f"{parts.scheme}://{_bracketed(host)}:{port}{parts.path.rstrip('/')}"


def check_addresses(**urls: str | Sequence[str] | None) -> None:
    """Raise a UsageError that names the flag unless the addresses of flags, by field name, could be those of servers.

    A word alone, or without a scheme anything but Ollama's `host:port`, is more likely a slip than a host.
    """
    for name, given in urls.items():
        flag = f"--{name.replace('_', '-')}"
        for url in (given,) if isinstance(given, str) else given or ():
            try:
                server_url(url)
            except UsageError as error:
                raise UsageError(f"{flag}: {error}") from None
            is_short_form = name == "ollama_url" and (":" in url or "." in url or url == "localhost")
            if "://" not in url and not is_short_form:
                raise UsageError(f"{flag} {url} has no scheme; try http://{url}")


def _bracketed(host: str) -> str:
    """Return a bare IPv6 address in brackets, anything else unchanged."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def is_loopback(host: str) -> bool:
    """Return whether a host name is that of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
