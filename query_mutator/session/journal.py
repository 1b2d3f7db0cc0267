"""The journal: every completed call is on disk before it is used, so a resumed run never repeats one.

    journal/step_<n>.jsonl     entries after the update at which the run had taken n environment steps

A line is a call (its site, the sha256 of the request, the outcome, failures included), the action of a step, or the
embedding of a text made by a server. The first line has `since` (n) and `after`, the checksum of the file before, so
that files cannot be exchanged or end early without being noticed. Each line is appended with one write, so it survives
the death of the process; a torn last line (a power cut) is skipped. A resumed run starts from a checkpoint's
environments and takes every action and outcome it finds in the journal up to the first damaged line.
"""

from __future__ import annotations

import logging
import re
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.encoder.base import RemoteEncoder
from query_mutator.env.flow import CallOutcome, CallSite
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.files.json_lines import JsonLines, scan_json_lines
from query_mutator.llm.coalesce import is_repeatable, request_key
from query_mutator.types import ChatRequest, Completion, FloatArray

logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"step_(\d+)\.jsonl")


class Journal:
    """The journal of one run folder from `since` environment steps on; thread-safe.

    `on_replay` is called with each completion taken from the journal. Raises DiskError when it cannot be written.
    """

    def __init__(
        self, folder: Path, *, since: int = 0, on_replay: Callable[[Completion], None] = lambda completion: None
    ) -> None:
        self._folder = folder
        self._on_replay = on_replay
        self._is_ending = False
        self._outcomes: dict[tuple[int, int, str, int], tuple[str, CallOutcome]] = {}
        self._actions: dict[tuple[int, int], int] = {}
        #: by sha256 of the request and attempt; None once the run is past its kill
        self._replies: dict[tuple[str, int], Completion] | None = {}
        self.vectors: dict[str, FloatArray] = {}  # embeddings [D] found here, by their texts
        self._lock = threading.Lock()  # guards which file is written
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            self._rows: JsonLines | None = self._read(since)
        if not self._replies:
            self._replies = None

    @classmethod
    def continued(cls, folder: Path, *, since: int, on_replay: Callable[[Completion], None]) -> Journal:
        """Return the journal of a writer that may have ended before it started the file of `since`.

        That file then continues the newest one before.
        """
        before = [step for step in _steps_in(folder) if step <= since]
        journal = cls(folder, since=before[-1] if before else since, on_replay=on_replay)
        if before and before[-1] < since:
            journal.start(since)
        return journal

    def __len__(self) -> int:
        return len(self._outcomes)

    def action(self, env: int, step: int) -> int | None:
        """Return the recorded action of an environment's step, None for an unknown one."""
        return self._actions.pop((env, step), None)

    def replay(self, steps: Sequence[tuple[int, int]], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the recorded actions [n] of steps (environment, step); record `chosen` [n] where there are none."""
        known = [self.action(*step) for step in steps]
        actions = [new if old is None else old for old, new in zip(known, chosen.tolist(), strict=True)]
        self.write_actions(
            [(*step, action) for step, action, old in zip(steps, actions, known, strict=True) if old is None]
        )
        return np.array(actions, dtype=np.int64)

    def find(self, site: CallSite, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the recorded outcome of a call, None when there is none or it answered another request."""
        sha256, outcome = self._outcomes.pop((site.env, site.step, site.phase, attempt), (None, None))
        if outcome is None:
            return self._shared(attempt, request)
        if sha256 != request_key(request):
            logger.warning("%s: %s was another request then; the call is repeated", self._folder, site)
            return None
        if outcome.completion.attempts:  # 0: a shared or remembered reply
            self._on_replay(outcome.completion)
        return outcome

    def _shared(self, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the reply to an equal request of another step, None when there is none.

        Before the kill the two shared one call, which had no time to be written for both. Made one after the other in
        the resumed run, they would be two.
        """
        if self._replies is None or not is_repeatable(request):
            return None
        reply = self._replies.get((request_key(request), attempt))
        return None if reply is None else CallOutcome(replace(reply, attempts=0), 0.0)

    def holds(self, site: CallSite, attempt: int) -> bool:
        """Return whether an attempt at a call is recorded."""
        return (site.env, site.step, site.phase, attempt) in self._outcomes

    def write(self, site: CallSite, attempt: int, request: ChatRequest, outcome: CallOutcome) -> None:
        """Append a completed call and hand it to the operating system.

        Cancelled calls are not journaled, so a resumed run repeats them.
        """
        if outcome.completion.error is not None and outcome.completion.error.kind == "cancelled":
            self._is_ending = True
            return
        self._keep_reply(request_key(request), attempt, outcome.completion)
        entry = {
            "env": site.env,
            "step": site.step,
            "phase": site.phase,
            "attempt": attempt,
            "request": request_key(request),
            "action": site.action,
            "elapsed_s": outcome.elapsed_s,
            "outcome": outcome.completion.to_json(),
        }
        self._append(entry)

    def write_actions(self, actions: Sequence[tuple[int, int, int]]) -> None:
        """Append environment, step and action of steps that start; none after a cancelled call."""
        if not self._is_ending:
            self._append(*({"env": env, "step": step, "action": action} for env, step, action in actions))

    def write_vectors(self, texts: Sequence[str], rows: FloatArray) -> None:
        """Append the embeddings [n, D] of texts."""
        pairs = zip(texts, np.ascontiguousarray(rows, dtype="<f4"), strict=True)
        self._append(*({"text": text, "vector": b64encode(row.tobytes()).decode()} for text, row in pairs))

    def start(self, env_steps: int) -> None:
        """Start the file of the next update, and sync the current one to disk."""
        with self._lock:
            if (before := self._rows) is None:
                return
            self._rows = self._open(env_steps, after=before.crc)
        self._replies = None
        before.sync()
        before.close()

    def drop_before(self, env_steps: int) -> None:
        """Remove the entries from before the oldest checkpoint that may be resumed."""
        with disk_errors(self._folder):
            for step in _steps_in(self._folder):
                if step < env_steps:
                    self._segment(step).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()

    def _segment(self, step: int) -> Path:
        return self._folder / f"step_{step}.jsonl"

    def _open(self, step: int, *, after: int = 0, cut_at: int | None = None) -> JsonLines:
        rows = JsonLines(self._segment(step), cut_at=cut_at)
        if not rows.size_bytes:
            rows.append({"since": step, "after": after})
        return rows

    def _append(self, *entries: Mapping[str, Any]) -> None:
        with self._lock:
            if self._rows is not None:  # None: the run is ending, no result will be used
                self._rows.append(*entries)

    def _read(self, since: int) -> JsonLines:
        """Take the entries from `since` on up to the first damaged line; return the file to continue, cut off there.

        Entries after a gap belong to another course of the run; their files are removed once all is read.
        """
        later = [step for step in _steps_in(self._folder) if step >= since]
        current, before, crc, end = since, 0, 0, None
        is_whole = later[:1] == [since]
        if later and not is_whole:
            logger.warning("%s: no such file; calls from there on are repeated", self._segment(since))
        while later and is_whole:
            current, before = later.pop(0), crc
            end, crc, is_whole = self._take(current, after=before if current > since else None)
        for step in later:
            self._segment(step).unlink()
        return self._open(current, after=before, cut_at=end)

    def _take(self, step: int, *, after: int | None) -> tuple[int, int, bool]:
        """Take the entries of a file up to the first damaged line; return where they end, their checksum, if all."""
        path = self._segment(step)
        end = crc = 0
        try:
            for row in scan_json_lines(path):
                if "since" not in row.value:
                    self._remember(row.value)
                elif row.value["since"] != step or after not in (None, row.value["after"]):
                    raise UsageError(f"{path}:1: damaged, it does not follow the file before")
                end, crc = row.end, row.crc
        except UsageError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{path}: not an entry of a journal ({error!r})"
        else:
            reason = f"{path}: torn after {end} bytes"
        is_whole = end == path.stat().st_size
        if not is_whole:
            logger.warning("%s; calls from there on are repeated", reason)
        return end, crc, is_whole

    def _remember(self, entry: dict[str, Any]) -> None:
        if "vector" in entry:
            self.vectors[entry["text"]] = np.frombuffer(b64decode(entry["vector"]), dtype="<f4").astype(np.float32)
            return
        env, step = entry["env"], entry["step"]
        if "outcome" not in entry:
            self._actions[env, step] = entry["action"]
            return
        outcome = CallOutcome(Completion.from_json(entry["outcome"]), entry["elapsed_s"])
        self._outcomes[env, step, entry["phase"], entry["attempt"]] = (entry["request"], outcome)
        self._keep_reply(entry["request"], entry["attempt"], outcome.completion)

    def _keep_reply(self, sha256: str, attempt: int, completion: Completion) -> None:
        if self._replies is not None and completion.ok:
            self._replies[sha256, attempt] = completion


def _steps_in(folder: Path) -> list[int]:
    """Return the steps of the files in a journal's folder, in order."""
    found = (_SEGMENT.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def keep_embeddings(encoder: Encoder, journal: Journal) -> None:
    """Journal embeddings made by a server before they are used, and load those of the journal."""
    if isinstance(encoder, CachedEncoder) and isinstance(encoder.inner, RemoteEncoder):
        if journal.vectors:
            encoder.put(list(journal.vectors), np.stack(list(journal.vectors.values())))
        encoder.inner.on_encoded = journal.write_vectors
