"""A page of `qm watch` as far as the server sees it: a client of its server-sent events."""

from __future__ import annotations

import base64
import gzip
import json
import socket
from typing import Any


class Page:
    """An open stream of the server at `port`."""

    def __init__(self, port: int, last_event_id: str = "", receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", port))
        more = f"Last-Event-ID: {last_event_id}\r\n" if last_event_id else ""
        # HTTP/1.0: no chunks, so the lines can be read as they are
        self.socket.sendall(f"GET /events HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n{more}\r\n".encode())
        self.lines = self.socket.makefile("rb")
        while self.lines.readline().strip():
            pass

    def take(self, count: int) -> list[tuple[str, str, Any]]:
        """Return the next events as (id, name of the event, message), without those that say it has caught up."""
        events: list[tuple[str, str, Any]] = []
        fields: dict[str, str] = {}
        while len(events) < count:
            line = self.lines.readline().decode()
            assert line, "the stream ended"
            name, _, value = line.strip().partition(":")
            if name:
                fields[name] = value.strip()
            elif fields:
                if "data" in fields and fields.get("event") != "caught-up":
                    data = fields["data"]
                    message = json.loads(gzip.decompress(base64.b64decode(data))) if data else None
                    events.append((fields.get("id", ""), fields.get("event", "message"), message))
                fields = {}
        return events

    def close(self) -> None:
        """Leave."""
        self.lines.close()
        self.socket.close()
