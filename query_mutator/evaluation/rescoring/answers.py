"""Answers that a run kept, and their new scores. An answer that occurs in many rows is scored once.

D dimensions of an embedding
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from query_mutator import forms
from query_mutator.cli.console import progress
from query_mutator.encoder import Encoder, embed_documents
from query_mutator.env.flow import Call, Flow
from query_mutator.env.scheduling import Scheduler
from query_mutator.env.scoring import reward_flow
from query_mutator.errors import TooManyFailuresError
from query_mutator.rewards import COSINES, Evidence, WeightedReward
from query_mutator.session.failure_rate import FailureWindow
from query_mutator.types import AS_IS, ErrorInfo, FloatArray, Question, Reward, wire_text

__all__ = ["Answered", "Gold", "Ratings", "Row", "Scoring", "check_ratings", "rate", "unscored"]

Row = Mapping[str, Any]  # of transcripts.jsonl or evaluation.jsonl
NOT_EMBEDDED = np.full(1, np.nan, np.float32)  # in place of a vector that no part of the reward reads
IN_PROGRESS = 4  # answers in progress for each call in flight


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to a wording of a question in a form; two are equal if they score the same."""

    question: Question
    text: str
    form: str
    answer: str
    fault: ErrorInfo | None = None  # why the row does not have all that a score needs
    known: Mapping[str, float] = field(default_factory=dict, compare=False)  # parts of its score in the run


#: The new score of each answer, or why it has none.
Ratings = Mapping[Answered, Reward | ErrorInfo]


def unscored(message: str) -> ErrorInfo:
    """Return the reason of an answer that cannot be scored."""
    return ErrorInfo(kind="unscored", message=message)


@dataclass(frozen=True, kw_only=True)
class Gold:
    """The questions of a run by their ids, and which parts of recorded scores stay as they are."""

    questions: Mapping[str, Question]
    keeps: frozenset[str] = frozenset()

    @classmethod
    def of(cls, questions: Iterable[Question], *, is_unchanged: bool) -> Gold:
        """Return the gold in `questions`; cosines stay where encoder and references are those of the run."""
        by_id = {question.id: question for question in questions}
        return cls(questions=by_id, keeps=frozenset(COSINES if is_unchanged else ()))

    def answered(self, row: Row, text: str, form: str | None, answer: str, parts: Row | None) -> Answered:
        """Return an answer in a row, with the gold of its question: that of the questions, else the row's own."""
        question, fault = self.questions.get(row["question_id"]), None
        if question is None or row.get("question") not in (None, question.text):
            question = Question(
                id=row["question_id"],
                text=row.get("question") or row["question_id"],
                accept=tuple(row.get("accepted") or ()),
                tags=tuple(row.get("tags") or ()),
            )
            if "accepted" not in row:
                fault = unscored(f"the dataset has no question {question.id!r} with this text")
        known = {name: parts[name] for name in self.keeps.intersection(parts or ()) if parts}
        return Answered(question, wire_text(text), form or AS_IS, wire_text(answer), fault, known)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The reward and what its parts need.

    The encoder is opened if a part may read embeddings and is not known; `scheduler`, None if no part asks a model,
    carries their calls, and `window` counts those that failed.
    """

    reward: WeightedReward
    open_encoder: Callable[[], Encoder]
    scheduler: Scheduler | None
    window: FailureWindow


def rate(answers: Iterable[Answered], scoring: Scoring) -> Ratings:
    """Return the new score of each answer; TooManyFailuresError when too many calls fail."""
    different = list(dict.fromkeys(answers))
    found: dict[Answered, Reward | ErrorInfo] = {one: one.fault for one in different if one.fault is not None}
    waiting = [one for one in different if one.fault is None]
    rows = _embedded(waiting, scoring)
    flows = ((one, _flow(one, scoring.reward, rows)) for one in waiting)
    with closing(progress("scoring", len(waiting), unit="answer")) as bar:
        for answered, result in _results(flows, scoring.scheduler):
            found[answered] = result
            if scoring.reward.asking:
                scoring.window.add(np.array([isinstance(result, Reward)]))
            bar.update()
    return found


def _results(
    flows: Iterator[tuple[Answered, Flow]], scheduler: Scheduler | None
) -> Iterator[tuple[Answered, Reward | ErrorInfo]]:
    """Yield the results of flows as they end; without a scheduler they need nothing."""
    if scheduler is None:
        yield from ((one, _result_of(flow)) for one, flow in flows)
        return
    with closing(scheduler):
        while True:
            for one, flow in itertools.islice(flows, IN_PROGRESS * scheduler.batch_size - scheduler.in_progress):
                scheduler.start(one, flow)
            if not scheduler.in_progress:
                return
            yield scheduler.finished()  # type: ignore[misc]  # its keys are those of `start`


def _result_of(flow: Flow) -> Reward | ErrorInfo:
    try:
        raise AssertionError(f"nobody carries out {next(flow)}")
    except StopIteration as stop:
        result: Reward | ErrorInfo = stop.value
        return result


def check_ratings(ratings: Ratings, *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when more than this share of the answers that could be scored has no new score."""
    could = [result for one, result in ratings.items() if one.fault is None]
    kinds = Counter(result.kind for result in could if isinstance(result, ErrorInfo))
    if kinds.total() > max_failure_rate * len(could):
        raise TooManyFailuresError(
            f"{kinds.total()} of {len(could)} answers have no new score, most often {kinds.most_common(1)[0][0]!r}; "
            "check the judge, or allow more with --max-failure-rate"
        )


def _flow(one: Answered, reward: WeightedReward, rows: Mapping[str, FloatArray]) -> Flow:
    """Return the flow of an answer's score; its result is a Reward or an ErrorInfo."""
    question = one.question
    evidence = Evidence(
        question=question,
        rewrite=one.text,
        answer=forms.get(one.form).answer_in(one.answer),
        question_vector=rows.get(question.text, NOT_EMBEDDED),
        rewrite_vector=rows.get(one.text, NOT_EMBEDDED),
        answer_vector=rows.get(one.answer, NOT_EMBEDDED),
        reference_vector=rows.get(question.reference, NOT_EMBEDDED) if question.reference else None,
        known=one.known,
    )
    return reward_flow(evidence, reward, call=lambda request, number: Call(request))


def _embedded(answers: Sequence[Answered], scoring: Scoring) -> Mapping[str, FloatArray]:
    """Return the vectors [D] of all texts of the answers with a part that may read them, by text."""
    wanted = [one for one in answers if not one.known.keys() >= set(scoring.reward.embedding)]
    given = ((one.question.text, one.question.reference, one.text, one.answer) for one in wanted)
    texts = sorted({text for four in given for text in four if text})
    if not texts:
        return {}
    return dict(zip(texts, embed_documents(texts, scoring.open_encoder(), what="embedding answers"), strict=True))
