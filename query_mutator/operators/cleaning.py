"""The operator `clean`: greetings before a question and thanks after it, taken off whole; nothing else changes.

A greeting or thanks is a sentence or line that says only that. Where a rule cannot tell, the text stays as it is.
"""

from __future__ import annotations

import re

from query_mutator.operators.guards import LANGUAGES, LAST_LATIN, words_in

_WHO = r"(?:there|all|everyone|everybody|folks|guys|again|team)"
_GREETING = rf"(?:(?:hi|hello|hey|greetings|good (?:morning|afternoon|evening|day))(?: {_WHO})*|dear {_WHO})"
_THANKS = (
    r"(?:many |kind )?(?:thanks|thank you|thx)(?: (?:so much|very much|a lot|again|in advance))*"
    r"(?: for (?:your|the|any) (?:help|time))?"
)
_FIRST = re.compile(rf"\s*(?:{_GREETING}|{_THANKS})(?:\s*[.!]+\s+|[ \t]*(?:[,.!]+[ \t]*)?\n\s*)", re.IGNORECASE)
_LAST = re.compile(
    rf"(?:(?<=[.!?])\s+|\s*\n\s*)(?:{_THANKS}|(?:best|kind|warm) regards)[ \t]*[,.!]*\s*\Z", re.IGNORECASE
)
LAST_CHARS = 100  # in which thanks are looked for
#: Text that may be about its own words, has code, quotes or something pasted, or is a list.
_MAY_BE_ABOUT_ITSELF = re.compile(
    r"[\"“”«»‘`{}<>=]|:(?=\s|\Z)|^(?: {4}|\t)|^[ \t]*(?:[-*•]|\d+[.)]) "
    r"|\b(?:say|said|spell|mean|answer|repl[yi]|respon[ds]|writ|greet|salut|translat|pronounc|proof|correct|rhym"
    r"|polit|word|phras|sentenc|lyric|letter|e?mail|messag|text|syllabl|vowel|quot|tone\b|title|complet|continu|summar"
    r"|edit|(?:count|sort|list|s[aiou]ng)(?:s|ed|ing)?\b)",
    re.IGNORECASE | re.MULTILINE,
)
#: Words of a question that may stand for the greeting before it.
_POINTS_BACK = re.compile(r"\b(?:it|its|this|that|these|those|they)\b", re.IGNORECASE)


def clean(text: str) -> str:
    """Return an English text without the greetings before it and the thanks after it; a question is always left."""
    if not _is_english(text) or _MAY_BE_ABOUT_ITSELF.search(text):
        return text
    start, end = 0, len(text)
    while found := _FIRST.match(text, start):
        start = found.end()
    while found := _LAST.search(text, max(start, end - LAST_CHARS), end):
        end = found.start()
    left = text[start:end]
    if len(left.split()) < 2 or (start and _POINTS_BACK.search(left)):
        return text
    return left


def _is_english(text: str) -> bool:
    """Return whether no other alphabet is in a text, and no other language has more of its frequent words."""
    if any(letter.isalpha() and ord(letter) > LAST_LATIN for letter in text):
        return False
    words = set(words_in(text))
    return max(LANGUAGES, key=lambda name: len(LANGUAGES[name] & words)) == "en"  # which is the first of equals
