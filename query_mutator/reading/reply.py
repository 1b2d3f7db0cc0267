"""What a reply says finally, by the kind of answer that its question has.

Marks come first, the last of them ("answer is", `\\boxed{}`, `<answer>`, `####`, a field of JSON), then bold text and
the clauses of the reply by weight (`clauses`). Several candidates of equal rank say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from query_mutator.reading import marks
from query_mutator.reading.clauses import REJECTED, Clause, after_label, content, ranked, sentences
from query_mutator.reading.options import letters_in, options_in, texts_in
from query_mutator.reading.patterns import Patterns
from query_mutator.reading.text import clean, spelled, without_tex
from query_mutator.reading.values import (
    Number,
    bracketed,
    close,
    dates_in,
    durations_in,
    evaluated,
    literal_in,
    numbers_in,
    times_in,
)

P = Patterns("reply")


Kind = Literal["letter", "number", "verdict", "date", "time", "duration", "list", "literal", "symbol", "text"]
KINDS: tuple[Kind, ...] = (
    "letter",
    "number",
    "verdict",
    "date",
    "time",
    "duration",
    "list",
    "literal",
    "symbol",
    "text",
)

_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(?!\w)|__([^_\n]{1,200})__")
_EMPHASIS = re.compile(r"(?<![\d\s])\*{1,3}|\*{1,3}(?![\d\s])|\*\*(?=\s|$)|(?<!\w)_{1,2}|_{1,2}(?!\w)|`")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a reply that may be its answer; `rest` is the reply from there on."""

    text: str
    rest: str
    is_marked: bool
    value: Any = None  # of a field of JSON
    raw: str = ""  # with what it negates
    is_final: bool = False  # nothing else is read
    is_aside: bool = False  # in parentheses
    weight: float = 20.0


@dataclass(frozen=True, slots=True)
class Said:
    """What a reply says finally: its kind, a value that replies can share, and the text that says so."""

    kind: Kind
    value: Any
    text: str


_LONG = 2000  # characters of a mark or a list that are read


class Several(Exception):
    """Raised where a reply names several candidates and decides for none."""


def spans(reply: str, question: str, *, kind: Kind = "text") -> Iterator[Span]:
    """Yield the parts of a reply that may be its answer, the most trusted first."""
    text = clean(reply)
    for _, end, span in _marks(text, question):
        if correction := P.CORRECTS.search(text, end):
            for clause in _ranked(text[correction.start() :].lstrip(".!? "), question, kind):
                yield from _of_clause(clause, text)
        if P.UNDECIDED.match(span.text) and not span.is_final:
            raise Several
        yield span
        if span.is_final:
            return
        if span.text.strip():
            break
    for clause in _ranked(_body(text), question, kind):
        yield from _of_clause(clause, text)


def _ranked(text: str, question: str, kind: Kind) -> list[Clause]:
    """Return the clauses by weight; of numbers, new ones and those with the unit that is asked for weigh more."""
    found = ranked(text, question, polarity=kind == "verdict")
    if kind != "number" or len(found) < 2:
        return found
    given = given_numbers(question)
    unit = _asked_unit(question)
    bonus: dict[int, float] = {}
    for clause in found:
        numbers = numbers_in(without_tex(clause.text), words=True)
        is_new = any(not any(close(number.value, one) for one in given) for number in numbers)
        is_asked = any(
            (unit and number.unit.lower()[:4] == unit[:4]) or (number.is_percent and "percent" in unit)
            for number in numbers
        )
        bonus[clause.at] = clause.weight + is_new + 1.5 * is_asked
    return sorted(found, key=lambda clause: (-bonus[clause.at], -clause.at))


def _body(text: str) -> str:
    """Return a text without its long blocks of code, unless it has nothing else."""
    prose = _FENCED.sub(lambda block: block[1] if len(block[1]) <= 30 else "\n", text)
    return prose if re.search(r"\w", prose) else text.replace("```", "")


_FENCED = re.compile(r"```[\w+-]{0,12}\n?([^`]{0,4000})```")


def _of_clause(clause: Clause, text: str) -> Iterator[Span]:
    bold = [one or other for one, other in _BOLD.findall(clause.text)]
    bold = [part for part in bold if not part.rstrip().endswith(":") and re.search(r"\w|[^\s\w]", part)]
    if bold and clause.weight > REJECTED / 2:
        yield Span(bold[-1], text, is_marked=False)
    yield Span(clause.text, text, is_marked=False, raw=clause.raw, is_aside=clause.weight <= -4.0, weight=clause.weight)


@lru_cache(maxsize=256)
def _marks(text: str, question: str) -> tuple[tuple[int, int, Span], ...]:
    return tuple(sorted(_marked(text, question), key=lambda place: (place[1], place[0]), reverse=True))


def _marked(text: str, question: str) -> Iterator[tuple[int, int, Span]]:
    for start, end, value in marks.json_fields(text, question):
        shown = value if isinstance(value, str) else "" if value is None else str(value)
        yield start, end, Span(shown, shown, is_marked=True, value=value, is_final=True)
    for start, end, inner in marks.boxed(text):
        if not _is_denied(text, start):
            yield start, end, Span(inner, inner, is_marked=True, is_final=True)
    for start, end, letter in marks.ticked(text):
        yield start, end, Span(letter, letter, is_marked=True, is_final=True)
    for start, end, inner in marks.tagged(text):
        yield start, end, Span(_without_fences(inner).strip(), inner, is_marked=True, is_final=True)
    closed = [(one[0], one[1]) for one in marks.json_fields(text, question)]
    for start, end in marks.labels(text):
        if any(begin <= start < finish for begin, finish in closed):
            continue
        rest = text[end:]
        line = rest.lstrip().partition("\n")[0][:_LONG]
        if line and not _is_denied(text, start) and not _asks(line):
            yield start, end, Span(line, rest, is_marked=True)


def _without_fences(text: str) -> str:
    return re.sub(r"```\w{0,12}", "", text)


def _asks(line: str) -> bool:
    first = sentences(line)[:1]
    return bool(first) and first[0].rstrip(" *_)").endswith("?")


def _is_denied(text: str, start: int) -> bool:
    """Return whether the words before a mark say that it is somebody else's, or denied."""
    before = text[max(0, start - 100) : start]
    if P.IS_DENIED.search(before) and re.match(r".{0,40}?(?:would|\")", text[start:]):
        return True
    before = re.split(r"[.!?:;\n]\s|\n|,\s(?=(?:but|so|and)\b)", before)[-1]
    return P.REJECTS_LABEL.search(before) is not None


# --- readers by kind -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def read(reply: str, kind: Kind, question: str) -> Said | None:
    """Return what a reply says finally, None for nothing of the kind or for several candidates."""
    question = spelled(question)
    try:
        found = _read_verdict(reply, question) if kind == "verdict" else _first(reply, kind, question)
    except Several:
        return None
    return None if found is None else Said(kind, *found)


def _first(reply: str, kind: Kind, question: str) -> tuple[Any, str] | None:
    for number, span in enumerate(spans(reply, question, kind=kind)):
        if number and span.is_aside and kind != "text":
            continue
        if (said := _FINDERS[kind](span, question)) is not None:
            return said, span.text
    return None


def asks_verdict(question: str) -> bool:
    """Return whether the wording of a question asks for yes or no."""
    return P.ASKS_VERDICT.search(question.strip()) is not None


def _read_verdict(reply: str, question: str) -> tuple[Any, str] | None:
    """Return the verdict of the best clause: one that says it counts more than one that repeats the question."""
    found: list[tuple[float, Any, str]] = []
    asks = asks_verdict(question)
    for span in spans(reply, question, kind="verdict"):
        if (said := _verdict(span, question)) is not None:
            found.append((span.weight + 2.0, said, span.text))
        elif (
            not span.is_aside
            and asks
            and (said := _implied(_EMPHASIS.sub("", span.raw or span.text), question)) is not None
        ):
            found.append((span.weight, said, span.text))
    best = max(found, key=lambda one: one[0], default=None)
    return None if best is None else best[1:]


def parts(span: Span) -> list[Clause]:
    """Return the clauses of a span, the first one first where it is marked."""
    return after_label(span.text) if span.is_marked else [Clause(text=span.text, weight=0.0, at=0)]


def _letter(span: Span, question: str) -> str | None:
    options = options_in(question)
    for clause in parts(span):
        crossed = re.findall(r"\b([A-Z])\b[^✗✘❌✓✔✅\n]{0,80}([✗✘❌✓✔✅])", clause.raw or clause.text)
        [letter for letter, mark in crossed if mark in "✓✔✅"]
        letters = letters_in(without_tex(clause.text).strip().strip("{}"))
        letters = [letter for letter in letters if not options or letter in options or len(letters) == 1]
        if letters:
            return letters[0] if span.is_marked or len(set(letters)) == 1 else letters[-1]
        lone = re.fullmatch(r"\W*([A-Za-z])\W*", clause.text)
        if lone and lone[1].upper() in options:
            return lone[1].upper()
        texts = texts_in(clause.text, options)
        if texts:
            if len(set(texts)) > 1 and re.search(r"\bor\b|\beither\b|\bboth\b", clause.text, re.IGNORECASE):
                raise Several
            return _chosen(texts, clause.text, options)
    return None


def _chosen(letters: Sequence[str], text: str, options: Any) -> str:
    """Return the option that a clause with several names states: after the last "is" or "=", else the first."""
    cut = list(re.finditer(r"=|:\s|\b(?:is|are|was|means|gives)\b", text))
    later = texts_in(text[cut[-1].end() :], options) if cut else []
    return later[0] if later else letters[0]


def _number(span: Span, question: str) -> Number | None:
    given = given_numbers(question)
    if isinstance(span.value, (int, float)) and not isinstance(span.value, bool):
        return Number(value=float(span.value))
    _check_single(span)
    if _OTHER_LITERAL.match(span.text):
        raise Several
    for clause in parts(span):
        if (found := final_number_in(clause.text, question, given, is_marked=span.is_marked)) is not None:
            return found
    return None


_OTHER_LITERAL = re.compile(r"[\W]*(?:None|null|undefined|NaN|\w{0,20}Error|\w{0,20}Exception|True|False)\b")


@lru_cache(maxsize=1024)
def given_numbers(question: str) -> tuple[float, ...]:
    """Return the numbers of a question, in digits and in words."""
    return tuple(number.value for number in numbers_in(without_tex(question), words=True))


def _check_single(span: Span) -> None:
    if isinstance(span.value, list) and len(span.value) > 1:
        raise Several


def final_number_in(text: str, question: str, given: Sequence[float], *, is_marked: bool) -> Number | None:
    """Return the number that a clause ends at: its result, the one that the question does not have, or its only one."""
    text = _EMPHASIS.sub("", without_tex(_BOLD.sub(r"\1\2", text)))
    single = numbers_in(text)
    evaluated(text) if len(single) > 1 or re.search("sqrt|√|pi|π", text) else None
    heads = numbers_in(text, words=True)
    if (
        heads
        and is_head(heads[0], text)
        and re.match(r"(?:\s[^\W\d]{1,20}){0,3}\W{0,6}[,;:–(—]", text[heads[0].end :])
        and not re.search(r"\d\s?[-+*/×·÷=]\s?\d", text)
    ):
        return heads[0]
    if results := list(P.RESULT.finditer(text)):
        for result in reversed(results):
            after = text[result.end() :]
            first = numbers_in(after, words=True)
            re.match(r"\W{0,3}(?:\d{1,9}\s?)?(?:sqrt|√)", after)
            if first:
                expression = re.match(r"[\s\d.()+*/^·×÷-]{3,60}", after)
                evaluated(re.sub(r"[\s+*/^·×÷(-]+$", "", expression[0])) if expression else None
                return first[0]
    numbers = [number for number in numbers_in(text) if not _is_label(text, number)]
    in_words = numbers_in(text, words=True)
    if not numbers or (not is_marked and all(any(close(number.value, one) for one in given) for number in numbers)):
        numbers = [
            number
            for number in in_words
            if not (number.is_word and number.value == 1 and not is_marked and P.IS_PRONOUN.match(text, number.end))
        ] or numbers
    if not numbers:
        return None
    if P.RANGE.search(text) and len({number.value for number in numbers}) > 1:
        raise Several
    new = [number for number in numbers if not any(close(number.value, one) for one in given)]
    if not new:
        return None if len({number.value for number in numbers}) > 1 else numbers[-1]
    if (
        len(new) > 1
        and P.ALTERNATIVES.search(text[new[-2].end : new[-1].start])
        and not close(new[-2].value, new[-1].value)
    ):
        raise Several
    asked = _asked_unit(question)
    named = [number for number in new if asked and number.unit.lower()[:4] == asked[:4]] or new
    return named[0] if _leads(text, named) else picked(named, text, question)


def _leads(text: str, numbers: Sequence[Number]) -> bool:
    """Return whether the first number is the answer and others explain it: it follows a copula."""
    return (
        re.search(
            r"\b(?:is|are|was|were|be|has|have|had|in|about|around|roughly|least|'s)\s\W{0,3}\Z",
            text[: numbers[0].start],
        )
        is not None
    )


def _asked_unit(question: str) -> str:
    found = re.search(
        r"\bhow (?:many|much) ([^\W\d_]{2,20})|\bin ([^\W\d_]{2,12})(?:, | to |\?|/|$)", question, re.IGNORECASE
    )
    return (found[1] or found[2]).lower() if found else ""


_ASKS_PERCENT = re.compile(r"\bpercent|percentage", re.IGNORECASE)


def _is_label(text: str, number: Number) -> bool:
    """Return whether a number counts a step, or is part of a name."""
    return (
        re.search(
            r"\b(?:step|line|act|chapter|article|option|note|apollo)\s\Z",
            text[max(0, number.start - 12) : number.start],
            re.IGNORECASE,
        )
        is not None
    )


_AFTER_NEGATED = re.compile("ではなく|じゃなく|아니라|아니고")
_NEGATES = re.compile(r"\b(?:not|no|never|cannot|none|neither|without|myth)\b|n't\b", re.IGNORECASE)


def _verdict(span: Span, question: str) -> str | None:
    raw = _EMPHASIS.sub("", (span.raw or span.text)[:_LONG])
    raw = span.text if _AFTER_NEGATED.search(raw) else raw
    if re.search(r"\byes\s(?:and|or)\sno\b|\bboth\syes\b", raw, re.IGNORECASE) or (
        not span.is_marked and re.match(r"\W*if\s(?:so|not|it|you|he|she|they|there)\b", raw, re.IGNORECASE)
    ):
        raise Several
    found = _verdicts(raw)
    if found:
        is_first = P.VERDICT.match(raw.lstrip(" \"'")) is not None
        return found[0] if span.is_marked or len(set(found)) == 1 or is_first else found[-1]
    return None


def _implied(text: str, question: str) -> str | None:
    """Return the verdict of a clause that repeats the question: with a negation it is no."""
    if re.match(r"(?:[\w-]+\s){0,2}not\W*(?:$|[:,;])", text.strip(), re.IGNORECASE):
        return "no"
    text = re.sub(r"\bnot (?:only|just|merely)\b", "", text, flags=re.IGNORECASE)
    asked, said = content(question), content(text)
    if not asked & said:
        return None
    if _NEGATES.search(text):
        return "no"
    return "yes" if len(asked & said) >= min(2, len(asked)) else None


def _verdicts(text: str) -> list[str]:
    found = []
    for match in P.VERDICT.finditer(text):
        if match["yes"]:
            before = text[max(0, match.start() - 20) : match.start()]
            found.append("no" if re.search(r"(?:\bnot|n't)\s(?:\w+\s)?\W?\Z", before) else "yes")
        elif match[0].lower() != "no" or not P.DETERMINES.match(text, match.end()):
            found.append("no")
    return found


def _values(finder: Callable[[str], Sequence[Any]]) -> Callable[[Span, str], Any]:
    def find(span: Span, question: str) -> Any:
        for clause in parts(span):
            text = _EMPHASIS.sub("", without_tex(clause.text))
            values = finder(text)
            _check_single(span)
            if values:
                return values[0] if span.is_marked else picked(values, text, question)
        return None

    return find


def picked(values: Sequence[Any], text: str, question: str) -> Any:
    """Return the value that a clause gives: after its last result sign, at its head, or near the question's words."""
    results = list(P.RESULT.finditer(text)) or list(re.finditer(r":\s", text))
    if results and (after := [value for value in values if value.start >= results[-1].end()]):
        return after[0]
    if is_head(values[0], text):
        return values[0]
    asked = content(question)
    scores = []
    for at, value in enumerate(values):
        start = values[at - 1].end if at else 0
        scores.append(len(asked & content(text[start : value.start])))
    best = max(scores)
    return next(value for value, score in zip(reversed(values), reversed(scores), strict=True) if score == best)


def is_head(value: Any, text: str) -> bool:
    """Return whether a value is all that stands before the first mark of a text, up to a preposition."""
    lead = P.IS_HEAD.fullmatch(text[: value.start])
    return lead is not None and P.IS_HEAD_2.match(text[value.end :]) is not None


def listed(reply: str, question: str) -> list[list[str]]:
    """Return the lists that a reply may mean, the most trusted first: of its mark, of its lines, of its sentences."""
    question = spelled(question)
    text = clean(reply)
    found: list[list[str]] = []
    for span in spans(reply, question):
        found += _lists_in(span.rest if not span.is_final and len(items_of(span.text)) < 2 else span.text)
    found += _lists_in(text) if _is_list(text) else []
    by_sentence: dict[int, list[Clause]] = {}
    best: dict[int, float] = {}
    for clause in ranked(_body(text), question):
        by_sentence.setdefault(clause.sentence, []).append(clause)
        best[clause.sentence] = max(best.get(clause.sentence, REJECTED), clause.weight)
    lines = _lists_in(text)
    for number in sorted(best, key=lambda number: (-best[number], -number))[:2]:
        held = sorted((clause for clause in by_sentence[number] if clause.weight > -3.5), key=lambda clause: clause.at)
        top = max(held, key=lambda clause: clause.weight, default=None)
        for together in ([top.text] if top else []) + [", ".join(clause.text for clause in held)]:
            items = items_of(together)
            found += bracketed_lists(together) or ([items] if len(items) > 1 else [])
    is_prose = found and best and max(best.values()) >= 3
    return found + lines if is_prose else lines + found


def _is_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and all(len(line.split()) <= 4 for line in lines)


def _lists_in(text: str) -> list[list[str]]:
    """Return the lists of a text in brackets, or on lines with bullets or numbers, the last one first."""
    blocks: list[list[str]] = [[]]
    for line in (line[:_LONG] for line in text.splitlines()):
        if P.ITEM.match(line):
            blocks[-1].append(P.LISTS_IN.split(_EMPHASIS.sub("", P.ITEM.sub("", line)))[0])
    if _is_list(text):
        return [[_EMPHASIS.sub("", line[:_LONG]).strip(" .") for line in text.splitlines() if line.strip()]]
    return []


def bracketed_lists(text: str) -> list[list[str]]:
    """Return the lists that stand in brackets as code does."""
    values = [literal_in(inner) for inner in bracketed(text)]
    return [
        [str(item) for item in value]
        for is_literal, value in values
        if is_literal and isinstance(value, (list, tuple, set))
    ]


def items_of(text: str) -> list[str]:
    """Return the items of a list in prose; what stands before a colon leads to it."""
    text = _EMPHASIS.sub("", without_tex(text[:_LONG])).strip(" .")
    is_literal, value = literal_in(text)
    if is_literal and isinstance(value, (list, tuple, set)):
        return [str(item) for item in value]
    text = re.sub(r"\([^()]{0,200}\)", "", text)
    _lead, _colon, _after = text.rpartition(": ")
    return [item.strip(" .'\"`") for item in P.SEPARATOR.split(text) if item.strip(" .'\"`")]


def _text(span: Span, question: str) -> str | None:
    _check_single(span)
    for clause in parts(span):
        _EMPHASIS.sub("", without_tex(clause.text)).strip()
    return None


def _date(span: Span, question: str) -> Any:
    if re.search(r"\bMM[/.-]DD", question, re.IGNORECASE):
        return _values(lambda text: dates_in(text, day_first=False))(span, question)
    is_day_first = re.search(r"\bDD[/.-]MM|\bday/month", question + span.rest, re.IGNORECASE) is not None
    return _values(lambda text: dates_in(text, day_first=True if is_day_first else None))(span, question)


_FINDERS: dict[Kind, Callable[[Span, str], Any]] = {
    "letter": _letter,
    "number": _number,
    "verdict": _verdict,
    "date": _date,
    "time": _values(times_in),
    "duration": _values(durations_in),
    "list": _text,
    "literal": _text,
    "symbol": _text,
    "text": _text,
}
