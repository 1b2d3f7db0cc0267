"""Does an answer match the gold? As a text, normalized as SQuAD's evaluation does, or as a number.

Texts: lower case, without punctuation and the articles a, an, the, one space between words (Rajpurkar et al., 2016,
arXiv:1606.05250, `normalize_answer` of its evaluation script). Numbers: the convention of GSM8K and its successors, the
one after `####`, in `\\boxed{}` or after "answer is", else the last in the answer (Cobbe et al., 2021,
arXiv:2110.14168; Lewkowycz et al., 2022, arXiv:2206.14858, appendix D: without units and thousands separators).
"""

from __future__ import annotations

import math
import re
import string
from dataclasses import dataclass
from functools import lru_cache

from query_mutator.types import READ_CHARS, read_part

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

_DIGITS = r"(?:\d{1,3}(?:[,'\u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"""(?<![\w])(?<!\d[.,])
    (?P<sign>(?<![\w)\]])[-−+]\s?)?
    (?:[$€£¥]\s?)?
    (?:
        \\d?frac\{{(?P<tex_top>\d{{1,15}})\}}\{{(?P<tex_bottom>\d{{1,15}})\}}
      | (?:(?P<whole>\d{{1,15}})\s+)?(?P<top>\d{{1,15}})\s?/\s?(?P<bottom>\d{{1,15}})(?!\d*[/.]\d|\d)
      | (?P<plain>(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\w))?)
    )
    (?:\s?(?P<scale>thousand|million|billion|trillion)\b)?
    (?P<percent>\s?\\?%|\s(?:percent|per\ cent)\b)?""",
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_SEPARATORS = re.compile("[,'\u00a0\u2009\u202f]")
_MARKED = re.compile(r"####|\\boxed\{|\banswer\s*(?:is|:|=|equals)", re.IGNORECASE)
_DECIDED = re.compile(r"(?:^|\n)[^\w\n]*(?:final\s+)?answer\W*:|####|\bthe (?:final )?answer is\b", re.IGNORECASE)
_CLOSE = 1e-6  # relative difference of equal numbers

_SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")
OPENING_CHARS = 240  # a refusal says so at once; later "I can't" is usually part of an answer

_REFUSAL = re.compile(
    r"""\b(
        (i\s*(am|'m)\s+)?(sorry|afraid)\b[^.!?]{0,60}\b(can(no|')?t|cannot|unable|won't|not\s+able)\b
      | i\s*(\s(can(no|')?t|can\s+not|cannot|won't|will\s+not)|(\sam|'m)\s+(unable|not\s+able)\s+to)
        \s+(help|assist|support|provide|answer|do|comply|fulfil+|engage|discuss|give|offer|share|participate|continue)
      | (i\s+(must|have\s+to)|i'll\s+have\s+to)\s+(decline|refuse)
      | (?<!you\s)(can(no|')?t|cannot|unable\s+to)\s+(help|assist)\s+(you\s+)?with\s+(that|this|it)
      | against\s+(my|our)\s+(guidelines|policy|policies)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_NOT_SURE = re.compile(
    r"""\b(
        (i\s*(am|'m)\s+)?not\s+(entirely\s+|quite\s+|really\s+)?(sure|certain)\b
      | i\s+(do\s+not|don't)\s+(really\s+)?(know|understand)\b
      | i\s+have\s+no\s+idea\b
      | (could|can)\s+you\s+(please\s+)?(clarify|rephrase|be\s+more\s+specific)\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number in a text; 50 % is 50 with `is_percent`."""

    value: float
    is_percent: bool = False


def normalized(text: str) -> str:
    """Return a text as SQuAD's evaluation compares it; a text of articles and punctuation alone stays."""
    lowered = text.lower()
    return " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split()) or " ".join(lowered.split())


def decided(answer: str) -> str:
    """Return what follows the last mark of a final answer, up to the end of its line; else the whole answer."""
    marks = list(_DECIDED.finditer(answer))
    rest = answer[marks[-1].end() :].strip() if marks else ""
    return rest.partition("\n")[0] if rest else answer


def numbers_in(text: str) -> list[Number]:
    """Return the finite numbers of a text in their order; units are left out, and nothing is converted."""
    found = (_number(match) for match in _NUMBER.finditer(text[-READ_CHARS:]))
    return [number for number in found if number is not None and math.isfinite(number.value)]


def final_number(answer: str) -> Number | None:
    """Return the number that an answer ends at: the first after its last mark, else the last one; None without any."""
    marks = list(_MARKED.finditer(answer))
    marked = numbers_in(answer[marks[-1].end() :][:READ_CHARS]) if marks else []
    if marked:
        return marked[0]
    return next(reversed(numbers_in(answer)), None)


def same_number(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal; where one is a percentage, 5 % equals both 5 and 0.05."""
    if math.isclose(one.value, other.value, rel_tol=_CLOSE, abs_tol=_CLOSE * _CLOSE):
        return True
    if one.is_percent == other.is_percent:
        return False
    share, plain = (one.value / 100, other.value) if one.is_percent else (other.value / 100, one.value)
    return math.isclose(share, plain, rel_tol=_CLOSE, abs_tol=_CLOSE * _CLOSE)


def _number(match: re.Match[str]) -> Number | None:
    top, bottom = match["tex_top"] or match["top"], match["tex_bottom"] or match["bottom"]
    if top is not None:
        if int(bottom) == 0:
            return None
        value = float(match["whole"] or 0) + int(top) / int(bottom)
    else:
        value = float(_SEPARATORS.sub("", match["plain"]))
    if match["scale"]:
        value *= _SCALES[match["scale"].lower()]
    is_negative = (match["sign"] or "").strip() in ("-", "−")
    return Number(value=-value if is_negative else value, is_percent=match["percent"] is not None)


def first_sentence(text: str) -> str | None:
    """Return the first sentence once it is complete: something follows its end, unless that is `。`, `！` or `？`."""
    text = text.lstrip()
    end = _SENTENCE_END.search(text)
    return text[: end.end()] if end else None


def is_refusal(text: str) -> bool:
    """Return whether a reply declines to answer, judged by its first 240 characters."""
    return _opens_with(_REFUSAL, text)


def is_not_sure(text: str) -> bool:
    """Return whether a reply says that it does not know, judged by its first 240 characters."""
    return not is_refusal(text) and _opens_with(_NOT_SURE, text)


def _opens_with(pattern: re.Pattern[str], text: str) -> bool:
    return _found(pattern, read_part(text).lstrip()[:OPENING_CHARS].replace("’", "'"))


@lru_cache(maxsize=8192)  # an answer is judged many times in its episode; whole answers would take gigabytes
def _found(pattern: re.Pattern[str], opening: str) -> bool:
    return pattern.search(opening) is not None
