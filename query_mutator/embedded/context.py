"""Handle prompts and replies that do not fit the context, as Ollama 0.9 and 0.24 do.

    truncate   True: the model reads the end of a prompt (the start of a text to embed); False: HTTP 400
    shift      True: a reply pushes the prompt out of the context; False: it ends there, with `done_reason` "length"

Both default to true. 0.9 knows only the `truncate` of embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from query_mutator.embedded.shaping import tokens_of
from query_mutator.embedded.wire import ApiError

__all__ = ["Context", "OllamaVersion"]

OllamaVersion = Literal["0.9", "0.24"]
_TOO_LONG = {
    "0.9": "input length exceeds maximum context length",
    "0.24": "the input length exceeds the context length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context of a loaded model in tokens, and what a call wants where something does not fit it."""

    tokens: int
    version: OllamaVersion
    truncate: bool
    shift: bool

    def prompt(self, text: str) -> str:
        """Return the part of a prompt that the model reads; ApiError 400 for one that may not be cut."""
        if self._holds(text):
            return text
        if not self.truncate and self.version != "0.9":
            raise ApiError(400, _TOO_LONG[self.version])
        return "".join(tokens_of(text)[-self.tokens :])

    def text(self, text: str) -> str:
        """Return the part of a text that is embedded; ApiError 400 for one that may not be cut."""
        if self._holds(text):
            return text
        if not self.truncate:
            raise ApiError(400, _TOO_LONG[self.version])
        return "".join(tokens_of(text)[: self.tokens])

    def reply_limit(self, prompt: str, max_tokens: int | None) -> int | None:
        """Return how many tokens a reply may have; None or below 1 is no limit."""
        if self.shift or self.version == "0.9":
            return max_tokens
        room = max(1, self.tokens - len(tokens_of(prompt)))
        return room if max_tokens is None or max_tokens < 1 else min(max_tokens, room)

    def _holds(self, text: str) -> bool:
        return len(text) <= self.tokens or len(tokens_of(text)) <= self.tokens
