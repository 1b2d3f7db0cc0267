"""`ConfidenceModel`: a calibrated P(right) of an answer, learned from graded answers.

    n answers, F columns, k attempts at one question

    columns of a reply (features) -> log odds (scorers) -> calibrated P(right) -> given the other answers (submission)

The probabilities are calibrated on out-of-fold ones (Platt 1999); folds keep the answers about one target together.
Gold is read in fitting only. `to_arrays` stores a model as numpy arrays and JSON, in checkpoints and policy files,
which strangers may write. `explain` says why a P(right) is high or low: the change of log odds when a group of columns
is that of a usual reply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, LoggedAnswer
from query_mutator.confidence.crossfit import (
    ENOUGH_QUESTIONS,
    Platt,
    TrainingTable,
    attempt_columns,
    attempt_groups,
    cross_fit,
    form_rates,
    target_hash,
    training_table,
    with_forms,
)
from query_mutator.confidence.features import FEATURES, LOGPROB
from query_mutator.confidence.scorers import LinearScorer, ScorerName, fit_scorer, real_array
from query_mutator.confidence.submission import combined, submitted
from query_mutator.encoder import Encoder
from query_mutator.errors import CheckpointError, TooFewAnswersError, UsageError
from query_mutator.files import record_of
from query_mutator.stats import auroc, brier_score, expected_calibration_error, reliability
from query_mutator.types import MAX_NAME_CHARS, DoubleArray

VERSION = 3
_MOST_JSON_BYTES = 1_000_000
_MOST_FORMS = 1_000
_MOST_LOG_ODDS = 50.0
_MOST_AGREEMENT = 10.0
_LEAST_LOG_ODDS = 0.03  # of a reason

MOST_READ = 20_000  # results that are kept of each kind
MOST_CHARS = 2_000  # of the question and answers of a result that is kept: 40 MB of text at most
Read = tuple[str | Attempt, ...]  # a question and answers to it
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Something about an answer, in words, and how much it adds to the log odds of being right."""

    text: str
    log_odds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How good the out-of-fold P(right) was."""

    scorer: ScorerName
    answers: int
    targets: int
    base_rate: float  # of right answers
    brier: float
    calibration_error: float
    auroc: float
    questions: int = ENOUGH_QUESTIONS

    @property
    def in_words(self) -> str:
        """Return the report in one line."""
        by_arm = "; answers are not read: by the rates of their forms alone more submissions are right"
        few = f"; {self.questions} questions are few, so it is shrunk towards {self.base_rate:.0%}"
        return (
            f"P(right): learned from {self.answers:,} answers, {self.base_rate:.0%} right; "
            f"AUROC {self.auroc:.2f}, calibration error {self.calibration_error:.3f}, out of fold"
            f"{by_arm if self.scorer == 'arms' else ''}{few if self.questions < ENOUGH_QUESTIONS else ''}"
        )

    @property
    def is_ordered(self) -> bool:
        """Return whether right answers are ordered above wrong ones more often than by chance."""
        return self.auroc > 0.5

    def check(self) -> None:
        """Raise TooFewAnswersError for a fit that orders right and wrong answers no better than chance."""
        if not self.is_ordered:
            raise TooFewAnswersError(
                f"P(right) of {self.answers:,} answers orders right and wrong ones no better than chance "
                f"(AUROC {self.auroc:.2f}, out of fold); give more questions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a stored model holds besides numbers; see `ConfidenceModel`."""

    version: int
    features: tuple[str, ...]
    rates: Mapping[str, float]
    kind: AnswerKind | None
    encoder: str
    report: FitReport

    def __post_init__(self) -> None:
        if (self.version, self.features) != (VERSION, FEATURES):
            raise ValueError("it is of another version of Query Mutator; fit it again")
        if any(len(name) > MAX_NAME_CHARS for name in (self.encoder, *self.rates)) or len(self.rates) > _MOST_FORMS:
            raise ValueError("a name of an encoder or a form is too long, or there are too many")
        if any(abs(rate) > _MOST_LOG_ODDS for rate in self.rates.values()):
            raise ValueError("a rate of a form is out of bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The attempt to submit, and the P(right) of all of them."""

    index: int
    p_right: float
    of_all: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceModel:
    """Returns the P(right) of attempts at a question; `fit` makes one, `to_arrays` stores it."""

    scorer: LinearScorer
    calibration: Platt
    agreement: float  # weight of answers that say the same
    reference: DoubleArray  # [F], the medians that an explanation compares with
    rates: Mapping[str, float]  # form -> log odds against all
    kind: AnswerKind | None  # how answers are read; None: by the wording of each question
    encoder_source: str  # fingerprint of the encoder it was fitted with, "" for none
    report: FitReport
    # Of the rows that it was fitted to; not stored with it.
    out_of_fold: DoubleArray = field(default_factory=lambda: np.empty(0), repr=False)  # [n]
    fold_models: tuple[Self, ...] = field(default=(), repr=False)
    fold_of: Mapping[str, int] = field(default_factory=dict, repr=False)  # by the hash of a target
    reliability: tuple[Mapping[str, float], ...] = field(default=(), repr=False)  # of `out_of_fold`, ten bins
    # What was read so far, at most MOST_READ of each: episodes read the same answers at every step.
    _submissions: dict[Read, Submission] = field(init=False, default_factory=dict, repr=False, compare=False)
    _alone: dict[Read, float] = field(init=False, default_factory=dict, repr=False, compare=False)

    @classmethod
    def fit(
        cls,
        rows: Iterable[LoggedAnswer] | TrainingTable,
        *,
        weights: DoubleArray | None = None,
        folds: int = 5,
        encoder: Encoder | None = None,
    ) -> Self:
        """Fit to graded answers, which count `weights` [n] times; UsageError for too few to learn from.

        A table of `training_table` saves reading the same answers again.
        """
        table = rows if isinstance(rows, TrainingTable) else training_table(tuple(rows), encoder=encoder)
        weight = np.ones(len(table)) if weights is None else np.asarray(weights, dtype=np.float64)
        found = cross_fit(table, weights=weight, folds=folds)
        rates = form_rates(table, weight)
        used = weight > 0
        columns = with_forms(table, rates, used)
        known = ~np.isnan(columns).all(axis=0)
        p, right = found.p[used], table.right[used]
        reference = np.full(len(FEATURES), math.nan)
        reference[known] = np.nanmedian(columns[:, known], axis=0)
        model = cls(
            scorer=fit_scorer(found.scorer, columns, right, weight[used], table.questions[used]),
            calibration=found.calibration,
            agreement=found.agreement,
            reference=reference,
            rates=rates,
            kind=table.kind,
            encoder_source=table.encoder_source,
            report=FitReport(
                scorer=found.scorer,
                answers=len(p),
                targets=len(np.unique(table.targets[used])),
                base_rate=float(right.mean()),
                brier=brier_score(p, right),
                calibration_error=expected_calibration_error(p, right),
                auroc=auroc(p, right),
                questions=len(np.unique(table.questions[used])),
            ),
            out_of_fold=found.p,
            reliability=tuple(reliability(p, right)),
        )
        parts = [replace(model, **fitted) for fitted in found.folds]
        fold_of = {name: place % folds for place, name in enumerate(table.target_hashes)}
        return replace(model, fold_models=tuple(parts), fold_of=fold_of)

    @property
    def reads_logprobs(self) -> bool:
        """Return whether an answer that it was fitted to had a log probability."""
        return not math.isnan(self.reference[FEATURES.index(LOGPROB)])

    def for_target(self, target: str) -> Self:
        """Return the model that has seen no answer about a target: this one, or that of the target's fold."""
        fold = self.fold_of.get(target_hash(target))
        return self if fold is None else self.fold_models[fold]

    def p_alone(self, question: str, attempts: Sequence[Attempt], *, encoder: Encoder | None = None) -> DoubleArray:
        """Return the P(right) [k] of each attempt read by itself."""
        self._check(encoder)

        # One by one: the last bits of a number must not depend on what else is read.
        def read(attempt: Attempt) -> float:
            return float(self.calibration.p(self.scorer.log_odds(self._columns(question, attempt, encoder)))[0])

        return np.array([_once(self._alone, (question, one), partial(read, one)) for one in attempts])

    def p_right(self, question: str, attempts: Sequence[Attempt], *, encoder: Encoder | None = None) -> DoubleArray:
        """Return the P(right) [k] of each attempt given the others, which support or contradict it."""
        return np.array(self.submit(question, attempts, encoder=encoder).of_all if attempts else ())

    def submit(self, question: str, attempts: Sequence[Attempt], *, encoder: Encoder | None = None) -> Submission:
        """Return which attempt to submit: the one whose answer is most likely right; ValueError without any."""
        if not attempts:
            raise ValueError("there is no attempt to submit")
        self._check(encoder)

        def read() -> Submission:
            alone, groups = self.p_alone(question, attempts, encoder=encoder), self._groups(question, attempts, encoder)
            whole = combined(alone, groups, agreement=self.agreement)
            index = submitted(alone, groups, agreement=self.agreement)
            return Submission(index=index, p_right=float(whole[index]), of_all=tuple(whole.tolist()))

        return _once(self._submissions, (question, *attempts), read)

    def explain(
        self, question: str, attempts: Sequence[Attempt], index: int, *, encoder: Encoder | None = None
    ) -> list[Reason]:
        """Return what moved the P(right) of one attempt away from that of a usual reply, the strongest first."""
        columns = self._columns(question, attempts[index], encoder)[0]
        found = _reasons(columns, self.reference, lambda rows: self.calibration.log_odds(self.scorer.log_odds(rows)))
        groups = self._groups(question, attempts, encoder)
        if others := len(groups) - 1:
            same = groups.count(groups[index]) - 1
            alone, whole = (
                _logit(read(question, attempts, encoder=encoder)[index]) for read in (self.p_alone, self.p_right)
            )
            text = f"{same} of {others} other answers {'agrees' if same == 1 else 'agree'}"
            found.append(Reason(text=text, log_odds=whole - alone))
        return sorted(found, key=lambda reason: -abs(reason.log_odds))

    def describe(self) -> dict[str, Any]:
        """Return how good P(right) was out of fold, as plain types: the report, and ten bins after a fit."""
        return {**asdict(self.report), "reliability": [*self.reliability]}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the model as numpy arrays, one of them JSON in bytes; no pickle."""
        about = About(
            version=VERSION,
            features=FEATURES,
            rates=self.rates,
            kind=self.kind,
            encoder=self.encoder_source,
            report=self.report,
        )
        known = ~np.isnan(self.reference)
        return {
            **self.scorer.to_arrays(),
            "calibration": np.array([self.calibration.slope, self.calibration.intercept]),
            "agreement": np.array([self.agreement]),
            "reference": np.where(known, self.reference, 0.0),
            "known": known,
            "about": np.frombuffer(json.dumps(asdict(about)).encode(), dtype=np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """Return the model in arrays; CheckpointError of one line for arrays that hold none."""
        about = _about(arrays)
        slope, intercept = real_array(arrays, "calibration", shape=(2,)).tolist()
        (agreement,) = real_array(arrays, "agreement", shape=(1,)).tolist()
        if not (0 < slope <= _MOST_LOG_ODDS and abs(intercept) <= _MOST_LOG_ODDS and 0 <= agreement <= _MOST_AGREEMENT):
            raise CheckpointError("the model of P(right) has a calibration or agreement out of bounds")
        reference, known = (real_array(arrays, name, shape=(len(FEATURES),)) for name in ("reference", "known"))
        return cls(
            scorer=LinearScorer.from_arrays(arrays, columns=len(FEATURES)),
            calibration=Platt(slope=slope, intercept=intercept),
            agreement=agreement,
            reference=np.where(known > 0, reference, math.nan),
            rates=about.rates,
            kind=about.kind,
            encoder_source=about.encoder,
            report=about.report,
        )

    def _check(self, encoder: Encoder | None) -> None:
        """Raise a UsageError for another encoder than that of the fit."""
        fingerprint = "" if encoder is None else encoder.fingerprint
        if fingerprint != self.encoder_source:
            raise UsageError(
                f"the model of P(right) was fitted with encoder {self.encoder_source or 'none'}, "
                f"not {fingerprint or 'none'}; pass the same"
            )

    def _columns(self, question: str, attempt: Attempt, encoder: Encoder | None) -> DoubleArray:
        return attempt_columns(question, [attempt], kind=self.kind, encoder=encoder, rates=self.rates)

    def _groups(self, question: str, attempts: Sequence[Attempt], encoder: Encoder | None) -> list[int]:
        return attempt_groups(question, attempts, kind=self.kind, encoder=encoder)


def _once(kept: dict[Read, T], key: Read, read: Callable[[], T]) -> T:
    """Return what is kept under a key, or read it, and keep it unless it is long."""
    found = kept.get(key)
    if found is None:
        found = read()
        if len(kept) >= MOST_READ:
            kept.clear()
        texts = [part if isinstance(part, str) else part.text + part.asked + part.context for part in key]
        if sum(map(len, texts)) <= MOST_CHARS:
            kept[key] = found
    return found


def _about(arrays: Mapping[str, np.ndarray]) -> About:
    array = arrays.get("about")
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1 or len(array) > _MOST_JSON_BYTES:
        raise CheckpointError("the array `about` is missing, or is not JSON in bytes")
    try:
        return record_of(About, json.loads(array.tobytes()), where="about")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the model of P(right) cannot be read: {error}") from None


def _reasons(
    columns: DoubleArray, reference: DoubleArray, log_odds: Callable[[DoubleArray], DoubleArray]
) -> list[Reason]:
    """Return the reasons for the columns [F] of one answer; `log_odds` scores rows [n, F]."""
    rows = np.tile(columns, (len(GROUPS) + 1, 1))
    for row, group in zip(rows[1:], GROUPS, strict=True):
        at = [FEATURES.index(name) for name in group]
        row[at] = reference[at]
    own, *without = log_odds(rows).tolist()
    values = dict(zip(FEATURES, columns.tolist(), strict=True))
    return [
        Reason(text=text.format_map(values), log_odds=own - other)
        for text, other in zip(GROUPS.values(), without, strict=True)
        if abs(own - other) >= _LEAST_LOG_ODDS
    ]


def _logit(p: float) -> float:
    p = min(max(p, 1e-9), 1 - 1e-9)
    return math.log(p / (1 - p))


#: Columns that change together -> what they are, in words with values of columns; every column is in one group.
GROUPS: Mapping[tuple[str, ...], str] = {
    ("equations", "wrong_equations", "wrong_share", "last_adds_up", "sums", "differences", "products", "quotients",
     "variables"): "{wrong_equations:.0f} of {equations:.0f} equations are wrong",
    ("answer_is_result", "answer_is_last_result", "marked_is_last", "answer_repeats", "numbers"):
        "how the last number follows from the equations",
    ("answer_in_question", "has_key", "key_words", "key_in_question"): "what the answer shares with the question",
    ("given_used", "given_unused", "given_mentioned", "given_reused", "steps_for_given"):
        "numbers of the question in no equation: {given_unused:.0f}",
    ("unknown_operands", "constant_operands", "unused_results"):
        "numbers in the equations from nowhere: {unknown_operands:.0f}",
    ("answer_is_whole", "answer_is_negative", "answer_is_zero", "answer_size", "answer_to_question", "answer_decimals",
     "fractional_results", "negative_results"): "the size of the number",
    ("cut", "unfinished", "ends_in_question", "question_marks", "concludes", "last_words", "chars_after_answer",
     "numbers_in_last", "new_in_last", "first_in_last"): "how the reply ends",
    ("hedges", "refuses", "not_sure", "alternatives"): "hedges in the reply: {hedges:.0f}",
    ("repeated_phrases", "repeated_sentences"): "{repeated_phrases:.0%} of the phrases are repeated",
    ("chars", "words", "lines", "sentences", "list_items", "markup"): "the length of the reply",
    ("asked_in_last", "asked_in_reply", "question_covered", "new_words", "echoes_context", "closeness"):
        "the last sentence has {asked_in_last:.0%} of the words that were asked about",
    ("question_words", "question_sentences", "question_condition", "given", "given_in_words", "given_size",
     "given_fractional", "question_shares", "question_compares"): "the question itself",
    ("form",): "the form of the request",
    ("logprob", "exp_logprob", "sum_logprob"): "the log probability of the reply",
}  # fmt: skip
