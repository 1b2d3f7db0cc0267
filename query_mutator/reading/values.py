"""Values in a text with their places: numbers, dates, times of the day, durations, literals of code."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from query_mutator.reading.patterns import Patterns, table, word_list

P = Patterns("values")

_CLOSE = 1e-9  # relative difference of equal numbers
_ROUNDED = 1e-6  # of small ones with digits after the point
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "mn": 1e6, "bn": 1e9}
_LETTERS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
_UNITS = word_list("values", "UNITS")
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORD_VALUES = (
    {word: float(value) for value, word in enumerate(_UNITS)}
    | {word: 10.0 * value for value, word in enumerate(_TENS, start=2)}
    | {"hundred": 100.0, "thousand": 1e3, "million": 1e6, "billion": 1e9, "dozen": 12.0, "half": 0.5}
    | {"third": 1 / 3, "thirds": 1 / 3, "quarter": 0.25, "quarters": 0.25, "halves": 0.5, "fifth": 0.2, "fifths": 0.2,
       "eighth": 1 / 8, "eighths": 1 / 8, "sixth": 1 / 6, "sixths": 1 / 6, "seventh": 1 / 7, "sevenths": 1 / 7,
       "ninth": 1 / 9, "ninths": 1 / 9, "tenth": 0.1, "tenths": 0.1, "hundredth": 0.01, "hundredths": 0.01}
)  # fmt: skip
_FACTORS = tuple(word_list("values", "FACTORS"))
_ORDINALS = tuple(word_list("values", "ORDINALS"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number in a text, with its place and what follows it; 50 % is 50 with `is_percent`."""

    value: float
    is_percent: bool = False
    start: int = 0
    end: int = 0
    is_word: bool = False
    unit: str = ""
    other: float | None = None  # the same digits, read as in another country


def numbers_in(text: str, *, words: bool = False) -> list[Number]:
    """Return the finite numbers of a text in their order, with `words` those up to millions in words, too."""
    found = [number for number in map(_number, P.NUMBER.finditer(text)) if number is not None]
    if words:
        taken = {place for number in found for place in range(number.start, number.end)}
        found += [number for match in P.IN_WORDS.finditer(text) if match.start() not in taken
                  for number in [_word_number(match)] if number is not None]  # fmt: skip
        found.sort(key=lambda number: number.start)
    return found


def _number(match: re.Match[str]) -> Number | None:
    if match["top"] is not None:
        if int(match["bottom"]) == 0:
            return None
        value = float(match["whole"] or 0) + int(match["top"]) / int(match["bottom"])
    else:
        value = float(_without_separators(match["plain"]))
        try:
            value *= 10.0 ** int((match["power"] or "0").replace("−", "-"))
            value = value ** int((match["raised"] or "1").replace("−", "-"))
        except (OverflowError, ZeroDivisionError):
            return None
    if match["scale"]:
        value *= _SCALES[match["scale"].lower()]
    if match["letter"] and (match["currency"] or match.string[match.start("letter") - 1].isdigit()):
        value *= _LETTERS.get(match["letter"], 1.0)
    sign = (match["sign"] or match["late_sign"] or "").strip().lower()
    before = match.string[max(0, match.start() - 3) : match.start()].rstrip()[-1:]
    is_spaced = (match["sign"] or "")[-1:].isspace()
    is_binary = before.isdigit() or (before != "" and before in ")]%") or (before.isalpha() and is_spaced)
    is_minus = sign in ("-", "−") and not is_binary
    if is_minus or (sign == "minus" and not before.isdigit()) or sign == "negative":
        value = -value
    if not math.isfinite(value):
        return None
    after = _UNIT.match(match.string, match.end())
    unit = after[1] if after else "dollar" if match["currency"] else ""
    other = None
    if (
        match["plain"]
        and re.fullmatch(r"\d{1,3}[.,]\d{3}", match["plain"])
        and not match["scale"]
        and not match["power"]
    ):
        other = value * 1000 if "." in match["plain"] else value / 1000
        other = None if match["plain"].startswith("0") else other
    return Number(
        other=other,
        value=value,
        is_percent=match["percent"] is not None,
        start=match.start(),
        end=match.end(),
        unit=unit,
    )


def _without_separators(digits: str) -> str:
    """Return digits as Python reads them: the last of two different signs is the point, 1,234 has none, 9,81 has."""
    digits = re.sub("[ '\u00a0\u2009\u202f]", "", digits)
    point, comma = digits.rfind("."), digits.rfind(",")
    if point >= 0 and comma >= 0:
        return digits.replace(",", "") if point > comma else digits.replace(".", "").replace(",", ".")
    if digits.count(".") > 1:
        return digits.replace(".", "")
    if comma < 0:
        return digits
    is_thousands = re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+", digits) is not None
    return digits.replace(",", "" if is_thousands else ".")


def _word_number(match: re.Match[str]) -> Number | None:
    """Return the number that words make: four and a half, sixty-four, half a dozen, three quarters."""
    names = re.findall(r"[a-z]+", match[0].lower())
    sign = -1 if names[0] in ("minus", "negative") else 1
    names = [name for name in names if name in _WORD_VALUES]
    is_alone = not names or (len(names) == 1 and names[0] in _ORDINALS)
    if is_alone and names != ["half"] and not match[0].lower().startswith(("a ", "an ")):
        return None
    total, group = 0.0, 0.0
    for at, name in enumerate(names):
        value = _WORD_VALUES[name]
        if name in _FACTORS and at:
            group = (group or 1) * value
            if value >= 1000:
                total, group = total + group, 0.0
        elif name in _FACTORS:
            group = value
        elif at and names[at - 1] not in _FACTORS and not (names[at - 1] in _TENS and 0 < value < 10) and value >= 1:
            return Number(
                value=sign * value, start=match.start(), end=match.end(), is_word=True
            )  # thirty... thirty-two
        else:
            group += value
    after = _UNIT.match(match.string, match.end())
    return Number(value=sign * (total + group), start=match.start(), end=match.end(), is_word=True,
                  unit=after[1] if after else "")  # fmt: skip


# --- units and equality ----------------------------------------------------------------------------------------------

_UNIT = re.compile(r"[\s-]?(?:\*\*|\\,|~)?\s?(km/h|m/s\^2|m/s|mph|[^\W\d_]{1,20}|°\s?[CF]?|[€$£])", re.IGNORECASE)
#: Dimension and size of a unit by the forms that occur; patterns.toml has a dimension, a size and its forms on a line.
_SIZES = {
    form: (dimension, float(size))
    for dimension, size, *forms in map(str.split, table("values", "SIZES").strip().splitlines())
    for form in forms
}


def size_of(unit: str) -> tuple[str, float] | None:
    """Return the dimension and size of a unit, None for a word that is none."""
    unit = unit.lower().replace(" ", "")
    return _SIZES.get(unit) or _SIZES.get(unit.removesuffix("s")) or _SIZES.get(unit.removesuffix("es"))


def close(one: float, other: float) -> bool:
    """Return whether two numbers are equal as they are written."""
    is_whole = one == round(one) and other == round(other)
    return math.isclose(one, other, rel_tol=_CLOSE if is_whole or abs(one) > 1000 else _ROUNDED, abs_tol=1e-12)


def same_number(said: Number, gold: Number, *, asks_percent: bool = False, unit: str = "") -> bool:
    """Return whether two numbers are equal; 25 % is 0.25, and 25 where a percentage is asked or expected.

    Units that are both known must agree; a weight of 2500 g is one of 2.5 kg unless the question asks for a `unit`.
    """
    one, other = size_of(said.unit), size_of(gold.unit) or size_of(unit)
    if one and other and one != other:
        return one[0] == other[0] and not unit and close(said.value * one[1], gold.value * other[1])
    is_grouped = said.other is not None and said.other > said.value
    if said.other is not None and close(said.other, gold.value) and is_grouped == gold.value.is_integer():
        return True
    if said.is_percent == gold.is_percent:
        return close(said.value, gold.value)
    share, plain = (said.value / 100, gold.value) if said.is_percent else (gold.value / 100, said.value)
    whole = abs(plain) >= 1 or asks_percent or gold.is_percent
    return close(share, plain) or (whole and close(share * 100, plain))


_EXPRESSION = re.compile(r"(?:sqrt|pi|[-\d.()+*/^√π ×·÷,])+")
_OPERATORS: Any = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/"})
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub,
          ast.UAdd, ast.Call, ast.Name, ast.Load)  # fmt: skip


def evaluated(text: str) -> float | None:
    """Return the value of an expression of numbers, roots, pi and powers; None for any other text."""
    text = text.strip().rstrip(".$ ").lstrip("$ ")
    if not 0 < len(text) <= 80 or not _EXPRESSION.fullmatch(text):
        return None
    text = re.sub(r"√\s?(\d+(?:\.\d+)?)", r"sqrt(\1)", text).translate(_OPERATORS)
    text = re.sub(r"(?<=[\d)])\s?(?=sqrt|pi|π|\()", "*", text.replace(",", "")).replace("π", "pi")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
            return None
        value = _value(tree.body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError, TypeError):
        return None
    return value if math.isfinite(value) else None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id="pi"):
            return math.pi
        case ast.UnaryOp(op=op, operand=inner):
            return -_value(inner) if isinstance(op, ast.USub) else _value(inner)
        case ast.Call(func=ast.Name(id="sqrt"), args=[inner]):
            return math.sqrt(_value(inner))
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                return math.pow(one, other)
            return one + other if isinstance(op, ast.Add) else one - other if isinstance(op, ast.Sub) else (
                one * other if isinstance(op, ast.Mult) else one / other)  # fmt: skip
    raise ValueError(ast.dump(node))


# --- dates and times -------------------------------------------------------------------------------------------------

_MONTH_NAMES = word_list("values", "MONTH_NAMES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Date:
    """A date in a text with its place; None for what it does not say."""

    year: int | None
    month: int
    day: int | None
    start: int = 0
    end: int = 0

    @property
    def key(self) -> tuple[int | None, int, int | None]:
        """Return what equal dates share."""
        return self.year, self.month, self.day


def dates_in(text: str, *, day_first: bool | None = None) -> list[Date]:
    """Return the dates of a text; 05/06/2021 is in May unless `day_first`, 05.06.2021 in June."""
    return [date for match in P.DATE.finditer(text) if (date := _date(match, day_first)) is not None]


def _date(match: re.Match[str], day_first: bool | None) -> Date | None:
    if match["y1"]:
        year, month, day = int(match["y1"]), int(match["m1"]), int(match["d1"])
    elif match["y6"]:
        year, month, day = int(match["y6"]), int(match["m6"]), int(match["d6"])
    elif match["one"]:
        first, second, year = int(match["one"]), int(match["two"]), int(match["y2"])
        is_day = day_first or (first > 12 and day_first is None) or (second <= 12 and match["sep"] == ".")
        day, month = (first, second) if is_day else (second, first)
    else:
        name = match["month3"] or match["month4"] or match["month5"]
        month = 1 + next(at for at, full in enumerate(_MONTH_NAMES) if full.startswith(name.lower()[:3]))
        written = match["y3"] or match["y4"] or match["y5"]
        number = match["d3"] or match["d4"]
        partial = Date(year=int(written) if written else None, month=month, day=int(number) if number else None,
                       start=match.start(), end=match.end())  # fmt: skip
        return partial if partial.day is None or 1 <= partial.day <= 31 else None
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return Date(year=year, month=month, day=day, start=match.start(), end=match.end())


_JOINED = re.compile(r"[\s,]*(?:and\s)?")
_SECONDS = {"h": 3600, "m": 60, "s": 1, "d": 86400, "w": 604800, "o": 2629746, "y": 31556952}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A time of the day in minutes, with its place; without a half of the day it is read as written."""

    minutes: int
    has_half: bool
    start: int = 0
    end: int = 0

    @property
    def key(self) -> int:
        """Return what equal times share."""
        return self.minutes


def times_in(text: str) -> list[Clock]:
    """Return the times of the day in a text."""
    return [time for match in P.CLOCK.finditer(text) if (time := _clock(match)) is not None]


def _hour(name: str) -> int:
    return int(name) if name.isdecimal() else int(_WORD_VALUES[name.lower()])


def _clock(match: re.Match[str]) -> Clock | None:
    half, has_half = (match["half"] or "")[:1].lower(), False
    if match["name"]:
        name = match["name"].lower()
        return Clock(minutes=0 if name == "midnight" else 720, has_half=True, start=match.start(), end=match.end())
    minute = 0
    if match["hour"]:
        hour, minute = int(match["hour"]), int(match["minute"])
    elif match["past_half"]:
        hour, minute = _hour(match["h1"]), 30
    elif match["way"]:
        hour = _hour(match["h2"])
        name = match["quarter"].lower()
        count = 15 if name == "quarter" else 25 if name == "twenty-five" else _hour(name)
        minute = count if match["way"].lower() in ("past", "after") else -count
    elif match["h3"]:
        hour, minute = int(match["h3"]), int(match["m3"] or 0)
    else:
        hour = _hour(match["bare"])
    part = (match["part"] or "").lower()
    if half or part:
        has_half = True
        is_late = half == "p" or part in ("afternoon", "evening") or (part == "night" and hour % 12 >= 6)
        hour = hour % 12 + 12 * is_late if hour <= 12 else hour
    if hour > 24 or minute >= 60:
        return None
    minutes = (60 * hour + minute) % 1440
    return Clock(minutes=minutes, has_half=has_half or hour > 12 or (hour == 0), start=match.start(), end=match.end())


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A length of time in seconds, with its place."""

    seconds: float
    start: int = 0
    end: int = 0

    @property
    def key(self) -> float:
        """Return what equal durations share."""
        return self.seconds


def durations_in(text: str) -> list[Duration]:
    """Return the lengths of time in a text; parts that follow each other are one: 2 h 15 min."""
    found: list[Duration] = []
    counts = [(number.start, number.end, number.value) for number in numbers_in(text, words=True)]
    for match in P.LENGTH.finditer(text):
        seconds = 3600.0 * int(match["hours"]) + 60 * int(match["minutes"])
        found.append(Duration(seconds=seconds, start=match.start(), end=match.end()))
    last_size = 0.0
    for start, end, count in sorted(counts):
        gap = re.compile(r"[\s-]{0,2}").match(text, end)
        unit = P.TIME_UNIT.match(text, gap.end() if gap else end)
        if unit is None or any(one.start <= start < one.end for one in found):
            continue
        name = unit["unit"].lower()
        size = float(_SECONDS["o" if name.startswith("mo") else name[0]])
        value = (count + (0.5 if unit["half"] else 0.0)) * size
        joined = _JOINED.match(text, found[-1].end) if found else None
        if found and size < last_size and joined and joined.end() == start:
            found[-1] = Duration(seconds=found[-1].seconds + value, start=found[-1].start, end=unit.end())
        else:
            found.append(Duration(seconds=value, start=start, end=unit.end()))
        last_size = size
    return found


# --- literals of code ------------------------------------------------------------------------------------------------

_PYTHON_NAMES = {"null": None, "true": True, "false": False, "none": None}
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_MOST_LITERAL = 4000


def literal_in(text: str) -> tuple[bool, Any]:
    """Return whether a text is a literal of Python or JSON, and its value."""
    text = text.strip()
    if not text or len(text) > _MOST_LITERAL:
        return False, None
    if text.lower() in _PYTHON_NAMES:
        return True, _PYTHON_NAMES[text.lower()]
    for parse in (ast.literal_eval, json.loads):
        try:
            return True, parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return False, None


def bracketed(text: str) -> Iterator[str]:
    """Yield the outermost bracketed parts of a text that close, skipping quoted brackets."""
    stack: list[tuple[str, int]] = []
    quote = ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote or letter == "\n" else quote
        elif letter in "'\"" and stack:
            quote = letter
        elif letter in _CLOSING:
            stack.append((_CLOSING[letter], at))
        elif stack and letter == stack[-1][0]:
            _, start = stack.pop()
            if not stack:
                yield text[start : at + 1]
        elif letter == "\n" and stack and at - stack[0][1] > _MOST_LITERAL:
            stack.clear()
