"""The score of a reply to an entry of reasoning-gym, by the scorer of its task.

Scorers read the bare answer, which replies surround with words. Handed over is what stands between the last `<answer>`
and `</answer>`, else what follows the last "Answer:", "the answer is" or "####" in its line, else the whole reply; of
it, where all answers of the task are numbers or single words, the one that it commits to. Some scorers run the answer
as Python code: these read only literals and arithmetic.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Set
from decimal import Decimal

from query_mutator.data.reasoning_gym import Entry, entry_of, extract_answer
from query_mutator.rewards.matching import decided
from query_mutator.types import Question

__all__ = ["answer_in", "is_harmless", "verified"]

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"(?<![\w./])[-−+]?{_DIGITS}(?:\.\d+)?(?:[eE][-+]?\d{{1,3}})?(?![\w/]|[.,]\d)")
_IS = re.compile(r"=|\b(?:is|are|equals)\b")
_PREDICATE = re.compile(r"""(?:=|:|\b(?:is|are|equals))\s+(\S+?)(?:[.!]?\s*$|[.!]?\s*\n|[.!]["'*`]*\s)""")
_VERDICTS = re.compile(r"\b(?:Yes|No|True|False|YES|NO|TRUE|FALSE|yes|true|false)\b")
_VERDICT = re.compile(
    r"\W*(?P<word>yes|no|true|false)\s*(?:[.,;:!*\n]|$)\W*(?P<next>(?:yes|no|true|false)\b)?", re.IGNORECASE
)
_WRAPPED = re.compile(r"""^(\*\*|["'`*$]|```)(?P<inside>.*)\1$""", re.DOTALL)
_MAX_CHARS = 4_000  # of an answer: no gold is as long
_MAX_CODE_CHARS, _MAX_GROWTH = 400, 256
_HUGE = re.compile(r"\d[eE][-+]?[\d_]{4,}")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
)


def verified(question: Question, reply: str) -> float:
    """Return the score in [0, 1] of a reply by the scorer of the question's task; 0 if it cannot be read."""
    entry = entry_of(question)
    answer = answer_in(reply, entry, question=question.text)
    if not answer or len(answer) > _MAX_CHARS or (entry.run_by and not is_harmless(answer, run_by=entry.run_by)):
        return 0.0
    return entry.score(answer)


def answer_in(reply: str, entry: Entry, *, question: str) -> str:
    """Return the bare answer in a reply, "" where the task asks for a number and the reply commits to none."""
    tagged = extract_answer(reply)
    said = decided(reply).removeprefix(":") if tagged is None else tagged
    if entry.kind == "number":
        return _number_in(said, question)
    if tagged is not None:
        return tagged
    return (_word_in(said) if entry.kind == "word" else None) or _bare(said)


def _bare(said: str) -> str:
    """Return a text without quotes or Markdown around it, and a single word without a period at its end."""
    text = said.strip()
    while found := _WRAPPED.match(text):
        text = found["inside"].strip()
    return text.removesuffix(".") if len(text.split()) == 1 else text


def _word_in(said: str) -> str | None:
    """Return the verdict that a text begins with, else the only word that a sentence ends with after "is"."""
    verdict = _VERDICT.match(said)
    if verdict is not None:
        named = {word.lower() for word in [*_VERDICTS.findall(said), verdict["next"] or verdict["word"]]}
        return verdict["word"] if named == {verdict["word"].lower()} else None
    words = {_bare(word) for word in _PREDICATE.findall(said)}
    return words.pop() if len(words) == 1 else None


def _number_in(said: str, question: str) -> str:
    """Return the only number of a text, else the only one that the question does not have or that stands after "is".

    "" where there is none or several.
    """
    named, given = _numbers(said), _numbers(question)
    new = {value: text for value, text in named.items() if value not in given}
    result = _numbers(_IS.split(said)[-1]) if _IS.search(said) else {}
    return next((text for found in (named, new, result) if len(found) == 1 for text in found.values()), "")


def _numbers(text: str) -> dict[Decimal, str]:
    """Return the numbers of a text by their values, written without thousands separators."""
    found = (match.replace(",", "").replace("−", "-") for match in _NUMBER.findall(text))
    return {Decimal(number): number for number in found}


def is_harmless(answer: str, *, run_by: Set[str]) -> bool:
    """Return whether running an answer as Python code only reads literals or computes numbers of modest size."""
    if _HUGE.search(answer):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # sympy changes the code before it runs it; a null byte is either of them
        return run_by == {"eval"}
    except (RecursionError, MemoryError):
        return False
    try:
        ast.literal_eval(tree)
    except (RecursionError, MemoryError):
        return False
    except ValueError:  # not a literal
        return len(answer) <= _MAX_CODE_CHARS and _is_arithmetic(tree, _MAX_GROWTH)
    return True


def _is_arithmetic(node: ast.AST, growth: int) -> bool:
    """Return whether code computes only with numbers, one-letter variables and known functions.

    The product of nested exponents, where a function counts as 8, is at most `growth`.
    """
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return "_" not in name
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            growth //= 8
        case ast.BinOp(op=ast.Pow() | ast.LShift(), right=right):
            parts = list(ast.walk(right))
            constants = [one.value for one in parts if isinstance(one, ast.Constant)]
            exponents = [value for value in constants if isinstance(value, int)]
            if any(isinstance(one, ast.Pow) for one in parts) or len(exponents) < len(constants):
                return False
            growth //= max(1, math.prod(exponents))
        case ast.BinOp() | ast.UnaryOp() | ast.operator() | ast.unaryop() | ast.Load():
            pass
        case _:
            return False
    return growth > 0 and all(_is_arithmetic(child, growth) for child in ast.iter_child_nodes(node))
