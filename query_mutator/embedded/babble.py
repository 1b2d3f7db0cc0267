"""The model `babble`: other words for every prompt, for measuring calls whose texts have to be embedded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

ANSWER_WORDS = 30
NEW_WORDS = 3  # in a rewrite
MAX_REWRITE_WORDS = 14

# One token each to a sentence encoder.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
_WORDS = _TEXT.split()


class Babble:
    """Answers with some thirty words drawn by the prompt; a rewrite is the question with a few words drawn for it."""

    name = "babble"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return one reply per prompt, in order."""
        return [self.reply(prompt) for prompt in prompts]

    def reply(self, prompt: str) -> str:
        """Return the reply, always the same to the same prompt."""
        before, opening, rest = prompt.partition("<question>")
        if not opening or not before.startswith("[operator: "):
            return " ".join(_drawn(prompt, ANSWER_WORDS)).capitalize() + "."
        kept = rest.partition("</question>")[0].split()[: MAX_REWRITE_WORDS - NEW_WORDS]
        return " ".join([*_drawn(prompt, NEW_WORDS), *kept])


def _drawn(prompt: str, count: int) -> list[str]:
    digest = hashlib.shake_128(prompt.encode("utf-8", "surrogatepass")).digest(count)
    return [_WORDS[byte % len(_WORDS)] for byte in digest]
