"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket

__all__ = ["detect_vanished_clients", "why_not_listening"]


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
