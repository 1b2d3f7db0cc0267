"""The equations that a text writes out, and whether they add up.

An equation is what stands on both sides of a "=" in a line, with an operator on one of them: "$12 x 3 hours = $36". A
few words behind a number are its unit. Nothing is run as code: + - * / and parentheses are evaluated here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from query_mutator.types import READ_CHARS

__all__ = ["Equation", "equations_in"]

_SIDE_CHARS = 400  # of each side of a sign
_MOST_TOKENS = 60
_MOST_EQUATIONS = 200
_ROUNDING = 0.005  # relative: results are rounded in writing

_CONTINUED = re.compile(r"(?<!\n)\n\s*=")
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_EQUALS = re.compile(r"(?<![<>!=])=(?!=)|\bequals\b|\bis equal to\b", re.IGNORECASE)
_END = re.compile(r"[.,](?=\s|$)|[;:?!]|<<|>>")
_OF = re.compile(r"(?<=%)\s+of\s+(?=[$€£]?\d)|(?<=\d/\d)\s+of\s+(?=[$€£]?\d)")
_TIMES = re.compile(r"(?<![^\W\d_])[xX×·](?![^\W\d_])")
_RATE = re.compile(r"/\s*(?=[^\W\d_])|-(?=[^\W\d_])")
_MANY_WORDS = re.compile(r"(?:[^\W\d_]+[^\w()+*/÷−%$€£.-]+){3}[^\W\d_]+")  # no unit: the expression ends here
_TOKEN = re.compile(r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()%|])")
_DASHES = str.maketrans({"÷": "/", "−": "-", "–": "-"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """Two sides of a sign of equality: the numbers that go in, the result, and whether it adds up."""

    operands: tuple[float, ...]
    operators: str
    result: float
    adds_up: bool


@dataclass(frozen=True, slots=True)
class _Side:
    """An expression: its values (a percentage may be a share too), its numbers and operators."""

    values: tuple[float, ...]
    numbers: tuple[float, ...]
    operators: str


def equations_in(text: str) -> list[Equation]:
    """Return the equations of the last 20,000 characters of a text, at most 200, in their order."""
    found: list[Equation] = []
    for line in _CONTINUED.sub(" =", text[-READ_CHARS:]).splitlines():
        if "=" in line or "equal" in line:
            found += _equations_of(_EQUALS.split(_BULLET.sub("", line)))
        if len(found) >= _MOST_EQUATIONS:
            break
    return found[:_MOST_EQUATIONS]


def _equations_of(parts: Sequence[str]) -> Iterator[Equation]:
    for before, after in pairwise(parts):
        left = _side(_END.split(before[-_SIDE_CHARS:])[-1], ends=True)
        right = _side(_END.split(after[:_SIDE_CHARS])[0], ends=False)
        if left is None or right is None or not left.operators + right.operators:
            continue
        worked, result = (left, right) if left.operators else (right, left)
        adds_up = any(math.isclose(a, b, rel_tol=_ROUNDING) for a in left.values for b in right.values)
        if adds_up or worked is left:  # "3 shirts and 2 shoes = 3 x 4" has no result in front
            yield Equation(
                operands=worked.numbers, operators=worked.operators, result=result.values[0], adds_up=adds_up
            )


def _side(text: str, *, ends: bool) -> _Side | None:
    """Return the expression at the end of a text, or at its beginning; None for an incomplete one."""
    text = _RATE.sub(" ", _TIMES.sub("*", _OF.sub("*", text.translate(_DASHES))))
    tokens = [match[0].replace(",", "") for match in _TOKEN.finditer(_MANY_WORDS.sub("|", text).replace("()", ""))]
    run = _run(tokens[::-1][:_MOST_TOKENS])[::-1] if ends else _run(tokens[:_MOST_TOKENS])
    if not run or "|" in run:
        return None
    numbers = tuple(float(token) for token in run if _is_number(token))
    operators = "".join(token for token in run if token in "+-*/")
    found = [_Reader(run, percent=percent).read() for percent in ((1.0, 0.01) if "%" in run else (1.0,))]
    values = tuple(value for value in found if value is not None and math.isfinite(value))
    return _Side(values, numbers, operators) if values and numbers else None


def _run(tokens: Sequence[str]) -> list[str]:
    """Return the tokens up to a number next to a number or a break; `|` in it marks an operator without its number."""
    run: list[str] = []
    for token in tokens:
        if token == "|" or (_is_number(token) and run and _is_number(next((t for t in reversed(run) if t != "%"), ""))):
            break
        run.append(token)
    return run


def _is_number(token: str) -> bool:
    return token[-1:].isdigit()


class _Reader:
    """Evaluates tokens: sum := product (("+" | "-") product)*, product := factor (("*" | "/") factor)*."""

    def __init__(self, tokens: Sequence[str], *, percent: float) -> None:
        self._tokens, self._at, self._percent = tokens, 0, percent

    def read(self) -> float | None:
        """Return the value of all tokens, None where they are no expression."""
        try:
            value = self._sum()
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        return value if self._at == len(self._tokens) else None

    def _next(self, wanted: str) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or token not in wanted:
            return ""
        self._at += 1
        return token

    def _sum(self) -> float:
        value = self._product()
        while sign := self._next("+-"):
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> float:
        value = self._factor()
        while sign := self._next("*/"):
            value = value * self._factor() if sign == "*" else value / self._factor()
        return value

    def _factor(self) -> float:
        if self._next("-"):
            return -self._factor()
        if self._next("("):
            value = self._sum()
            if not self._next(")"):
                raise ValueError
        else:
            token = self._tokens[self._at] if self._at < len(self._tokens) else ""
            value = float(token)  # ValueError for an operator
            self._at += 1
        return value * self._percent if self._next("%") else value
