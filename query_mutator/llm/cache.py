"""A cache of replies on disk, keyed by what decides them: the model's digest, the messages, options, seed and sample.

One SQLite file in WAL mode serves any number of processes at once. Failed calls are never stored. If the file cannot be
written, the run logs a warning and continues. Every row has a checksum, which SQLite's own checks do not replace: a
reply with a flipped bit is asked for again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from query_mutator.errors import BackendError, UsageError
from query_mutator.files import decode_object, encode, user_cache_folder
from query_mutator.llm.client import Client, ModelServer
from query_mutator.llm.coalesce import Deliver, JoiningClient, Work, is_repeatable, request_key
from query_mutator.types import ChatRequest, Completion

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 30.0  # for another process's write
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS replies_v3 (
        key TEXT PRIMARY KEY, reply BLOB NOT NULL, checksum INTEGER NOT NULL, stored_at REAL NOT NULL
    ) WITHOUT ROWID
"""
#: What is not stored of a reply: it says how long this call took.
_OF_THE_CALL: Mapping[str, Any] = dict.fromkeys(("total_s", "load_s", "prompt_eval_s", "eval_s", "latency_s"), 0.0)


def default_cache_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where replies are kept: the file QUERY_MUTATOR_REPLIES names, else one in the user's cache folder."""
    if environ.get("QUERY_MUTATOR_REPLIES"):
        return Path(environ["QUERY_MUTATOR_REPLIES"]).expanduser()
    return user_cache_folder(environ) / "replies.sqlite"


class ReplyStore:
    """A file of replies by key; safe from many threads and processes. UsageError when it cannot be opened.

    `hits` and `misses` count the lookups of this process.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()  # one connection for all threads: a lookup takes microseconds
        self._has_warned = False
        self._is_closed = False
        self.hits = 0
        self.misses = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"{self.path} cannot hold the cache ({error}); name another file with --cache-path"
            ) from None

    def get(self, key: str) -> Completion | None:
        """Return the reply stored under a key, without times; None for an unknown key, and for a damaged row."""
        try:
            with self._lock:
                found = self._find(key)
                self.hits += found is not None
                self.misses += found is None
        except sqlite3.Error as error:
            self._warn(error)
            return None
        return None if found is None else replace(found, attempts=0)

    def _find(self, key: str) -> Completion | None:
        row = self._connection.execute("SELECT reply, checksum FROM replies_v3 WHERE key = ?", (key,)).fetchone()
        if row is None or not isinstance(row[0], bytes) or row[1] != _checksum(key, row[0]):
            return None
        return Completion.from_json(decode_object(row[0]))

    def put(self, key: str, completion: Completion) -> None:
        """Store a reply, in place of a damaged one: what is there and whole is not asked for again."""
        try:
            reply = encode(replace(completion, **_OF_THE_CALL).to_json())
            row = (key, reply, _checksum(key, reply), time.time())
            with self._lock:
                self._connection.execute("INSERT OR REPLACE INTO replies_v3 VALUES (?, ?, ?, ?)", row)
        except (sqlite3.Error, ValueError) as error:  # ValueError: a lone surrogate has no UTF-8
            self._warn(error)

    def __len__(self) -> int:
        with self._lock:
            return int(self._connection.execute("SELECT count(*) FROM replies_v3").fetchone()[0])

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    def _prepare(self) -> None:
        give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                # A power cut may lose the last replies, never the file; a commit does not wait for the disk.
                self._connection.execute("PRAGMA synchronous=NORMAL")
                self._connection.execute(_SCHEMA)
                return
            except sqlite3.OperationalError as error:
                # Changing to WAL does not wait for a lock, so we do: another process may be opening the file too.
                if "locked" not in str(error) or time.monotonic() > give_up_at:
                    raise
                time.sleep(0.01)

    def _warn(self, error: Exception) -> None:
        if not (self._has_warned or self._is_closed):
            logger.warning("the cache %s fails, making the calls instead (%s)", self.path, error)
        self._has_warned = True


def _checksum(key: str, reply: bytes) -> int:
    return zlib.crc32(reply, zlib.crc32(key.encode()))


class ReplyMemory:
    """Replies by key in memory, with their times; safe from many threads."""

    def __init__(self) -> None:
        self._replies: dict[str, Completion] = {}

    def get(self, key: str) -> Completion | None:
        """Return the reply kept under a key, with `attempts` 0; None for an unknown key."""
        return self._replies.get(key)

    def put(self, key: str, completion: Completion) -> None:
        """Keep a reply."""
        self._replies[key] = replace(completion, attempts=0)

    def close(self) -> None:
        """Do nothing: there is no file."""


class Cache(JoiningClient):
    """A client that answers known requests from a store; `identity(model)` names its weights."""

    def __init__(self, client: Client, store: ReplyStore | ReplyMemory, *, identity: Callable[[str], str]) -> None:
        super().__init__(client)
        self._store = store
        self._identity = identity

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make, whose answer is stored, or None when the reply is stored or in flight."""
        if not is_repeatable(request):
            return super().join(request, deliver)
        try:
            key = request_key(request, identity=self._identity(request.model))
        except BackendError:  # the call itself reports what is wrong
            return super().join(request, deliver)
        found = self._store.get(key)
        if found is not None:
            deliver(found)
            return None
        return super().join(request, lambda completion: self._keep(key, completion, deliver))

    def close(self) -> None:
        """Close the inner client and the store; idempotent."""
        super().close()
        self._store.close()

    def _keep(self, key: str, completion: Completion, deliver: Deliver) -> None:
        if completion.ok and completion.attempts:  # 0: a shared call, which its leader stores
            self._store.put(key, completion)
        deliver(completion)


class Identity:
    """Names the weights behind a model's name and how they run, for the cache; asks the servers once per model."""

    def __init__(self, servers: Sequence[ModelServer], *, extra: str) -> None:
        self._servers = tuple(servers)
        self._extra = extra
        self._known: dict[str, str] = {}

    def __call__(self, model: str) -> str:
        """Return the model's digest, or its name and server where there is none, and `extra`.

        Raises BackendError when a server does not answer, or does not have the model.
        """
        if model not in self._known:
            digests = sorted({server.digest(model) or f"{model} at {server.url}" for server in self._servers})
            self._known[model] = f"{' '.join(digests)} {self._extra}"
        return self._known[model]
