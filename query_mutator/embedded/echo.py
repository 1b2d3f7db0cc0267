"""The model `echo`: the same words for every prompt, for measuring everything but a model."""

from __future__ import annotations

from collections.abc import Sequence


class Echo:
    """Answers every prompt with `fixed_reply`, which the server sends without asking a worker thread."""

    name = "echo"

    def __init__(
        self, fixed_reply: str = "This reply is always the same, so that only the calls are measured."
    ) -> None:
        self.fixed_reply = fixed_reply

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return the fixed reply for each prompt."""
        return [self.fixed_reply] * len(prompts)
