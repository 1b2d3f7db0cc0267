"""Does a reply decline to answer, or say that it does not know?

A reply is a refusal where a sentence at its beginning declines, and what is left says nothing about the matter: an
apology, a reason, an offer. What stands in quotes is somebody else's.
"""

from __future__ import annotations

import re
from functools import lru_cache

from query_mutator.reading.clauses import sentences
from query_mutator.reading.text import Patterns, clean, word_list

P = Patterns("refusals")

_OPENING_CHARS = 400  # a refusal says so at once; later "I can't" is usually part of an answer
_MOST_SENTENCES = 5

_CUES = tuple(word_list("refusals", "CUES"))  # one of them is in every refusal
_QUOTED = re.compile(r"\"[^\"\n]{0,300}(?:\"|$)|(?<!\w)'[^'\n]{10,300}'(?!\w)|`[^`\n]{0,200}`")
_BARE_NOT = re.compile(r"\b(can|won|don|isn|doesn|wouldn|shouldn|couldn)t\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")


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
    return not _declines(opening) and P.NOT_SURE.search(opening) is not None


def _opening(reply: str) -> str:
    return clean(reply).lstrip()[:_OPENING_CHARS]


@lru_cache(maxsize=8192)  # an answer is judged many times in its episode; whole answers would take gigabytes
def _declines(opening: str) -> bool:
    opening = _BARE_NOT.sub(r"\1't", opening)
    text = re.sub(r"[{}\"]", " ", opening) if opening.startswith("{") else _QUOTED.sub(" X ", opening)
    lowered = text.lower()
    if not any(cue in lowered for cue in _CUES) or not P.DECLINES.search(text):
        return False
    declined = False
    for number, sentence in enumerate(sentences(text)[:_MOST_SENTENCES]):
        if sentence.rstrip().endswith("?"):
            continue
        if (decline := _decline(sentence)) is not None:
            declined, after = True, sentence[decline.end() :]
            _, *rest = after.split(", ", 1) if P.CONCEDES.match(sentence) else P.BUT.split(after, maxsplit=1)
            if rest and (_informs(rest[0]) or (P.CONCEDES.match(sentence) and _decline(rest[0]) is None)):
                return False
        elif declined:
            if not P.EMPTY.search(sentence) and (P.TELLS.search(sentence) or len(sentence.split()) >= 7):
                return False
        elif sentence.rstrip().endswith(":") or number > 2 or _informs(sentence):
            later = text[text.find(sentence) + len(sentence) :]
            if number > 1 or sentence.rstrip().endswith(":") or not _decline(later[:200]):
                return False
    return declined


def _decline(text: str) -> re.Match[str] | None:
    return None if P.HARMLESS.search(text) else P.DECLINES.search(text)


def _informs(text: str) -> bool:
    is_new = P.TELLS.search(text) is not None or not P.EMPTY.search(text)
    return len(text.split()) >= 2 and is_new and _decline(text) is None
