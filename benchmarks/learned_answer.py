"""Policies and plans that submit the answer that is most likely right, against rivals of as many calls.

    python -m benchmarks.learned_answer --validation        learns on the training questions, reads the validation ones
    python -m benchmarks.learned_answer --json F            the same, reads the held-out ones
    python -m benchmarks.learned_answer --second-author     the same, reads the second author's, and logs the reading

Replies are recorded ones of a language model. Each seed is one `qm plan --answer learned` and one `qm train`; the price
at which the policy acts is chosen on validation questions, for nine tenths of the further calls of each budget: new
wordings take more. A rival has the calls that were really made on these questions; at 1.4 it is the best one of one
call, and on a random four tenths of the questions the best one of two: the best plan, or among the forms that are right
most often on the training questions a vote, or the likeliest by log probability; with --gguf also the one that the
model calls true, and these of random replies in the best form. Intervals resample seeds and targets. P(right)
is scored on the answers in all forms: within each family and form, against a fit on question and form alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from benchmarks.answer_rivals import Replies, most_true, random_replies, votes_of
from benchmarks.general import config_of, flags_of, percent, plan_jobs
from benchmarks.learning import World, task_settings, train_seed
from benchmarks.second_author import LOG, log_reading
from query_mutator.bounds import group_of
from query_mutator.cli.console import table
from query_mutator.confidence import Attempt, ConfidenceModel
from query_mutator.confidence.submission import eased
from query_mutator.data import GENERAL_2, load_questions, target_key
from query_mutator.env.task import Task
from query_mutator.evaluation.comparison import Found, Job
from query_mutator.evaluation.heldout import price_for_budget
from query_mutator.files import user_cache_folder, write_json
from query_mutator.learners import Plan, PlanPolicy, plan_task
from query_mutator.llm.stack import build_client
from query_mutator.plan.choose import PlanChoice, PlanPoint
from query_mutator.plan.race import find_plan
from query_mutator.plan.table import Table
from query_mutator.reading.gold import FAMILY
from query_mutator.session.play import greedy
from query_mutator.session.task import split_dataset
from query_mutator.settings import Calls, ModelSettings
from query_mutator.stats import auroc, crossed_intervals, expected_calibration_error
from query_mutator.training.config import TrainConfig
from query_mutator.types import DoubleArray, Question

BUDGETS = (1.5, 2.0, 3.0, 6.0)
MOST_CALLS = 1 + math.ceil(max(BUDGETS))  # of a rival
MAX_CALLS = 60_000
MOST_ASKED = 3  # answers to a question of which the model is asked whether they are true
SLOTS = 8  # of those calls
MARGIN = 0.9  # of the calls beyond the first, for which the price of a policy is chosen


def best_at(search: PlanChoice, budget: float, *, learned: bool) -> PlanPoint:
    """Return the plan of a search that is right most often on the training questions within a budget."""
    kind = [point for point in search.points if (point.plan.answer == "learned") == learned]
    return replace(search, points=tuple(kind)).best_plan_at(budget)


def plan_rows(search: PlanChoice, task: Task, seed: int) -> list[Job]:
    """Return what asks the questions of a task by the plans of a search at each budget, both kinds."""
    jobs = []
    for budget in BUDGETS:
        plan = best_at(search, budget, learned=True).plan
        acting = replace(plan_task(plan, task), confidence=search.confidence)
        jobs.append(Job(name=f"plan {budget:g}@{seed}", task=acting, player=greedy(PlanPolicy(plan))))
    for calls in range(1, MOST_CALLS + 1):
        jobs += plan_jobs({f"best plan {calls}@{seed}": best_at(search, calls, learned=False).plan}, task)
    return jobs


def policy_rows(world: World, config: TrainConfig, questions: Sequence[Question]) -> list[Job]:
    """Return what asks the questions by a trained policy at the prices of each budget."""
    trained = train_seed(world, config, max_calls=sys.maxsize)
    validation, jobs = trained.task.on(split_dataset(task_settings(config)).validation), []
    for budget in BUDGETS:
        wanted = 1 + MARGIN * (budget - 1)
        price, _ = price_for_budget(world.evaluator, validation, trained.policy, wanted)
        task = trained.task.on(questions).with_rules(call_price=(price,))
        jobs.append(Job(name=f"policy {budget:g}@{config.seed}", task=task, player=greedy(trained.policy)))
    return jobs


def within(strata: Sequence[Any], p: DoubleArray, right: DoubleArray) -> float:
    """Return the AUROC [n] within strata: the share of pairs of a right and a wrong answer of one that p orders."""
    pairs, ordered = 0.0, 0.0
    _, of = np.unique([str(one) for one in strata], return_inverse=True)
    for stratum in range(of.max() + 1):
        mask = of == stratum
        hits = right[mask].sum()
        if count := float(hits * (mask.sum() - hits)):
            pairs += count
            ordered += count * auroc(p[mask], right[mask])
    return ordered / pairs


class Answers:
    """The answers of questions in all forms."""

    def __init__(self, world: World, task: Task, questions: Sequence[Question]) -> None:
        """Ask them."""
        self.questions, self.forms = list(questions), [form.name for form in task.forms]
        self.task = task.on(questions)
        scores, rows = Table(world.evaluator, self.task), range(len(questions))
        scores.gather([Plan(steps=(form,)) for form in self.forms], rows)
        found = [{attempt.form: attempt for attempt in scores.answers(row).values()} for row in rows]
        self.by_form = {form: [one[form] for one in found] for form in self.forms}

    def right(self) -> DoubleArray:
        """Return whether each is right [forms, n]."""
        return np.array([[float(one.reward.success >= 0.5) for one in self.by_form[form]] for form in self.forms])

    def attempt(self, form: str, at: int) -> Attempt:
        """Return what P(right) is read from."""
        return self.task.reply_of(at, self.by_form[form][at])

    def replies(self, order: Sequence[str]) -> Replies:
        """Return the replies in forms, in an order."""
        places = range(len(self.questions))
        right = self.right()[[self.forms.index(form) for form in order]].T
        attempts = [[self.attempt(form, at) for form in order] for at in places]
        return Replies(questions=self.questions, attempts=attempts, right=right)

    def inputs(self) -> DoubleArray:
        """Return question and form without the answer [forms * n, D + forms]."""
        vectors = np.tile(self.task.question_vectors, (len(self.forms), 1))
        return np.hstack([vectors, np.repeat(np.eye(len(self.forms)), len(self.questions), axis=0)])

    def strata(self) -> list[tuple[str, str]]:
        """Return family and form of each [forms * n]."""
        families = [next((t for t in q.tags if t.startswith(FAMILY)), "") for q in self.questions]
        return [(form, family) for form in self.forms for family in families]


def judged(model: ConfidenceModel, answers: Answers, blind: LogisticRegression) -> dict[str, Any]:
    """Return how good P(right) is on the answers in all forms, and a fit without the answer."""
    n, right = len(answers.questions), answers.right().ravel()
    p = np.array([
        model.p_alone(question.text, [answers.attempt(form, at)])[0]
        for form in answers.forms for at, question in enumerate(answers.questions)
    ])  # fmt: skip
    by_form = {
        form: expected_calibration_error(p[at * n : (at + 1) * n], right[at * n : (at + 1) * n])
        for at, form in enumerate(answers.forms)
    }
    return {
        "answers": len(right),
        "auroc": auroc(p, right),
        "within": within(answers.strata(), p, right),
        "within_without_answer": within(answers.strata(), blind.predict_proba(answers.inputs())[:, 1], right),
        "calibration_error": expected_calibration_error(p, right),
        "by_form": by_form,
    }


def submitted_error(model: ConfidenceModel, plan: Plan, answers: Answers) -> float:
    """Return the calibration error of the answers that a plan submits."""
    order = [step for step in plan.steps if step in answers.forms]
    p, right = [], []
    for at, question in enumerate(answers.questions):
        attempts = []
        for form in order:
            attempts.append(answers.attempt(form, at))
            found = model.submit(question.text, attempts)
            if plan.stop_at is not None and eased(found.p_right, len(attempts) - 1) >= plan.stop_at:
                break
        p.append(found.p_right)
        right.append(float(answers.by_form[order[found.index]][at].reward.success >= 0.5))
    return expected_calibration_error(np.array(p), np.array(right))


def rivals_of(answers: Answers, order: Sequence[str], *, gguf: str | None) -> dict[tuple[str, int], DoubleArray]:
    """Return whether the answers of the rivals that are no plan are right [n], by name and calls."""
    found = votes_of(answers.replies(order))
    if gguf is not None:
        with closing(build_client([gguf], Calls(batch_size=SLOTS), backend="llama")) as live:
            found |= votes_of(random_replies(live.client, answers.task, order[0]), of=" of random replies:")
            found |= most_true(
                live.client, answers.task.calls.target_model, answers.replies(order[:MOST_ASKED]), slots=SLOTS
            )
    return found


def strongest(rivals: Mapping[tuple[str, int], DoubleArray], calls: float) -> tuple[str, DoubleArray]:
    """Return the rival that is right most often at a number of calls, and how often it is [seeds, n].

    Between two whole numbers a random share of the questions gets the calls of the larger one.
    """
    fewer = math.floor(calls)
    (low, of_low), (high, of_high) = (
        max(((name, right) for name, right in rivals.items() if name[1] <= most), key=lambda one: one[1].mean())
        for most in (fewer, fewer + 1)
    )
    share = calls - fewer
    named = "" if low == high else f", {share:.0%} {high[0]}"
    return f"{low[0]}{named}", (1 - share) * of_low + share * of_high


def compared(ours: DoubleArray, theirs: DoubleArray, keys: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a method [seeds, n] and of a rival."""
    of_ours, of_rival, of_lead = crossed_intervals(np.stack([ours, theirs, ours - theirs], axis=2), keys).tolist()
    return {
        "success": float(ours.mean()), "ci": of_ours, "seeds": ours.mean(axis=1).tolist(),
        "rival_success": float(theirs.mean()), "rival_ci": of_rival,
        "lead": float((ours - theirs).mean()), "lead_ci": of_lead,
    }  # fmt: skip


def run(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search once for each seed, play all plans, and return the report."""
    settings = task_settings(config_of(argv := flags_of(arguments)))
    task, split = world.task_of(settings).with_rules(ask="form", max_asks=None), split_dataset(settings)
    questions = list(split.validation if arguments.validation else split.test)
    if arguments.second_author:
        log_reading(arguments.log, ["benchmarks.learned_answer"], argv)
        questions = load_questions(GENERAL_2)
    training, held_out = Answers(world, task, split.train), Answers(world, task, questions)
    keys = [target_key(one) for one in questions]
    rates = dict(zip(training.forms, training.right().mean(axis=1), strict=True))
    blind = LogisticRegression(max_iter=1000).fit(training.inputs(), training.right().ravel())
    order = sorted(rates, key=lambda form: -rates[form])
    rivals = rivals_of(held_out, order, gguf=arguments.gguf)
    found, searches = Found(), []
    for seed in arguments.seeds:
        started = time.perf_counter()
        searches.append(find_plan(world.evaluator, task, max_calls=arguments.max_calls, seed=seed, learned=True))
        jobs = plan_rows(searches[-1], held_out.task, seed)
        jobs += policy_rows(world, config_of([*argv, "--seed", str(seed)]), questions)
        world.evaluator.run_all(jobs, found, title="evaluation")
        print(f"seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)

    def column(name: str, measure: str) -> DoubleArray:
        rows = [found[f"{name}@{seed}"].values() for seed in arguments.seeds]
        return np.array([[float(getattr(one, measure)) for one in row] for row in rows])

    everyone = {name: np.tile(right, (len(arguments.seeds), 1)) for name, right in rivals.items()}
    everyone |= {(f"best plan {k}", k): column(f"best plan {k}", "is_right") for k in range(1, MOST_CALLS + 1)}
    rows = {}
    for kind, budget in itertools.product(("policy", "plan"), BUDGETS):
        name = f"{kind} {budget:g}"
        ours, calls = column(name, "is_right"), float(column(name, "calls").mean())
        rival, theirs = strongest(everyone, calls)
        rows[name] = {"calls": calls, "rival": rival} | compared(ours, theirs, keys)
    first, model = searches[0], searches[0].confidence
    assert model is not None
    errors = {f"{b:g}": submitted_error(model, best_at(first, b, learned=True).plan, held_out) for b in BUDGETS}
    return {
        "questions": len(questions),
        "budgets": rows,
        "rivals": {name: float(right.mean()) for (name, _), right in everyone.items()},
        "p_right": judged(model, held_out, blind) | {"submitted": errors},
        "plans": {f"{b:g}": [str(best_at(search, b, learned=True).plan) for search in searches] for b in BUDGETS},
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    rows = [
        (name, f"{row['calls']:.2f}",
         percent(row["success"], row["ci"]), f"{100 * min(row['seeds']):.1f}",
         f"{row['rival']}: {percent(row['rival_success'], row['rival_ci'])}",
         percent(row["lead"], row["lead_ci"], sign="+"))
        for name, row in found["budgets"].items()
    ]  # fmt: skip
    title = f"{found['questions']} questions; the strongest rival has as many calls"
    columns = ("", "calls", "right", "lowest seed", "strongest rival", "lead")
    quality = found["p_right"]
    submitted = ", ".join(f"{error:.3f} at {budget}" for budget, error in quality["submitted"].items())
    forms = ", ".join(f"{form} {error:.3f}" for form, error in quality["by_form"].items())
    return "\n\n".join([
        table(title, columns, rows),
        f"P(right) of {quality['answers']} answers: AUROC {quality['auroc']:.3f}; within family and form "
        f"{quality['within']:.3f}, without the answer {quality['within_without_answer']:.3f}\n"
        f"calibration error {quality['calibration_error']:.3f}; of submitted answers {submitted}\nby form: {forms}",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="of the trainer, after those of examples/first_run.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--max-calls", type=int, default=MAX_CALLS, help="of each search")
    parser.add_argument("--validation", action="store_true", help="score validation questions, on which to choose")
    parser.add_argument("--second-author", action="store_true", help="score the second author's questions")
    parser.add_argument("--gguf", help="the recorded model's file, or smollm2: P(True) is a rival too")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = group_of(ModelSettings, config_of(flags_of(arguments)))
    world = World(settings, user_cache_folder() / "general")
    with world.system:
        found = run(world, arguments)
    print(in_words(found))
    if arguments.json is not None:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
