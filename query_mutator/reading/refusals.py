"""Does a reply decline to answer, or say that it does not know?

A reply is a refusal where a sentence at its beginning declines, and what is left says nothing about the matter: an
apology, a reason, an offer. What stands in quotes is somebody else's.
"""

from __future__ import annotations

import re
from functools import lru_cache

from query_mutator.reading.clauses import sentences
from query_mutator.reading.patterns import Patterns
from query_mutator.reading.text import clean

P = Patterns("refusals")

OPENING_CHARS = 400  # a refusal says so at once; later "I can't" is usually part of an answer
_MOST_SENTENCES = 5

_QUOTED = re.compile(r"\"[^\"\n]{0,300}(?:\"|$)|(?<!\w)'[^'\n]{10,300}'(?!\w)|`[^`\n]{0,200}`")
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")
_LETTER = re.compile(r"^\W*(?:subject:|dear\s|hi\s\w+,|to\swhom)", re.IGNORECASE)
_BUT = re.compile(r"[,;]?\s?(?:but|however|though|yet|nevertheless|;|:)\s?", re.IGNORECASE)


def first_sentence(text: str) -> str | None:
    """Return the first sentence once it is complete: something follows its end, unless that is `。`, `！` or `？`."""
    text = text.lstrip()
    end = _SENTENCE_END.search(text)
    return text[: end.end()] if end else None


def is_refusal(reply: str) -> bool:
    """Return whether a reply declines to answer, judged by its beginning."""
    return _declines(_opening(reply))


def is_not_sure(reply: str) -> bool:
    """Return whether a reply says that it does not know, judged by its beginning."""
    opening = _opening(reply)
    return not _declines(opening) and _is_not_sure(opening)


def _opening(reply: str) -> str:
    return clean(reply).lstrip()[:OPENING_CHARS]


@lru_cache(maxsize=8192)  # an answer is judged many times in its episode; whole answers would take gigabytes
def _is_not_sure(opening: str) -> bool:
    return P.NOT_SURE.search(opening) is not None


@lru_cache(maxsize=8192)
def _declines(opening: str) -> bool:
    if _LETTER.match(opening):
        return False
    opening = re.sub(r"^```\w*\s|```\s*$", "", opening)
    text = re.sub(r"[{}\"]", " ", opening) if opening.startswith("{") else _QUOTED.sub(" X ", opening)
    declined = False
    for number, sentence in enumerate(sentences(text)[:_MOST_SENTENCES]):
        pieces = [piece for piece in P.CUT.split(sentence) if piece.strip()]
        if number == 0 and sentence.rstrip().endswith(":") and not P.DECLINES.search(sentence):
            return False
        if sentence.rstrip().endswith("?") and number == 0:
            if re.match(r"\W*(?:can't|cannot|unable|not)\b", sentence, re.IGNORECASE):
                return False
            continue
        if P.DECLINES.search(sentence) and not P.HARMLESS.search(sentence):
            declined = True
            after = sentence[P.DECLINES.search(sentence).end() :]  # type: ignore[union-attr]
            rest = _BUT.split(after, maxsplit=1)
            if len(rest) == 2 and _informs(rest[1]):
                return False
            if (
                re.match(r"(?:while|although|though|even\sif)\b", sentence.strip(), re.IGNORECASE)
                and pieces[1:]
                and len(pieces[-1].split()) > 2
                and not P.DECLINES.search(pieces[-1])
            ):
                return False
        elif (
            not declined
            and (number > 2 or (_informs(sentence) and (number or not P.DECLINES.search(text[len(sentence) : 200]))))
        ) or (declined and P.TELLS.search(sentence) and not P.EMPTY.search(sentence)):
            return False
    return declined


def _informs(text: str) -> bool:
    """Return whether a text says something about the matter."""
    return (
        len(text.split()) >= 2
        and not P.DECLINES.search(text)
        and (P.TELLS.search(text) is not None or not P.EMPTY.search(text))
    )
