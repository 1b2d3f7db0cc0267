"""What a learned P(right) is worth on logged answers: submit by it and stop by it, against the better of two baselines:
the arm that is best on the part "train", alone, and a vote over parsed answers of as many calls, ties to the best arm.

    python benchmarks/logged_arms.py --logs FOLDER --json FILE

FOLDER has `logs.jsonl.gz` (or `logs.jsonl`), one question per line (`question`, `gold`, `part`: "train" or "test",
`right` and `answers` by prompt; answers may be missing), and `prompts.json`. Everything is chosen on the part "train",
by cross-validation: model, calibration, order of prompts, and for each mean number of calls the P(right) of the answer
to submit below which the next prompt is asked, as plans do. Percent right of the part "test"; "learned" is the mean of
refits on bootstrap samples of the training questions.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.cli.console import exit_code
from query_mutator.confidence import Attempt, ConfidenceModel, LoggedAnswer, greedy_order, plain_vote
from query_mutator.confidence.answer_keys import AnswerKind
from query_mutator.confidence.crossfit import (
    CrossFit,
    TrainingTable,
    cross_fit,
    table_of,
    training_table,
    with_forms,
)
from query_mutator.confidence.submission import MOST_ANSWERS, Walks
from query_mutator.errors import DatasetError, TooFewAnswersError, UsageError
from query_mutator.files import decode_object, parse_json, write_json
from query_mutator.stats import crossed_intervals
from query_mutator.types import DoubleArray

CALLS = (1.0, 1.5, 2.0, 3.0, 6.0)  # per question, on average
FOLDS = 5
REFITS = 10
READ = ("logs.jsonl.gz", "logs.jsonl", "prompts.json")
RIGHT = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A question with its graded answers by prompt; a grade may have no text."""

    question: str
    gold: str | None
    part: str
    right: dict[str, bool]
    answers: dict[str, str]

    def attempt(self, prompt: str) -> Attempt:
        """Return the answer to a prompt."""
        return Attempt(text=self.answers[prompt], form=prompt)

    def prompts(self) -> list[str]:
        """Return the prompts with a text and a grade."""
        return [prompt for prompt in self.answers if prompt in self.right]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out questions, and a table of their answers in the order in which prompts are asked."""

    logs: list[Logged]
    table: TrainingTable
    places: list[list[int]]  # [n], rows of the table for each question


def main(argv: Sequence[str]) -> int:
    """Print the table and write the JSON file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, required=True, help="folder of logs.jsonl.gz and prompts.json")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--refits", type=int, default=REFITS, help="bootstrap samples of the training questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-only", action="store_true", help="print what was chosen; read no test question")
    options = parser.parse_args(argv)
    if options.refits < 1 or options.seed < 0:
        raise UsageError("--refits needs a number from 1, --seed one from 0")
    if options.json is not None and options.json.resolve() in {(options.logs / name).resolve() for name in READ}:
        raise UsageError(f"--json {options.json}: the logs are only read; choose another file")
    prompts, logs = read_logs(options.logs)
    train = [log for log in logs if log.part == "train"]
    if others := Counter(log.part for log in logs if log.part not in ("train", "test")):
        print(f"{options.logs}: left out, of other parts: {dict(others)}", file=sys.stderr)
    table = training_table(list(graded(train)))
    found = cross_fit(table, weights=np.ones(len(table)), folds=FOLDS)
    asked = learned_order(train, prompts, table, found)
    voted = by_rate(train, prompts)
    print(f"{len(train)} training questions, {len(table)} answers with text; answers read as {table.kind or 'worded'}")
    print(f"learned: {found.scorer}, prompts {' '.join(asked)}; votes: prompts {' '.join(voted)}", flush=True)
    if options.train_only:
        return 0
    result = evaluate(logs, table, orders=(asked, voted), options=options)
    if options.json is not None:
        write_json(options.json, result)
    return 0


def evaluate(
    logs: Sequence[Logged],
    table: TrainingTable,
    *,
    orders: tuple[list[str], list[str]],
    options: Any,
) -> dict[str, Any]:
    """Return the percentages of the test part, after printing them with their spread."""
    asked, voted = orders
    held_out = [log for log in logs if log.part == "test" and log.prompts()]
    if not held_out:
        raise UsageError(f"{options.logs}: no question of the part 'test' has an answer with a grade")
    test = test_of(held_out, asked, voted, kind=table.kind)
    votes = vote_column(held_out, voted, table.kind)
    learned = np.empty((options.refits, len(held_out), len(CALLS)))  # [S, n, calls]
    mean_calls = np.empty((options.refits, len(CALLS)))
    for refit in range(options.refits):
        started = time.monotonic()
        model, least = fitted(table, asked, seed=options.seed + refit)
        columns = with_forms(test.table, model.rates, np.ones(len(test.table), dtype=bool))
        p = model.calibration.p(model.scorer.log_odds(columns))
        walks = Walks.of(p, test.table.answer_groups, test.places, agreement=model.agreement)
        for at, each in enumerate(least):
            stops = np.minimum(walks.stops(each[0]), each[1] - 1)
            learned[refit, :, at] = test.table.right[walks.at(stops)]
            mean_calls[refit, at] = stops.mean() + 1
        print(f"refit {refit + 1} of {options.refits}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return printed(learned, votes, mean_calls.mean(axis=0), test)


def fitted(table: TrainingTable, order: Sequence[str], *, seed: int) -> tuple[ConfidenceModel, list[tuple[float, int]]]:
    """Return a model of a bootstrap sample of the questions, and for each budget where it stops: P(right), most calls.

    Where training questions have one answer, P(right) decides about the second call alone.
    """
    rng = np.random.default_rng(seed)
    questions = int(table.questions.max()) + 1
    drawn = rng.multinomial(questions, np.full(questions, 1 / questions)).astype(np.float64)
    try:
        model = ConfidenceModel.fit(table, weights=drawn[table.questions], folds=FOLDS)
    except TooFewAnswersError:  # the Bayesian bootstrap (Rubin 1981) leaves none of a few wrong answers out
        drawn = rng.exponential(size=questions)
        model = ConfidenceModel.fit(table, weights=drawn[table.questions], folds=FOLDS)
    if len(set(table.forms)) == 1:
        of_first = np.repeat(model.out_of_fold, np.rint(10 * drawn[table.questions]).astype(int))
        return model, [
            (float(np.quantile(of_first, calls - 1)), 2) if 1 < calls < 2 else (math.inf, int(calls)) for calls in CALLS
        ]
    place = {form: at for at, form in enumerate(order)}
    rows = np.lexsort(([place[form] for form in table.forms], table.questions))
    starts = np.flatnonzero(np.diff(table.questions[rows], prepend=-1))
    places = [each.tolist() for each in np.split(rows, starts[1:])]
    walks = Walks.of(model.out_of_fold, table.answer_groups, places, agreement=model.agreement)
    weights = drawn[table.questions[rows[starts]]]
    return model, [(walks.least(calls, weights), MOST_ANSWERS) for calls in CALLS]


def vote_column(logs: Sequence[Logged], order: Sequence[str], kind: AnswerKind | None) -> DoubleArray:
    """Return whether the answers of a vote [n, calls] are right; 1.5 calls are a second one for a random half.

    Prompts come in `order`, the best first, so the vote of one call is the best one alone.
    """
    right = np.empty((len(logs), len(CALLS)))
    for at, log in enumerate(logs):
        prompts = [prompt for prompt in order if prompt in log.prompts()]
        for column, calls in enumerate(CALLS):
            asked = prompts[: int(calls)]
            right[at, column] = log.right[asked[plain_vote(log.question, list(map(log.attempt, asked)), kind=kind)]]
    right[:, CALLS.index(1.5)] = right[:, [CALLS.index(1.0), CALLS.index(2.0)]].mean(axis=1)
    return right


def printed(learned: DoubleArray, votes: DoubleArray, mean_calls: DoubleArray, test: HeldOut) -> dict[str, Any]:
    """Print the table, and return the result."""
    clusters = [log.question for log in test.logs]
    taken = {f"{calls:g}": round(float(mean), 3) for calls, mean in zip(CALLS, mean_calls, strict=True)}
    print(f"\n{len(test.logs)} test questions, percent right; mean calls of learned: {taken}")
    print("| calls | learned (refits) | vote | best arm | over the better |\n|---|---|---|---|---|")
    single = votes[:, [CALLS.index(1.0)]]
    better = np.where(votes.mean(axis=0) > single.mean(), votes, single)  # [n, calls]
    over = 100 * crossed_intervals(learned - better[None], clusters)  # [calls, 2]
    result: dict[str, Any] = {"n": len(test.logs), "learned": {}, "vote": {}, "over": {}}
    for at, calls in enumerate(f"{calls:g}" for calls in CALLS):
        refits, rate = 100 * learned[:, :, at].mean(axis=1), 100 * float(votes[:, at].mean())
        lead = float(refits.mean() - 100 * better[:, at].mean())
        result["learned"][calls], result["vote"][calls] = round(float(refits.mean()), 2), round(rate, 2)
        result["over"][calls] = [round(value, 2) for value in (lead, *over[at].tolist())]
        cells = [f"{refits.mean():.1f} ({refits.min():.1f} to {refits.max():.1f})", f"{rate:.1f}"]
        cells += [f"{100 * single.mean():.1f}", "{:+.1f} [{:+.1f}, {:+.1f}]".format(*result["over"][calls])]
        print(f"| {calls} | {' | '.join(cells)} |")
    return result | {"mean_calls": taken}


def test_of(logs: Sequence[Logged], order: Sequence[str], ranked: Sequence[str], *, kind: AnswerKind | None) -> HeldOut:
    """Return the test questions with the columns of their answers; without the first prompt the best by rate is it."""
    orders = []
    for log in logs:
        known = log.prompts()
        first = next(prompt for prompt in (order[0], *ranked) if prompt in known)
        orders.append([first, *(prompt for prompt in order if prompt in known and prompt != first)])
    # A question that occurs twice is two questions here, or its answers would be mixed.
    tables = [
        table_of([answer(log, prompt) for prompt in prompts], kind=kind)
        for log, prompts in zip(logs, orders, strict=True)
    ]
    sizes = np.cumsum([0, *(len(table) for table in tables)])
    whole = TrainingTable(
        columns=np.concatenate([table.columns for table in tables]),
        right=np.concatenate([table.right for table in tables]),
        forms=tuple(form for table in tables for form in table.forms),
        questions=np.repeat(np.arange(len(tables)), np.diff(sizes)),
        answer_groups=np.concatenate([table.answer_groups for table in tables]),
        targets=np.repeat(np.arange(len(tables)), np.diff(sizes)),
        kind=kind,
    )
    places = [list(range(start, end)) for start, end in zip(sizes[:-1].tolist(), sizes[1:].tolist(), strict=True)]
    return HeldOut(logs=list(logs), table=whole, places=places)


def graded(logs: Sequence[Logged]) -> Iterator[LoggedAnswer]:
    """Yield the answers with text and grade."""
    return (answer(log, prompt) for log in logs for prompt in log.prompts())


def answer(log: Logged, prompt: str) -> LoggedAnswer:
    """Return one graded answer."""
    return LoggedAnswer(question=log.question, attempt=log.attempt(prompt), right=log.right[prompt], gold=log.gold)


def by_rate(train: Sequence[Logged], prompts: Sequence[str]) -> list[str]:
    """Return the prompts by their rate of right training answers, the best first; those without one last."""

    def rate(prompt: str) -> float:
        grades = [log.right[prompt] for log in train if prompt in log.right]
        return sum(grades) / len(grades) if grades else -1.0

    return sorted(prompts, key=rate, reverse=True)


def learned_order(train: Sequence[Logged], prompts: Sequence[str], table: TrainingTable, found: CrossFit) -> list[str]:
    """Return the order in which prompts are asked.

    The first is the best with training texts, by whose P(right) it is decided whether to ask again. The others come by
    rate; where all have texts, each is the one with which submissions by out-of-fold P(right) are right most often.
    """
    order = by_rate(train, prompts)
    read = set(table.forms)
    first = next(prompt for prompt in order if prompt in read)
    if not read >= {prompt for prompt in order if any(prompt in log.right for log in train)}:
        return [first, *(prompt for prompt in order if prompt != first)]
    known = [prompt for prompt in order if prompt in read]
    chosen = greedy_order(table, found.p, known, first=first, agreement=found.agreement)
    return [*chosen, *(prompt for prompt in order if prompt not in chosen)]


def read_logs(folder: Path) -> tuple[list[str], list[Logged]]:
    """Return the names of the prompts and the logs; UsageError of one line for a folder that holds none."""
    prompts = list(_prompts(folder / "prompts.json"))
    packed, plain = folder / "logs.jsonl.gz", folder / "logs.jsonl"
    path = packed if packed.exists() or not plain.exists() else plain
    logs = []
    try:
        with gzip.open(path) if path == packed else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    logs.append(_logged(line, f"{path}:{number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not any(log.part == "train" for log in logs):
        raise DatasetError(f"{path}: no question has the part 'train', from which everything is learned")
    return list(dict.fromkeys([*prompts, *(prompt for log in logs for prompt in (*log.right, *log.answers))])), logs


def _prompts(path: Path) -> dict[str, Any]:
    try:
        return decode_object(path.read_bytes(), parse_json)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise DatasetError(f"{path}: not a JSON object of prompts ({error})") from None


def _logged(line: bytes, place: str) -> Logged:
    try:
        row = decode_object(line, parse_json)
    except ValueError as error:
        raise DatasetError(f"{place}: not a JSON object ({error})") from None
    question, part, right, answers = (row.get(name) for name in ("question", "part", "right", "answers"))
    if not isinstance(question, str) or not question.strip():
        raise DatasetError(f"{place}: `question` is not a text")
    if not isinstance(part, str):
        raise DatasetError(f"{place}: `part` is not 'train' or 'test'")
    if not isinstance(right, dict) or not isinstance(answers if answers is not None else {}, dict):
        raise DatasetError(f"{place}: `right` and `answers` are not objects by prompt")
    texts = {name: text for name, text in (answers or {}).items() if text is not None}
    if bad := next((name for name, text in texts.items() if not isinstance(text, str)), None):
        raise DatasetError(f"{place}: the answer to {bad!r} is not a text")
    grades = {
        name: _grade(value, f"{place}: `right` of {name!r}") for name, value in right.items() if value is not None
    }
    return Logged(question=question, gold=_gold(row.get("gold"), place), part=part, right=grades, answers=texts)


def _grade(value: object, place: str) -> bool:
    grade = RIGHT.get(str(value).strip().lower().removesuffix(".0"))
    if grade is None:
        raise DatasetError(f"{place} is {str(value)[:40]!r}; give true or false")
    return grade


def _gold(value: object, place: str) -> str | None:
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and not isinstance(value, (str, int, float)):
        raise DatasetError(f"{place}: `gold` is neither a text nor a number")
    return None if value is None else str(value)


if __name__ == "__main__":
    raise SystemExit(exit_code(main, sys.argv[1:], prog="logged_arms"))
