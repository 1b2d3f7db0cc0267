"""Does a reply say what a question accepts? The comparison knows the type of the gold, the reading does not.

A gold letter is one of the options of its question; a number, a verdict, a date, a time, a list, a literal of code, a
symbol and a short text are known by their form. Of a family of names (the tag `family:NAME`) a reply must name an
accepted one and no other; of two parts (`family:ONE+OTHER`, accepted answers joined by " | ") both must be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from itertools import islice
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.reading import reply as replies
from query_mutator.reading import text as texts
from query_mutator.reading import values
from query_mutator.reading.clauses import P as CLAUSES
from query_mutator.reading.clauses import Span, content, is_fragment, sentences
from query_mutator.reading.marks import after_mark, marked, options_in
from query_mutator.reading.reply import Kind, Several, read
from query_mutator.reading.text import UNSPACED, Patterns, clean, fold, places_of, plain, spelled, stems
from query_mutator.reading.values import Value, dates_in, literal_in, numbers_in, size_of, times_in

P = Patterns("gold")

_VERDICTS = dict(pair.split("=") for pair in texts.word_list("gold", "VERDICTS"))
_PROSE = frozenset(texts.word_list("gold", "PROSE"))
_TOKEN_EDGE = "\"'`.,;:()[]"
_CONTAINERS = (list, tuple, dict, set)
_FUNCTION_WORDS = frozenset(texts.word_list("gold", "FUNCTION_WORDS"))
_OTHER_BEFORE = frozenset(texts.word_list("gold", "OTHER_BEFORE"))
FAMILY = "family:"
PARTS_JOINED_BY = " | "
#: Families whose answers are symbols: upper and lower case count, and a symbol inside a sentence may be a word.
SYMBOLS = ("symbol", "state_code")

_READ_SPANS = 4  # of a reply, for literals and symbols


@dataclass(frozen=True, slots=True)
class Gold:
    """The accepted answers of a question, each of its own type; `family` names the set that they are from."""

    accept: tuple[str, ...]
    question: str
    family: str | None = None

    def matches(self, reply: str) -> bool:
        """Return whether a reply says an accepted answer finally."""
        return _says(self, reply)


@lru_cache(maxsize=4096)  # a reply is graded many times in its episode
def _says(gold: Gold, reply: str) -> bool:
    if gold.family is not None:
        return commits_to(reply, gold.accept, family=gold.family, question=gold.question)
    try:
        return any(_matches(text, reply, gold.question) for text in gold.accept)
    except Several:
        return False


@lru_cache(maxsize=4096)
def kind_of_gold(gold: str, question: str) -> Kind:
    """Return the type of an accepted answer, by its form and the options of its question."""
    text = texts.without_tex(spelled(gold)).strip()
    options = options_in(spelled(question))
    if options and _letter_of(text, options) is not None:
        return "letter"
    if fold(text) in _VERDICTS:
        return "verdict"
    if P.LITERAL.fullmatch(text) and literal_in(text)[0]:
        return "literal"
    for kind, found in (("date", dates_in(text)), ("time", times_in(text))):
        is_whole = len(found) == 1 and found[0].start == 0 and P.ZONE.fullmatch(text, found[0].end) is not None
        if is_whole and (kind == "time" or found[0].value[2] is not None):
            return "time" if kind == "time" else "date"
    numbers = numbers_in(text, words=True)
    is_whole = len(numbers) == 1 and numbers[0].start == 0 and P.UNIT.fullmatch(text, numbers[0].end) is not None
    if is_whole and ("^" not in text[numbers[0].end :] or size_of(numbers[0].unit)):
        return "number"
    if (P.ITEMS.search(text) and not P.SENTENCE.match(text)) or (" and " in text and P.ASKS_SEVERAL.search(question)):
        return "list"
    if P.SYMBOL.fullmatch(text):
        return "symbol" if not UNSPACED.search(text) and not re.fullmatch("[a-z]{2,}", text) else "text"
    return "text"


def _letter_of(text: str, options: Mapping[str, str]) -> str | None:
    """Return the letter that a gold text names, by itself or by the text of its option."""
    if lone := re.fullmatch(r"[(\[]?([A-Za-z])[\])]?[.:]?|\(?([A-Z])[).:]\s.+", text, re.DOTALL):
        letter = (lone[1] or lone[2]).upper()
        return letter if letter in options else None
    same = [letter for letter, option in options.items() if texts.words(option) == texts.words(text) != ()]
    return same[0] if len(same) == 1 else None


def _matches(gold: str, reply: str, question: str) -> bool:
    kind = kind_of_gold(gold, question)
    text = texts.without_tex(spelled(gold)).strip()
    span = next(iter(marked(clean(reply), question)), None)
    if span is not None and not isinstance(span.value, list) and kind not in ("letter", "symbol"):
        said = texts.without_tex(span.text)
        if "".join(text.split()) in ["".join(said.strip(edge).split()) for edge in ("", " .", " .*`$\"'")]:
            return True
    if kind == "text":
        said_so = _is_sentence(gold, reply) if P.SENTENCE.match(text) else None
        return _gives(gold, reply, question) if said_so is None else said_so
    if kind == "list":
        return _list_matches(gold, reply, question)
    if kind == "literal":
        return _literal_matches(text, reply, question)
    if kind == "symbol":
        found = islice(replies.spans(reply, question), _READ_SPANS)
        shown = _said_by(lambda span: _symbols(span, text), found, question)
        return shown is not None and texts.unspaced(shown) == texts.unspaced(text)
    zones = _zones(text) if kind == "time" else set()
    if zones and not zones & (_zones(clean(reply)) or zones):
        return False
    said = read(reply, kind, question)
    return said is not None and _is_same(said, text, kind, question)


def _zones(text: str) -> set[str]:
    """Return the time zones that follow times in a text."""
    return {found[1].replace("GMT", "UTC") for found in P.TIME_ZONE.finditer(text)}


def _is_same(said: Any, text: str, kind: Kind, question: str) -> bool:
    """Return whether a value that was read without the gold equals it."""
    if kind == "letter":
        return bool(said == _letter_of(text, options_in(spelled(question))))
    if kind == "verdict":
        return bool(said == _VERDICTS[fold(text)])
    if kind == "date":
        gold_date = dates_in(text, day_first=replies.asks_day_first(question))[0].value
        year = said[0] or (gold_date[0] if gold_date[0] and str(gold_date[0]) in question else 0)
        return bool(said[1:] == gold_date[1:]) and gold_date[0] in (None, year, 2000 + year, 1900 + year)
    if kind == "time":
        minutes, is_known = times_in(text)[0].value
        is_either = not is_known and not (said[1] and text.startswith("0"))  # half of the day
        return bool(said[0] == minutes or (is_either and said[0] % 720 == minutes % 720))
    gold = numbers_in(text, words=True)[-1]
    question = spelled(question)
    units = [found[1] for at in P.ASKED_UNIT.finditer(question) if (found := values.UNIT.match(question, at.end()))]
    unit = "" if gold.unit else next(filter(size_of, reversed(units)), "")
    return values.same_number(said, gold, unit=unit)


def _list_matches(text: str, reply: str, question: str) -> bool:
    gold = replies.items_of(spelled(text))
    for said in replies.listed(reply, question):
        places = _places(said, gold)
        if places is None:
            continue
        if -1 in places:
            return False
        if len(set(places)) == len(gold):
            return places == list(range(len(gold))) if P.ASKS_ORDER.search(question) else True
    return False


def _places(said: Sequence[str], gold: Sequence[str]) -> list[int] | None:
    """Return the place of each said item among the gold ones, -1 for another one; None where fewer than half are any.

    Words that lead to the list, and a phrase after it, are no items.
    """
    found = [_place(item, gold) for item in said]
    known = [at for at, place in enumerate(found) if place is not None]
    if not known or len(known) * 2 < len(gold):
        return None
    lead = [item for item in said[: known[0]] if len(item.split()) < 3]
    trail = [item for item in said[known[-1] + 1 :] if len(item.split()) < 4]
    inside = found[known[0] : known[-1] + 1]
    return [-1 if place is None else place for place in inside] + [-1] * bool(lead or trail)


def _place(said: str, gold: Sequence[str]) -> int | None:
    numbers, tokens = numbers_in(said), stems(said)
    for place, item in enumerate(gold):
        wanted = numbers_in(item) if re.fullmatch(r"\W*[\d.,/]+\W*", item) else ()
        if wanted and numbers and values.close(numbers[-1].value, wanted[0].value):
            return place
        if not wanted and places_of(stems(item), tokens):
            return place
    return None


def _said_by(finder: Callable[[Span], Sequence[Value]], found: Iterable[Span], question: str) -> Any:
    """Return the value that the first span with any gives."""
    for span in found:
        if said := finder(span):
            is_first = span.is_marked or replies.is_head(said[0], span.text)
            return (said[0] if is_first else replies.picked(said, span.text, question)).value
    return None


def _literal_matches(text: str, reply: str, question: str) -> bool:
    _, gold = literal_in(text)
    whole = literal_in(clean(reply).strip(" .`\n"))[1]
    if type(whole) is not type(gold):
        first, *others = [*islice(replies.spans(reply, question, kind="verdict"), _READ_SPANS)] or [Span("", "")]
        fences = [Span(found[1], "") for found in replies.FENCED.finditer(clean(reply))]
        whole = _said_by(lambda span: _literals(span.text, gold), [first, *fences[-1:], *others], question)
    return type(whole) is type(gold) and bool(whole == gold)


def _literals(text: str, gold: Any) -> list[Value]:
    """Return the literals of a text: after its last == or arrow, in code, brackets or quotes, else its last word."""
    at = text.rfind("==") + 2 if "==" in text else text.rfind("→") + 1
    shown = [(one.start(), one[1] or one[2] or "") for one in P.SHOWN_CODE.finditer(text, at)]
    found: list[Value] = []
    for start, piece in [(at, text[at:]), *shown]:
        inside = [*values.bracketed(piece), *P.QUOTED.findall(piece)] if start > at or not shown else []
        for inner in [P.ASSIGNS.sub("", piece.strip(" .*`\n")), *inside]:
            is_literal, value = literal_in(inner)
            if is_literal and (isinstance(value, _CONTAINERS) or not isinstance(gold, _CONTAINERS)):
                found.append(Value(value=value, start=start, end=start + len(piece) + 2))
    word = re.search(r"(\S{1,200}?)[.!]?\W?\s?\Z", (shown or [(at, text)])[-1][1][-210:])
    return found or ([Value(value=word[1], start=0, end=len(text))] if isinstance(gold, str) and word else [])


def _symbols(span: Span, gold: str) -> list[Value]:
    """Return the symbols that a clause shows: in code or quotes, else words that look like one."""
    text = texts.without_tex(span.text)
    found = [
        Value(value=one[1] or one[2] or one[3], start=one.start(), end=one.end())
        for one in P.SHOWN_SYMBOL.finditer(text)
        if one[1] or not re.fullmatch("[a-z]{3,}", one[2] or one[3])
    ]
    for one in re.finditer(r"\S+", text):
        inner = re.fullmatch(r"[(\[\"'`](\S+?)[)\]\"'`][.,;:]?", one[0])
        whole = inner[1] if inner else one[0]
        forms = (whole, *map(whole.rstrip, (".", ".,;:")), *map(whole.strip, ("*", "*.,;:")))  # COUNT(*). is COUNT(*)
        token = gold if gold in forms else whole.strip(_TOKEN_EDGE) or whole.strip(".,;:") or whole
        is_sign = re.fullmatch(r"[.,;:!?()-]", token) is None or text.strip() == token
        is_symbol = P.SYMBOL_WORD.fullmatch(token) and token not in _PROSE and is_sign
        is_article = token == "A" and re.match(r"\s[a-z]", text[one.end() : one.end() + 2])
        if (texts.unspaced(token) == texts.unspaced(gold) or is_symbol) and not is_article:
            found.append(Value(value=token, start=one.start(), end=one.start() + one[0].find(token) + len(token)))
    return [one for one in found if one.value[:1].isalnum() == gold[:1].isalnum()] or found


def _is_sentence(gold: str, reply: str) -> bool | None:
    """Return whether the last sentence of a reply that has most words of a gold sentence has them in its order."""
    wanted = texts.words(gold)
    for sentence in reversed(sentences(clean(reply))):
        if not CLAUSES.WRONG.search(sentence):
            quoted = [one for one in re.findall(r"\*\*[^*]+\*\*|\"[^\"]+\"", sentence) if " " in one]
            said = texts.words(plain(quoted[-1] if quoted else sentence))
            if 2 * len({*said} & {*wanted}) > len({*wanted}):
                return bool(places_of(wanted, said))
    return None


def _gives(gold: str, reply: str, question: str) -> bool:
    """Return whether the first clause of a reply that says anything new gives a gold text."""
    is_negative = P.NEGATIVE.search(gold) is not None
    for span in replies.spans(reply, question, kind="verdict" if is_negative else "text"):
        for clause in replies.parts(span):
            text = plain(span.raw if is_negative and span.raw else clause.text).strip()
            text = P.APPOSITION.sub("", text) if is_fragment(text) else text
            is_new = content(text) - content(question) or (span.is_marked and re.search(r"\w", text))
            if is_new or _names(text, gold, question):
                return _names(text, gold, question)
    return False


def _names(text: str, gold: str, question: str) -> bool:
    """Return whether a clause gives a gold text as its answer."""
    wanted = texts.without_tex(spelled(gold))
    if UNSPACED.search(wanted):
        name = rf"(?<![東西南北新大小]){re.escape(fold(wanted).replace(' ', ''))}"
        return re.search(name, fold(text).replace(" ", "")) is not None and not P.EAST_ASIAN_OR.search(text)
    if P.FORMULA.search(wanted):
        return _has_formula(text, wanted)
    tokens = stems(text)
    if _is_subject_other(text, gold, question):
        return False
    return any(
        _is_itself(text, tokens, at, form, wanted, question)
        for form in _forms(wanted, question)
        for at in places_of(form, tokens)
    )


def _has_formula(text: str, gold: str) -> bool:
    """Return whether a text has a formula, as it is written or with its terms in another order."""
    formula, said = (texts.unspaced(fold(one)) for one in (gold, text))
    if re.search(rf"(?<![\w.·*×/^]){re.escape(formula)}(?!\w)", said):
        return True
    wanted, given = _sides(gold), map(_sides, P.BETWEEN_FORMULAS.split(text))
    return any(sides[-1:] == wanted or [sides[0], sides[-1]] == wanted for sides in given)


def _sides(formula: str) -> list[list[str]]:
    """Return the sides of a formula, each as its terms in alphabetical order."""
    sides = re.split("=|->|→", texts.unspaced(fold(formula)).strip(".*`"))
    return [sorted(P.TERM.findall(side if side[:1] in ("+", "-") else f"+{side}")) for side in sides]


def _forms(gold: str, question: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of a gold text without leading function words; of a person the last name, too."""
    bare = stems(gold)
    while len(bare) > 1 and bare[0] in _FUNCTION_WORDS:
        bare = bare[1:]
    if not bare:
        return
    yield bare
    name = gold.split()
    is_name = 2 <= len(name) <= 4 and all(word[0].isupper() or (word.islower() and len(word) <= 3) for word in name)
    if is_name and P.PERSON.search(question) and len(bare[-1]) > 3:
        yield bare[-1:]


def _is_itself(text: str, tokens: Sequence[str], at: int, form: Sequence[str], gold: str, question: str) -> bool:
    """Return whether words of a clause are the gold, and not a part of another name or of a comparison."""
    before = tokens[at - 1] if at else ""
    known = texts.words(gold)
    if gold[:1].isupper() and before in _OTHER_BEFORE and before.capitalize() in text:
        return False
    folded = fold(text)
    place = re.search(r"(?<!\w)" + r"\W+".join(map(re.escape, form)), folded)
    if place is None:
        return True
    lead, tail = folded[: place.start()], folded[place.end() :]
    if lead.endswith("-") or P.OR_BEFORE.search(lead) or P.OR_AFTER.match(tail):
        return False
    compared = P.COMPARED.search(lead)
    if compared and compared[0].split()[0] not in texts.words(question):
        return False
    if len(form) > 1 or len(known) < 2 or len(folded) != len(text):
        return True
    given = P.GIVEN_NAMES.search(text[: place.start()])
    return given is None or _is_same_given(given[1], gold.rpartition(" ")[0])


def _is_same_given(said: str, gold: str) -> bool:
    """Return whether given names agree, an initial with any name that begins with it; JK is J. K., more may be said."""
    one, other = (
        [fold(part) for word in names for part in (word if word.isupper() and len(word) < 4 else [word])]
        for names in map(P.GIVEN_NAME.findall, (said, gold))
    )
    pairs = zip(one, other, strict=False)
    are_same = all(a == b or (1 in (len(a), len(b)) and a[0] == b[0]) for a, b in pairs)
    return are_same or one == other[-len(one) :]


def _is_subject_other(text: str, gold: str, question: str) -> bool:
    """Return whether a clause gives another name as the subject of the verb that the question asks a subject for."""
    subject, asked = P.SUBJECT_FIRST.match(text), P.ASKS_SUBJECT.search(question)
    if subject is None or asked is None:
        return False
    is_asked = subject[2] is None or content(subject[2]) == content(asked[1]) != frozenset()
    name = content(subject[1])
    return bool(is_asked and name and not name & (content(question) | content(gold)))


def family_of(tags: Sequence[str]) -> str | None:
    """Return the family that the tags of a question name, None without one."""
    return next((tag.removeprefix(FAMILY) for tag in tags if tag.startswith(FAMILY)), None)


def commits_to(reply: str, accept: Sequence[str], *, family: str, question: str) -> bool:
    """Return whether a reply names an accepted answer, in each part of its family, and nothing else of it."""
    accepted = [text.split(PARTS_JOINED_BY) for text in accept]
    return all(
        _commits_to_one(reply, [parts[place] for parts in accepted], family=name, question=question)
        for place, name in enumerate(family.split("+"))
    )


def _commits_to_one(reply: str, accept: Sequence[str], *, family: str, question: str) -> bool:
    said = re.sub(re.escape(question.strip()), " ", after_mark(clean(reply)), flags=re.IGNORECASE)  # without a copy
    if family in SYMBOLS:
        return _family_symbols(said) == {accept[0]}
    if _families().get(family) is None:
        raise UsageError(f"no family {family!r}; known: {', '.join(sorted(_families()))}")
    if all(text.isdecimal() for text in accept):
        number = read(reply, "number", question)
        is_copy = number is not None and number.is_word and family == "digits"  # asks for "two" in digits
        return number is not None and number.value == int(accept[0]) and not is_copy
    pattern = _pattern(family)
    named = set(pattern.findall(fold(said)))
    golden = {fold(text) for text in accept}
    asked = set(pattern.findall(fold(question)))
    return bool(named & golden) and named - asked <= golden


def _family_symbols(said: str) -> set[str]:
    """Return the symbols that a reply shows: quoted, after "is" or a colon, before one, on a line or in a list."""
    shown = {symbol for groups in P.FAMILY_SYMBOL.findall(said) for symbol in groups if symbol}
    for symbols in P.LIST_OF_SYMBOLS.findall(said):
        shown |= set(re.findall(r"\b[A-Z][A-Za-z]?\b", symbols))
    return shown


@cache
def _families() -> Mapping[str, Sequence[str]]:
    """Return the answers of each family of both authors' questions."""
    folder = resources.files("query_mutator") / "data" / "questions"
    names: dict[str, Sequence[str]] = {}
    for file in ("general_grader.json", "general_2_grader.json"):
        names |= json.loads((folder / file).read_text(encoding="utf8"))
    return names


@cache
def _pattern(family: str) -> re.Pattern[str]:
    """Return what finds the names of a family in a folded text, the longest first, in the singular or plural.

    "The European continent" is Europe; "in Danish" is a language, and "Czech Republic" a country, not a people.
    """
    names = "|".join(re.escape(name) for name in sorted({fold(name) for name in _families()[family]}, key=len)[::-1])
    before, after = (r"(?<!\bin )", r"(?! republic)") if family == "demonym" else ("", "")
    return re.compile(rf"{before}(?<!\w)({names}){after}(?=(?:e?s|a?n(?= continent))?(?!\w))")
