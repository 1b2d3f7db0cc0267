"""The first part of a two-part question."""

from __future__ import annotations

import re

from query_mutator.embedded.rules.text import sentences, tidy, words

MIN_WORDS = 4
_ASKS = r"(?:how|what|which|who|where|when|why|can|could|is|are|do|does|should|would|will|has|have)"
#: Where a second question begins inside a sentence: "…, and how do I …", "… and also …", "…; which …".
_SECOND = re.compile(
    rf"(?:[,;]\s*|\s+)(?:(?:and|or|but|plus)\s+)?(?:(?:then|also|second|secondly|next|after that|afterwards|"
    rf"while we're at it|by the way|on top of that|besides)\b[,]?\s+)*(?={_ASKS}\b)|\s+(?:and also|and then|as well as)\s+",
    re.IGNORECASE,
)


def first_part(text: str) -> str:
    """Return the text up to where its second question begins, or the whole text where there is none."""
    found = sentences(text)
    asking = [at for at, sentence in enumerate(found) if sentence.endswith("?")]
    if len(asking) > 1:
        return " ".join(found[: asking[0] + 1])
    for match in _SECOND.finditer(text):
        head = text[: match.start()]
        if match.start() and len(words(head)) >= MIN_WORDS and re.match(_ASKS, head.strip(), re.IGNORECASE):
            return tidy(head) + "?"
    return text
