"""One GGUF file in llama.cpp's server, in a process that ends with this one: in `close`, and when this one is killed.

It is a separate process because a crash of native code would end the run, and because a call over loopback can be
cancelled at any moment. llama.cpp writes its log of errors to a file without a name, whose first line explains a
failed start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from query_mutator.errors import BackendError, UsageError
from query_mutator.files.gguf_file import size_bytes
from query_mutator.llm import llama_child

__all__ = ["LlamaProcess", "require_xllamacpp"]

START_S = 120.0  # for which a model may load, with the time its file takes from a slow disk
_SLOW_BYTES_PER_S = 20e6
_LOG_HEAD_BYTES = 65_536
_LOADING_ERROR = re.compile(r"error loading model: (.*)")
_LOG_PREFIX = re.compile(r"^[\d.]+ E ")


def require_xllamacpp() -> str:
    """Return the version of the package that runs the files; UsageError with what to install."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError("--gguf needs the package xllamacpp; install it with `pip install 'query-mutator[llama]'`")
    return version("xllamacpp")


class LlamaProcess:
    """A running server; the constructor returns when the model is loaded. UsageError when it cannot be.

    `key` is what requests must carry, by default a new one; it is in no command line, environment or log.
    """

    def __init__(
        self, path: Path, *, name: str, slots: int, context: int, port: int = 0, key: str | None = None
    ) -> None:
        self._path, self._owner = path, os.getpid()
        self.key = key or secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in `close`
        self._start_s = int(START_S + size_bytes(path) / _SLOW_BYTES_PER_S)
        numbers = map(str, (slots, context, port, self._start_s))
        command = [sys.executable, "-P", llama_child.__file__, str(path), name, *numbers]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # for the key; its end is the sign that this process is gone
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,  # Ctrl-C is for the run; a new session would be scheduled apart from it (Linux autogroups)
        )
        try:
            self._send_key()
            self.url = self._ready_url()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Return the port on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    @property
    def is_alive(self) -> bool:
        """Return whether the process is there; a fork of its owner cannot tell, and uses it."""
        return os.getpid() != self._owner or self._process.poll() is None

    def close(self) -> None:
        """End the process; idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def _send_key(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already; its output says why
            self._process.stdin.write(f"{self.key}\n".encode())
            self._process.stdin.flush()

    def _ready_url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, said = line.decode(errors="replace").strip().partition(" ")
            if word == llama_child.READY:
                return said
            if word == llama_child.FAILED:
                raise UsageError(f"--gguf {self._path}: {self._reason() or said}; give a file that llama.cpp can run")
        code = self._process.wait()
        if code == -signal.SIGALRM:
            waited = f"not loaded after {self._start_s} s"
            raise UsageError(f"--gguf {self._path}: {waited}; its chat template may not end; give another file")
        raise BackendError(
            f"--gguf {self._path}: llama.cpp ended with code {code} while it loaded the model"
            f"{f' ({reason})' if (reason := self._reason()) else ''}; give a smaller --num-ctx, or another file"
        )

    def _reason(self) -> str:
        """Return what the log says about a failed start, "" if nothing."""
        self._log.seek(0)
        text = self._log.read(_LOG_HEAD_BYTES).decode(errors="replace")
        found = _LOADING_ERROR.search(text)
        first = found[1] if found else next(iter(text.strip().splitlines()), "")
        return _LOG_PREFIX.sub("", first).removeprefix("llama_model_loader: ").strip()
