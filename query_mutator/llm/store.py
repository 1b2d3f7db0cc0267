"""The store of replies: every reply of a run in one SQLite file, and a file of the user's that all runs share.

    replies.sqlite     replies     key -> model, prompt, reply         what was asked and answered, failures too
                       actions     env, step -> action                 written before the step starts
                       facts       name -> value

A reply is written before it is used, so a run that was killed plays its last rollout again from the file and pays for
nothing twice. The key is a digest of what decides a reply: weights, messages, options, form, seed and sample. Every row
has a checksum: SQLite does not see a flipped bit in a text, and a damaged row is asked for again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from query_mutator.errors import DiskError, UsageError
from query_mutator.files import decode, decode_object, encode, user_cache_folder
from query_mutator.types import ChatRequest, Completion, Message

logger = logging.getLogger(__name__)

_DAMAGED = "move it away: its replies are asked for again"
_LOCK_TIMEOUT_S = 30.0  # for another process's write
_TABLES = (
    "replies ("
    "key BLOB PRIMARY KEY, model TEXT, prompt TEXT, reply TEXT, since INTEGER, stored_at REAL, checksum INTEGER)",
    "actions (env INTEGER, step INTEGER, action INTEGER, checksum INTEGER, PRIMARY KEY (env, step)) WITHOUT ROWID",
    "facts (name TEXT PRIMARY KEY, value, checksum INTEGER) WITHOUT ROWID",
)
#: Of the newest 200 replies that took time; models by name without the tag `latest`.
_MEAN_SECONDS = """
    SELECT avg(seconds) FROM (
        SELECT reply ->> 'latency_s' AS seconds FROM replies
        WHERE rowid > (SELECT max(rowid) FROM replies) - 2000 AND seconds > 0
            AND (:names = '[]' OR replace(model, ':latest', '') IN (SELECT value FROM json_each(:names)))
        ORDER BY rowid DESC LIMIT 200)
"""


def default_cache_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where all runs keep replies: the file QUERY_MUTATOR_REPLIES names, else one in the user's cache folder."""
    if environ.get("QUERY_MUTATOR_REPLIES"):
        return Path(environ["QUERY_MUTATOR_REPLIES"]).expanduser()
    return user_cache_folder(environ) / "replies.sqlite"


def seconds_seen(path: str | Path, models: Collection[str]) -> float | None:
    """Return the mean seconds of the newest calls to some models, or to any where none is named; None without any."""
    uri, seconds = f"{Path(path).absolute().as_uri()}?mode=ro", None
    with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as file:
        [(seconds,)] = file.execute(_MEAN_SECONDS, {"names": encode(sorted(models)).decode()})
    return seconds


class Store:
    """One file of replies, None for memory; safe from many threads, and from processes on one machine.

    UsageError when it cannot be opened or is damaged, DiskError when it cannot be written. With `is_cache` it only
    warns, and the calls are made. `has_wal` is False in a folder that several machines share.
    """

    def __init__(self, path: str | Path | None, *, is_cache: bool = False, has_wal: bool = True) -> None:
        self.path = Path(path) if path is not None else None
        self._is_cache, self._has_warned, self._is_ending = is_cache, False, False
        self._lock = threading.Lock()  # one connection for all threads: a look-up takes microseconds
        self._since = 0
        self._paid_since = -1  # environment steps at the newest reply when the file was opened
        self._counted: set[bytes] | None = None  # replies that were counted; None where no rollout is played again
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path or ":memory:", timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.text_factory = bytes  # a flipped bit may have left a text that is not UTF-8
            self._prepare(has_wal)
            self._paid_since = int(self.fact("since", -1))
        except (OSError, sqlite3.Error) as error:
            advice = "name another file with --cache-path" if is_cache else _DAMAGED
            raise UsageError(f"{self.path} cannot hold replies ({error}); {advice}") from None

    def _prepare(self, has_wal: bool) -> None:
        give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self._connection.execute(f"PRAGMA journal_mode={'WAL' if has_wal else 'TRUNCATE'}")
                # A power cut may lose the last replies, never the file; a commit does not wait for the disk.
                self._connection.execute("PRAGMA synchronous=NORMAL")
                for table in _TABLES:
                    self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                break
            except sqlite3.OperationalError as error:
                # Changing to WAL does not wait for a lock, so we do: another process may be opening the file too.
                if "locked" not in str(error) or time.monotonic() > give_up_at:
                    raise
                time.sleep(0.01)
        # In a stranger's file a table without our keys would be read whole at each look-up, and a trigger is code.
        rows = self._connection.execute("SELECT sql FROM sqlite_master WHERE sql NOTNULL")
        found = {b"".join(sql.split()).decode() for (sql,) in rows}
        own = {"".join(f"CREATE TABLE {table}".split()) for table in _TABLES}
        if not own <= found or any(sql.startswith("CREATETRIGGER") for sql in found):
            raise sqlite3.DatabaseError("its tables are not ours")

    # --- replies ---------------------------------------------------------------------------------------------------

    def find(self, key: str, request: ChatRequest) -> tuple[Completion, bool] | None:
        """Return the reply to a request, and whether the rollout that is played again had paid for it.

        A failure is found by the same attempt of the same turn alone. None for an unknown or damaged row.
        """
        places = [_place(key, request, failed=True)] if request.turn is not None and self._counted is not None else []
        for place in (*places, _place(key, request)):
            for row in self.execute("SELECT * FROM replies WHERE key = ?", (place,)):
                if row[-1] == _checksum(row[:-1]):
                    return self._take(place, Completion.from_json(decode_object(row[3])), since=row[4])
        return None

    def _take(self, place: bytes, reply: Completion, *, since: int) -> tuple[Completion, bool]:
        with self._lock:
            if self._counted is None or since < self._since or place in self._counted:
                return reply, False
            self._counted.add(place)
        return reply, reply.attempts > 0

    def put(self, key: str, request: ChatRequest, reply: Completion) -> None:
        """Write a reply, in place of a damaged one; a failure only if its call has a turn and none was cancelled."""
        if reply.error is not None and reply.error.kind == "cancelled":
            self._is_ending = True
        elif reply.ok or (request.turn is not None and not self._is_cache and not self._is_ending):
            place = _place(key, request, failed=not reply.ok)
            prompt = encode([[one.role, one.content] for one in request.messages]).decode()
            row = (place, request.model, prompt, encode(reply.to_json()).decode(), self._since, time.time())
            if self._counted is not None:
                self._counted.add(place)  # first: whoever finds it from now on has not paid
            self._write("replies", row)

    def replies(self) -> Iterator[tuple[tuple[Message, ...], Completion]]:
        """Yield the messages of every call that has a reply, with it, the oldest first; damaged rows are left out."""
        after = 0
        while rows := self.execute("SELECT rowid, * FROM replies WHERE rowid > ? LIMIT 1000", (after,)):
            after = rows[-1][0]
            for _, *row, checksum in rows:
                if checksum == _checksum(row) and (reply := Completion.from_json(decode_object(row[3]))).ok:
                    said = decode(row[2])
                    yield tuple(Message(role=role, content=content) for role, content in said), reply

    def __len__(self) -> int:
        return sum(row[0] for row in self.execute("SELECT count(*) FROM replies"))

    # --- what else a run must know ---------------------------------------------------------------------------------

    def begin(self, env_steps: int) -> None:
        """Start the part of a run after `env_steps` steps, which is played again if the file has replies of it."""
        with self._lock:
            self._counted = set() if env_steps <= self._paid_since else None
            self._since = env_steps
        if env_steps > self._paid_since:
            self.set_fact("since", env_steps)

    def replay(self, steps: Sequence[tuple[int, int]], chosen: Sequence[int]) -> list[int]:
        """Return the stored actions [n] of steps (environment, step); store `chosen` [n] where there are none.

        After a cancelled call none is stored: it was chosen after a step that did not come about.
        """
        actions = []
        for (env, step), action in zip(steps, chosen, strict=True):
            known = self._action(env, step) if self._counted is not None else None
            if known is None and not self._is_ending:
                self._write("actions", (env, step, action))
            actions.append(action if known is None else known)
        return actions

    def _action(self, env: int, step: int) -> int | None:
        """Return a stored action; after a damaged one the later ones are of another course of the run."""
        for row in self.execute("SELECT * FROM actions WHERE env = ? AND step = ?", (env, step)):
            if row[-1] == _checksum(row[:-1]):
                return int(row[2])
            self.execute("DELETE FROM actions WHERE env = ? AND step >= ?", (env, step))
        return None

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a stored fact."""
        rows = self.execute("SELECT * FROM facts WHERE name = ?", (name,))
        return next((row[1] for row in rows if row[-1] == _checksum(row[:-1])), default)

    def set_fact(self, name: str, value: Any) -> None:
        """Store a fact: bytes or a number."""
        self._write("facts", (name, value))

    # --- the file --------------------------------------------------------------------------------------------------

    def execute(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query; texts are bytes. A failure of SQLite is reported as the class says."""
        try:
            with self._lock:  # directly: an interrupt between two Python frames would leave it locked
                return self._connection.execute(query, values).fetchall()
        except (sqlite3.Error, ValueError) as error:  # ValueError: a text without UTF-8
            self._failed(error)
            return []

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._is_ending = self._has_warned = True
            self._connection.close()

    def _write(self, table: str, values: Sequence[Any]) -> None:
        marks = ", ".join("?" * len(values))
        self.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks}, ?)", (*values, _checksum(values)))

    def _failed(self, error: Exception) -> None:
        if self._is_cache:
            if not self._has_warned:
                logger.warning("the cache %s fails, making the calls instead (%s)", self.path, error)
            self._has_warned = True
        elif isinstance(error, sqlite3.OperationalError):
            raise DiskError(f"{self.path} cannot be written ({error}); free some space, then resume") from None
        elif isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError):
            raise UsageError(f"{self.path} is damaged ({error}); {_DAMAGED}") from None
        # Else the file is closed: the run is ending, no result will be used.


def _place(key: str, request: ChatRequest, *, failed: bool = False) -> bytes:
    """Return the key of a row: a failure is that of one attempt of one turn."""
    return blake2b(f"{key} {(request.turn, request.attempt) if failed else ''}".encode(), digest_size=16).digest()


def _checksum(values: Sequence[Any]) -> int:
    """Return the CRC-32 of a row's values; texts are bytes when they are read."""
    return zlib.crc32(repr([one.encode() if isinstance(one, str) else one for one in values]).encode())
