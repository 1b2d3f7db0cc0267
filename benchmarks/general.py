"""One call a question: every form, cleaning, the best plan and eight policies on a language model's recorded replies.

    python -m benchmarks.general --folds 0 1 2 3 4     trains on four fifths of the training questions, scores the fifth
    python -m benchmarks.general --json table.json     trains on all of them, reads the held-out questions
    python -m benchmarks.general --second-author       the same, reads the second author's, and logs the reading
    python -m benchmarks.general --folds 0 --flags "--teacher none --entropy-coef 0.02"

Intervals resample seeds and, independently, what questions are about: the same 10,000 draws for all rows. The plan
comes from one search; the best form alone is the one that is best on the training questions. "ideal clean" asks the
texts as they were before they were spoiled, which nobody has: it is what is left to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.learning import World, task_settings, train_seed
from benchmarks.second_author import log_reading
from benchmarks.seeds_report import Results, agreeing, crossed, percent
from query_mutator.bounds import group_of
from query_mutator.cli.console import table
from query_mutator.data.bundled import FOLDER, GENERAL_2, general_second_author
from query_mutator.encoder.documents import cache_dir
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Found, Job, by_policy, uniform
from query_mutator.evaluation.plan_search import find_plan
from query_mutator.files import write_json
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.rewards.committed import FAMILY
from query_mutator.session.dataset import split_dataset
from query_mutator.settings.models import ModelSettings
from query_mutator.training.config import TrainConfig, parse_config
from query_mutator.types import AS_IS, Question

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "first_run.json"
ONE_CALL = "--ask form --max-asks 1 --max-episode-steps 3 --answer best --algo bandit --teacher search"
CLEAN = "clean"
YARDSTICK = ("question_answer", "short_answer", "statement", "expert")  # forms in which the ideal texts are recorded
KINDS = ("plain", "misspelt", "slang", "wordy", "second-language", "two-part")


def score(world: World, fold: str, arguments: argparse.Namespace) -> tuple[Found, list[Question], dict[str, Any]]:
    """Return the outcomes of all methods on the questions of a fold or on the held-out ones, and what was chosen."""
    argv = ["--validation-fold", fold, *flags_of(arguments), *ONE_CALL.split(), *arguments.flags.split()]
    settings = task_settings(config := config_of(argv))
    task, split = world.task_of(settings), split_dataset(settings)
    questions = list(split.test if fold == "none" else split.validation)
    if arguments.second_author:
        log_reading(arguments.log, ["benchmarks.general"], argv)
        questions = general_second_author()
    search = find_plan(world.evaluator, task, max_calls=config.plan_calls, seed=1)
    best = search.best_plan_at(1).plan
    fixed = fixed_plans(task) | {"best_plan": best}
    jobs = [*plan_jobs(fixed, task.on(questions))]
    ideal = [replace(question, text=text) for question, text in zip(questions, ideal_texts(questions), strict=True)]
    yardstick = [form.name for form in task.forms if form.name in YARDSTICK]
    plans = {in_ideal(AS_IS): Plan()} | {in_ideal(form): Plan(steps=(form,)) for form in yardstick}
    jobs += plan_jobs(plans, task.on(ideal))
    for seed in arguments.seeds:
        started = time.perf_counter()
        trained = train_seed(world, config_of([*argv, "--seed", str(seed)]), max_calls=sys.maxsize)
        jobs += [Job(name=f"policy@{seed}", task=trained.task.on(questions), make=by_policy(trained.policy))]
        jobs += [Job(name=f"random@{seed}", task=task.on(questions), make=uniform(seed=seed))]
        print(f"fold {fold}, seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found = Found()
    world.evaluator.run_all(jobs, found, title="evaluation")
    return found, questions, {"plan": str(best), "best_form": best_form(world, task), "calls": search.calls}


def flags_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of every training."""
    return ["--config", str(CONFIG), "--backend", "recorded", *arguments.flags.split()]


def config_of(argv: Sequence[str]) -> TrainConfig:
    """Return the settings that a run with these flags has on a language model."""
    return parse_config(argv)


def fixed_plans(task: Task) -> dict[str, Plan]:
    """Return the rows without a choice: each form alone, cleaning alone, and both."""
    names = [form.name for form in task.forms]
    alone = {name: Plan(steps=(name,)) for name in names}
    return {"identity": Plan(), **alone, CLEAN: Plan(steps=(CLEAN,))} | {
        f"{CLEAN} > {name}": Plan(steps=(CLEAN, name)) for name in names
    }


def plan_jobs(plans: Mapping[str, Plan], task: Task) -> list[Job]:
    """Return what asks all questions of a task by plans."""
    return [
        Job(name=name, task=partial(plan_task, plan)(task), make=by_policy(plan_policy(plan, task)))
        for name, plan in plans.items()
    ]


def best_form(world: World, task: Task) -> str:
    """Return the form that does best on the training questions as they stand."""
    plans = {form.name: Plan(steps=(form.name,)) for form in task.forms}
    found = Found()
    world.evaluator.run_all(plan_jobs(plans, task), found, title="forms")
    return max(plans, key=lambda name: sum(outcome.is_right for outcome in found[name].values()))


def in_ideal(form: str) -> str:
    """Return the row of a form of the ideal texts."""
    return f"ideal {CLEAN} > {form}"


def ideal_texts(questions: Sequence[Question]) -> list[str]:
    """Return the texts as they were before they were spoiled."""
    rows = [
        json.loads(line)
        for path in (FOLDER / "general.jsonl", GENERAL_2)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    texts = {row["id"]: row.get("clean") for row in rows}
    return [texts[question.id] or question.text for question in questions]


def report(results: Results) -> dict[str, Any]:
    """Return success by row, over all questions, by kind and by family, and what the policy leads by."""
    [questions] = results.sets.values()
    names = list(dict.fromkeys(name.partition("@")[0] for name in results.found))
    groups = {kind: np.array([kind in question.tags for question in questions]) for kind in KINDS}
    families = sorted({tag for question in questions for tag in question.tags} - {*KINDS})
    groups |= {
        name.removeprefix(FAMILY): np.array([name in question.tags for question in questions]) for name in families
    }
    rows = {}
    for name in names:
        column = results.column(name, "is_right")
        [interval] = crossed(results, [column])
        parts = {label: float(np.nanmean(column[:, mask])) for label, mask in groups.items() if mask.any()}
        calls, tokens = (float(np.nanmean(results.column(name, measure))) for measure in ("calls", "tokens"))
        rows[name] = {"success": float(np.nanmean(column)), "ci": interval, "calls": calls, "tokens": tokens} | parts
    lead = results.column("policy", "is_right") - results.column("best_plan", "is_right")
    [interval] = crossed(results, [lead])
    if interval[0] == interval[1]:
        interval = agreeing(results, lead)
    seeds = [float(rate) for rate in results.column("policy", "is_right").mean(axis=1)]
    return {
        "questions": len(questions),
        "seeds": dict(zip(map(str, results.seeds), seeds, strict=True)),
        "rows": rows,
        "policy_minus_best_plan": {"success": float(np.nanmean(lead)), "ci": interval},
        "groups": {label: int(mask.sum()) for label, mask in groups.items()},
    }


def way_to_ideal(rows: Mapping[str, Any], form: str) -> dict[str, float]:
    """Return the shares of the way from the question as it stands to ideal cleaning in a form."""
    start, ideal = rows["identity"]["success"], rows[in_ideal(form)]["success"]
    return {name: (rows[name]["success"] - start) / (ideal - start) for name in ("best_plan", "policy")}


def in_words(found: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    rows = sorted(found["rows"].items(), key=lambda row: row[1]["success"])
    tables = [
        table(
            f"{found['questions']} questions, {len(found['seeds'])} seeds",
            ("", "success", "calls", "tokens"),
            [
                (name, percent(row["success"], row["ci"]), f"{row['calls']:.2f}", f"{row['tokens']:.0f}")
                for name, row in rows
            ],
        )
    ]
    shown = [*dict.fromkeys(("identity", found["best_form"], CLEAN, "best_plan", "policy", found["ideal"]))]
    groups = [(label, count) for label, count in found["groups"].items() if count]
    body = [
        (label, str(count), *(f"{100 * found['rows'][name][label]:.0f}" for name in shown)) for label, count in groups
    ]
    tables.append(table("by kind and family, % right", ("", "questions", *shown), body))
    seeds = ", ".join(f"{100 * rate:.1f}" for rate in found["seeds"].values())
    lead = found["policy_minus_best_plan"]
    lines = [f"policy by seed: {seeds}", f"policy - best_plan: {percent(lead['success'], lead['ci'], sign='+')}"]
    if found["way_to_ideal"]:
        way = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found["way_to_ideal"].items())
        lines.append(f"of the way to {found['ideal']}: {way}")
    tables.append("\n".join([*lines, f"plans: {', '.join(found['plans'])}"]))
    return "\n\n".join(tables)


def run(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Score every fold, or the questions that are held out, and return the report over all of them."""
    pooled, questions, chosen = Found(), list[Question](), []
    for fold in arguments.folds or ["none"]:
        found, asked, choice = score(world, fold, arguments)
        for name, outcomes in found.items():
            pooled.setdefault(name, {}).update({len(questions) + place: one for place, one in outcomes.items()})
        questions += asked
        chosen.append(choice)
    result = report(Results(seeds=arguments.seeds, sets={"all": questions}, found=pooled))
    forms = [name for name in YARDSTICK if name == chosen[0]["plan"].rpartition(" > ")[2]]
    best = in_ideal(forms[0] if forms else YARDSTICK[0])
    is_known = best in result["rows"]
    return result | {
        "best_form": chosen[0]["best_form"],
        "ideal": best if is_known else "best_plan",
        "way_to_ideal": way_to_ideal(result["rows"], best.rpartition(" > ")[2]) if is_known else {},
        "plans": [one["plan"] for one in chosen],
        "flags": arguments.flags,
    }


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="of the trainer, after those of examples/first_run.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folds", nargs="+", choices=list("01234"), help="folds of the training questions to score")
    where.add_argument("--second-author", action="store_true", help="score the second author's questions")
    parser.add_argument("--log", type=Path, default=Path(__file__).with_name("second_author_readings.jsonl"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "general", help="folder of embeddings")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; write them as JSON."""
    arguments = arguments_of(argv)
    torch.set_num_threads(1)
    world = World(group_of(ModelSettings, config_of(flags_of(arguments))), arguments.store)
    with world.system:
        found = run(world, arguments)
    print(in_words(found))
    if arguments.json is not None:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
