"""Evaluation of a policy: on a fold of the training questions during training, on held-out questions at its end.

With `data.split`, this is the only code that reads held-out questions.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tqdm import tqdm

from query_mutator.cli.console import note
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data.split import target_key
from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.env.task import Task
from query_mutator.errors import DiskError
from query_mutator.evaluation.cascades import with_models
from query_mutator.evaluation.comparison import Comparison, Method, standard_methods
from query_mutator.evaluation.cost import EvaluationCost
from query_mutator.evaluation.methods import Evaluator, Found, Job
from query_mutator.evaluation.outcomes import failure_kinds, mean, scored
from query_mutator.evaluation.summary import PLAN, Results, summarize
from query_mutator.files import JsonLines, atomic_write, encode, user_cache_folder
from query_mutator.learners.direct import PRICES
from query_mutator.learners.plan import Plan, PlanPolicy, Policy, plan_task
from query_mutator.plan.race import find_plan
from query_mutator.session.models import OpenModels
from query_mutator.session.play import check_failures, greedy, script
from query_mutator.types import SUBMIT, Question

logger = logging.getLogger(__name__)

SEEN, UNSEEN = "targets of training", "other targets"
TEXTS_AT_ONCE = 64  # between two updates of the progress bar
SAMPLE_SEED = 0  # the same questions in every run, whatever its seed

NUM_QUESTIONS = 300  # at most, on which calls are counted: of two hundred the mean is known to a tenth of a call
NUM_PRICES = 65  # 7.5 % apart


def embed_questions(encoder: Encoder, questions: Sequence[Question]) -> None:
    """Put questions and references into the encoder's cache, from the cache folder if they were embedded before."""
    texts = sorted({text for question in questions for text in (question.text, question.reference) if text})
    if not isinstance(encoder, CachedEncoder) or not texts:
        return
    path = (
        user_cache_folder() / f"embeddings-{hashlib.sha256(encode([encoder.fingerprint, *texts])).hexdigest()[:24]}.npz"
    )
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(path, allow_pickle=False) as saved:
        rows = saved["rows"]
        if rows.shape == (len(texts), encoder.dim) and rows.dtype == np.float32 and np.isfinite(rows).all():
            encoder.put(texts, rows)
            return
    with tqdm(total=len(texts), desc="embedding questions", unit="text", disable=None) as bar:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            encoder.encode(chunk := texts[start : start + TEXTS_AT_ONCE])
            bar.update(len(chunk))
    try:
        with atomic_write(path) as file:
            np.savez(file, rows=encoder.encode(texts))
    except (DiskError, OSError) as error:
        logger.warning("cache cannot be written: %s", error)


def fixed_sample(questions: Sequence[Question], size: int) -> tuple[Question, ...]:
    """Return `size` of the questions, the same ones each time, in their order."""
    if len(questions) <= size:
        return tuple(questions)
    chosen = np.random.default_rng(SAMPLE_SEED).choice(len(questions), size, replace=False)
    return tuple(questions[index] for index in sorted(chosen))


def compare(
    evaluator: Evaluator,
    models: OpenModels,
    task: Task,
    questions: Sequence[Question],
    policy: Policy,
    *,
    seed: int,
    search_calls: int = 0,
    budget: float | None = None,
    is_plan: bool = False,
    max_calls: int | None = None,
    trained_on: Collection[str] = (),
    guard: Sequence[Question] = (),
    dataset: str | None = None,
    on_plan: Callable[[Plan, ConfidenceModel | None, GainModel | None], None] = lambda plan, confidence, gains: None,
    keep: Callable[[Results], None] = lambda results: None,
    show: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Return the report on `questions` as plain JSON types: every method, who answered, from what.

    `task` has the rules of the policy's episodes. `search_calls` bounds the search for the best plan within a `budget`
    of mean calls per question; a policy that `is_plan` needs none. `max_calls` bounds all calls, by a random sample of
    the questions. `guard` are requests that should be refused: no answer to them is scored. `dataset` names questions
    that are not the held-out ones of the training; those about targets in `trained_on` are a group. `on_plan` is called
    with the best plan, its P(right) and gains, `keep` with the outcomes. After an interruption it is called with those
    that all methods finished, if any, and `show` with the report on them. It is a report even if no question could be
    scored; `check_report` raises for too many of those.
    """
    acting, task = task, with_models(task, models.targets)
    whole = EvaluationCost(
        num_test=len(questions),
        num_guard=len(guard),
        num_train=len(task.train_questions),
        num_operators=task.num_rewrites,
        num_asked=task.num_asked,
        asking=task.reward.asking,
        episode_calls=task.max_episode_calls,
        search_calls=0 if is_plan else search_calls,
        num_models=len(models.targets),
    )
    cost, bound = whole.within(max_calls), min(whole.calls, max_calls or whole.calls)
    note(f"evaluation: {cost.announced(bound, available=len(questions))}")
    methods, search = standard_methods(acting, greedy(policy), seed=seed), None
    if cost.search_calls:
        search = find_plan(
            evaluator,
            task,
            max_calls=cost.search_calls,
            seed=seed,
            budget=budget,
            learned=task.rules.answer == "learned",
        )
        plan, confidence = search.chosen.plan, search.confidence or task.confidence
        gains = search.gains if plan.gain_at is not None else None
        on_plan(plan, confidence, gains)
        cost = replace(cost, plan_calls=plan_task(plan, task).max_episode_calls, search_calls=search.calls)
        cost = cost if max_calls is None else cost.filled(max_calls, available=len(questions))

        def planned(task: Task) -> Task:
            return replace(plan_task(plan, task), confidence=confidence, gains=gains)

        methods.append(Method(name=PLAN, player=greedy(PlanPolicy(plan)), rules=planned))
    asked = fixed_sample(questions, cost.num_test)
    embed_questions(models.encoder, asked)
    comparison = Comparison(
        evaluator,
        methods,
        test=task.on(asked),
        guard=task.on(fixed_sample(guard, cost.num_guard)) if cost.num_guard else None,
        ranking=task.on(fixed_sample(task.train_questions, cost.num_ranking)),
        models=models.targets,
        seed=seed,
    )

    def report() -> dict[str, Any]:
        results = comparison.results()
        seen = [target_key(question) in trained_on for question in results.questions]
        groups = {SEEN: seen, UNSEEN: [not was for was in seen]} if any(seen) else {}
        return {
            **summarize(results, groups=groups, is_plan=is_plan),
            "best_single_operator": comparison.ranking[0] if comparison.ranking else None,
            "k": comparison.k,
            "plan_search": search.to_json() if search else None,
            "target": ", ".join(models.targets),
            "mutator": models.mutator_model,
            "encoder": models.encoder.source,
            "dataset": dataset,
            "available": len(questions),
            "eval_calls": max_calls,
            "calls_at_most": bound,
            "asked": len(asked),
            "calls": len(comparison.calls) + (search.calls if search else 0),
        }

    try:
        comparison.run()
    except KeyboardInterrupt:
        if comparison.results().questions:
            keep(comparison.results())  # first: the process ends soon, whatever is left to do
            show(report())
        raise
    keep(comparison.results())
    return report()


def write_rows(path: Path, results: Results) -> None:
    """Write a row for each method and question, in place of those of a file."""
    with closing(JsonLines(path, cut_at=0)) as file:
        file.append(*results.rows())


def validation_figures(evaluator: Evaluator, task: Task, policy: Policy, *, with_identity: bool) -> dict[str, float]:
    """Return the greedy policy's figures on the scored questions of a task under their metric keys.

    With the original questions' success, for comparison, where that is not known yet: both share their calls.
    TooManyFailuresError when too many questions are unscored.
    """
    players = {"validation": greedy(policy)}
    if with_identity:
        players["validation, identity"] = script([task.actions.index(SUBMIT)])
    found: Found = {}
    jobs = [Job(name=name, task=task, player=player) for name, player in players.items()]
    evaluator.run_all(jobs, found, title="validation")
    for by_question in found.values():
        kinds = failure_kinds(list(by_question.values()))
        check_failures(kinds, len(by_question), max_failure_rate=evaluator.max_failure_rate)
    outcomes, *others = (list(by_question.values()) for by_question in found.values())
    identity = {"validation/identity_success": mean(others[0], "success")} if others else {}
    return identity | {
        "validation/success": mean(outcomes, "success"),
        "validation/score": mean(outcomes, "score"),
        "validation/refusals": mean(outcomes, "refused"),
        "validation/calls_per_question": mean(outcomes, "calls"),
        "validation/questions": len(outcomes),
        "validation/unscored": len(outcomes) - len(scored(outcomes)),
    }


def price_for_budget(evaluator: Evaluator, task: Task, policy: Policy, budget: float) -> tuple[float, float]:
    """Return a price at which a task's questions take at most `budget` calls on average, or cost it, and what they do.

    The lowest such price, found by bisection: the higher the price, the fewer the calls. Where no price makes so few
    calls, as with a learner that saw a single price, it is the highest.
    """
    prices = [float(f"{price:.3g}") for price in np.geomspace(*PRICES, NUM_PRICES)]

    @cache
    def calls_at(price: float) -> float:
        outcomes = evaluator.run(task.with_rules(call_price=(price,)), greedy(policy), name="price for --budget")
        return mean(outcomes, "price", default=math.inf)

    place = bisect_left(prices, True, key=lambda price: calls_at(price) <= budget)
    price = prices[min(place, NUM_PRICES - 1)]
    return price, calls_at(price)
