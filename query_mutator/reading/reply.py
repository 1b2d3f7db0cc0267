"""What a reply says finally, by the kind of answer that its question has.

Marks come first, the last of them ("answer is", `\\boxed{}`, `<answer>`, `####`, a field of JSON), then bold text and
the clauses of the reply by weight (`clauses`). Several candidates of equal rank say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

from query_mutator.reading.choice import chosen, mentions
from query_mutator.reading.clauses import ASIDE_WEIGHT, REJECTED, Span, clauses, content
from query_mutator.reading.marks import letters_in, marked, options_in
from query_mutator.reading.text import BOLD, EMPHASIS, UNSPACED, Patterns, clean, plain, spelled, without_tex
from query_mutator.reading.values import Value, bracketed, close, dates_in, literal_in, numbers_in, times_in

P = Patterns("reply")

Kind = Literal["letter", "number", "verdict", "date", "time", "list", "literal", "symbol", "text"]

_LONG = 2000  # characters of a mark or a list that are read
FENCED = re.compile(r"```[\w+-]{0,12}\n?([^`]{0,4000})```")

_FINDERS: dict[Kind, Callable[[str], Sequence[Any]]] = {
    "number": lambda text: numbers_in(without_tex(text), words=True),
    "date": dates_in,
    "time": times_in,
}


class Several(Exception):
    """Raised where a reply names several candidates and decides for none."""


def spans(reply: str, question: str, *, kind: Kind = "text") -> Iterator[Span]:
    """Yield the parts of a reply that may be its answer, the most trusted first."""
    text = clean(reply)
    for span in marked(text, question)[:1]:
        yield span
        if span.is_final:
            return
    for clause in _ranked(body(text), question, kind):
        bold = [part for part in BOLD.findall(clause.text) if not part.rstrip().endswith(":")]
        if bold:
            yield Span(bold[-1], text)
        yield replace(clause, rest=text)


def _ranked(text: str, question: str, kind: Kind) -> list[Span]:
    """Return the clauses that a reply holds, the best first; one with a value that is not in the question gains."""
    found = [one for one in clauses(text, question, polarity=kind == "verdict") if one.weight > REJECTED]
    if kind in _FINDERS and len(found) > 1:
        gains = [_gain(_new(_FINDERS[kind](one.text), question, kind), question, kind) for one in found]
        found = [replace(clause, weight=clause.weight + gain) for clause, gain in zip(found, gains, strict=True)]
    return sorted(found, key=lambda clause: (-clause.weight, -clause.at))


def _gain(values: Sequence[Any], question: str, kind: Kind) -> float:
    """Return what new values add to the weight of a clause: more for a whole date or a percentage that is asked for."""
    is_share = kind == "number" and "percent" in question
    asked = [one for one in values if (kind == "date" and None not in one.value) or (is_share and one.is_percent)]
    return 2.5 if asked else 0.5 * bool(values)


def body(text: str) -> str:
    """Return a text without its long blocks of code, unless it has nothing else."""
    prose = FENCED.sub(lambda block: block[1] if len(block[1]) <= 30 else "\n", text)
    return prose if re.search(r"\w", prose) else text.replace("```", "")


def parts(span: Span) -> list[Span]:
    """Return the clauses after a mark in their order, else the span as it is."""
    if not span.is_marked or not (re.search(r"\s", span.text.strip()) or UNSPACED.search(span.text)):
        return [span]
    return [one for one in clauses(span.text, "") if one.weight > REJECTED]


@lru_cache(maxsize=1024)
def read(reply: str, kind: Kind, question: str) -> Any:
    """Return what a reply says finally, None for nothing of the kind or for several candidates.

    A letter or a verdict is a string, a number a `Value`, a date or a time as in one.
    """
    question = spelled(question)
    try:
        return _verdict(reply, question) if kind == "verdict" else _first(reply, kind, question)
    except Several:
        return None


def _first(reply: str, kind: Kind, question: str) -> Any:
    finder: Callable[[str, Span, str], Any] = {"letter": _letter, "number": _number}.get(
        kind, partial(_date_or_time, kind=kind)
    )
    for number, span in enumerate(spans(reply, question, kind=kind)):
        if kind == "letter" and not span.is_marked:
            return None if number else chosen(body(clean(reply)), question)  # a mark without a letter
        if number and span.weight <= ASIDE_WEIGHT:
            continue
        for clause in parts(span):
            if (said := finder(clause.text, span, question)) is not None:
                return said
        if not number and _decided(span.raw or span.text, question) != (span.raw or span.text):
            raise Several
    return None


def _letter(text: str, _: Span, question: str) -> str | None:
    """Return the letter that a mark holds, also by the text of its option."""
    options = options_in(question)
    text = plain(text).strip(" {}")
    letters = letters_in(text)
    letters = [letter for letter in letters if letter in options] or letters[: len(letters) == 1]
    named = letters or [one[2] for one in mentions(text, options) if one[3] in ("text", "number", "False:True")]
    if P.LETTERS_ALONE.fullmatch(text) or (len(set(named)) > 1 and P.BETWEEN.search(text)):
        raise Several
    return named[0] if named else None


def _number(text: str, span: Span, question: str) -> Any:
    """Return the number that a clause ends at: its result, one that the question does not have, or its only one."""
    text = plain(text)
    clock = times_in(text)
    in_words = [one for one in numbers_in(text, words=True) if not any(at.start <= one.start < at.end for at in clock)]
    if P.ASKS_SHARE.search(question):  # one in four
        for one, other in pairwise(in_words):
            if other.value and P.OUT_OF.fullmatch(text, one.end, other.start):
                return replace(one, value=one.value / other.value, end=other.end)
    if "year" in question:  # of 14 October 1066 only the year
        days = {(one.start, one.value[2]) for one in dates_in(text)}
        in_words = [one for one in in_words if not any(at <= one.start and one.value == day for at, day in days)]
    if not in_words and P.ASKS_DURATION.search(question) and len(spans_ := [*P.DURATION.finditer(text)]) == 1:
        minutes = 60 * int(spans_[0][1]) + int(spans_[0][2])
        return Value(value=float(minutes), start=spans_[0].start(), end=spans_[0].end(), unit="min")
    if after := _after_result(in_words, text):
        _check_one(after[:2], text)
        return after[0]
    if in_words and P.EQUATION.match(text, in_words[0].end) and not text[: in_words[0].start].strip():  # 44 = 12 + 32
        return in_words[0]
    numbers = [one for one in in_words if not (one.is_word and one.value == 1)] or in_words  # "one" is a pronoun
    if len(set(map(_key, numbers))) < 2:
        return numbers[-1] if numbers else None
    new = _new(numbers, question, "number")
    if (found := P.RANGE.search(text)) and sum(found.start() <= one.start < found.end() for one in new) > 1:
        raise Several
    new = [number for number in new if not number.is_word] or new
    _check_one(new, text)
    return picked(new, text, question) if new else None


def _check_one(numbers: Sequence[Value], text: str) -> None:
    for one, other in pairwise(numbers):
        if P.ALTERNATIVES.fullmatch(text, one.end, other.start) and not close(one.value, other.value):
            raise Several


def _new(values: Sequence[Any], question: str, kind: Kind) -> list[Any]:
    """Return the values that the question does not have."""
    given = set(map(_key, _FINDERS[kind](question)))
    return [one for one in values if _key(one) not in given]


def _key(one: Value) -> tuple[Any, bool]:
    return round(one.value, 9) if isinstance(one.value, float) else one.value, one.is_percent


def _date_or_time(text: str, span: Span, question: str, kind: Kind) -> Any:
    text, day_first = plain(text), asks_day_first(f"{question} {span.rest[:_LONG]}")
    values = times_in(text, in_digits=True) if kind == "time" else dates_in(text, day_first=day_first)
    values = _new(values, question, kind) or values
    if not values:
        return None
    return (values[0] if span.is_marked else picked(values, text, question)).value


def asks_day_first(text: str) -> bool | None:
    """Return whether a text asks for a date with the day first, None where it does not say."""
    asked = P.DAY_FIRST.search(text)
    return None if asked is None else asked[1] is None


def picked(values: Sequence[Any], text: str, question: str) -> Any:
    """Return the value that a clause gives: after its last result sign, at its head, or near the question's words."""
    if after := _after_result(values, text):
        return after[0]
    if is_head(values[0], text):
        return values[0]
    asked = content(question)
    starts = [0, *(value.end for value in values[:-1])]
    scores = [len(asked & content(text[at : value.start])) for at, value in zip(starts, values, strict=True)]
    return values[len(scores) - 1 - scores[::-1].index(max(scores))]


def _after_result(values: Sequence[Any], text: str) -> list[Any]:
    """Return the values from the last result sign on that none calculates with and no condition holds."""
    for mark in reversed([*P.RESULT.finditer(text)]):
        after = [value for value in values if value.start >= mark.end()]
        is_condition = mark[0] == "=" and P.CONDITION.search(text, 0, mark.start())  # = 15 for x = 4
        if after and not is_condition and not P.OPERATES.match(text, after[0].end):
            return after
    return []


def is_head(value: Any, text: str) -> bool:
    """Return whether a value is all that stands before the first mark of a text, up to a preposition."""
    lead = P.BEFORE_HEAD.fullmatch(text, 0, value.start)
    return lead is not None and P.AFTER_HEAD.match(text, value.end) is not None


def asks_verdict(question: str) -> bool:
    """Return whether the wording of a question asks for yes or no."""
    return P.ASKS_VERDICT.search(question.strip()) is not None


def _verdict(reply: str, question: str) -> str | None:
    """Return the verdict of the best clause: one that says it counts more than one that repeats the question."""
    found: list[tuple[float, str | None]] = []
    for span in spans(reply, question, kind="verdict"):
        text = EMPHASIS.sub("", (span.raw or span.text)[:_LONG])
        if P.BOTH_VERDICTS.search(text):
            raise Several
        decided = _decided(text, question)
        said = (one for one in P.VERDICT.finditer(decided) if not P.DETERMINER.match(decided, one.start()))
        if verdicts := ["yes" if one["yes"] else "no" for one in said]:
            is_first = span.is_marked or P.VERDICT.match(decided.lstrip(" \"'")) is not None
            found.append((span.weight + 3.0, verdicts[0 if is_first else -1]))
        elif decided != text:
            found.append((span.weight + 2.0, None))
        elif span.weight > ASIDE_WEIGHT and asks_verdict(question) and (implied := _implied(text, question)):
            found.append((span.weight, implied))
    return max(found, key=lambda one: one[0], default=(0.0, None))[1]


def _decided(text: str, question: str) -> str:
    """Return a text without what it leaves undecided; of what the question asks that is an answer."""
    return P.UNDECIDED.sub(lambda one: one[0] if content(question) & content(one[one.lastindex or 0]) else "X", text)


def _implied(text: str, question: str) -> str | None:
    """Return the verdict of a clause that repeats the question: with a negation it is no."""
    asked, said = content(question), content(text)
    if asked & said and P.NEGATES.search(text):
        return "no"
    return "yes" if len(asked & said) >= max(1, min(2, len(asked))) else None


def listed(reply: str, question: str) -> Iterator[list[str]]:
    """Yield the lists that a reply may mean, the most trusted first: of its mark, its best sentences, its lines."""
    question = spelled(question)
    text = clean(reply)
    for span in marked(text, question)[:1]:
        items = [str(item) for item in span.value] if isinstance(span.value, list) else items_of(span.text)
        if len(items) > 1 or span.is_final:
            yield items
    by_sentence: dict[int, list[Span]] = {}
    for clause in _ranked(body(text), question, "list"):
        by_sentence.setdefault(clause.sentence, []).append(clause)  # in the order of their best clauses
    for held in list(by_sentence.values())[:2]:
        whole = ", ".join(one.text for one in sorted(held, key=lambda one: one.at) if one.weight > ASIDE_WEIGHT)
        each = [one.text for one in held[:3]]
        yield from (items for together in (*each, whole) if len(items := items_of(together)) > 1)
    yield from _on_lines(text)


def _on_lines(text: str) -> Iterator[list[str]]:
    """Yield the list on the lines of a text: all of a few words, or those with bullets or numbers."""
    whole = [line[:_LONG] for line in text.splitlines() if line.strip()]
    lines = [EMPHASIS.sub("", line).strip(" .") for line in whole]
    items = [EMPHASIS.sub("", P.ITEM.sub("", line)).strip(" .") for line in whole if P.ITEM.match(line)]
    labelled = [line.partition(": ")[2] for line in lines]
    if len(items) > 1 or (len(lines) > 1 and all(len(line.split()) <= 4 for line in lines)):
        yield items if len(items) > 1 else labelled if all(labelled) else lines
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|") and "--" not in line]
    yield from map(list, zip(*cells[1:], strict=False))  # columns of a table


def items_of(text: str) -> list[str]:
    """Return the items of the first list in brackets, else of one in prose."""
    text = EMPHASIS.sub("", without_tex(text[:_LONG])).strip(" .")
    literals = (literal_in(part)[1] for part in bracketed(text))
    if (found := next((one for one in literals if isinstance(one, (list, tuple, set))), None)) is not None:
        return [str(item) for item in found]
    _, *after = re.split(r"→|⇒|\bbecomes?\b", text)
    text = after[0] if len(after) == 1 and P.SEPARATOR.search(after[0]) else text
    text = re.sub(r"±\s?([\w.√/]+)", r"-\1, \1", re.sub(r"\([^()]{0,200}\)", "", text))
    text = ", ".join(text.split()) if re.fullmatch(r"[\d.\s-]+", text) else text
    return [item for part in P.SEPARATOR.split(text) if (item := part.strip(" .'\"`[]{}"))]
