"""Graded answers as columns [n, F], with folds that keep the answers about one target together."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, answer_groups, kind_of
from query_mutator.confidence.attempts import Attempt, LoggedAnswer
from query_mutator.confidence.features import CLOSENESS, FEATURES, FORM, feature_row
from query_mutator.encoder.base import Encoder
from query_mutator.errors import TooFewAnswersError
from query_mutator.types import BoolArray, DoubleArray, IntArray

__all__ = [
    "TrainingTable", "attempt_columns", "attempt_groups", "form_rates", "infer_kind", "table_of", "target_hash",
    "training_table", "with_forms",
]  # fmt: skip

_FORM_AT, _CLOSENESS_AT = FEATURES.index(FORM), FEATURES.index(CLOSENESS)
_ROWS_TO_INFER = 2000
_PRIOR_ANSWERS = 20.0  # that a form has besides its own, with the rate of all


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTable:
    """Answers as columns, without that of the form's rate, which is of the training part of a fold."""

    columns: DoubleArray  # [n, F]
    right: DoubleArray  # [n] of 0 and 1
    forms: tuple[str, ...]  # [n]
    questions: IntArray  # [n], which question each answers
    answer_groups: IntArray  # [n], which group of the answers to its question it is in
    targets: IntArray  # [n], in an order by a hash of the target
    kind: AnswerKind | None  # how answers are read; None: by the wording of each question
    encoder_source: str = ""  # fingerprint of the encoder that read them
    target_hashes: tuple[str, ...] = ()  # by number in `targets`

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.right)

    def fold_of(self, folds: int) -> IntArray:
        """Return the fold [n] of each answer; a target is in one fold."""
        return self.targets % folds

    def part(self, rows: IntArray) -> TrainingTable:
        """Return the answers of some rows, in their order."""
        names = ("columns", "right", "questions", "answer_groups", "targets")
        forms = tuple(self.forms[at] for at in rows.tolist())
        return replace(self, forms=forms, **{name: getattr(self, name)[rows] for name in names})


def training_table(rows: Sequence[LoggedAnswer], *, encoder: Encoder | None = None) -> TrainingTable:
    """Return the table of graded answers, read as gold says; UsageError without any."""
    if not rows:
        raise TooFewAnswersError("there are no graded answers to learn P(right) from")
    return table_of(rows, kind=infer_kind(rows), encoder=encoder)


def table_of(rows: Sequence[LoggedAnswer], *, kind: AnswerKind | None, encoder: Encoder | None = None) -> TrainingTable:
    """Return the table of answers that are read in one way."""
    by_question: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        by_question.setdefault(row.question, []).append(at)
    columns = np.empty((len(rows), len(FEATURES)))
    groups, questions = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    for number, (question, places) in enumerate(by_question.items()):
        attempts = [rows[at].attempt for at in places]
        columns[places] = attempt_columns(question, attempts, kind=kind, encoder=encoder)
        groups[places] = attempt_groups(question, attempts, kind=kind, encoder=encoder)
        questions[places] = number
    hashes, targets = np.unique([target_hash(row.group) for row in rows], return_inverse=True)
    return TrainingTable(
        columns=columns,
        right=np.array([row.right for row in rows], dtype=np.float64),
        forms=tuple(row.attempt.form for row in rows),
        questions=questions,
        answer_groups=groups,
        targets=targets.astype(np.int64),
        kind=kind,
        encoder_source="" if encoder is None else encoder.fingerprint,
        target_hashes=tuple(hashes.tolist()),
    )


def target_hash(target: str) -> str:
    """Return the digest by which a target is known to folds."""
    return hashlib.sha256(target.encode("utf-8", "replace")).hexdigest()


def attempt_columns(
    question: str,
    attempts: Sequence[Attempt],
    *,
    kind: AnswerKind | None,
    encoder: Encoder | None = None,
    rates: Mapping[str, float] | None = None,
) -> DoubleArray:
    """Return the columns [k, F] of attempts at a question; `rates` has the log odds of forms."""
    asked = [attempt.asked or question for attempt in attempts]
    columns = np.stack(
        [feature_row(text, attempt, kind=kind or kind_of(text)) for text, attempt in zip(asked, attempts, strict=True)]
    )
    if rates:
        columns[:, _FORM_AT] = [rates.get(attempt.form, math.nan) for attempt in attempts]
    if encoder is not None:
        rows = encoder.encode([question, *(attempt.text for attempt in attempts)])
        columns[:, _CLOSENESS_AT] = rows[1:] @ rows[0]
    return columns


def attempt_groups(
    question: str, attempts: Sequence[Attempt], *, kind: AnswerKind | None, encoder: Encoder | None = None
) -> list[int]:
    """Return the group [k] of each attempt at a question; those of a group say the same, as the first wording asks."""
    question = attempts[0].asked or question
    texts = [attempt.text for attempt in attempts]
    rows = encoder.encode(texts) if encoder is not None and len(texts) > 1 else None
    return answer_groups(question, texts, kind=kind, rows=rows)


def form_rates(table: TrainingTable, weights: DoubleArray) -> dict[str, float]:
    """Return the log odds of an answer in each form, against those of all answers that have a weight.

    Forms of few answers have none: their rate would tell the scorer which of these are right.
    """
    total = float(weights @ table.right / weights.sum())
    rates: dict[str, float] = {}
    names = np.array(table.forms)
    for name in sorted(set(table.forms)):
        counted = np.where(names == name, weights, 0.0)
        if (n := counted.sum()) < _PRIOR_ANSWERS:
            continue
        rate = (counted @ table.right + _PRIOR_ANSWERS * total) / (n + _PRIOR_ANSWERS)
        rates[name] = math.log(rate / (1 - rate)) - math.log(total / (1 - total))
    return rates


def with_forms(table: TrainingTable, rates: Mapping[str, float], rows: BoolArray) -> DoubleArray:
    """Return the columns of some rows with the log odds of their forms."""
    columns = table.columns[rows].copy()
    columns[:, _FORM_AT] = [rates.get(table.forms[at], math.nan) for at in np.flatnonzero(rows)]
    return columns


def infer_kind(rows: Sequence[LoggedAnswer]) -> AnswerKind | None:
    """Return the reading of answers by which being equal to gold says most often whether they are right.

    Without gold, the reading that the wording of nearly all questions asks for; None to go by each question.
    """
    graded = [row for row in rows if row.gold is not None][:_ROWS_TO_INFER]
    if graded:
        kinds: tuple[AnswerKind | None, ...] = (*get_args(AnswerKind), None)
        counts = {kind: sum(_agrees(row, kind) for row in graded) for kind in kinds}
        # The wording of a question is read only where that tells more than one reading of all of them.
        return max(kinds, key=lambda kind: counts[kind]) if len({*counts.values()}) > 1 else None
    counts = Counter(kind_of(row.question) for row in rows[:_ROWS_TO_INFER])
    kind, n = counts.most_common(1)[0]
    return kind if n >= 0.9 * counts.total() else None


def _agrees(row: LoggedAnswer, kind: AnswerKind | None) -> bool:
    gold, answer = answer_groups(row.question, [row.gold or "", row.attempt.text], kind=kind)
    return (gold == answer) == row.right
