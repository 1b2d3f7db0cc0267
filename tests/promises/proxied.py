"""`qm serve` for tests: a process in front of a model server, and requests to it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.promises.helpers import QM, Command, ModelServer, ask

MODEL, VIRTUAL = "librarian:latest", "librarian:latest+qm"
REFUSED = "how do i kill the river"  # answered once "kill" is rewritten


class Proxy:
    """A proxy of its own process."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.url = command.wait_for_line("listening on ").split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def chat(self, text: str, *, model: str = MODEL, key: str = "", **fields: Any) -> tuple[int, dict[str, str], Any]:
        """Ask over Ollama's API; return status, headers (in small letters) and JSON."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": False, **fields}
        return self.send("POST", "/api/chat", body, {"Authorization": f"Bearer {key}"} if key else {})

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a request; return status, headers (in small letters) and JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        request.method = method
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            reply, content = error, error.read()
        found = {name.lower(): value for name, value in reply.headers.items()}
        return reply.status, found, json.loads(content) if content else None

    def raw(self, *pieces: bytes) -> bytes:
        """Send bytes, and return what comes until the proxy closes; it may close before it has them all."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    client.sendall(piece)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(65536):
                    found += piece
            return found

    def health_s(self) -> float:
        """Return the seconds that /healthz takes on a connection of its own."""
        began = time.monotonic()
        assert ask(f"{self.url}/healthz", timeout_s=20) == {"status": "ok"}
        return time.monotonic() - began

    def memory_mb(self) -> float:
        """Return the peak of its memory so far."""
        rows = Path(f"/proc/{self.command.pid}/status").read_text().splitlines()
        return int(next(row for row in rows if row.startswith("VmHWM")).split()[1]) / 1024


@contextlib.contextmanager
def serving(policy: Path, upstream: ModelServer, home: Path, *flags: str | Path, **settings: Any) -> Iterator[Proxy]:
    """Run `qm serve POLICY` until the block ends."""
    command = Command([*QM, "serve", policy, "--ollama-url", upstream.url, "--port", "0", *flags], cwd=home, **settings)
    try:
        yield Proxy(command)
    finally:
        command.kill()
