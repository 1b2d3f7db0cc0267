"""The text of one streamed reply as it grows, whatever the wire format of its pieces."""

from __future__ import annotations

import time
from collections.abc import Callable

from query_mutator.types import Completion, ErrorInfo


class StreamedText:
    """Gathers the pieces of a reply and asks `is_enough` after each."""

    def __init__(self, is_enough: Callable[[str], bool]) -> None:
        self._is_enough = is_enough
        self._started = time.perf_counter()
        self.text = ""
        self.pieces = 0
        self.was_cut = False
        self.error: ErrorInfo | None = None

    def add(self, piece: str) -> bool:
        """Take the next piece; False when no more is wanted."""
        if not piece:
            return True
        self.text += piece
        self.pieces += 1
        self.was_cut = self._is_enough(self.text)
        return not self.was_cut

    def fail(self, kind: str, message: str) -> bool:
        """Note what is wrong with the stream; always False, as no more is wanted."""
        self.error = ErrorInfo(kind=kind, message=message)
        return False

    def beginning(self, *, model: str) -> Completion:
        """Return what came before the reply was cut."""
        return Completion(text=self.text.strip(), model=model, completion_tokens=self.pieces)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the call began."""
        return time.perf_counter() - self._started
