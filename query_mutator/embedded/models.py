"""What a model of the embedded server is, and the two models that load nothing: `echo` and `babble`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from query_mutator.errors import UsageError

__all__ = ["Babble", "Echo", "EmbeddedModel", "PromptError"]

#: Words in an answer of `babble`, new words in a rewrite, and the most words of a rewrite.
ANSWER_WORDS, NEW_WORDS, MAX_REWRITE_WORDS = 30, 3, 14

# Each is a single token to a sentence encoder.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
_WORDS = _TEXT.split()


class PromptError(UsageError):
    """A prompt or format that a model cannot answer; the server replies with HTTP 400 and this message."""


class EmbeddedModel(Protocol):
    """A model that answers several prompts at once; a prompt is the text of the last user message.

    Optional attributes: `fixed_reply` (the reply to every prompt, sent without a worker thread), `digest` (what the
    replies depend on, as a sha256), `operators` (names of the rewrite operators a mutator can carry out), `weights`
    (models with the same share a runner), `parameters` (of the model's file, as {"num_ctx": 2048}).
    """

    name: str

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return one reply per prompt, in order; raise PromptError for a prompt that cannot be answered."""
        ...


class Echo:
    """Answers every prompt with the same words, for measuring everything but a model."""

    name = "echo"

    def __init__(
        self, fixed_reply: str = "This reply is always the same, so that only the calls are measured."
    ) -> None:
        self.fixed_reply = fixed_reply

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return the fixed reply for each prompt."""
        return [self.fixed_reply] * len(prompts)


class Babble:
    """Answers with thirty words drawn by the prompt, for measuring calls whose texts have to be embedded.

    A rewrite is the question with a few drawn words in front.
    """

    name = "babble"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return one reply per prompt, in order; equal prompts get equal replies."""
        return [self.reply(prompt) for prompt in prompts]

    def reply(self, prompt: str) -> str:
        """Return the reply to one prompt."""
        _, opening, rest = prompt.partition("<question>")
        if not opening:
            return " ".join(_draw(prompt, ANSWER_WORDS)).capitalize() + "."
        kept = rest.partition("</question>")[0].split()[: MAX_REWRITE_WORDS - NEW_WORDS]
        return " ".join([*_draw(prompt, NEW_WORDS), *kept])


def _draw(prompt: str, count: int) -> list[str]:
    digest = hashlib.shake_128(prompt.encode("utf-8", "surrogatepass")).digest(count)
    return [_WORDS[byte % len(_WORDS)] for byte in digest]
