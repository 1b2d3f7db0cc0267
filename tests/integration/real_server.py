"""Model servers that are not ours, in processes that tests can kill and start again on the same port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_START_S = 240.0


class RealServer:
    """A running server; a subclass says the command that starts it. What it prints is appended to a log in `folder`."""

    environ: dict[str, str] = {}  # noqa: RUF012 - in addition to that of this process

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"server-{self.port}.log"
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def command(self) -> Sequence[str | Path]:
        """Return the words after `python` that start the server on `port`."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, self.command())], stdout=log, stderr=log, env={**os.environ, **self.environ}
            )
        give_up_at = time.monotonic() + _START_S
        while not self._is_ready():
            is_alive = self._process.poll() is None and time.monotonic() < give_up_at
            assert is_alive, self._log.read_text()[-3000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the process as a crash would."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False
