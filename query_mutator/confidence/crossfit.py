"""Out-of-fold P(right), and the order of forms by it: the model that scores an answer has seen none about its target.

n answers, F columns
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, LoggedAnswer, answer_groups, kind_of
from query_mutator.confidence.features import CLOSENESS, FEATURES, FORM, feature_row
from query_mutator.confidence.scorers import ScorerName, fit_scorer, logistic_fit
from query_mutator.confidence.submission import Walks, submitted
from query_mutator.encoder import Encoder
from query_mutator.errors import TooFewAnswersError, UsageError
from query_mutator.types import BoolArray, DoubleArray, IntArray

_FORM_AT, _CLOSENESS_AT = FEATURES.index(FORM), FEATURES.index(CLOSENESS)
_ROWS_TO_INFER = 2000
_PRIOR_ANSWERS = 20.0  # that a form has besides its own, with the rate of all

AGREEMENT = 0.25  # weight of answers that say the same; with more, those that agree are too sure
#: Weights of agreement to choose from. Answers known by their arm alone are a vote with 1, the best arm with 0.
_WAYS: Mapping[ScorerName, tuple[float, float]] = {"linear": (AGREEMENT, 1.0), "arms": (1.0, 0.0)}
_CALLS_TO_COMPARE = (1.5, 2.0, 3.0, 6.0)
_PRIOR_OF_GAINS = 20.0  # questions on which another form adds nothing
_FEWEST = 10  # right answers, and wrong ones
_QUESTIONS_TO_COMPARE = 50
_PRIOR = 2.0  # answers that draw the calibration towards the identity
_PRIOR_QUESTIONS = 30.0  # with the rate of all, that a calibration on few questions has besides its own
ENOUGH_QUESTIONS = 100  # from which on a calibration is used as fitted
_FLAT = 1e-6


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
    texts = [attempt.text for attempt in attempts]
    rows = encoder.encode(texts) if encoder is not None and len(texts) > 1 else None
    return answer_groups(attempts[0].asked or question, texts, kind=kind, rows=rows)


def form_rates(table: TrainingTable, weights: DoubleArray) -> dict[str, float]:
    """Return the log odds of an answer in each form, relative to those of all answers that have a weight.

    Forms with few answers are left out: their rate would leak which of these are right.
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
    """Return the reading of answers whose equality to gold agrees most often with the grades.

    Without gold, the reading that the wording of nearly all questions asks for; None: decide per question.
    """
    graded = [row for row in rows if row.gold is not None][:_ROWS_TO_INFER]
    if graded:
        kinds: tuple[AnswerKind | None, ...] = (*get_args(AnswerKind), None)

        def agrees(row: LoggedAnswer, kind: AnswerKind | None) -> bool:
            gold, answer = answer_groups(row.question, [row.gold or "", row.attempt.text], kind=kind)
            return (gold == answer) == row.right

        counts = {kind: sum(agrees(row, kind) for row in graded) for kind in kinds}
        # The wording of a question is read only where that tells more than one reading of all of them.
        return max(kinds, key=lambda kind: counts[kind]) if len({*counts.values()}) > 1 else None
    counts = Counter(kind_of(row.question) for row in rows[:_ROWS_TO_INFER])
    kind, n = counts.most_common(1)[0]
    return kind if n >= 0.9 * counts.total() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Platt:
    """A logistic regression on log odds: P = sigmoid(slope * log odds + intercept)."""

    slope: float = 1.0
    intercept: float = 0.0

    def log_odds(self, log_odds: DoubleArray) -> DoubleArray:
        """Return calibrated log odds."""
        return self.slope * log_odds + self.intercept

    def p(self, log_odds: DoubleArray) -> DoubleArray:
        """Return calibrated probabilities."""
        return np.asarray(1 / (1 + np.exp(-np.clip(self.log_odds(log_odds), -30, 30))))

    @classmethod
    def fit(
        cls, log_odds: DoubleArray, right: DoubleArray, weights: DoubleArray, *, questions: int = ENOUGH_QUESTIONS
    ) -> Platt:
        """Fit with a weak pull towards slope 1 and intercept 0.

        Fits on few `questions` are shrunk to the rate of right answers: 40 keep 69 % of the log odds, 80 keep 93 %.
        """
        inputs = np.stack([np.clip(log_odds, -30, 30), np.ones_like(log_odds)], axis=1)
        start, penalty = np.array([1.0, 0.0]), np.full(2, _PRIOR)
        found = logistic_fit(inputs, right, weights, start=start, penalty=penalty)
        kept = questions / (questions + _PRIOR_QUESTIONS * max(0.0, 1 - questions / ENOUGH_QUESTIONS))
        rate = np.average(right, weights=weights)
        intercept = kept * found[1] + (1 - kept) * math.log(rate / (1 - rate)) if kept < 1 else found[1]
        return cls(slope=max(_FLAT, float(kept * found[0])), intercept=float(intercept))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFit:
    """The chosen scorer, its out-of-fold probabilities [n], the fields of the models that gave them, and a calibration.

    The model of a fold is fitted to the answers of the others, `calibration` to those of all.
    """

    scorer: ScorerName
    p: DoubleArray
    folds: tuple[Mapping[str, Any], ...]  # scorer, rates of forms, calibration
    calibration: Platt
    agreement: float = AGREEMENT


_OutOfFold = tuple[DoubleArray, list[dict[str, Any]]]


def cross_fit(table: TrainingTable, *, weights: DoubleArray, folds: int) -> CrossFit:
    """Fit the regression out of fold; UsageError for too few answers.

    Full weight of agreement, a vote among the arms, or the best arm alone is chosen instead where its submissions to
    questions with several answers are right more often, by more than one standard error.
    """
    _check(table, weights, folds)
    fold, questions = table.fold_of(folds), len(np.unique(table.questions[weights > 0]))

    def calibrated(name: ScorerName) -> CrossFit:
        raw, models = _out_of_fold(table, weights, name, fold)
        p = np.empty(len(table))
        for part in range(folds):  # the calibration of a fold comes from the others
            rest = fold != part
            calibration = Platt.fit(raw[rest], table.right[rest], weights[rest], questions=questions)
            p[~rest] = calibration.p(raw[~rest])
            models[part]["calibration"] = calibration
        calibration = Platt.fit(raw, table.right, weights, questions=questions)
        return CrossFit(scorer=name, p=p, folds=tuple(models), calibration=calibration)

    fits = {name: calibrated(name) for name in _WAYS}
    ways = [replace(fits[name], agreement=each) for name, several in _WAYS.items() for each in several]
    places = _by_rate(table, weights)
    if len(places) < _QUESTIONS_TO_COMPARE:
        return ways[0]
    counts = weights[[place[0] for place in places]]
    right = [right_submissions(table, way.p, places, counts, agreement=way.agreement) for way in ways]
    gains = np.stack(right) - right[0]  # [ways, n]
    mean = gains @ counts / counts.sum()
    error = np.sqrt((gains - mean[:, None]) ** 2 @ counts) / counts.sum()
    return ways[int(np.where(mean > error, mean, 0.0).argmax())]


def _by_rate(table: TrainingTable, weights: DoubleArray) -> list[list[int]]:
    """Return the rows of each question with several answers; the form with the highest rate of right ones is first."""
    rates = form_rates(table, weights)
    order = np.lexsort((np.array([-rates.get(form, 0.0) for form in table.forms]), table.questions))
    places = np.split(order, np.flatnonzero(np.diff(table.questions[order])) + 1)
    return [place.tolist() for place in places if len(place) > 1 and weights[place[0]] > 0]


def right_submissions(
    table: TrainingTable, p: DoubleArray, places: Sequence[Sequence[int]], counts: DoubleArray, *, agreement: float
) -> DoubleArray:
    """Return how often the submission to each question is right [n], over several mean numbers of calls.

    P(right) [N] decides what is submitted and where to stop; questions have their answers at `places`, and count
    `counts` [n] times.
    """
    walks = Walks.of(p, table.answer_groups, places, agreement=agreement)
    stops = [walks.stops(walks.least(calls, counts)) for calls in _CALLS_TO_COMPARE]
    return np.asarray(np.mean([table.right[walks.at(each)] for each in stops], axis=0))


def _out_of_fold(table: TrainingTable, weights: DoubleArray, name: ScorerName, fold: IntArray) -> _OutOfFold:
    """Return the log odds [n] of answers by models of the other folds, and each fold's scorer and rates of forms."""
    raw = np.empty(len(table))
    models = list[dict[str, Any]]()
    for part in range(int(fold.max()) + 1):
        held_out = fold == part
        kept = np.where(held_out, 0.0, weights)
        learned = kept > 0
        rates = form_rates(table, kept)
        answers = table.right[learned], kept[learned], table.questions[learned]
        scorer = fit_scorer(name, with_forms(table, rates, learned), *answers)
        raw[held_out] = scorer.log_odds(with_forms(table, rates, held_out))
        models.append({"scorer": scorer, "rates": rates})
    return raw, models


def _check(table: TrainingTable, weights: DoubleArray, folds: int) -> None:
    if weights.shape != (len(table),) or not np.isfinite(weights).all() or (weights < 0).any():
        raise UsageError(f"{len(table)} answers need as many weights, finite and not negative")
    used = weights > 0
    hits, n = int(table.right[used].sum()), int(used.sum())
    if min(hits, n - hits) < _FEWEST:
        raise TooFewAnswersError(
            f"{hits} right and {n - hits} wrong answers are too few to learn P(right) from; give {_FEWEST} of each"
        )
    if not 2 <= folds <= len(np.unique(table.targets[used])):
        raise TooFewAnswersError(
            f"{folds} folds need as many targets, and at least 2; give questions about more targets"
        )
    for part in range(folds):
        rest = table.right[used & (table.fold_of(folds) != part)]
        if not 0 < rest.sum() < len(rest):
            raise TooFewAnswersError(
                "all right answers, or all wrong ones, are about a few targets; give more questions"
            )


# --- the order of forms ----------------------------------------------------------------------------------------------


def greedy_order(
    table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, first: str, agreement: float, most: int | None = None
) -> list[str]:
    """Return up to `most` forms of a table in greedy order, by out-of-fold P(right) [n]."""
    chosen = [first]
    while (rest := [form for form in forms if form not in chosen]) and (most is None or len(chosen) < most):
        chosen.append(max(rest, key=lambda form: _gain(table, p, [*chosen, form], agreement=agreement)))
    return chosen


def places_by_question(table: TrainingTable, forms: Sequence[str]) -> list[list[int]]:
    """Return the rows of each question that was asked in all of these forms, in their order."""
    order = {form: place for place, form in enumerate(forms)}
    places: dict[int, list[int]] = {}
    for at in np.flatnonzero(np.isin(table.forms, forms)).tolist():
        places.setdefault(int(table.questions[at]), []).append(at)
    whole = (rows for rows in places.values() if len(rows) == len(forms) == len({table.forms[at] for at in rows}))
    return [sorted(rows, key=lambda at: order[table.forms[at]]) for rows in whole]


def _gain(table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, agreement: float) -> float:
    """Return what the last form adds to the rate of right submissions, shrunk to 0 if few questions had all."""

    def right(rows: Sequence[int]) -> float:
        chosen = submitted(p[rows], table.answer_groups[rows].tolist(), agreement=agreement)
        return float(table.right[rows[chosen]])

    gains = [right(rows) - right(rows[:-1]) for rows in places_by_question(table, forms)]
    return sum(gains) / (len(gains) + _PRIOR_OF_GAINS) if gains else -math.inf
