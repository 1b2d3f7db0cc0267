"""The journal: every completed call is on disk before it is used, so a resumed run never repeats one.

    journal/step_<n>.jsonl     entries after the update at which the run had taken n environment steps

A line is a call (its site, the sha256 of the request, the outcome, failures included), the action of a step, or the
embedding of a text made by a server. Each is appended with one write, so it survives the death of the process; a torn
last line (a power cut) is skipped. A resumed run starts from a checkpoint's environments and takes every action and
outcome it finds in the journal.
"""

from __future__ import annotations

import logging
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.flow import CallOutcome, CallSite
from query_mutator.files import decode, disk_errors, encode
from query_mutator.llm.coalesce import request_key
from query_mutator.types import ChatRequest, Completion, ErrorInfo

FloatArray = NDArray[np.float32]

logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"step_(\d+)\.jsonl")
_DEFAULTS = tuple(asdict(Completion()).items())


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
        self.vectors: dict[str, FloatArray] = {}  # embeddings [D] found here, by their texts
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            steps = self._steps()
            known = [step for step in steps if step >= since] if since in steps else []
            for step in known:
                for entry in _read(self._segment(step)):
                    self._remember(entry)
            self._file = self._open(known[-1] if known else since)

    def __len__(self) -> int:
        return len(self._outcomes)

    def action(self, env: int, step: int) -> int | None:
        """Return the recorded action of an environment's step, None for an unknown one."""
        return self._actions.pop((env, step), None)

    def settle(self, steps: Sequence[tuple[int, int]], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the recorded actions [n] of steps (environment, step); record `chosen` [n] where there are none."""
        known = [self.action(*step) for step in steps]
        actions = [new if old is None else old for old, new in zip(known, chosen.tolist(), strict=True)]
        self.write_actions(
            [(*step, action) for step, action, old in zip(steps, actions, known, strict=True) if old is None]
        )
        return np.array(actions, dtype=np.int64)

    def find(self, site: CallSite, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the recorded outcome of a call, None when there is none or it answered another request."""
        if not self._outcomes:
            return None
        sha256, outcome = self._outcomes.pop((site.env, site.step, site.phase, attempt), (None, None))
        if outcome is None:
            return None
        if sha256 != request_key(request):
            logger.warning("%s: %s was another request then; the call is repeated", self._folder, site)
            return None
        if outcome.completion.attempts:  # 0: a shared or remembered reply
            self._on_replay(outcome.completion)
        return outcome

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
        entry = {
            "env": site.env,
            "step": site.step,
            "phase": site.phase,
            "attempt": attempt,
            "request": request_key(request),
            "action": site.action,
            "elapsed_s": outcome.elapsed_s,
            "outcome": _to_json(outcome.completion),
        }
        self._append(encode(entry) + b"\n")

    def write_actions(self, actions: Sequence[tuple[int, int, int]]) -> None:
        """Append environment, step and action of steps that start; none after a cancelled call."""
        if not self._is_ending:
            self._append(
                "".join(
                    f'{{"env": {env}, "step": {step}, "action": {action}}}\n' for env, step, action in actions
                ).encode()
            )

    def write_vectors(self, texts: Sequence[str], rows: FloatArray) -> None:
        """Append the embeddings [n, D] of texts."""
        pairs = zip(texts, np.ascontiguousarray(rows, dtype="<f4"), strict=True)
        lines = [encode({"text": text, "vector": b64encode(row.tobytes()).decode()}) for text, row in pairs]
        self._append(b"".join(line + b"\n" for line in lines))

    def start(self, env_steps: int) -> None:
        """Start the file of the next update, after syncing the present one to disk."""
        with disk_errors(self._folder):
            os.fsync(self._file)
            following = self._open(env_steps)
            os.dup2(following, self._file, inheritable=False)  # atomic: no writer has to wait
            os.close(following)

    def drop_before(self, env_steps: int) -> None:
        """Remove the entries from before the oldest checkpoint that may be resumed."""
        with disk_errors(self._folder):
            for step in self._steps():
                if step < env_steps:
                    self._segment(step).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _steps(self) -> list[int]:
        found = (_SEGMENT.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _segment(self, step: int) -> Path:
        return self._folder / f"step_{step}.jsonl"

    def _open(self, step: int) -> int:
        return os.open(self._segment(step), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _append(self, left: bytes) -> None:
        try:
            while left and self._file >= 0:  # below 0: the run is ending, no result will be used
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with disk_errors(self._folder):
                raise error from None

    def _remember(self, entry: dict[str, Any]) -> None:
        if "vector" in entry:
            self.vectors[entry["text"]] = np.frombuffer(b64decode(entry["vector"]), dtype="<f4").astype(np.float32)
            return
        env, step = entry["env"], entry["step"]
        if "outcome" not in entry:
            self._actions[env, step] = entry["action"]
            return
        outcome = CallOutcome(_from_json(entry["outcome"]), entry["elapsed_s"])
        self._outcomes[env, step, entry["phase"], entry["attempt"]] = (entry["request"], outcome)


def _to_json(completion: Completion) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    fields_set = {name: value for name, default in _DEFAULTS if (value := getattr(completion, name)) != default}
    return fields_set | {"error": asdict(completion.error)} if completion.error is not None else fields_set


def _from_json(row: dict[str, Any]) -> Completion:
    known = {field.name for field in fields(Completion)}
    values = {name: value for name, value in row.items() if name in known}
    if values.get("error") is not None:
        values["error"] = ErrorInfo(**values["error"])
    return Completion(**values)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's entries and truncate it after the last whole one, so that appending starts a line."""
    whole = 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = decode(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if entry is None:
                logger.warning("%s: torn after %d bytes; calls from there on are repeated", path, whole)
                break
            whole += len(line)
            yield entry
    os.truncate(path, whole)
