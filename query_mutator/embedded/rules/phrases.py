"""A glossary of phrases to replace: longest match first, inflected, with gaps ("chuck * out" -> "remove *")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from query_mutator.embedded.rules.inflect import forms, plural
from query_mutator.embedded.rules.tables import Row, grammar, load_rows
from query_mutator.embedded.rules.text import like, tidy, tokens

__all__ = ["AUXILIARIES", "GAP", "NUMBER", "Phrase", "PhraseTable", "Span", "match_key", "previous_word", "spell_out"]

GAP = "*"
NUMBER = "<n>"
MAX_GAP_WORDS = 5
#: Before a participle: "has nuked" and "was nuked" take the participle of the replacement, "nuked" alone its past.
AUXILIARIES = grammar("auxiliary")
_DETERMINERS = grammar("determiner")
_NUMBER_WORDS = grammar("number")


class Span(NamedTuple):
    """Where a key matched: the token after it, and the tokens its gap took."""

    end: int
    gap: list[str]


class Phrase(NamedTuple):
    """One way to write a glossary key, and what to write instead (in both past forms where they differ)."""

    key: tuple[str, ...]
    past: str
    participle: str
    is_plain_verb: bool = False  # base or third person: after an article the word is a noun


def spell_out(key: str, replacement: str, kind: str) -> Iterator[Phrase]:
    """Yield the inflected forms of one glossary row; kind is v (verb), n (noun) or - (not inflected)."""
    if kind == "v":
        olds, news = forms(key), forms(replacement)
        for old, new in zip(olds[:3], news[:3], strict=True):
            yield Phrase(tuple(old.split()), new, new, is_plain_verb=old != olds.gerund)
        yield Phrase(tuple(olds[3].split()), news[3], news[4] if olds[3] == olds[4] else news[3])
        if olds[3] != olds[4]:
            yield Phrase(tuple(olds[4].split()), news[4], news[4])
        return
    yield Phrase(tuple(key.split()), replacement, replacement)
    if kind == "n":
        several = plural(replacement)
        yield Phrase(tuple(plural(key).split()), several, several)


class PhraseTable:
    """Rows of (phrase, replacement, kind), applied to a text from left to right, each word at most once."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._by_first: dict[str, list[Phrase]] = defaultdict(list)
        for key, replacement, kind in rows:
            for phrase in spell_out(key, replacement.strip(), kind):
                self._by_first[phrase.key[0]].append(phrase)
        for found in self._by_first.values():
            found.sort(key=lambda phrase: -len(phrase.key))

    @classmethod
    def load(cls, name: str) -> PhraseTable:
        """Return the table of a glossary file."""
        return cls(load_rows(name))

    def words(self) -> set[str]:
        """Return every word of the keys, in all their forms."""
        return {word for found in self._by_first.values() for phrase in found for word in phrase.key}

    def apply(self, text: str, *, allow: Callable[[list[str], int, int], bool] | None = None) -> str:
        """Return the text with every phrase replaced for which `allow(tokens, start, end)` is true."""
        return tidy("".join(self._rewrite(tokens(text), allow)))

    def _rewrite(self, parts: list[str], allow: Callable[[list[str], int, int], bool] | None) -> Iterator[str]:
        at = 0
        while at < len(parts):
            match = self._match(parts, at)
            if match is None or (allow is not None and not allow(parts, at, match[1].end)):
                yield parts[at]
                at += 1
                continue
            phrase, span = match
            new = phrase.participle if previous_word(parts, at) in AUXILIARIES else phrase.past
            inner = "".join(self._rewrite(span.gap, allow)).strip()
            yield like(parts[at], new.replace(GAP, inner))
            at = span.end

    def _match(self, parts: list[str], start: int) -> tuple[Phrase, Span] | None:
        noun_place = previous_word(parts, start) in _DETERMINERS
        first = parts[start].lower().replace("’", "'")
        starting = self._by_first.get(first, []) + (self._by_first.get(NUMBER, []) if _fits(first, NUMBER) else [])
        for phrase in starting:
            if noun_place and phrase.is_plain_verb:
                continue
            span = match_key(parts, start, phrase.key)
            if span is not None:
                return phrase, span
        return None


def previous_word(parts: Sequence[str], at: int) -> str:
    """Return the token before `at` in lower case, spaces skipped, or an empty string."""
    return next((part.lower() for part in reversed(parts[:at]) if not part.isspace()), "")


def match_key(parts: Sequence[str], start: int, key: Sequence[str]) -> Span | None:
    """Return the span of a key that matches at `start`, or None; a gap stays within its clause."""
    at, gap = start, list[str]()
    for place, word in enumerate(key):
        if word == GAP:
            end = _gap_end(parts, at, key[place + 1])
            if end is None:
                return None
            gap, at = list(parts[at:end]), end
            continue
        if place and key[place - 1] != GAP:
            if at >= len(parts) or not (parts[at].isspace() or parts[at] == "-"):
                return None
            at += 1
        if at >= len(parts) or not _fits(parts[at].lower().replace("’", "'"), word):
            return None
        at += 1
    return Span(at, gap)


def _fits(token: str, word: str) -> bool:
    """Return True when the token is the key's word, or a number where the key has NUMBER."""
    return token == word or (word == NUMBER and (token.isdecimal() or token in _NUMBER_WORDS))


def _gap_end(parts: Sequence[str], start: int, stop: str) -> int | None:
    """Return the index of the word `stop`, at most MAX_GAP_WORDS words away in the same clause."""
    count = 0
    for at in range(start, len(parts)):
        part = parts[at]
        if part.lower() == stop:
            return at if count else None
        if part[0].isalnum() or part[0] in '`"_':
            count += 1
        elif not part.isspace() and part != "-":
            return None
        if count > MAX_GAP_WORDS:
            return None
    return None
