"""Helpers to test a model server: raw HTTP calls, open calls, and a model that fails."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any, Protocol

FOREVER_MS = 3_600_000.0


class HasPort(Protocol):
    """A server on the loopback address, in this process or another."""

    port: int


class Fragile:
    """Fails on the prompt "bad" alone."""

    name = "fragile"

    def reply(self, prompt: str) -> str:
        if prompt == "bad":
            raise RuntimeError("no answer to that")
        return "fine"


def send(server: HasPort, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def get(server: HasPort, path: str) -> Any:
    status, body = send(server, "GET", path)
    assert status == 200
    return json.loads(body)


def post(server: HasPort, path: str, **body: Any) -> tuple[int, Any]:
    status, reply = send(server, "POST", path, body)
    return status, json.loads(reply)


def chat(server: HasPort, text: str, *, model: str = "upper", **more: Any) -> Any:
    status, reply = post(server, "/api/chat", model=model, messages=[user(text)], stream=False, **more)
    assert status == 200, reply
    return reply


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def count(server: HasPort, name: str) -> Any:
    return get(server, "/debug/stats")[name]


def in_flight(server: HasPort) -> tuple[int, int]:
    """Return the numbers of calls in a slot and waiting for one."""
    counted = get(server, "/debug/stats")
    return counted["in_service"], counted["waiting"]


class Held:
    """A chat request whose reply is not read; `leave()` closes the connection."""

    def __init__(self, server: HasPort, text: str, *, model: str = "echo", **more: Any) -> None:
        body = json.dumps({"model": model, "messages": [user(text)], "stream": False, **more}).encode()
        head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self.socket.sendall(head + body)

    def leave(self) -> None:
        self.socket.close()
