"""The first part of a two-part question."""

from __future__ import annotations

import re

from query_mutator.embedded.rules.text import sentences, tidy, words

MIN_WORDS = 4
_ASKS = r"(?:how|what|which|who|where|when|can i|could i|should i|is there|does|do i)"
_NEXT = r"(?:then|also|second|secondly|next|afterwards|besides|after that|while we're at it|by the way|on top of that)"
#: Where a second question begins inside a sentence: "…, and how do I …", "… and also …", "…; which …".
_SECOND = re.compile(
    rf"[,;]?\s+(?:and|or|but|plus)\s+(?:{_NEXT}\b,?\s+)*(?={_ASKS}\b)"
    rf"|[,;]\s+(?:{_NEXT}\b,?\s+)*(?=(?:how|what|which|where|who)\b)"
    r"|,?\s+and (?:also|then|secondly)\b",
    re.IGNORECASE,
)
_OPENS = re.compile(rf"{_ASKS}\b|is\b|are\b|can\b|could\b|why\b", re.IGNORECASE)


def first_part(text: str) -> str:
    """Return the text up to where its second question begins, or the whole text where there is none."""
    found = sentences(text)
    asking = [at for at, sentence in enumerate(found) if sentence.endswith("?")]
    if len(asking) > 1:
        return " ".join(found[: asking[0] + 1])
    for match in _SECOND.finditer(text):
        head = text[: match.start()]
        if len(words(head)) >= MIN_WORDS and _OPENS.match(head.strip()):
            return tidy(head) + "?"
    return text
