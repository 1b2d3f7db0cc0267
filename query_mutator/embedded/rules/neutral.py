"""Neutral wording: replace violent words that govern a computing noun by what they mean there.

"kill a child process" -> "stop a child process"; "kill my neighbour" stays. A verb is replaced if its object (or
subject, without an object) is a noun of computing and not a person, animal or property; the replacement depends on that
noun and on the words that follow ("crack a path open", "crack a line into words").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from query_mutator.embedded.rules.inflect import forms, stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.phrases import (
    AUXILIARIES,
    GAP,
    PhraseTable,
    Span,
    match_key,
    previous_word,
)
from query_mutator.embedded.rules.tables import grammar, load_classes, load_rows, load_words
from query_mutator.embedded.rules.text import is_word, like, tokens

__all__ = ["Neutral", "load_verbs"]

WINDOW = 8  # words on each side that decide what a verb governs
#: In place of a meaning: the verb is meant literally.
KEEP = "keep"
_STOPS = frozenset(".,;:!?()")
_PRONOUNS, _STAND_INS, _BOUNDARIES = grammar("pronoun"), grammar("stand-in"), grammar("boundary")
_DETERMINERS = grammar("determiner") | grammar("demonstrative")
#: Nouns of computing that say nothing alone; "library" is part of the field's name, which may have been added.
_VAGUE = frozenset({"object", "objects", "library", "content", "contents", "part", "parts", "end", "start", "place"})
_SKIPPED, _BEFORE_NOUN, _FAMILY = grammar("skipped"), grammar("before-noun"), grammar("family")


class Verb(NamedTuple):
    """One inflected way to write a verb of the glossary, and its meanings as (condition, five forms)."""

    key: tuple[str, ...]
    form: int
    meanings: tuple[tuple[str, tuple[str, ...]], ...]


class Governed(NamedTuple):
    """What a verb governs: the class of the noun, and whether it is the verb's object."""

    noun_class: str
    is_object: bool


def load_verbs() -> dict[str, list[Verb]]:
    """Return the verb glossary by first word, longest keys first."""
    by_first: dict[str, list[Verb]] = defaultdict(list)
    for names, rules in load_rows("neutral_verbs.tsv"):
        meanings = tuple(_meanings(rules))
        for name in names.split():
            for form, written in enumerate(forms(name.replace("_", " "))):
                key = tuple(written.split())
                by_first[key[0]].append(Verb(key, form, meanings))
    for found in by_first.values():
        found.sort(key=lambda verb: -len(verb.key))
    return dict(by_first)


def _meanings(rules: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    # "*=stop >to=split" is cut at the conditions, since a meaning may have several words
    condition, words = "", list[str]()
    for piece in rules.split():
        if "=" in piece:
            if condition:
                yield condition, tuple(forms(" ".join(words)))
            condition, _, first = piece.partition("=")
            words = [first]
        else:
            words.append(piece)
    yield condition, tuple(forms(" ".join(words)))


class Neutral:
    """Replaces violent words that govern computing nouns; all others stay."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._verbs = load_verbs()
        phrases = load_rows("neutral_phrases.tsv")
        # Idioms contain verbs and are replaced before them; single words may be verbs ("attack") and come after.
        self._idioms = PhraseTable(row for row in phrases if " " in row[0])
        self._nouns = PhraseTable(row for row in phrases if " " not in row[0])
        self._classes = {word: name for name, words in load_classes("nouns.tsv").items() for word in words}
        self._living = load_words("living.txt")
        self._lexicon = lexicon

    def glossary(self) -> set[str]:
        """Return every word of the glossaries."""
        verbs = {word for found in self._verbs.values() for verb in found for word in verb.key}
        return verbs | self._idioms.words() | self._nouns.words()

    def __call__(self, text: str) -> str:
        """Return the text in neutral words."""
        text = self._idioms.apply(text, allow=self._is_about_computing)
        text = "".join(self._rewrite(tokens(text)))
        return self._nouns.apply(text, allow=self._is_noun)

    def _rewrite(self, parts: list[str]) -> Iterator[str]:
        at = 0
        while at < len(parts):
            found = self._match(parts, at)
            if found is None:
                yield parts[at]
                at += 1
            else:
                span, written = found
                gap = "".join(span.gap).strip()
                written = written.replace(GAP, gap) if GAP in written else f"{written} {gap}".strip()
                yield like(parts[at], written)
                at = span.end

    def _match(self, parts: list[str], at: int) -> tuple[Span, str] | None:
        before = previous_word(parts, at)
        for verb in self._verbs.get(parts[at].lower(), ()):
            if verb.form < 2 and before in _BEFORE_NOUN and not (verb.form and before == "that"):
                continue
            span = match_key(parts, at, verb.key)
            if span is None:
                continue
            governed = self._governed(parts, at, span)
            written = self._written(verb, governed, parts, at) if governed is not None else KEEP
            return None if written == KEEP else (span, written)
        return None

    def _written(self, verb: Verb, governed: Governed, parts: list[str], at: int) -> str:
        clause = list(islice(_clause(parts[at:]), 2 * WINDOW))
        before = previous_word(parts, at)
        passive = verb.form >= 3 and before in AUXILIARIES
        for condition, meaning in verb.meanings:
            if meaning[0] == KEEP and not governed.is_object:
                continue
            follows = condition.startswith(">") and condition[1:] in clause[len(verb.key) - 1 :]
            absent = condition == "none" and not governed.is_object and not passive
            thing = not passive and condition == "thing" and any(stem in self._classes for stem in stems(before))
            if follows or absent or thing or condition in ("*", governed.noun_class):
                return KEEP if meaning[0] == KEEP else meaning[4 if passive else verb.form]
        raise AssertionError(f"{verb.key}: a row of neutral_verbs.tsv has no * meaning")

    def _governed(self, parts: list[str], at: int, span: Span) -> Governed | None:
        """Return what the verb governs, or None for a person, property, or nothing of computing."""
        after = list(islice(_clause(parts[span.end :]), WINDOW))
        target = list(_noun_phrase(_words(span.gap))) or list(_noun_phrase(after))
        if self._lives(target) or (not target and self._lives(after)):
            return None
        nouns = [word for word in target if word not in _STAND_INS]
        if target:
            found = self._class_of(nouns) if nouns else self._class_in(parts)
            return Governed(found, is_object=True) if found else None
        subject = list(islice(_clause(reversed(parts[:at])), WINDOW))
        if self._lives(subject, but=_PRONOUNS):
            return None
        found = self._class_of(subject[::-1]) or self._class_in(parts)
        return Governed(found, is_object=False) if found else None

    def _lives(self, words: Iterable[str], *, but: frozenset[str] = frozenset()) -> bool:
        """Return whether a word names a person, an animal or property, except the words `but`."""
        return any(stem in self._living and stem not in but for word in words for stem in stems(word))

    def _class_of(self, words: Sequence[str]) -> str | None:
        """Return the class of the last noun that has one; a corpus word without a class is data."""
        classes = [self._classes[stem] for word in words for stem in stems(word) if stem in self._classes]
        strong = [found for found in classes if found != "data"]
        if classes:
            return strong[-1] if strong and classes[-1] != "data" else classes[-1]
        telling = (word for word in words if len(word) > 2 and word not in _FAMILY)
        known = any(word in self._lexicon.vocabulary or word in self._lexicon.field for word in telling)
        return "data" if known else None

    def _class_in(self, parts: list[str]) -> str | None:
        """Return the class of a noun anywhere in the text, for pronouns; None if the text also mentions people."""
        spoken = list(_words(parts))
        if self._lives(spoken, but=_PRONOUNS):
            return None
        return next((self._classes[stem] for word in spoken for stem in stems(word) if stem in self._classes), None)

    def _is_noun(self, parts: list[str], start: int, end: int) -> bool:
        before = previous_word(parts, start)
        is_noun = parts[start].lower() not in self._verbs or before in _BEFORE_NOUN or before in self._classes
        return is_noun and self._is_about_computing(parts, start, end)

    def _is_about_computing(self, parts: list[str], start: int, end: int) -> bool:
        near = _words(parts[max(0, start - 2 * WINDOW) : end + 2 * WINDOW])
        if self._lives(near, but=_PRONOUNS):
            return False
        said = (word for word in _words(parts) if word not in _STAND_INS and word not in _VAGUE)
        return any(stem in self._classes for word in said for stem in stems(word))


def _words(parts: Iterable[str]) -> Iterator[str]:
    """Yield the words in lower case; code and numbers count as words."""
    return (part.lower() for part in parts if is_word(part) or part[0].isalnum() or part[0] in '`"_')


def _clause(parts: Iterable[str]) -> Iterator[str]:
    """Yield the words up to the next punctuation."""
    return _words(takewhile(lambda part: part not in _STOPS, parts))


def _noun_phrase(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of the noun phrase at the start, without determiners and adverbs."""
    begun = False
    for word in takewhile(lambda word: word not in _BOUNDARIES, islice(words, WINDOW)):
        if word in ("of", "from"):
            begun = False
        elif word in _DETERMINERS and begun:
            return  # "the process | my neighbour left running"
        elif word not in _DETERMINERS and word not in _SKIPPED and not word.endswith("ly"):
            begun = True
            yield word
