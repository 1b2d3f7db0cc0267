"""Does a reply say what a question accepts? The comparison knows the type of the gold, the reading does not.

A gold letter is one of the options of its question; a number, a verdict, a date, a time, a list, a literal of code, a
symbol and a short text are known by their form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from query_mutator.reading.clauses import content, is_fragment, stem
from query_mutator.reading.families import commits_to
from query_mutator.reading.options import options_in
from query_mutator.reading.patterns import Patterns, word_list
from query_mutator.reading.reply import (
    _EMPHASIS,
    Kind,
    Several,
    Span,
    is_head,
    items_of,
    listed,
    parts,
    picked,
    read,
    spans,
)
from query_mutator.reading.text import clean, fold, is_unspaced, spelled, without_tex, words
from query_mutator.reading.values import (
    Clock,
    Number,
    bracketed,
    close,
    dates_in,
    durations_in,
    evaluated,
    literal_in,
    numbers_in,
    same_number,
    size_of,
    times_in,
)

P = Patterns("gold")


_VERDICTS = dict(pair.split("=") for pair in word_list("gold", "VERDICTS"))
_ASKS_DAY_FIRST = re.compile(r"\bDD[/.-]MM|\bday/month", re.IGNORECASE)
_ASKS_PERCENT = re.compile(r"%|\bper\s?cent|percentage", re.IGNORECASE)
_OTHER_NAME = frozenset(word_list("gold", "OTHER_NAME"))
_OTHER_AFTER = frozenset(["city", "bissau", "jr", "junior", "island", "islands", "state", "strait"])


@dataclass(frozen=True, slots=True)
class Gold:
    """The accepted answers of a question, each with its type."""

    accept: tuple[str, ...]
    question: str
    family: str | None = None  # of names, one of which is the answer (`families`)
    kinds: tuple[Kind, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(kind_of_gold(text, self.question) for text in self.accept))

    def matches(self, reply: str) -> bool:
        """Return whether a reply says an accepted answer finally."""
        return _says(self, reply)


@lru_cache(maxsize=4096)  # a reply is graded many times in its episode
def _says(gold: Gold, reply: str) -> bool:
    if gold.family is not None:
        return commits_to(reply, gold.accept, family=gold.family, question=gold.question)
    try:
        return any(
            _matches(text, kind, reply, gold.question) for text, kind in zip(gold.accept, gold.kinds, strict=True)
        )
    except Several:
        return False


@lru_cache(maxsize=4096)
def kind_of_gold(gold: str, question: str) -> Kind:
    """Return the type of an accepted answer, by its form and the options of its question."""
    text = without_tex(spelled(gold)).strip()
    options = options_in(spelled(question))
    if options and (_letter_of(text, options) is not None):
        return "letter"
    if fold(text) in _VERDICTS and not (fold(text) in ("true", "false") and P.ASKS_CODE.search(question)):
        return "verdict"
    if text in ("True", "False", "true", "false"):
        return "literal"
    if re.fullmatch(r"[\[{(].*[\]})]", text, re.DOTALL) and literal_in(text)[0] and evaluated(text) is None:
        return "literal"
    if re.fullmatch(r"'[^'\n]*'|\"[^\"\n]*\"", text) or text in ("None", "NULL", "null", "undefined", "NaN"):
        return "literal"
    finders: tuple[tuple[Kind, Any], ...] = (("date", dates_in), ("time", times_in), ("duration", durations_in))
    for kind, finder in finders:
        found: Sequence[Any] = finder(text)
        is_whole = len(found) == 1 and found[0].start == 0 and len(text) - found[0].end <= 1
        if is_whole and (kind != "date" or found[0].day is not None):
            return kind
    if (
        len(text) > 1
        and re.search(r"[^\W_]\s?(?:,|;|→)\s?\S", text)
        and not re.fullmatch(r"[-+]?[$€£]?\s?\d{1,3}(?:,\d{3})+(?:\.\d+)?\W*\w*|[-+]?\d+,\d+", text)
    ):
        return "list"
    numbers = numbers_in(text)
    if numbers and numbers[0].start == 0 and P.KIND_OF_GOLD.fullmatch(text[numbers[0].end :]) and len(numbers) == 1:
        return "number"
    if evaluated(text) is not None:
        return "number"
    in_words = numbers_in(text, words=True)
    if len(in_words) == 1 and in_words[0].start == 0 and in_words[0].end == len(text):
        return "number"
    if re.fullmatch(r"[^\w\s]{1,4}|\w|[A-Za-z]{1,3}[+#*]{1,3}|[A-Z][a-z]?|(?=\S*[^\w.,'\"-])\S{1,8}", text) or (
        P.ASKS_SYMBOL.search(question) and re.fullmatch(r"\S{1,6}", text) and not text.islower()
    ):
        return "symbol" if not is_unspaced(text) else "text"
    return "text"


def _letter_of(text: str, options: Any) -> str | None:
    """Return the letter that a gold text names, by itself or by the text of its option."""
    lone = re.fullmatch(r"\(?\[?([A-Za-z])[\])]?[.:]?", text.strip())
    if lone:
        return lone[1].upper() if lone[1].upper() in options else None
    lettered = re.fullmatch(r"\(?([A-Z])[).:]\s(.+)", text.strip(), re.DOTALL)
    if lettered and lettered[1] in options:
        return lettered[1]
    same = [letter for letter, option in options.items() if words(option) and words(option) == words(text)]
    return same[0] if len(same) == 1 else None


def _matches(gold: str, kind: Kind, reply: str, question: str) -> bool:
    text = without_tex(spelled(gold)).strip()
    if kind not in ("letter", "symbol") and _is_marked_gold(text, reply, question):
        return True
    if kind == "letter":
        said = read(reply, "letter", question)
        return said is not None and said.value == _letter_of(text, options_in(spelled(question)))
    if kind == "verdict":
        return _verdict_matches(_VERDICTS[fold(text)], reply, question)
    if kind == "number":
        said = read(reply, "number", question)
        return said is not None and _same_as_gold(said.value, gold_number(text), question)
    if kind == "date":
        return _date_matches(text, reply, question)
    if kind == "time":
        said = read(reply, "time", question)
        return said is not None and _same_time(said.value, times_in(text)[0], is_padded=text.startswith("0"))
    if kind == "duration":
        return _duration_matches(text, reply, question)
    if kind == "list":
        return _list_matches(gold, reply, question)
    if kind == "literal":
        return _literal_matches(text, reply, question)
    if kind == "symbol":
        return _symbol_matches(text, reply, question)
    return _text_matches(gold, reply, question)


def _is_marked_gold(text: str, reply: str, question: str) -> bool:
    """Return whether the final mark of a reply holds the gold text itself, whatever its type."""
    try:
        span = next(spans(reply, question), None)
    except Several:
        return False
    if span is None or not span.is_marked or isinstance(span.value, list):
        return False
    said = without_tex(span.text)
    wanted = "".join(text.split())
    return wanted != "" and any(
        wanted == "".join(one.split()) for one in (said, said.strip().rstrip("."), said.strip(" .*`$\"'"))
    )


def _same_as_gold(said: Number, gold: Number, question: str) -> bool:
    question = spelled(question)
    units = [unit for found in P.ASKED_UNIT.finditer(question) for unit in found.groups() if unit and size_of(unit)]
    size_of(said.unit)
    return same_number(
        said, gold, asks_percent=bool(_ASKS_PERCENT.search(question)), unit="" if gold.unit else (units or [""])[-1]
    )


def gold_number(text: str) -> Number:
    """Return the number of a gold text."""
    numbers = numbers_in(text, words=True)
    value = evaluated(text)
    if value is not None and not (len(numbers) == 1 and close(numbers[0].value, value)):
        return Number(value=value)
    return numbers[0]


def _deciding(reply: str, question: str) -> list[Span]:
    """Return the marked span of a reply, else those of its best clause."""
    found: list[Span] = []
    for span in spans(reply, question):
        found.append(span)
    return found[:4]


# --- one comparison for each type ------------------------------------------------------------------------------------


def _verdict_matches(gold: str, reply: str, question: str) -> bool:
    said = read(reply, "verdict", question)
    return said is not None and said.value == gold


def _date_matches(text: str, reply: str, question: str) -> bool:
    asks_month = re.search(r"\bMM[/.-]DD", question, re.IGNORECASE) is not None
    day_first = True if _ASKS_DAY_FIRST.search(question) else False if asks_month else None
    gold = dates_in(text, day_first=day_first)[0]
    said = read(reply, "date", question)
    if said is None or said.value.month != gold.month or said.value.day != gold.day:
        return False
    return said.value.year == gold.year or said.value.year is None or gold.year is None


def _same_time(said: Clock, gold: Clock, *, is_padded: bool) -> bool:
    if said.minutes == gold.minutes:
        return True
    return (
        (not said.has_half or not (gold.has_half or is_padded))
        and said.minutes % 720 == gold.minutes % 720
        and not gold.has_half
    )


def _duration_matches(text: str, reply: str, question: str) -> bool:
    gold = durations_in(text)[0]
    said = read(reply, "duration", question)
    if said is not None:
        return close(said.value.seconds, gold.seconds)
    number = read(reply, "number", question)
    return (
        number is not None
        and not number.value.unit
        and close(number.value.value, numbers_in(text, words=True)[0].value)
        and not times_in(number.text)
    )


def _list_matches(text: str, reply: str, question: str) -> bool:
    gold = items_of(spelled(text))
    for said in listed(reply, question):
        places = _places(said, gold)
        if places is None and len(said) >= len(gold) and all(numbers_in(item) for item in [*said, *gold]):
            return False
        if places is None:
            continue
        if -1 in places:
            return False
        if len(set(places)) < len(gold):
            continue
        in_order = list(dict.fromkeys(places))
        return places == in_order == list(range(len(gold))) if P.ASKS_ORDER.search(question) else True
    return False


def _places(said: Sequence[str], gold: Sequence[str]) -> list[int] | None:
    """Return the place of each said item among the gold ones, -1 for another one; None where fewer than half are any.

    Words that lead to the list, and a phrase after it, are no items.
    """
    found = [_item_place(item, gold) for item in said]
    if sum(place is not None for place in found) * 2 < len(gold):
        return None
    first = next(at for at, place in enumerate(found) if place is not None)
    last = max(at for at, place in enumerate(found) if place is not None)
    lead = [item for item in said[:first] if len(item.split()) < 3 and not P.FUNCTIONAL.match(item)]
    trail = [item for item in said[last + 1 :] if len(item.split()) < 4 and not P.FUNCTIONAL.match(item)]
    others = -1 if lead or trail else None
    return [-1 if place is None else place for place in found[first : last + 1]] + ([-1] if others else [])


def _item_place(said: str, gold: Sequence[str]) -> int | None:
    """Return which gold item a said one is."""
    number = numbers_in(said)
    tokens = [stem(word) for word in words(said)]
    for place, item in enumerate(gold):
        wanted = numbers_in(item)
        if wanted and re.fullmatch(r"\W*[\d.,/]+\W*", item):
            if number and close(number[-1].value, wanted[0].value):
                return place
        elif _find(tokens, [stem(word) for word in words(item)]) is not None:
            return place
    return None


def _find(tokens: Sequence[str], wanted: Sequence[str]) -> int | None:
    return (
        next(
            (at for at in range(len(tokens) - len(wanted) + 1) if list(tokens[at : at + len(wanted)]) == list(wanted)),
            None,
        )
        if wanted
        else None
    )


_FENCE = re.compile(r"```[\w+-]{0,12}\n?([^`]{1,4000})```")
_CODE = re.compile(r"`([^`\n]{1,400})`|\*\*([^*\n]{1,300})\*\*(?!\w)")
_QUOTED = re.compile(r"'[^'\n]{0,300}'|\"[^\"\n]{0,300}\"")
_ASSIGNS = re.compile(r"\A[\w. ]{1,30}=\s|\Aassert\s.{1,300}==\s|\A(?:>>>|print).{0,200}\n", re.DOTALL)


def _literal_matches(text: str, reply: str, question: str) -> bool:
    _, gold = literal_in(text)
    if isinstance(gold, bool):
        return _bool_matches(gold, reply, question)
    is_whole, whole = literal_in(re.sub(r"```[\w+-]{0,12}", "", clean(reply)).strip(" .`"))
    if (
        is_whole
        and isinstance(whole, (dict, list))
        and type(whole) is type(gold)
        and not (isinstance(whole, dict) and "answer" in whole)
    ):
        return _same_literal(whole, gold)
    wanted: Any = (list, tuple, set, dict) if isinstance(gold, (list, tuple, set, dict)) else object
    fences = [found[1] for found in _FENCE.finditer(clean(reply))]
    for span in [
        *_deciding(reply, question)[:1],
        *(Span(fence, fence, is_marked=False) for fence in fences[-1:]),
        *_deciding(reply, question)[1:],
    ]:
        candidates = [one for one in _literals(span, gold) if isinstance(one[1], wanted)]
        given = [literal_in(one)[1] for one in [*_QUOTED.findall(question), *bracketed(question)]]
        candidates = [one for one in candidates if span.is_marked or one[1] not in given or one[1] == gold]
        if candidates:
            at = 0 if span.is_marked or is_head(candidates[0][0], span.text) else -1
            return _same_literal(candidates[at][1], gold)
    return False


def _bool_matches(gold: bool, reply: str, question: str) -> bool:
    for span in spans(reply, question, kind="verdict"):
        found = list(P.BOOLEAN.finditer(_EMPHASIS.sub("", span.text)))
        if found:
            places = [_Place(one.start(), one.end()) for one in found]
            place = places[0] if span.is_marked else picked(places, _EMPHASIS.sub("", span.text), question)
            one = found[places.index(place)]
            return (
                (one[1] is not None or one[3] is not None) if gold else (one[2] is not None or one[0].lower() == "no")
            )
    return False


def _literals(span: Span, gold: Any) -> list[tuple[_Place, Any]]:
    """Return the literals of a span with their places: code, else brackets and quotes, else its last word."""
    text = span.text
    at = text.rfind("==") + 2 if "==" in text else text.rfind("→") + 1
    is_literal, value = literal_in(_ASSIGNS.sub("", text[at:].strip(" .*`\n")))
    if is_literal and isinstance(value, (type(gold), list, tuple, dict, set)):
        return [(_Place(at, len(text)), value)]
    found: list[tuple[_Place, Any]] = []
    pieces = [(match.start(), match[1] or match[2] or "") for match in _CODE.finditer(text, max(at, 0))] or [
        (at, text[at:])
    ]
    for start, piece in pieces:
        for inner in [_ASSIGNS.sub("", piece.strip(" .")), *bracketed(piece), *_QUOTED.findall(piece)]:
            is_literal, value = literal_in(inner)
            if is_literal:
                found.append((_Place(start, start + len(piece) + 2), value))
    if not found and isinstance(gold, str):
        word = re.search(r"(\S+?)[.!]?\W?\s?\Z", pieces[-1][1])
        found = [(_Place(0, len(text)), word[1])] if word else []
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    end: int


def _same_literal(said: Any, gold: Any) -> bool:
    return type(said) is type(gold) and bool(said == gold)


_TOKEN_EDGE = "\"'`.,;:()[]"
_SHOWN_SYMBOL = re.compile(r"`\s?([^`\n]{1,12}?)\s?`|\*\*(\S{1,6})\*\*(?!\w)|(?<!\w)[\"']([^\"'\s]{1,6})[\"'](?!\w)")
_PROSE = tuple(word_list("gold", "PROSE"))


def _symbol_matches(text: str, reply: str, question: str) -> bool:
    for span in _deciding(reply, question):
        said = _symbols(without_tex(span.text), text)
        if said:
            places = [place for place, _ in said]
            place = (
                places[0] if span.is_marked or is_head(places[0], span.text) else picked(places, span.text, question)
            )
            return (
                dict(said)[place] in (text, text.replace(" ", "")) or re.sub(r"[\s·*×]", "", dict(said)[place]) == text
            )
    return False


def _symbols(text: str, gold: str) -> list[tuple[_Place, str]]:
    """Return the symbols that a clause shows, with their places: in code or quotes, else words that look like one."""
    found = [
        (_Place(match.start(), match.end()), match[1] or match[2] or match[3]) for match in _SHOWN_SYMBOL.finditer(text)
    ]
    found = [one for one in found if not re.fullmatch("[a-z]{3,}", one[1]) or text[one[0].start] == "`"]
    for match in re.finditer(r"\S+", text):
        token = match[0].strip(_TOKEN_EDGE) or match[0].strip(".,;:") or match[0]
        if (
            token == gold
            or (
                P.SYMBOL_WORD.fullmatch(token)
                and token not in _PROSE
                and (len(token) > 1 or not re.fullmatch(r"[.,;:!?()-]", token) or text.strip() == token)
            )
        ) and (token != "A" or not re.match(r"\s[a-z]", text[match.end() :])):
            found.append((_Place(match.start(), match.end()), token))
    return found


# --- short texts -----------------------------------------------------------------------------------------------------


def _text_matches(gold: str, reply: str, question: str) -> bool:
    for _number, span in enumerate(spans(reply, question)):
        for clause in parts(span):
            text = _EMPHASIS.sub("", without_tex(clause.text)).strip()
            new = content(text) - content(question)
            if not new and not (span.is_marked and re.search(r"\w", text)) and not names(text, gold, question):
                continue
            return names(_answering(text, gold, question), gold, question)
    return False


def _answering(text: str, gold: str, question: str) -> str:
    """Return the part of a clause that answers: a name without its appositions, the asked one of two statements."""
    segments = re.split(r",\s", text)
    if (
        len(segments) > 1
        and is_fragment(text)
        and not re.match(r"\W*(?:on|in|at|by|from|to|near|under|inside)\b", text, re.IGNORECASE)
    ):
        kept = [segments[0]]
        for segment in segments[1:]:
            if not P.KNOWN_AS.match(segment):
                break
            kept.append(segment)
        text = ", ".join(kept)
    statements = re.split(r"\s(?:and|but)\s(?=\w)", text)
    if len(statements) > 1:
        asked = content(question)
        scores = [len(asked & content(statement)) for statement in statements]
        holding = [
            score for statement, score in zip(statements, scores, strict=True) if names(statement, gold, question)
        ]
        if holding and max(holding) < max(scores) and scores.index(max(scores)) > 0:
            return ""
    return text


def names(text: str, gold: str, question: str) -> bool:
    """Return whether a clause gives a gold text as its answer."""
    plain = without_tex(spelled(gold))
    if is_unspaced(plain):
        if re.search("或|还是|または|それとも|か.{1,6}(?:か|のどちら)|หรือ|또는|아니면", text):
            return False
        return fold(plain).replace(" ", "") in fold(text).replace(" ", "")
    tokens = [stem(word) for word in words(text)]
    for wanted in _variants(plain, question):
        at = _find(tokens, wanted)
        while at is not None:
            if _is_own_name(text, tokens, at, wanted, plain, question):
                return True
            later = _find(tokens[at + 1 :], wanted)
            at = None if later is None else at + 1 + later
    return False


def _variants(gold: str, question: str) -> list[list[str]]:
    tokens = [stem(word) for word in words(gold)]
    functional = (
        "a",
        "an",
        "the",
        "in",
        "at",
        "on",
        "to",
        "because",
        "of",
        "by",
        "his",
        "her",
        "their",
        "its",
        "my",
        "our",
        "your",
        "it",
    )
    bare = list(tokens)
    while len(bare) > 1 and bare[0] in functional:
        bare = bare[1:]
    found = [bare]
    found.append([{"mount": "mt", "saint": "st", "doctor": "dr"}.get(word, word) for word in bare])
    name = gold.split()
    if (
        2 <= len(name) <= 4
        and all(word[:1].isupper() or (word.islower() and len(word) <= 3) for word in name)
        and P.PERSON.search(question)
        and len(bare[-1]) > 3
    ):
        found.append(bare[-1:])
        found.append([bare[0], bare[-1]])
    return found


def _is_own_name(text: str, tokens: Sequence[str], at: int, wanted: Sequence[str], gold: str, question: str) -> bool:
    before = tokens[at - 1] if at else ""
    after = tokens[at + len(wanted)] if at + len(wanted) < len(tokens) else ""
    if gold[:1].isupper() and (before in _OTHER_NAME or (after in _OTHER_AFTER and after not in words(gold))):
        return False
    place = re.search(r"(?<!\w)" + r"\W+".join(re.escape(word) for word in wanted), fold(text))
    lead = fold(text)[: place.start()] if place else ""
    if (
        re.search(r"\bfrom\s(?:\w+\s){0,2}\Z", lead)
        and place
        and re.search(r"\A\W*\w*\sto\s", fold(text)[place.end() :])
        and "from" not in words(question)
    ):
        return False
    distance = P.DISTANCE.search(lead)
    if distance and distance[0].split()[0] not in words(question):
        return False
    if len(wanted) == 1 and len(gold.split()) > 1 and place and P.IS_OWN_NAME.search(text[: place.start()]):
        first = re.search(r"([\w'-]+)\.?\s\Z", text[: place.start()])
        if first and fold(first[1]) not in words(gold):
            return False
    return not re.search(r"\b(?:or|oder|还是|或)\b", text) or not re.search(
        rf"\bor\s(?:else\s)?(?:the\s|an?\s)?\W?{re.escape(wanted[0])}|{re.escape(wanted[-1])}\w?\W{{0,3}}\sor\s(?!simply|better|just|also|in|rather|as)|{re.escape(wanted[-1])}(?:,\s\w+){{1,4}},?\sor\s",
        fold(text),
    )
