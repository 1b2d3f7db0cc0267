"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket
from types import ModuleType

from query_mutator.errors import UsageError

resource: ModuleType | None
try:
    import resource
except ImportError:  # there is none for Windows
    resource = None

__all__ = ["BACKLOG", "detect_vanished_clients", "listen", "most_open_files", "why_not_listening"]

BACKLOG = 2048  # clients that come before the server has started wait
_MAX_FILES = 16_384


def detect_vanished_clients(listening: socket.socket) -> None:
    """Make the system probe idle connections, so that a call whose client lost its network gives its slot back."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted sockets inherit it
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def why_not_listening(host: str, port: int, error: Exception) -> str:
    """Return in words why a server cannot listen."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
    return f"cannot listen on {host}:{port}: {error}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; UsageError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    detect_vanished_clients(found)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port") from None
    return found


def most_open_files() -> int:
    """Raise the process's limit of open files as far as it may, and return it; 0 if it is not known."""
    if resource is None:
        return 0
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MAX_FILES:
        return _MAX_FILES
    files = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files
