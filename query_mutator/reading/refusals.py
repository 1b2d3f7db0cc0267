"""Does a reply decline to answer, or say that it does not know?

A logistic regression on the words and letters of the reply's beginning decides, fitted to replies labeled by hand
(`scripts/fit_refusals.py`). Quoted text does not count: it is somebody else's.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from query_mutator.reading.text import Patterns, clean, hashed, stored

P = Patterns("refusals")

WEIGHTS = Path(__file__).with_name("refusals.npz")
BUCKETS = 2**14  # of words, and as many of letters; n-grams share them by a hash
_WORDS, _LETTERS = (1, 2, 3, 4), (3, 4, 5)  # lengths of n-grams

_OPENING_CHARS = 400  # a refusal says so at once; later "I can't" is usually part of an answer
_QUOTED = re.compile(r"\"[^\"\n]{0,300}(?:\"|$)|(?<!\w)'[^'\n]{10,300}'(?!\w)|`[^`\n]{0,200}`")
_TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
_ENDS = re.compile(r"[.!?。！？]")  # the next sentence gets a mark, so that n-grams see where it begins
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


def ngrams(reply: str) -> tuple[list[int], list[int]]:
    """Return the buckets of the n-grams of words and of letters at the beginning of a reply, each bucket once."""
    return _ngrams(_opening(reply))


def _opening(reply: str) -> str:
    return clean(reply).lstrip()[:_OPENING_CHARS]


@lru_cache(maxsize=8192)  # an answer is judged many times in its episode; whole answers would take gigabytes
def _declines(opening: str) -> bool:
    weights, log_odds = stored(WEIGHTS)
    for block, buckets in zip(weights, _ngrams(opening), strict=True):
        log_odds += sum(block[bucket] for bucket in buckets) / max(1, len(buckets)) ** 0.5
    return log_odds > 0


def _ngrams(opening: str) -> tuple[list[int], list[int]]:
    text = re.sub(r"[{}\"]", " ", opening) if opening.startswith("{") else _QUOTED.sub(" X ", opening)
    tokens = _TOKEN.findall(_ENDS.sub(r"\g<0> ^ ", f"^ {text.lower()}"))
    words = {" ".join(tokens[at : at + n]) for n in _WORDS for at in range(len(tokens) - n + 1)}
    padded = [f" {word} " for word in text.lower().split()]
    letters = {word[at : at + n] for word in padded for n in _LETTERS for at in range(len(word) - n + 1)}
    return hashed(words, BUCKETS), hashed(letters, BUCKETS)
