"""The journal of a file that is being answered: OUT.journal, from which the output is written when all is done.

    {"input", "target_model", ...}                          the first row: a journal of other questions is not resumed
    {"line", "step", "phase", "request", "outcome"}         a completed call, on disk before it is used
    {"line", "row", "kind"}                                 the row of a line, with the kind of its error

A resumed command makes no call again that was answered, and asks those lines again whose failures may pass. Two numbers
per line are all that grows with the file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from query_mutator.env.flow import CallOutcome, CallSite
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, decode_object, encode
from query_mutator.files.json_lines import JsonLines, scan_json_lines
from query_mutator.llm.coalesce import request_key
from query_mutator.llm.retry import TRANSIENT
from query_mutator.session.journal import completion_from_json, completion_to_json
from query_mutator.types import ChatRequest

__all__ = ["FileJournal"]


class FileJournal:
    """The calls and rows of one output; `find`, `holds` and `write` are for a scheduler."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, num_lines: int) -> None:
        """Open a journal, new or resumed; UsageError for one that was begun with another `header`, or is damaged."""
        self.path = path
        #: by line without a row, step and phase: the sha256 of an answered request, and the answer
        self._known: dict[int, dict[tuple[int, str], tuple[str, CallOutcome]]] = {}
        self._rows_at = array("q", bytes(8 * (num_lines + 1)))  # by line: where its row begins, 0 for none
        self.num_done = self.num_failed = 0
        if path.exists():
            self._read(header)
        self._file = JsonLines(path)
        if not self._file.size_bytes:
            self._file.append(header)

    def is_done(self, line: int) -> bool:
        """Return whether a line was done before this command started."""
        return self._rows_at[line] != 0

    def find(self, site: CallSite, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the answer to a call that an earlier command made, whichever attempt it was."""
        key, outcome = self._known.get(site.env, {}).get((site.step, site.phase), (None, None))
        return outcome if key == request_key(request) else None

    def holds(self, site: CallSite, attempt: int) -> bool:
        """Return False: failed attempts are made again."""
        return False

    def write(self, site: CallSite, attempt: int, request: ChatRequest, outcome: CallOutcome) -> None:
        """Append an answered call and hand it to the operating system."""
        if outcome.completion.ok:
            about = {"line": site.env, "step": site.step, "phase": site.phase, "request": request_key(request)}
            self._file.append({**about, "outcome": completion_to_json(outcome.completion)})

    def add(self, line: int, row: Mapping[str, Any], kind: str | None = None) -> None:
        """Append the row of a line that is done; `kind` is that of its error."""
        self._file.append({"line": line, "row": row, "kind": kind})
        self._known.pop(line, None)
        self.num_done += 1
        self.num_failed += kind is not None

    def write_outputs(self, answers: Path, errors: Path) -> None:
        """Write the rows of all lines in order, those without an answer to a file of their own, and end the journal."""
        self._file.sync()
        self._file.close()
        self._scan(resumes=False)
        if self.num_failed:
            self._write(errors, failed=True)
        else:
            errors.unlink(missing_ok=True)
        self._write(answers, failed=False)
        self.path.unlink()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _read(self, header: Mapping[str, Any]) -> None:
        """Take the rows and the answered calls of an earlier command."""
        first = next(iter(scan_json_lines(self.path)), None)
        if first is not None and first.value != decode_object(encode(header)):
            raise UsageError(
                f"{self.path} was begun with {_differences(first.value, header)}; repeat that command to resume it, or "
                "remove the file to start again"
            )
        self._scan(resumes=True)

    def _scan(self, *, resumes: bool) -> None:
        """Find the row of each line; with `resumes` take the answered calls of the others."""
        at = 0
        for found in scan_json_lines(self.path):
            entry = found.value
            if "row" in entry:
                self._take_row(entry, at, resumes=resumes)
            elif "outcome" in entry and resumes:
                outcome = CallOutcome(completion_from_json(entry["outcome"]), 0.0)
                self._known.setdefault(entry["line"], {})[entry["step"], entry["phase"]] = (entry["request"], outcome)
            at = found.end

    def _take_row(self, entry: Mapping[str, Any], at: int, *, resumes: bool) -> None:
        line, kind = entry["line"], entry["kind"]
        if resumes and kind in TRANSIENT:
            return
        self._known.pop(line, None)
        self._rows_at[line] = at
        if resumes:
            self.num_done += 1
            self.num_failed += kind is not None

    def _write(self, path: Path, *, failed: bool) -> None:
        with self.path.open("rb") as journal, atomic_write(path) as file:
            for at in filter(None, self._rows_at):
                journal.seek(at)
                entry = json.loads(journal.readline())  # keeps whole numbers of any size
                if (entry["kind"] is not None) == failed:
                    file.write(encode(entry["row"]) + b"\n")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, as "input x (now y)"."""
    found = [f"{name} {before.get(name)} (now {value})" for name, value in now.items() if before.get(name) != value]
    return ", ".join(found) or "other settings"
