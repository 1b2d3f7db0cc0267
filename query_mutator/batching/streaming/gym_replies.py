"""Read the replies of a puzzle gym, in any of its output modes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from query_mutator.batching.streaming.gym_types import (
    GymProtocolError,
    PuzzleCompletion,
    PuzzleObservation,
    PuzzleResult,
)

__all__ = ["ENVIRONMENT", "Reply"]

ENVIRONMENT = "ENVIRONMENT"  # the error code of a puzzle that failed
RULER = re.compile(r"^[=-]{5,}$")
SOLVED = re.compile(r"CONGRATULATIONS|^COMPLETE\b")
LOST = re.compile(r"^GAME ?OVER", re.IGNORECASE)
NOT_STARTED = re.compile(r"Unknown command|Invalid (start|game|difficulty)", re.IGNORECASE)
FAILED = re.compile(r"^Error: (.+)")
REFUSED = re.compile(r"unknown command|invalid|error|usage:", re.IGNORECASE)
HINT = re.compile(r"^\s*hint\s*:\s*(.*?)\s*$", re.IGNORECASE)
R = TypeVar("R", PuzzleObservation, PuzzleCompletion)


class Reply(NamedTuple):
    """The reply to one command: its lines of text, and its lines that are JSON objects."""

    lines: tuple[str, ...]
    objects: tuple[dict[str, Any], ...]

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Self:
        """Sort lines into text and JSON objects; invalid JSON is text."""
        texts, objects = [], []
        for line in lines:
            found = None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
            if isinstance(found, dict):
                objects.append(found)
            else:
                texts.append(line)
        return cls(tuple(texts), tuple(objects))

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the last object of a type, or None."""
        return next((one for one in reversed(self.objects) if one.get("type") == kind), None)

    @property
    def text(self) -> str:
        """Return the lines, without blank lines and rulers at both ends."""
        lines = list(self.lines)
        for end in (0, -1):
            while lines and (not lines[end].strip() or RULER.match(lines[end].strip())):
                lines.pop(end)
        return "\n".join(lines)

    @property
    def failure(self) -> str | None:
        """Return the error message of a puzzle that failed on the server, if it did."""
        error = self.last("error")
        if error is not None and error.get("code") == ENVIRONMENT:
            return str(error.get("message"))
        found = (FAILED.match(line) for line in self.lines)
        return next((match[1] for match in found if match), None)

    @property
    def refusal(self) -> str | None:
        """Return why a puzzle was not started, if the server says so."""
        return self.failure or next((line for line in self.lines if NOT_STARTED.match(line)), None)

    @property
    def _solved(self) -> bool:
        return any(SOLVED.search(line) for line in self.lines)

    def observation(self) -> PuzzleObservation | None:
        """Return the state of the puzzle, or None if the reply does not show it."""
        given = self.last("observation")
        if given is not None:
            return _record(PuzzleObservation, {**given, "text": _text_of(given)})
        if any("GRID-START" in line for line in self.lines):  # output mode agent
            return PuzzleObservation(text=_agent_block(self.lines), is_complete=self._solved)
        return None

    def result(self) -> PuzzleResult:
        """Return the result of an action."""
        failure = self.failure
        if failure is not None:
            return PuzzleResult(success=False, code=ENVIRONMENT, message=failure, done=True)
        given, complete = self.last("result") or {}, self.last("complete")
        solved = (complete is not None and _record(PuzzleCompletion, complete).success) or self._solved
        lost = any(LOST.match(line.strip()) for line in self.lines)
        success = given.get("success")
        if success is None and REFUSED.search(self.text.partition("\n")[0]):
            success = False
        return PuzzleResult(
            success=success,
            code=given.get("code"),
            message=given.get("message") or self.text,
            reward=float(given.get("reward", 1.0 if solved else 0.0)),
            done=solved or lost or bool(given.get("terminated") or given.get("truncated")),
            solved=solved,
            truncated=bool(given.get("truncated")),
            state=self.observation(),
            info=complete or {},
        )

    def hint(self) -> PuzzleResult:
        """Return the hint, as `GymClient.get_hint` does."""
        given = self.last("hint")
        if given is not None:
            message, action = str(given.get("message", "")), given.get("action")
            return PuzzleResult(success=True, code="HINT", message=message, info={"action": action})
        for match in filter(None, map(HINT.match, self.lines)):
            return PuzzleResult(success=True, code="HINT", message=match[1])
        refused = self.last("result") or {}
        return PuzzleResult(success=False, code="NO_HINT", message=refused.get("message") or self.text)


def _text_of(state: dict[str, Any]) -> str:
    """Return a JSON state as text for a reader."""
    shown = state.get("text") or state.get("grid_display")
    if isinstance(shown, str) and shown.strip():
        return f"{state.get('game', 'Puzzle')} ({state.get('difficulty', '?')})\n{shown.rstrip()}"
    return json.dumps({name: value for name, value in state.items() if name != "type"}, sort_keys=True)


def _agent_block(lines: Sequence[str]) -> str:
    """Return the last block between GAME-START and GAME-END."""
    starts = [place for place, line in enumerate(lines) if "GAME-START" in line]
    first = starts[-1] + 1 if starts else 0
    ends = [place for place, line in enumerate(lines) if "GAME-END" in line and place > first]
    return "\n".join(lines[first : ends[0] if ends else len(lines)])


def _record(kind: type[R], fields: dict[str, Any]) -> R:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise GymProtocolError(f"the gym sent an invalid {fields.get('type')}: {error.errors()[0]['msg']}") from error
