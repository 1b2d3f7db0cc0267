"""The table of what is known: question x arm (a plan's wording and form) -> reply, grade, calls, log probabilities.

    by asking    plans -> (missing calls, all plans and questions in one pool) -> a `Cell` for each question and plan
    from a log   replies -> graded by their label, by gold with the parts of the reward, or by a judge's preference

A rewrite or an answer is asked for once: what one plan asked, the others know. P(right) is learned from `LoggedAnswer`
rows, which both have.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from query_mutator.cli.console import progress
from query_mutator.confidence import Attempt as Reply
from query_mutator.confidence import ConfidenceModel, LoggedAnswer
from query_mutator.data import Split, target_key
from query_mutator.data.readers import LoggedReply
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Asked, Attempt, QuestionMemory
from query_mutator.env.scheduling import Call, Flow, Need, map_needs
from query_mutator.env.task import Task
from query_mutator.errors import DatasetError
from query_mutator.forms import FORMS
from query_mutator.learners import Plan, PlanPolicy, plan_task
from query_mutator.llm.cache import request_key
from query_mutator.registry import check_known
from query_mutator.rewards import Evidence, Unscored, WeightedReward
from query_mutator.session.play import Caller, Played, check_failures, greedy, in_pool, play
from query_mutator.types import ASK, UNSAFE, ErrorInfo, Question

Rows = Sequence[int]  # indices of questions

ANSWERS = (2, 6)  # to a question, at least and at most, to learn P(right) from
CLEANED_SHARE = 0.75  # of the questions, whose text local operators rewrite first
QUESTIONS_OF_A_PLAN = 32

MOST_ASKED_AGAIN = 8  # replies to one question in one form: traffic repeats itself
_MARKS = ".,;:?!…\"'"  # around a word
_NO_VECTOR = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Cell:
    """A plan's answer to a question, and the calls that the plan makes for it; with an `error` it is unscored."""

    attempt: Attempt | None
    calls: float  # of a task with prices, what they cost
    error: ErrorInfo | None = None

    @property
    def success(self) -> float:
        """Return whether the answer is right, NaN if it is unscored; 0 for a reward without the part `right`."""
        return math.nan if self.attempt is None else self.attempt.reward.success

    @property
    def score(self) -> float:
        """Return the answer's reward, NaN if it is unscored."""
        return math.nan if self.attempt is None else self.attempt.reward.score


class Table:
    """Replies to the questions of a task, and the cells of plans that follow from them."""

    def __init__(self, caller: Caller, task: Task, *, on_call: Callable[[], object] = lambda: None) -> None:
        """Start without a call; `on_call` is called after each call that is made."""
        self.task = plan_task(Plan(), task)
        self._caller = caller
        self._on_call = on_call
        self._memories = [QuestionMemory() for _ in task.questions]
        self._asked: set[str] = set()  # requests: questions may share texts
        self._cells: dict[Plan, dict[int, Cell]] = {}
        self._tasks: dict[Plan, Task] = {}

    @property
    def calls(self) -> int:
        """Return the calls that were made."""
        return len(self._asked)

    def cells(self, plan: Plan, rows: Rows) -> list[Cell]:
        """Return the cells of a gathered plan for the questions `rows`."""
        known = self._cells.get(plan, {})
        assert all(row in known for row in rows), f"{plan}: calls are missing; gather them first"
        return [known[row] for row in rows]

    def answers(self, row: int) -> dict[Asked, Attempt]:
        """Return all answers to a question so far, in whatever wording and form, by what was asked."""
        attempts = self._memories[row].attempts
        return {asked: found for asked, found in attempts.items() if isinstance(found, Attempt)}

    def graded(self, rows: Rows, plans: Collection[Plan] | None = None) -> Iterator[tuple[LoggedAnswer, float]]:
        """Yield answers to the questions `rows`, by default all of them, with their scores.

        Of questions with one text the first counts: their answers would count as answers to one.
        """
        first = {self.task.questions[row].text: row for row in reversed(rows)}
        for row in rows:
            question = self.task.questions[row]
            known: Iterable[object] = self._memories[row].attempts.values()
            if plans is not None:
                known = [self.cells(plan, [row])[0].attempt for plan in plans]
            for attempt in known if first[question.text] == row else ():
                if isinstance(attempt, Attempt):
                    yield (
                        LoggedAnswer(
                            question=question.text,
                            attempt=self.task.reply_of(row, attempt),
                            right=attempt.reward.success >= 0.5,
                            target=target_key(question),
                            gold=question.accept[0] if question.accept else question.reference,
                        ),
                        attempt.reward.score,
                    )

    def max_calls(self, plan: Plan, rows: Rows) -> int:
        """Return an upper bound on the calls that `gather` makes for a plan."""
        return sum(self._calls_left(plan, row) for row in rows)

    def gather(self, plans: Iterable[Plan], rows: Rows) -> None:
        """Make the calls that plans still need on the questions `rows`, in one pool."""
        self.gather_all([(list(plans), rows)])

    def gather_all(self, blocks: Sequence[tuple[Sequence[Plan], Rows]]) -> None:
        """Make the calls that the plans of each block still need on its questions, all in one pool.

        TooManyFailuresError when the calls of too many questions of a block fail for good.
        """
        flows = 4 * self._caller.batch_size  # some of them embed and score
        parts = max(1, flows // max(1, sum(len(rows) for _, rows in blocks)))
        parted = (
            (row, self._complete(plans[part::parts], row))
            for plans, rows in blocks
            for row in rows
            for part in range(parts)
        )
        with closing(in_pool(self._caller, self.task.encoder, lambda: next(parted, None), at_once=flows)) as finished:
            for _ in finished:
                pass
        for plan, rows in ((plan, rows) for plans, rows in blocks for plan in plans):
            kinds = Counter(cell.error.kind for cell in self.cells(plan, rows) if cell.error is not None)
            check_failures(kinds, len(rows), max_failure_rate=self._caller.max_failure_rate)

    def _complete(self, plans: Sequence[Plan], row: int) -> Flow:
        """Play the plans that have no cell for a question yet."""
        for plan in plans:
            if row not in self._cells.get(plan, ()):
                yield from map_needs(self._play(plan, self._open(plan, row)), self._counted)

    def _open(self, plan: Plan, row: int) -> EpisodeEngine:
        if plan not in self._tasks:
            self._tasks[plan] = plan_task(plan, self.task)
        return EpisodeEngine.open(self._tasks[plan], row, memory=self._memories[row], observes=False)

    def _play(self, plan: Plan, engine: EpisodeEngine) -> Flow:
        """Play a plan on a question and keep the cell."""
        played: Played = yield from play(greedy(PlanPolicy(plan)), engine)
        cell = Cell(None if played.error else engine.submitted, engine.spent, played.error)
        self._cells.setdefault(plan, {})[engine.episode.index] = cell

    def _counted(self, need: Need) -> Flow:
        """Yield a need, and count a call whose equal was not made before; return its result."""
        if not isinstance(need, Call):
            return (yield need)
        key = request_key(need.request)
        is_new = key not in self._asked
        self._asked.add(key)
        completion = yield need
        if is_new:
            self._on_call()
        return completion

    def _calls_left(self, plan: Plan, row: int) -> int:
        """Return the maximum calls of a plan on a question that are not remembered, 0 where its cell is known."""
        if row in self._cells.get(plan, ()):
            return 0
        engine = self._open(plan, row)
        flow = self._play(plan, engine)
        if next(flow, None) is None:
            return 0
        action, actions = PlanPolicy(plan)(engine), self.task.actions  # of the call that is missing
        flow.close()
        items = [actions.index(name) for name in plan.items]
        ask = actions.index(ASK)
        rest = items[items.index(action) :] if action in items else [ask]
        answers = rest.count(ask) or 1
        rewrites = sum(item != ask and not self.task.is_local(item) for item in rest)
        return rewrites + answers * (1 + self.task.reward.asking)


def learn_confidence(
    caller: Caller, task: Task, *, max_calls: int, seed: int
) -> tuple[ConfidenceModel, dict[int, QuestionMemory]]:
    """Fit P(right) on answers from random plans of about `max_calls` calls; return it, and the answers by question.

    TooFewAnswersError for too few to learn from, or to order them better than chance.
    """
    rng, asked = np.random.default_rng(seed), list[int]()
    order = rng.permutation(len(task.questions)).tolist()
    count = int(np.clip(max_calls // max(1, len(order)), *ANSWERS))
    size = max(1, min(QUESTIONS_OF_A_PLAN, max_calls // count))
    with progress("answers to learn P(right) from", max_calls) as bar:
        table = Table(caller, task, on_call=bar.update)
        starts = range(0, len(order), size)
        blocks = [(random_plan(table.task, rng, answers=count), order[start : start + size]) for start in starts]
        while blocks:
            totals = itertools.accumulate(table.max_calls(plan, rows) for plan, rows in blocks)
            fitting = sum(1 for _ in itertools.takewhile((max_calls - table.calls).__ge__, totals)) or int(not asked)
            now, blocks = blocks[:fitting], blocks[fitting:] if fitting else []
            table.gather_all([([plan], rows) for plan, rows in now])
            asked += [row for _, rows in now for row in rows]
    confidence = ConfidenceModel.fit([answer for answer, _ in table.graded(asked)])
    confidence.report.check()
    return confidence, {row: QuestionMemory(attempts=dict(table.answers(row))) for row in asked}


def random_plan(task: Task, rng: np.random.Generator, *, answers: int) -> Plan:
    """Return a plan that asks in so many random forms, mostly after all local operators; without forms, operators."""
    forms = [form.name for form in task.forms]
    operators = [operator.name for operator in task.operators]
    is_cleaned = rng.random() < CLEANED_SHARE and bool(forms)
    first = [name for place, name in enumerate(operators) if is_cleaned and task.is_local(place)]
    drawn = rng.permutation(forms or operators)[:answers].tolist()
    return Plan(steps=tuple([*first, *(step for name in drawn for step in (name, ASK))][:-1]))


@dataclass(kw_only=True)
class GradedLog:
    """Graded answers of a log, and why its other replies are left out."""

    answers: list[LoggedAnswer] = field(default_factory=list)
    graded_by: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    models: dict[str, str] = field(default_factory=dict)  # of the arms of replies that name one

    @property
    def forms(self) -> Mapping[str, int]:
        """Return the number of answers in each form, the most first."""
        return dict(Counter(answer.attempt.form for answer in self.answers).most_common())

    def in_words(self) -> str:
        """Return what was read, in one line."""
        prompts = f"{len(self.forms)} prompt{'s' * (len(self.forms) != 1)}"
        questions = len({answer.question for answer in self.answers})
        parts = [f"{len(self.answers):,} answers to {questions:,} questions in {prompts}"]
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
    cannot be graded; UsageError for a form that no reply is in.
    """
    log, asked, prompts = GradedLog(), Counter[tuple[str, str]](), set[str]()
    train, test = ((*split.train, *split.validation), split.test) if split else ((), ())
    known = {words_of(question.text): question for question in train}
    held_out = {words_of(name) for question in test for name in (question.text, target_key(question))}
    for reply in replies:
        prompts |= {reply.form, reply.arm}
        question = known.get(words_of(reply.question), Question(id="", text=reply.question))
        question = replace(
            question,
            accept=reply.gold or question.accept,
            tags=tuple(dict.fromkeys((*question.tags, *reply.tags))),
            about=reply.target or question.about,
        )
        if {words_of(reply.question), words_of(target_key(question))} & held_out:
            log.left_out["about held-out questions of --dataset"] += 1
        elif UNSAFE in reply.tags:
            log.left_out["marked unsafe"] += 1
        elif forms and not {reply.form, reply.arm} & {*forms}:
            log.left_out["in other prompts than --forms"] += 1
        elif reply.awaits_label and not question.accept:
            log.left_out["without a grade"] += 1
        elif asked[reply.question, reply.arm] == MOST_ASKED_AGAIN:
            log.left_out["of a question that was asked again and again"] += 1
        else:
            asked[reply.question, reply.arm] += 1
            _add(log, reply, question, reward)
    log.answers = _joined(log.answers)
    for name in forms:
        check_known("prompt", name, sorted(prompts))
    return log


def _joined(answers: Sequence[LoggedAnswer]) -> list[LoggedAnswer]:
    """Return answers with one target for those that a question has: no question is both learned from and scored."""
    joined, first = dict[str, str](), dict[str, str]()

    def target_of(name: str) -> str:
        while name in joined:
            name = joined[name]
        return name

    for answer in answers:
        ours, known = target_of(answer.group), target_of(first.setdefault(words_of(answer.question), answer.group))
        if ours != known:
            joined[ours] = known
    return [replace(answer, target=target_of(answer.group)) for answer in answers]


def words_of(text: str) -> str:
    """Return the words of a text without case and marks around them: what makes two texts one question."""
    return " ".join(filter(None, (word.strip(_MARKS) for word in text.casefold().split()))) or text


def _add(log: GradedLog, reply: LoggedReply, question: Question, reward: WeightedReward) -> None:
    """Add a graded answer; DatasetError for one that has no grade."""
    text = FORMS.get(reply.form).read(reply.reply) if reply.form in FORMS else reply.reply
    if reply.label is not None:
        right, how = reply.label, "label"
    elif question.accept:
        right, how = is_right(text, question, reward, where=reply.where), "gold"
    else:
        raise DatasetError(f"{reply.where}: neither `gold` nor `label`; give accepted answers, or whether it is right")
    log.graded_by[how] += 1
    if reply.model:
        log.models[reply.arm] = reply.model
    log.answers.append(
        LoggedAnswer(
            question=reply.question,
            attempt=Reply(
                text=text, form=reply.arm, logprob=reply.logprob, cut=reply.cut, context=reply.context
            ),
            right=right,
            target=question.about or (target_key(question) if question.id else ""),
            gold=question.accept[0] if question.accept else None,
        )
    )  # fmt: skip


def is_right(text: str, question: Question, reward: WeightedReward, *, where: str) -> bool:
    """Return whether a reward takes what a form read in a reply for right; DatasetError where it cannot say."""
    evidence = Evidence(
        question=question,
        rewrite=question.text,
        answer=text,
        question_vector=_NO_VECTOR,
        rewrite_vector=_NO_VECTOR,
        answer_vector=_NO_VECTOR,
    )
    try:
        return reward(evidence).success >= 0.5
    except Unscored as error:
        raise DatasetError(f"{where}: {error}") from None
