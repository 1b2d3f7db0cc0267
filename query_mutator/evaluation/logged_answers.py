"""Grade the replies of a log: by their label, by gold with the parts of the reward, or by a judge's preference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from query_mutator.confidence import Attempt, LoggedAnswer
from query_mutator.data.logs import LoggedReply
from query_mutator.data.split import Split, target_key
from query_mutator.errors import DatasetError
from query_mutator.forms import FORMS
from query_mutator.registry import check_known
from query_mutator.rewards import Evidence, Unscored, WeightedReward
from query_mutator.types import UNSAFE, Question

MOST_REPLIES = 200_000  # of a log: 120 MB of columns
MOST_ASKED_AGAIN = 8  # replies to one question in one form: traffic repeats itself
MOST_FORMS = 200
_NO_VECTOR = np.empty(0, dtype=np.float32)


@dataclass(kw_only=True)
class GradedLog:
    """Graded answers, and why other replies are left out."""

    answers: list[LoggedAnswer] = field(default_factory=list)
    graded_by: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def forms(self) -> Mapping[str, int]:
        """Return the number of answers in each form, the most first."""
        return dict(Counter(answer.attempt.form for answer in self.answers).most_common())

    @property
    def questions(self) -> int:
        """Return the number of different questions."""
        return len({answer.question for answer in self.answers})

    def in_words(self) -> str:
        """Return what was read, in one line."""
        prompts = f"{len(self.forms)} prompt{'s' * (len(self.forms) != 1)}"
        parts = [f"{len(self.answers):,} answers to {self.questions:,} questions in {prompts}"]
        parts += [f"{count:,} graded by {how}" for how, count in self.graded_by.items()]
        parts += [f"left out: {count:,} {why}" for why, count in self.left_out.items()]
        return "; ".join(parts)


def grade_log(
    replies: Iterable[LoggedReply],
    *,
    reward: WeightedReward,
    split: Split | None = None,
    forms: Collection[str] = (),
) -> GradedLog:
    """Return the graded answers of a log in `forms`, by default in all.

    Questions of `split` have its gold, and replies about its held-out ones are left out. DatasetError for a reply that
    cannot be graded, but for one of real traffic, which is left out; UsageError for a form that no reply is in.
    """
    found, known = GradedLog(), _Known.of(split)
    asked: Counter[tuple[str, str]] = Counter()
    prompts: set[str] = set()
    for reply in replies:
        prompts.add(reply.form)
        question = known.question_of(reply)
        why = known.why_not(reply, question) or _why_not(reply, forms)
        if why is None:
            asked[reply.question, reply.form] += 1
            is_repeated = asked[reply.question, reply.form] > MOST_ASKED_AGAIN
            why = "of a question that was asked again and again" if is_repeated else None
        if why is None and len(found.answers) >= MOST_REPLIES:
            why = f"after the first {MOST_REPLIES:,}"
        if why is None:
            why = _add(found, reply, question, reward)
        if why is not None:
            found.left_out[why] += 1
    for name in forms:
        check_known("prompt", name, sorted(prompts)[:MOST_FORMS])
    if len(found.forms) > MOST_FORMS:
        raise DatasetError(f"the log has more than {MOST_FORMS} prompts; give each prompt one name in all rows")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The questions of a dataset by their text, and what is held out of it."""

    questions: Mapping[str, Question]
    test_texts: Collection[str]
    test_targets: Collection[str]

    @classmethod
    def of(cls, split: Split | None) -> _Known:
        train, test = ((*split.train, *split.validation), split.test) if split else ((), ())
        return cls(
            questions={_same(question.text): question for question in train},
            test_texts={_same(question.text) for question in test},
            test_targets={target_key(question) for question in test},
        )

    def question_of(self, reply: LoggedReply) -> Question:
        """Return the question of a reply, with the gold of its row if it has some."""
        known = self.questions.get(_same(reply.question), Question(id="", text=reply.question))
        return replace(
            known,
            accept=reply.gold or known.accept,
            tags=tuple(dict.fromkeys((*known.tags, *reply.tags))),
            about=reply.target or known.about,
        )

    def why_not(self, reply: LoggedReply, question: Question) -> str | None:
        """Return why nothing is learned from a reply."""
        if _same(reply.question) in self.test_texts or target_key(question) in self.test_targets:
            return "about held-out questions of --dataset"
        return None


def _same(text: str) -> str:
    """Return what makes two texts one question."""
    return " ".join(text.casefold().split())


def _why_not(reply: LoggedReply, forms: Collection[str]) -> str | None:
    if UNSAFE in reply.tags:
        return "marked unsafe"
    return "in other prompts than --forms" if forms and reply.form not in forms else None


def _add(found: GradedLog, reply: LoggedReply, question: Question, reward: WeightedReward) -> str | None:
    """Add a graded answer; return why it has no grade."""
    text = FORMS.get(reply.form).read(reply.reply) if reply.form in FORMS else reply.reply
    if reply.label is not None:
        right, how = reply.label, "label"
    elif question.accept:
        right, how = _is_right(text, reply, question, reward), "gold"
    elif reply.is_preferred is not None:
        right, how = reply.is_preferred, "the judge's preference"
    elif reply.is_traffic:
        return "without a label, gold or a judge's choice"
    else:
        raise DatasetError(f"{reply.where}: neither `gold` nor `label`; give accepted answers, or whether it is right")
    found.graded_by[how] += 1
    found.answers.append(
        LoggedAnswer(
            question=reply.question,
            attempt=Attempt(
                text=text, form=reply.form, logprob=reply.logprob, cut=reply.cut, context=reply.context
            ),
            right=right,
            target=question.about or (target_key(question) if question.id else ""),
            gold=question.accept[0] if question.accept else None,
        )
    )  # fmt: skip
    return None


def _is_right(text: str, reply: LoggedReply, question: Question, reward: WeightedReward) -> bool:
    evidence = Evidence(
        question=question,
        rewrite=reply.question,
        answer=text,
        question_vector=_NO_VECTOR,
        rewrite_vector=_NO_VECTOR,
        answer_vector=_NO_VECTOR,
    )
    try:
        return reward(evidence).success >= 0.5
    except Unscored as error:
        raise DatasetError(f"{reply.where}: {error}") from None
