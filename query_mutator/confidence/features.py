"""What a reply looks like next to its question, as numbers [F]; none of them reads gold.

`FEATURES` names the columns in their order; NaN stands for what is not known. Columns are of the reply's text, of its
numbers and equations (`number_features`), and of what the caller knows: the form's rate, the mean log probability, the
closeness of question and reply.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, answer_key, content_words
from query_mutator.confidence.attempts import Attempt
from query_mutator.confidence.number_features import NUMBER_FEATURES, number_features
from query_mutator.rewards.verdicts import is_not_sure, is_refusal
from query_mutator.types import DoubleArray

__all__ = ["CLOSENESS", "FEATURES", "FORM", "feature_row", "is_unfinished"]

_SHORT_WORDS = 12

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_HEDGE = re.compile(
    r"\b(?:maybe|perhaps|might|may|probably|possibly|i think|i believe|approximately|about|around|roughly|not sure|"
    r"unclear|seems?|assum\w+|likely|estimate\w*|let's say)\b",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(r"\b(?:therefore|thus|hence|so|answer is|in total|finally)\b|####|\\boxed", re.IGNORECASE)
_FINISHED = re.compile(r"[.!?)\]}\"'*`%$€£”’]$|\d$")
_LIST_ITEM = re.compile(r"(?m)^[^\S\n]*(?:\d+[.)]|[-*•])\s")
_MARKUP = re.compile(r"\*\*|\\|```|\$\$|^#", re.MULTILINE)
_ALTERNATIVE = re.compile(r"\bor\b|/|;", re.IGNORECASE)

TEXT_FEATURES = (
    "chars", "words", "lines", "sentences", "last_words", "list_items", "markup",
    "cut", "unfinished", "ends_in_question", "question_marks", "concludes",
    "hedges", "refuses", "not_sure", "alternatives",
    "repeated_phrases", "repeated_sentences",
    "asked_in_last", "asked_in_reply", "question_covered", "new_words", "echoes_context",
    "has_key", "key_words", "key_in_question",
    "question_words", "question_sentences", "question_condition",
)  # fmt: skip
FORM, LOGPROB, CLOSENESS = "form", "logprob", "closeness"
FEATURES = (*TEXT_FEATURES, *NUMBER_FEATURES, FORM, LOGPROB, CLOSENESS)


def feature_row(
    question: str, attempt: Attempt, *, kind: AnswerKind, form: float = math.nan, closeness: float = math.nan
) -> DoubleArray:
    """Return the columns [F] of one attempt; `form` is the log odds of its form, `closeness` a cosine."""
    text = attempt.text.strip()
    values = [*_text_features(question, text, attempt, kind), *number_features(question, text)]
    logprob = math.nan if attempt.logprob is None else float(np.clip(attempt.logprob, -50, 0))
    return np.array([*values, form, logprob, closeness], dtype=np.float64)


def _sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text."""
    return [part for part in _SENTENCE.split(text.strip()) if part.strip()]


def is_unfinished(text: str) -> bool:
    """Return whether a text ends in the middle of a sentence, as a reply that was cut; a short one needs no period."""
    return len(text.split()) > _SHORT_WORDS and not _FINISHED.search(text.rstrip())


def _text_features(question: str, text: str, attempt: Attempt, kind: AnswerKind) -> list[float]:
    parts, words = _sentences(text), [word.lower() for word in _WORD.findall(text)]
    last = parts[-1] if parts else ""
    key = answer_key(text, kind, question=question)
    return [
        *_shape(text, parts, words, last),
        math.nan if attempt.cut is None else float(attempt.cut),
        float(is_unfinished(text)),
        float(text.endswith("?")),
        float(text.count("?")),
        float(bool(_CONCLUSION.search(last))),
        float(len(_HEDGE.findall(text))),
        float(is_refusal(text)),
        float(is_not_sure(text)),
        float(len(_ALTERNATIVE.findall(last))),
        _repeated([tuple(words[at : at + 3]) for at in range(len(words) - 2)]),
        float(len(parts) - len(set(parts))),
        *_overlaps(question, text, last, attempt.context),
        float(key is not None),
        float(len(key.split()) if key else 0),
        float(key is not None and set(key.split()) <= _known_words(question)),
        *_question_features(question),
    ]


def _shape(text: str, parts: Sequence[str], words: Sequence[str], last: str) -> list[float]:
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(text.count("\n")),
        math.log1p(len(parts)),
        math.log1p(len(_WORD.findall(last))),
        float(len(_LIST_ITEM.findall(text))),
        float(len(_MARKUP.findall(text))),
    ]


def _repeated(parts: Sequence[object]) -> float:
    """Return the share of parts that occurred before."""
    return 1 - len(set(parts)) / len(parts) if parts else 0.0


def _overlaps(question: str, text: str, last: str, context: str) -> list[float]:
    """Return how much of the question, or of its last sentence, returns, how much is new, and how much is context."""
    asked, known, said = _asked_words(question), _known_words(question), content_words(text)
    new = said - known
    return [
        len(asked & content_words(last)) / max(1, len(asked)),
        len(asked & said) / max(1, len(asked)),
        len(known & said) / max(1, len(known)),
        len(new) / max(1, len(said)),
        len(new & content_words(context)) / max(1, len(new)) if context else math.nan,
    ]


@functools.lru_cache(maxsize=4096)
def _question_features(question: str) -> tuple[float, ...]:
    asked = _sentences(question)[-1:]
    words = math.log1p(len(_WORD.findall(question)))
    return words, float(len(_sentences(question))), float(bool(asked) and bool(re.search(r"\bif\b", asked[0].lower())))


@functools.lru_cache(maxsize=4096)
def _asked_words(question: str) -> frozenset[str]:
    """Return the content words of the last sentence with a question mark, else of the last one."""
    parts = _sentences(question)
    asked = [part for part in parts if "?" in part][-1:] or parts[-1:]
    return content_words(asked[0]) if asked else frozenset()


def _known_words(question: str) -> frozenset[str]:
    return content_words(question)
