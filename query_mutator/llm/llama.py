"""The backend without a server to start: `--gguf FILE [FILE]`, the user's own files, run by llama.cpp.

Each file runs in its own process, which ends with this one (`llama_process`). Calls go to it over loopback as to any
llama-server, so that they can be cancelled and stopped early. Slots are the calls in flight of `--batch-size`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from query_mutator.errors import BackendError, QueryMutatorError, UsageError
from query_mutator.files.gguf_file import check_file, digest_of, gguf_path, model_name, size_bytes
from query_mutator.llm import llama_child
from query_mutator.llm.client import INFO_TIMEOUT_S, ModelServer
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest, Completion

logger = logging.getLogger(__name__)

START_S = 120.0  # for which a model may load, with the time its file takes from a slow disk
_SLOW_BYTES_PER_S = 20e6
_LOG_HEAD_BYTES = 65_536
_LOADING_ERROR = re.compile(r"error loading model: (.*)")

DEFAULT_CONTEXT = 4096  # tokens of a slot; the model's own, often 128k, would take GB for each slot
MAX_RESTARTS = 3  # of one file: a request that crashes llama.cpp is not repeated forever


def require_xllamacpp() -> str:
    """Return the version of the package that runs the files; UsageError with what to install."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError("--gguf needs the package xllamacpp; install it with `pip install 'query-mutator[llama]'`")
    return version("xllamacpp")


class _Client(OpenAIBackend):
    """The client of a process."""

    more_context = "give a larger --num-ctx, if the model has one"


class LlamaProcess:
    """A running server and the `client` of it; returns when the model is loaded. UsageError when it cannot be.

    It takes the port and the key of the one `before`. The key, which requests must carry, is in no command line,
    environment or log.
    """

    client: OpenAIBackend

    def __init__(
        self, path: Path, *, name: str, slots: int, context: int, before: LlamaProcess | None, **settings: Any
    ) -> None:
        self._path, self._owner = path, os.getpid()
        self.restarts: int = 0 if before is None else before.restarts + 1
        self._key: str = secrets.token_hex(16) if before is None else before._key
        port = 0 if before is None else urlsplit(before.client.url).port
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
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # it ended already; its output says why
                self._process.stdin.write(f"{self._key}\n".encode())
                self._process.stdin.flush()
            environ = {OpenAIBackend.key_variable: self._key}
            self.client = _Client(self._ready_url(), environ=environ, pool_size=slots, **settings)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Return whether the process exists; a fork of its owner assumes that it does."""
        return os.getpid() != self._owner or self._process.poll() is None

    def close(self) -> None:
        """Cancel the calls in flight and end the process; idempotent."""
        if hasattr(self, "client"):
            self.client.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

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
        return first.strip()


class LlamaBackend(ModelServer):
    """One file or two (target, then mutator) as one server; a file is loaded when it is first needed.

    A process that crashed is started again. UsageError for a file that cannot be used.
    """

    title = "llama.cpp"
    url_flag = "gguf"
    api_root = OpenAIBackend.api_root
    default_url = ""
    runs_files = True
    more_models = "give their files to --gguf"
    more_slots = "give --batch-size {slots}"
    more_context = _Client.more_context
    more_speed = f"leave a core to other programs with OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) - 1)}, or "
    more_speed += ModelServer.more_speed

    def __init__(
        self,
        url: str,
        *,
        mutator: str | None = None,
        pool_size: int = 8,
        runner_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        options = dict(runner_options or {})
        self._context = int(options.pop("num_ctx", None) or DEFAULT_CONTEXT)
        super().__init__(url, runner_options=options)
        paths = [Path(url), *([Path(mutator)] if mutator else [])]
        self._files = {model_name(path): path for path in paths}
        if len(self._files) < len(paths):
            raise UsageError(f"--gguf {url} {mutator}: both models would be {paths[0].stem!r}; rename one file")
        self._slots, self._settings = pool_size, settings
        self._running: dict[str, LlamaProcess] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # guards starts and ends of processes

    @classmethod
    def address(cls, given: str | None = None) -> str:
        """Return the absolute path of a file; UsageError without one, and for a package that is not installed."""
        if not given:
            raise UsageError("--backend llama needs a model; give its file with --gguf FILE")
        return gguf_path(given)

    @classmethod
    def open(cls, urls: Sequence[str], **settings: Any) -> tuple[Self, ...]:
        """Return one server with all files."""
        paths = list(dict.fromkeys(cls.address(url) for url in urls or (None,)))
        if len(paths) > 2:
            raise UsageError(f"--gguf takes one file, or two (target, then mutator); {len(paths)} were given")
        return (cls(paths[0], mutator=paths[1] if len(paths) > 1 else None, **settings),)

    def addresses(self) -> tuple[str, ...]:
        """Return the paths of the files."""
        return tuple(map(str, self._files.values()))

    def http_url(self, model: str) -> str:
        """Return the address of a model's process."""
        return self._loaded(model).url

    def http_headers(self, model: str) -> Mapping[str, str]:
        """Return the key of a model's process, which nobody else has."""
        return self._loaded(model).http_headers(model)

    def default_models(self) -> tuple[str, str]:
        """Return the names of the target and the mutator."""
        names = [*self._files]
        return names[0], names[-1]

    # --- what is known about the files -----------------------------------------------------------------------------

    def version(self, *, timeout_s: float = INFO_TIMEOUT_S) -> str:
        """Return the version of the binding, after a check of the files; a process that crashed is started again."""
        found = require_xllamacpp()
        for name, path in self._files.items():
            check_file(path)
            if name in self._running:
                self._loaded(name)
        return f"({found})"

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the names of the files, without their ending."""
        return tuple(self._files)

    def digest(self, model: str) -> str:
        """Return the sha256 of a model's file, and load it."""
        name = self.require_model(model)
        self._loaded(name)
        return digest_of(self._files[name])

    def file_digests(self) -> tuple[str, ...]:
        """Return the sha256 of each file."""
        return tuple(map(self.digest, self._files))

    def slots(self, model: str) -> int:
        """Return how many calls a model works on at once."""
        return self._slots

    def context(self, model: str) -> int | None:
        """Return how many tokens of prompt and reply fit into one call."""
        return self._loaded(model).context(model)

    # --- calls -----------------------------------------------------------------------------------------------------

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply, or a Completion that carries the error."""
        if request.model not in self._files:
            message = f"there is no model {request.model!r}; --gguf has {', '.join(self._files)}"
            return Completion.failed("model_missing", message)
        try:
            client = self._loaded(request.model)
        except QueryMutatorError as error:
            return Completion.failed("cancelled" if self._is_closed else "server", str(error))
        return client.complete(request)

    def close(self) -> None:
        """Cancel the calls in flight and end the processes; idempotent."""
        with self._lock:
            self._is_closed = True
            running, self._running = self._running, {}
        for process in running.values():
            process.close()

    def _loaded(self, name: str) -> OpenAIBackend:
        """Return the client of a model's process, started if need be; QueryMutatorError when it cannot be."""
        running = self._running.get(name)
        if running is not None and running.is_alive:
            return running.client
        with self._lock:
            if self._is_closed:
                raise UsageError("the run has ended")
            running = self._running.get(name)
            if running is None or not running.is_alive:
                running = self._running[name] = self._start(name, before=running)
            return running.client

    def _start(self, name: str, *, before: LlamaProcess | None) -> LlamaProcess:
        """Start a model's process, in place of the one `before`, which crashed."""
        require_xllamacpp()
        path, sizes = self._files[name], {"slots": self._slots, "context": self._context}
        check_file(path)
        if before is not None:
            if before.restarts == MAX_RESTARTS:
                raise UsageError(f"llama.cpp crashed {1 + MAX_RESTARTS} times with {path}")
            logger.warning("llama.cpp crashed with %s; it is started again", path)
            before.close()
        return LlamaProcess(path, name=name, before=before, **sizes, **self._settings)
