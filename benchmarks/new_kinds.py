"""Whether P(right) carries over to kinds of questions that it has not seen: the recorded replies to `general`.

    python -m benchmarks.new_kinds                        leaves a domain out of five, reads training questions alone
    python -m benchmarks.new_kinds --leave-out family     leaves one family out of 21
    python -m benchmarks.new_kinds --held-out             scores all questions; for the last reading, not to choose by

P(right) is learned from the training questions of the other domains, in all forms, and scored on the questions of the
domain; no call is made. Forms are asked in the order of their rates on the questions it is learned from. The baseline:
the answer with the highest mean log probability among as many. When stopping by P(right), one threshold for all
questions, which reads no gold, gives the mean number of calls; a random share of the questions of the baseline has the
calls of the next whole number. Ten refits on bootstrap samples of training questions; intervals resample refits and
targets.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.answer_rivals import grade
from benchmarks.general import CONFIG, config_of, percent
from query_mutator.bounds import group_of
from query_mutator.cli.console import table as text_table
from query_mutator.confidence import Attempt, ConfidenceModel, LoggedAnswer, submissions, training_table
from query_mutator.confidence.crossfit import TrainingTable, with_forms
from query_mutator.confidence.features import FEATURES, LOGPROB
from query_mutator.confidence.submission import eased
from query_mutator.data import in_test, target_key
from query_mutator.env.task import Task
from query_mutator.files import write_json
from query_mutator.reading.gold import FAMILY
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task, read_dataset
from query_mutator.settings import ModelSettings, TaskSettings
from query_mutator.stats import crossed_intervals
from query_mutator.types import AS_IS, BoolArray, DoubleArray, IntArray, Question

CALLS = (2, 3, 5, 7)  # of every question
MEAN_CALLS = (1.8, 3.0)  # when stopping
REFITS = 10
DOMAINS = {
    "countries": "continent currency country_of_capital capital demonym country_of_people country_of_city language",
    "states": "state_of_city state_code state_capital",
    "elements": "symbol atomic_number element",
    "inflections": "superlative plural",
    "numbers": "product digits sum difference half",
}
_DOMAIN_OF = {family: domain for domain, families in DOMAINS.items() for family in families.split()}


@dataclass(frozen=True, kw_only=True)
class World:
    """Questions [n], and their answers in each of k forms as rows of one table."""

    questions: Sequence[Question]
    forms: Sequence[str]
    table: TrainingTable  # [n * k]
    rows: IntArray  # [n, k]

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the recorded answers to the questions of a task."""
        forms = [AS_IS, *(form.name for form in task.forms)]
        answers = [_answer(task, place, form) for place, _ in enumerate(task.questions) for form in forms]
        rows = np.arange(len(answers)).reshape(-1, len(forms))
        return cls(questions=task.questions, forms=forms, table=training_table(answers), rows=rows)

    def groups(self, leave_out: str) -> list[str]:
        """Return the family or the domain of each question; that of the first part where it has two."""
        families = [
            next(tag.removeprefix(FAMILY) for tag in question.tags if tag.startswith(FAMILY)).partition("+")[0]
            for question in self.questions
        ]
        return families if leave_out == "family" else [_DOMAIN_OF[family] for family in families]


def _answer(task: Task, place: int, form: str) -> LoggedAnswer:
    """Return the graded answer to a question in a form."""
    question, named = task.questions[place], task.form_named(form)
    assert task.recorded is not None
    reply = task.recorded(task.target(place, question.text, form))
    assert reply is not None
    shown = task.examples[place] if named.uses_examples else ()
    attempt = Attempt(
        text=named.answer_in(reply.text),
        asked=question.text,
        form=form,
        logprob=reply.logprob,
        cut=reply.hit_limit,
        context=" ".join(example.answer for example in shown),
    )
    return LoggedAnswer(
        question=question.text,
        attempt=attempt,
        right=grade(question, attempt.text) >= 0.5,
        target=target_key(question),
        gold=question.accept[0],
    )


def paths(world: World, model: ConfidenceModel, rows: IntArray) -> tuple[IntArray, DoubleArray]:
    """Return which rows are submitted after each of k answers [n, k], and their P(right)."""
    columns = with_forms(world.table.part(rows.ravel()), model.rates, np.ones(rows.size, dtype=bool))
    p = model.calibration.p(model.scorer.log_odds(columns)).reshape(rows.shape)
    found = [
        submissions(of_one, world.table.answer_groups[own].tolist(), agreement=model.agreement)
        for of_one, own in zip(p, rows, strict=True)
    ]
    chosen = np.array([[own[at] for at, _ in path] for own, path in zip(rows, found, strict=True)])
    return chosen, np.array([[value for _, value in path] for path in found])


def likeliest(world: World, rows: IntArray) -> DoubleArray:
    """Return whether the answer with the highest mean log probability is right after each of k answers [n, k]."""
    logprobs = np.nan_to_num(world.table.columns[rows, FEATURES.index(LOGPROB)], nan=-math.inf)
    best = [logprobs[:, : calls + 1].argmax(axis=1) for calls in range(rows.shape[1])]
    return world.table.right[np.take_along_axis(rows, np.stack(best, axis=1), axis=1)]


def stopped(right: DoubleArray, p: DoubleArray, mean_calls: float) -> DoubleArray:
    """Return whether what is submitted is right [n] when asking stops at one threshold of P(right) [n, k]."""
    reached = np.maximum.accumulate(eased(p, np.arange(p.shape[1])), axis=1)
    spare = round((mean_calls - 1) * len(p))  # calls beyond the first, the lowest P(right) first
    threshold = np.sort(reached[:, :-1], axis=None)[min(spare, reached[:, :-1].size - 1)]
    stops = (reached[:, :-1] < threshold).sum(axis=1)
    return right[np.arange(len(right)), stops]


def between(right: DoubleArray, calls: float) -> DoubleArray:
    """Return a column [n] of outcomes after k answers [n, k], of a random share of questions the next one."""
    low, share = math.floor(calls), calls - math.floor(calls)
    return right[:, low - 1] if not share else (1 - share) * right[:, low - 1] + share * right[:, low]


def refit(world: World, left_out: Sequence[str], scored: BoolArray, *, seed: int) -> tuple[DoubleArray, DoubleArray]:
    """Return the outcomes [n, cells] of P(right) and of the baseline on scored questions [n], left out in fitting."""
    train, groups = np.array([not in_test(question) for question in world.questions]), np.array(left_out)
    right, p, base = (np.empty((len(train), len(world.forms))) for _ in range(3))
    for group in sorted(set(left_out)):
        learned, asked = np.flatnonzero(train & (groups != group)), np.flatnonzero(scored & (groups == group))
        drawn = np.random.default_rng(seed).multinomial(len(learned), np.full(len(learned), 1 / len(learned)))
        rates = np.average(world.table.right[world.rows[learned]], axis=0, weights=drawn)
        order = np.argsort(-rates, kind="stable")
        part = world.table.part(world.rows[learned].ravel())
        weights = np.repeat(drawn.astype(np.float64), len(world.forms))
        model = ConfidenceModel.fit(part, weights=weights)
        chosen, p[asked] = paths(world, model, rows := world.rows[asked][:, order])
        right[asked], base[asked] = world.table.right[chosen], likeliest(world, rows)
    right, p, base = right[scored], p[scored], base[scored]
    ours = [between(right, calls) for calls in CALLS] + [stopped(right, p, calls) for calls in MEAN_CALLS]
    return np.stack(ours, axis=1), np.stack([between(base, calls) for calls in (*CALLS, *MEAN_CALLS)], axis=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", choices=("domain", "family"), default="domain")
    parser.add_argument("--held-out", action="store_true", help="score held-out questions too")
    parser.add_argument("--refits", type=int, default=REFITS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    config = config_of(["--config", str(CONFIG), "--backend", "recorded"])
    settings = group_of(TaskSettings, config)
    questions = read_dataset(settings).questions
    train = [question for question in questions if not in_test(question)]
    task = make_task(open_models(group_of(ModelSettings, config)), settings, train, learns=True)
    world = World.of(task.on(questions if arguments.held_out else train))
    scored, groups = np.ones(len(world.questions), dtype=bool), world.groups(arguments.leave_out)
    outcomes = []
    for seed in range(arguments.refits):
        outcomes.append(refit(world, groups, scored, seed=seed))
        print(f"refit {seed + 1} of {arguments.refits}", file=sys.stderr, flush=True)
    ours, base = (np.stack(part) for part in zip(*outcomes, strict=True))  # [S, n, cells]
    intervals = crossed_intervals(ours - base, [target_key(question) for question in world.questions])
    names = [f"{calls}" for calls in CALLS] + [f"mean {calls:g}" for calls in MEAN_CALLS]
    leads = (ours - base).mean(axis=(0, 1))
    rows = [
        (name, f"{100 * of_ours:.1f}", f"{100 * of_base:.1f}", percent(lead, interval, sign="+"))
        for name, of_ours, of_base, lead, interval in zip(
            names, ours.mean(axis=(0, 1)), base.mean(axis=(0, 1)), leads, intervals.tolist(), strict=True
        )
    ]
    title = f"{len(world.questions)} questions, each {arguments.leave_out} left out of the fit; percent right"
    print(text_table(title, ("calls", "P(right)", "likeliest", "lead"), rows))
    if arguments.json is not None:
        found = {name: [lead, *interval] for name, lead, interval in zip(names, leads, intervals.tolist(), strict=True)}
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
