"""What a reply asserts: its clauses by weight, without what it negates, quotes from others or takes back.

A conclusion ("so …"), a correction ("no, …") and a contrast ("people say …, but …") weigh more than a plain clause, one
that repeats the question's words more than one that does not; asides and reasons weigh less, and a question nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from query_mutator.reading.text import Patterns, stems, word_list

P = Patterns("clauses")

REJECTED = -99.0
ASIDE_WEIGHT = -4.0
_LONG = 800  # characters of a sentence: of a longer one its beginning and its end are read
_FIRST, _LAST = 3, 15  # sentences of a reply that are read
_QUESTION_ENDS = ("?", "？", "؟")

_STOP = re.compile(
    r"[\U0001f300-\U0001faff\u2600-\u26ff\u2728]\ufe0f?(?=\s+[A-ZА-Я])|[.!?][\"')\]*_`]{0,4}(?=\s|$)|[。！？।]+|[.!?](?=\*\*)|[؛؟](?=\s|$)|(?:\.\.\.|…)(?=\s|[A-Z])"
)
_READABLE = re.compile("[^\\s.,;:!?\U0001f000-\U0001faff\u2600-\u2712\ufe0f]|[!?;:.,]`")
_HEAD_END = re.compile(r"[,;–—(]|:(?!\d)|\s-\s(?!\d)|\.\s|$")
_BOLD = re.compile(r"\*\*[^*\n]{0,200}[^*:\n]\*\*(?![\w:])")
_CONTENT_STOP = frozenset(word_list("clauses", "CONTENT_STOP"))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a reply that may be its answer: what a mark holds, or what a clause asserts."""

    text: str  # of a clause with blanks for what it negates
    rest: str = ""  # the reply from there on
    weight: float = 20.0  # how much it counts as the answer
    raw: str = ""  # with what it negates
    at: int = 0  # its place among the clauses
    sentence: int = 0
    is_marked: bool = False
    is_final: bool = False  # its end is known, and nothing else is read
    value: Any = None  # of a field of JSON
    start: int = 0
    end: int = 0


@lru_cache(maxsize=4096)
def content(text: str) -> frozenset[str]:
    """Return the stems of the words of a text that carry meaning."""
    kept = (word.removesuffix("'s").removesuffix("'") for word in stems(text) if word not in _CONTENT_STOP)
    bare = (P.ENDING.sub("", word) for word in kept if len(word) > 2 or not word.isascii() or word.isdigit())
    return frozenset(word[:5] if P.INFLECTED.match(word) else word for word in bare)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; a line ends one."""
    found: list[str] = []
    is_value = P.LONE_NUMBER.match(text) is not None  # "8. Not to be confused with …" is no list
    for line in text.splitlines():
        start = 0
        for stop in _STOP.finditer(line):
            is_open = P.ABBREVIATION.search(line, max(0, stop.end() - 30), stop.end() + 3)
            is_open = is_open or (None if is_value else P.NUMBERED.fullmatch(line, 0, stop.end()))
            if stop[0] == "." and (is_open or line[stop.end() : stop.end() + 2].strip()[:1].islower()):
                continue
            found.append(line[start : stop.end()])
            start = stop.end()
        found.append(line[start:])
    return [one if len(one) <= _LONG else one[: _LONG // 4] + one[-_LONG:] for one in found if one.strip()]


@lru_cache(maxsize=512)
def clauses(text: str, question: str, polarity: bool = False) -> tuple[Span, ...]:
    """Return the clauses of a text in its order; with `polarity` what is called wrong counts, as a verdict."""
    readable = [one for one in sentences(text) if _READABLE.search(one)]
    kept = [one for one in readable if not P.CHAT.match(one)] or readable
    kept = [*kept[:_FIRST], *kept[_FIRST:][-_LAST:]]
    asked = frozenset(word for word in content(question) if not word.isdigit())
    asks_why = P.ASKS_WHY.search(question) is not None
    found: list[Span] = []
    before = 0.0
    for number, sentence in enumerate(kept):
        body, asides = _without_asides(sentence)
        is_question = body.rstrip(" *_').").endswith(_QUESTION_ENDS) and len(kept) > 1
        base = (number == len(kept) - 1) + number / len(kept)  # the later the more
        pieces = _pieces(P.BULLET.sub("", body))
        for place, (connector, piece) in enumerate(pieces):
            weight = base + _weight(f"{connector} {piece}", is_reason=asks_why or len(pieces) == 1)
            if not place and not number:
                if is_fragment(body):
                    weight += 3.0 if len(kept) <= 3 else 1.0
                else:
                    weight += 3.0 if P.ANSWERS.match(piece) else bool(P.DIRECT.match(body))
            if asked:
                weight += 2.0 * len(asked & content(piece)) / min(len(asked), 4)
            if connector == ":" or P.CONTINUES.match(piece):  # a label, or "which leaves 9"
                weight = max(weight, before)
            before = weight
            if P.WITHDRAWS.search(piece):
                found = [replace(one, weight=REJECTED) for one in found]
                weight = REJECTED
            elif P.RETRACTS.match(piece):
                found = [replace(one, weight=one.weight - 3.0) for one in found]
            if _BOLD.search(piece):
                weight += 1.5
            asserted = without_negated(piece, question)
            is_wrong = not polarity and (P.WRONG.search(piece) or not P.SUBSTANCE.search(asserted))
            if is_question or is_wrong or P.ATTRIBUTED.search(piece):  # says what others think, or what is wrong
                weight = REJECTED
            found.append(Span(text=asserted, weight=weight, at=len(found), sentence=number, raw=piece))
        for aside in asides:
            weight = REJECTED if is_question or P.ATTRIBUTED.search(aside) else ASIDE_WEIGHT
            found.append(
                Span(text=without_negated(aside, question), weight=weight, at=len(found), sentence=number, raw=aside)
            )
    if sum(P.HEDGES.search(one.raw) is not None for one in found) > 1:  # it could be 7; it could be 9
        found = [replace(one, weight=REJECTED) if P.HEDGES.search(one.raw) else one for one in found]
    return tuple(found)


def _weight(piece: str, *, is_reason: bool) -> float:
    """Return how much the words of a clause make it the answer; reasons count where they are all or asked for."""
    weight = 4.0 * bool(P.CONCLUDES.search(piece)) + 2.0 * bool(P.CONTRAST.search(piece)) + bool(P.RESULT.search(piece))
    if P.CONCEDES.match(piece):
        return weight - 4.0
    if (P.REASON.match(piece) and not is_reason) or P.ASIDE.match(piece):
        return weight - 3.0
    return weight - 2.5 * bool(P.HYPOTHETIC.search(piece))


def _without_asides(sentence: str) -> tuple[str, list[str]]:
    """Return a sentence without parentheses that hold words, and what these hold."""
    asides = [inner for inner in P.PARENTHESES.findall(sentence) if P.ASIDE_WORDS.search(inner)]
    return P.PARENTHESES.sub(lambda found: " " if P.ASIDE_WORDS.search(found[1]) else found[0], sentence), asides


def is_fragment(sentence: str) -> bool:
    """Return whether a sentence begins with an answer alone: a few words without a verb, up to the first mark."""
    sentence = P.CODE.sub("X", sentence)
    stop = _HEAD_END.search(sentence, 1)
    head, rest = (sentence[: stop.start()], sentence[stop.start() :]) if stop else (sentence, "")
    if P.INTRODUCES.match(rest) or P.SUBJECTS_FIRST.match(sentence) or P.CALCULATES.match(sentence):
        return False
    return len(P.WORD.findall(head)) <= 5 and not P.FINITE.search(head) and not P.LEADS.match(head)


def _pieces(sentence: str) -> list[tuple[str, str]]:
    """Return the clauses of a sentence, each with the mark that separates it from the one before."""
    cuts = [(found.start(), found.end()) for found in P.SPLIT.finditer(sentence)]
    starts, stops = ([0, *(end for _, end in cuts)], [*(begin for begin, _ in cuts), len(sentence)])
    for start, stop in zip(starts, stops, strict=True):  # although …, it is …
        comma = sentence.find(", ", start, stop) if P.SUBORDINATE.match(sentence, start) else -1
        if comma > 0:
            cuts.append((comma, comma + 2))
    pieces: list[tuple[str, str]] = []
    start, mark = 0, ""
    for begin, end in [*sorted(cuts), (len(sentence), len(sentence))]:
        if sentence[start:begin].strip():
            pieces.append((mark, sentence[start:begin]))
        start, mark = end, sentence[begin:end].strip()
    return pieces


def without_negated(piece: str, question: str = "") -> str:
    """Return a clause with blanks for what it negates and its question, up to its options, does not.

    "not 8 but 9" leaves 9, "it is 24, not 12" leaves 24, "C doesn't fit" nothing, "9 instead of 8" 9.
    """
    kept, at, asked = "", 0, question.partition("\n")[0].lower()
    while found := P.NEGATOR.search(piece, at):
        kind, before = found.lastgroup, piece[at : found.start()]
        stop = found.end() if kind == "after" else max(_negated_end(piece, found.end(), kind), found.end())
        negated = content(piece[found.end() : stop])
        if found[0].lower() in asked and negated and (kind == "instead" or negated <= content(asked)):
            kept, at = kept + piece[at : found.end()], found.end()  # which is not a mammal? what is 8 less than 20?
            continue
        if kind in ("after", "verb"):  # the subject before it, too
            before = before[: max(before.rfind(mark) + len(mark) if mark in before else 0 for mark in _SUBJECT_ENDS)]
        kept += before + " "
        at = stop
    return kept + piece[at:]


_SUBJECT_ENDS = (", ", ": ", "、", "，")


def _negated_end(piece: str, at: int, kind: str | None) -> int:
    end = P.RESUMES.search(piece, at)
    while end and kind == "pair" and piece[end.start()] == ",":  # neither A, B nor C
        end = P.RESUMES.search(piece, end.end())
    stop = end.start() if end else len(piece)
    subject = P.SUBJECT.search(piece, at, stop) if kind == "instead" else None  # instead of 12 you get 13
    return subject.start() if subject else stop
