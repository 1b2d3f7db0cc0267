"""The result table over eight seeds, and its front, on memoised calls: a training of 5,000 calls costs seconds.

    python benchmarks/eight_seeds.py                          flags of examples/first_run.json, all training questions
    python benchmarks/eight_seeds.py --flags "--teacher search" --json table.json --image docs/images/front.png
    python benchmarks/eight_seeds.py --blind                  `--max-asks 1`, next to the best chain with one answer
    python benchmarks/eight_seeds.py --validation             no held-out question is read: the flags' fold is scored

Every seed trains, then all methods answer the bundled held-out questions and those of the second author. The plans come
from one search on the questions of the training, best_of_k from its ranking of operators. Intervals resample seeds and,
independently, targets: one draw for all methods, 10,000 draws. "At the policy's calls" is chosen on training questions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.front_picture import draw_front
from benchmarks.learning import World, task_settings, train_seed
from benchmarks.seeds_report import BUDGETS, MOST_K, Results, Sets, in_words, report
from query_mutator.data import guard_questions
from query_mutator.data.bundled import EVALUATION_ONLY
from query_mutator.encoder.documents import cache_dir
from query_mutator.env.task import Task
from query_mutator.evaluation.baselines import Method, best_of, best_single, chain_of
from query_mutator.evaluation.cost import RANKING_QUESTIONS
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.methods import Found, Job, by_policy, uniform
from query_mutator.evaluation.outcomes import mean
from query_mutator.evaluation.plan_search import MAX_CALLS, find_plan
from query_mutator.files import write_json
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.session.dataset import read_dataset, split_dataset
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.models import ModelSettings
from query_mutator.training.config import parse_config
from query_mutator.types import SUBMIT

FIRST_RUN = Path(__file__).resolve().parents[1] / "examples" / "first_run.json"


def question_sets(settings: TaskSettings, *, validation: bool) -> Sets:
    """Return the questions to score, by set; with `validation` no held-out question is loaded."""
    split = split_dataset(settings)
    if validation:
        return {"validation questions": split.validation}
    trained = {question.text for question in split.train + split.validation}
    others = read_dataset(replace(settings, dataset="second_hand"), EVALUATION_ONLY).questions
    return {"held out": split.test, "second author": [q for q in others if q.text not in trained]}


def fixed_methods(task: Task, ranking: Sequence[str], plans: Iterable[Plan]) -> list[Method]:
    """Return the methods that are the same for every seed; a plan's name is its text."""
    return [
        chain_of("identity", task, [SUBMIT]),
        best_single(ranking, task),
        *(best_of(k, ranking, task) for k in range(2, min(MOST_K, len(ranking) + 1) + 1)),
        *(
            Method(name=str(plan), make=by_policy(plan_policy(plan, task)), rules=partial(plan_task, plan))
            for plan in dict.fromkeys(plans)
        ),
    ]


def ranked_operators(world: World, task: Task) -> list[str]:
    """Return the operators by success of their one rewrite on a sample of the training questions, the best first."""
    some, found = task.on(fixed_sample(task.train_questions, RANKING_QUESTIONS)), Found()
    names = [operator.name for operator in task.operators]
    methods = [chain_of(name, task, [name, SUBMIT], answer="last") for name in names]
    jobs = [Job(name=method.name, task=method.rules(some), make=method.make) for method in methods]
    world.evaluator.run_all(jobs, found, title="operators")
    merits = {
        name: (mean(list(found[name].values()), "success"), mean(list(found[name].values()), "score")) for name in names
    }
    return sorted(names, key=lambda name: merits[name], reverse=True)


def run(world: World, argv: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Search for plans, train every seed, score all methods; return the report."""
    settings = task_settings(parse_config(argv))
    task, started = world.task_of(settings), time.perf_counter()
    if settings.answer == "learned":  # by the seeds alone, each of which learns P(right)
        task = task.with_rules(answer="best")
    search = find_plan(world.evaluator, task, max_calls=arguments.plan_calls, seed=1)
    front = {budget: search.best_plan_at(budget).plan for budget in BUDGETS}
    say(f"plan search: {search.calls:,} calls, {search.seconds:.0f} s: {search.best.plan}")
    methods = fixed_methods(task, ranked_operators(world, task), [search.best.plan, *front.values()])
    costs = {}
    for seed in arguments.seeds:
        config = parse_config([*argv, "--seed", str(seed)])
        trained = train_seed(world, config, max_calls=arguments.max_calls)
        costs[seed] = {"training_calls": trained.calls, "search_calls": trained.search_calls}
        assert trained.bandit is not None, "no episode of the training has ended"
        baselines = {
            "random": uniform(seed=seed),
            "bandit": by_policy(trained.bandit),
            "policy": by_policy(trained.policy),
        }
        rules = partial(as_trained, trained.task)
        methods += [Method(name=f"{name}@{seed}", make=make, rules=rules) for name, make in baselines.items()]
        say(f"seed {seed}: {trained.calls:,} calls, {time.perf_counter() - started:.0f} s")
    results = score(world, task, methods, arguments, settings)
    say(f"scored {len(methods)} methods, {time.perf_counter() - started:.0f} s")
    return report(results, search, front, costs) | {"flags": list(argv), "blind": arguments.blind}


def as_trained(trained: Task, task: Task) -> Task:
    """Return a task with the rules, and the P(right), of a training."""
    return replace(task, rules=trained.rules, confidence=trained.confidence)


def score(
    world: World, task: Task, methods: Sequence[Method], arguments: argparse.Namespace, settings: TaskSettings
) -> Results:
    """Return the outcomes of all methods on all sets, on the guard questions, and on some training questions."""
    sets = question_sets(settings, validation=arguments.validation)
    asked = {
        "": [question for questions in sets.values() for question in questions],
        ", guard": guard_questions(),
        ", training": fixed_sample(task.train_questions, RANKING_QUESTIONS),
    }
    tasks = {part: task.on(questions) for part, questions in asked.items()}
    jobs = [
        Job(name=method.name + part, task=method.rules(some), make=method.make)
        for part, some in tasks.items()
        for method in methods
    ]
    found = Found()
    world.evaluator.run_all(jobs, found, title="evaluation")
    return Results(seeds=arguments.seeds, sets=sets, found=found)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def flags_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of every training; on held-out questions it learns from all training questions."""
    fold = [] if arguments.validation else ["--validation-fold", "none"]
    return [
        "--config",
        str(FIRST_RUN),
        "--deterministic",
        *fold,
        *arguments.flags.split(),
        *(["--max-asks", "1"] if arguments.blind else []),
    ]


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="of the trainer, after those of examples/first_run.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--max-calls", type=int, default=sys.maxsize, help="calls after which a training ends")
    parser.add_argument("--plan-calls", type=int, default=MAX_CALLS, help="of the search for the plans of the table")
    parser.add_argument("--blind", action="store_true", help="one answer, at the end, for policy and plans")
    parser.add_argument("--validation", action="store_true", help="score the flags' validation fold in place of all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "learning", help="folder of replies and embeddings")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; write JSON and picture."""
    arguments = arguments_of(argv)
    torch.set_num_threads(1)
    world = World(ModelSettings(backend="embedded", deterministic=True), arguments.store)
    with world.system:
        found = run(world, flags_of(arguments), arguments)
    print(in_words(found))
    if arguments.json is not None:
        write_json(arguments.json, found)
    if arguments.image is not None:
        draw_front(found, arguments.image)


if __name__ == "__main__":
    main()
