"""Values in a text with their places: numbers with units, dates, times of the day, literals of code."""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from query_mutator.reading.text import UNSPACED, Patterns, any_of, tables, word_list

P = Patterns("values")
UNIT = P.UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number, date (year, month, day), time (minutes, is the half of the day known) or literal with its place."""

    value: Any
    start: int = 0
    end: int = 0
    unit: str = ""  # of a number; 50 % is 50 with `is_percent`
    is_percent: bool = False
    is_word: bool = False


_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "mn": 1e6, "bn": 1e9,
           "mio": 1e6, "mrd": 1e9, "k": 1e3, "m": 1e6, "b": 1e9}  # fmt: skip
_SPACES = re.compile("[ '\u00a0\u2009\u202f]")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+")
_JOINS = re.compile(r"[\s,]*(?:and\s)?")


@lru_cache(maxsize=8192)
def numbers_in(text: str, *, words: bool = False) -> tuple[Value, ...]:
    """Return the finite numbers of a text in their order, with `words` those in words, too; 2 h 15 min is one."""
    found = [number for number in map(_number, P.NUMBER.finditer(text)) if number is not None]
    if words:
        taken = {place for number in found for place in range(number.start, number.end)}
        in_words = (_word_number(match) for match in _IN_WORDS.finditer(text) if match.start() not in taken)
        found = sorted([*found, *filter(None, in_words)], key=lambda number: number.start)
    return tuple(_joined(found, text))


def _joined(numbers: Sequence[Value], text: str) -> list[Value]:
    """Return the numbers; parts of one quantity, from a larger unit to a smaller one or a fraction, are joined."""
    found: list[Value] = []
    for number in numbers:
        last = found[-1] if found else number
        size, smaller, unit = (size_of(last.unit), size_of(number.unit), UNIT.match(text, last.end))
        share = number.value * smaller[1] / size[1] if size and smaller and size[0] == smaller[0] else 0.0
        if 0 < share < 1 and unit and _JOINS.fullmatch(text, unit.end(), number.start):
            found[-1] = replace(last, value=last.value + share, end=number.end)
        else:
            found.append(number)
    return found


def _number(match: re.Match[str]) -> Value | None:
    try:
        value = _magnitude(match)
    except (ArithmeticError, ValueError):  # too large, 1/0, 000,000,000
        return None
    if not math.isfinite(value):
        return None
    sign = match["sign"] or match["late_sign"] or ""
    before = match.string[max(0, match.start() - 3) : match.start()].rstrip()[-1:]
    is_operator = before.isdigit() or before in tuple(")]%") or (before.isalpha() and sign[-1:].isspace())
    if sign.strip().lower() == "negative" or (sign.strip().lower() in ("-", "minus") and not is_operator):
        value = -value
    after = UNIT.match(match.string, match.end())
    return Value(
        value=value,
        is_percent=match["percent"] is not None,
        start=match.start(),
        end=match.end(),
        unit=(match["currency"] or "").strip()[-3:] or (after[1] if after else ""),
    )


def _magnitude(match: re.Match[str]) -> float:
    if match["top"] is not None:
        value = float(match["whole"] or 0) + int(match["top"]) / int(match["bottom"])
    else:
        value = float(_without_separators(match["plain"])) * 10.0 ** int(match["power"] or "0")
        value = value ** int(match["raised"] or "1")
    return value * _SCALES.get((match["scale"] or match["letter"] or "").lower(), 1.0)


def _without_separators(digits: str) -> str:
    """Return digits as Python reads them: the last of two different signs is the point, 1,234 has none, 9,81 has."""
    digits = _SPACES.sub("", digits)
    point, comma = digits.rfind("."), digits.rfind(",")
    if point >= 0 and comma >= 0:
        return digits.replace(",", "") if point > comma else digits.replace(".", "").replace(",", ".")
    if digits.count(".") > 1:
        return digits.replace(".", "")
    return digits.replace(",", "" if _GROUPED.fullmatch(digits) else ".")


_SIGNS = {sign: unicodedata.numeric(sign, 2.0) for sign in "〇零一二三四五六七八九十百千万億亿萬两兩"}
_ONES = {sign: value for sign, value in _SIGNS.items() if value < 10} | {
    word: float(value) for line in tables()["values"]["ONES"].splitlines() for value, word in enumerate(line.split())
}
_TENS = {word: 10.0 * (at % 8 + 2) for at, word in enumerate(word_list("values", "TENS"))}
_FACTORS = {"hundred": 100.0, "dozen": 12.0, "thousand": 1e3, "million": 1e6, "billion": 1e9}
_PARTS = {word + end: 1 / part for part, word in enumerate(word_list("values", "PARTS"), start=2) for end in ("", "s")}
_FACTORS |= {sign: value for sign, value in _SIGNS.items() if value >= 10}
NUMERALS = {**_ONES, **_TENS, **_FACTORS, **_PARTS}
_NAMES = any_of([name for name in NUMERALS if not UNSPACED.match(name)])
_UNSPACED_NAMES = any_of([name for name in NUMERALS if UNSPACED.match(name)])
_IN_WORDS = re.compile(
    rf"(?<![\w-])(?:(?:half\s)?an?(?=\s(?:hour|minute|second|day|week|month|year)\b)|(?:(?:minus|negative)\s)?"
    rf"(?:half\san?\s|an?\s)?{_NAMES}(?:(?:[-\s]|,?\sand\s(?:an?\s)?|\sof\san?\s){_NAMES}){{0,6}})(?!\w)(?!-\w)"
    rf"|{_UNSPACED_NAMES}+",
    re.IGNORECASE,
)


def _word_number(match: re.Match[str]) -> Value | None:
    """Return the number that words make: four and a half, sixty-four, half a dozen, three quarters, 三百."""
    names = re.findall(_UNSPACED_NAMES, match[0]) or re.split(r"[\s,-]+", match[0].lower())
    if names[0] in _PARTS and names[0] not in ("half", "quarters"):
        return None
    value = _spoken(names) if any(name in NUMERALS for name in names) else 1.0  # an hour
    unit = UNIT.match(match.string, match.end())
    return Value(value=-value if names[0] in ("minus", "negative") else value, start=match.start(), end=match.end(),
                 is_word=True, unit=unit[1] if unit else "")  # fmt: skip


def _spoken(names: Sequence[str]) -> float:
    before, value, last = 0.0, 0.0, ""  # before is what stands before "and"
    for name, following in zip(names, [*names[1:], ""], strict=True):
        number = NUMERALS.get(name, 0.0)
        if name in _FACTORS:  # of two hundred five thousand, of 三百六十
            before, value = 0.0, before + value
            value += (value % number or 1.0) * number - value % number
        elif name in _PARTS:
            value = (value or 1.0) * number
        elif name == "and":
            before, value = before + value, 0.0
        elif (last in _ONES or (last in _TENS and number >= 10)) and number and following not in _PARTS:
            break  # thirty... thirty-two
        value += number * (name in NUMERALS and name not in _FACTORS and name not in _PARTS)
        last = name if number else last
    return before + value


#: Dimensions and size of a unit by the forms that occur, with and without a prefix.
_SIZES = {
    form: (dimensions.split(), float(size))
    for dimensions, forms in tables()["units"].items()
    for form, size in (pair.split("=") for pair in forms.split())
}
_PREFIXES = [pair.split("=") for pair in word_list("values", "PREFIXES")]
_SIZES = {
    name + unit: (_SIZES[unit][0], _SIZES[unit][1] * float(factor))
    for name, factor in _PREFIXES
    for unit in word_list("values", "PREFIXED")
    if len(name) < 3 or len(unit) > 2
} | _SIZES
_UNIT_PARTS = re.compile(r"\s*(/|\bper\b|[·\s])\s*")
_UNIT_PART = re.compile(r"([^\W\d_]+|°\s?[CF]?|[€$£¥]|US\$)(?:\^(-?\d))?", re.IGNORECASE)
_POWERS = re.compile(r"(?i)(square|sq\.?|cubic)\s(\w+)")


@lru_cache(maxsize=4096)
def size_of(unit: str) -> tuple[tuple[str, ...], float] | None:
    """Return the dimensions and size of a unit, with prefixes, powers and quotients; None for a word that is none."""
    unit = _POWERS.sub(lambda found: f"{found[2]}^{3 if found[1][0] in 'cC' else 2}", unit.strip())
    first, *others = _UNIT_PARTS.split(re.sub(r"°\s", "°", unit))
    dimensions: list[str] = []
    size = 1.0
    for sign, part in [("", first), *zip(others[::2], others[1::2], strict=True)]:
        found = _UNIT_PART.fullmatch(part)
        forms = [found[1], found[1].lower()[len(found[1]) == 1 :]] if found else []  # m is not M
        forms += [form[: -len(end)] for form in forms for end in ("s", "es") if len(form) > 3 and form.endswith(end)]
        base = next((_SIZES[form] for form in forms if form in _SIZES), None)
        if found is None or base is None:
            return None
        power = int(found[2] or 1) * (-1 if sign in ("/", "per") else 1)
        dimensions += [name if power > 0 else f"-{name}" for name in base[0]] * abs(power)
        size *= base[1] ** power
    return tuple(sorted(dimensions)), size


def close(one: float, other: float) -> bool:
    """Return whether two numbers are equal as they are written."""
    return math.isclose(one, other, rel_tol=1e-9 if abs(one) > 1000 else 1e-6, abs_tol=1e-300)


def same_number(said: Value, gold: Value, *, unit: str = "") -> bool:
    """Return whether two numbers are equal; 25 % is 0.25, and 25 where that is no share.

    Units that are both known must agree; a weight of 2500 g is one of 2.5 kg unless the question asks for a `unit`.
    """
    one, other = size_of(said.unit), size_of(gold.unit) or size_of(unit)
    if one and other and one != other:
        return one[0] == other[0] and not unit and close(said.value * one[1], gold.value * other[1])
    if said.is_percent == gold.is_percent:
        return close(said.value, gold.value)
    share, plain = (said.value / 100, gold.value) if said.is_percent else (gold.value / 100, said.value)
    is_whole = abs(plain) >= 1 or gold.is_percent
    return close(share, plain) or (is_whole and close(share * 100, plain))


_MONTHS = {name: at % 12 + 1 for at, name in enumerate(word_list("words", "MONTH"))}
ORDINALS = {name: at for at, name in enumerate(word_list("words", "ORDINAL"), start=1)}
_DATES = ("YEAR_FIRST", "EAST_ASIAN_DATE", "DATE_IN_DIGITS", "DAY_MONTH", "MONTH_DAY", "MONTH_YEAR")


def dates_in(text: str, *, day_first: bool | None = None) -> list[Value]:
    """Return the dates of a text; 05/06/2021 is in May unless `day_first`, 05.06.2021 in June."""
    found: list[Value] = []
    for name in _DATES:
        for match in getattr(P, name).finditer(text):
            date = _date(match.groupdict(), day_first)
            if date is not None and all(match.end() <= one.start or one.end <= match.start() for one in found):
                found.append(Value(value=date, start=match.start(), end=match.end()))
    return sorted(found, key=lambda one: one.start)


def _date(parts: dict[str, str | None], day_first: bool | None) -> tuple[int | None, int, int | None] | None:
    year, day, month = parts.get("year"), parts.get("day"), parts["month"] or ""
    if "mark" in parts and day:  # 05/06/2021
        is_day_first = day_first or (int(month) > 12 and day_first is None) or parts["mark"] == "."
        if is_day_first:
            day, month = month, day
    number = int(month) if month.isdecimal() else _MONTHS[month.lower()]
    in_month = int(day) if day and day.isdecimal() else ORDINALS.get((day or "").lower())
    if not (1 <= number <= 12 and 1 <= (in_month or 1) <= 31):
        return None
    return int(year) if year else None, number, in_month


def times_in(text: str, *, in_digits: bool = False) -> list[Value]:
    """Return the times of the day in a text, with `in_digits` also 15.40 and 1540 hours."""
    text = P.DIGITAL.sub(r"\1:\3", text) if in_digits else text
    found = ((match, _time(match)) for match in P.CLOCK.finditer(text))
    return [Value(value=time, start=match.start(), end=match.end()) for match, time in found if time is not None]


_NAMED_TIMES = {"noon": 12, "midday": 12, "midnight": 0, "quarter": 15, "half": 30, "twenty-five": 25}


def _time(match: re.Match[str]) -> tuple[int, bool] | None:
    def count(name: str) -> int:
        return int(name) if name.isdecimal() else int({**NUMERALS, **_NAMED_TIMES}[name])

    name = next(
        filter(None, (match["hour"], match["past"], match["bare"], match["spoken"], match["cjk"], match["named"]))
    ).lower()
    hour, minute = count(name), int(match["minute"] or match["cjk_minute"] or 0)
    if match["spoken"]:
        minute = int(_spoken(match["spoken_minute"].lower().removeprefix("oh ").split("-")))
    if match["past"]:
        minute = count(match["count"].lower()) * (1 if match["way"].lower() in ("past", "after") else -1)
    half, part = (match["half"] or "")[:1].lower(), (match["part"] or "").lower()
    if (half or part) and hour <= 12:
        is_late = half == "p" or part in ("afternoon", "evening") or (part == "night" and hour % 12 >= 6)
        hour = hour % 12 + 12 * is_late
    if hour > 24 or minute >= 60:
        return None
    return (60 * hour + minute) % 1440, bool(half or part or hour > 12 or hour == 0 or name in _NAMED_TIMES)


_OPENS_LITERAL = re.compile(r"[\[{(\"'\d.+-]|[rbfu]{1,2}[\"']|null|none|true|false", re.IGNORECASE)
_BRACKET = re.compile(r"[\[\](){}]|\"[^\"\n]{0,300}\"|'[^'\n]{0,300}'")
_MOST_LITERAL = 4000


@lru_cache(maxsize=4096)
def literal_in(text: str) -> tuple[bool, Any]:
    """Return whether a text is a literal of Python or JSON, and its value."""
    text = text.strip()
    if len(text) > _MOST_LITERAL or not _OPENS_LITERAL.match(text):
        return False, None
    for parse in (ast.literal_eval, json.loads):
        try:
            return True, parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return False, None


def bracketed(text: str) -> Iterator[str]:
    """Yield the outermost bracketed parts of a text that close, skipping quoted brackets."""
    start, depth = 0, 0
    for match in _BRACKET.finditer(text):
        if match[0] in "([{":
            start, depth = (start if depth else match.start()), depth + 1
        elif match[0] in ")]}" and depth:
            depth -= 1
            if not depth:
                yield text[start : match.end()]
