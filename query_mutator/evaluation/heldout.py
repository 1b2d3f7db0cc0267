"""The comparison with the baselines on held-out questions: with `data.split`, the only code that reads them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from tqdm import tqdm

from ppo.frozen import InferencePolicy
from query_mutator.cli.console import note
from query_mutator.data.split import target_key
from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.env.task import Task
from query_mutator.errors import DiskError
from query_mutator.evaluation.comparison import Comparison, Method, QuestionTasks, standard_methods
from query_mutator.evaluation.cost import PLAN_CALLS, EvaluationCost
from query_mutator.evaluation.methods import Evaluator, by_policy
from query_mutator.evaluation.summary import PLAN, Results, summarize
from query_mutator.files import atomic_write, encode, user_cache_folder
from query_mutator.files.json_lines import JsonLines
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.plan.choose import PlanChoice
from query_mutator.plan.race import find_plan
from query_mutator.session.models import OpenModels
from query_mutator.types import Question

logger = logging.getLogger(__name__)

SEEN, UNSEEN = "targets of training", "other targets"
TEXTS_AT_ONCE = 64  # between two updates of the progress bar
SAMPLE_SEED = 0  # the same questions in every run, whatever its seed


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


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """What a policy is compared with besides the baselines.

    `search_calls` bounds the calls of a search for the best plan, 0 for none, and `budget` the plan's mean calls per
    question. A policy that `is_plan` needs none.
    """

    search_calls: int = 0
    budget: float | None = None
    is_plan: bool = False

    @property
    def calls_to_search(self) -> int:
        """Return the bound on calls of the search for a plan."""
        return 0 if self.is_plan else self.search_calls


def compare(
    evaluator: Evaluator,
    models: OpenModels,
    task: Task,
    questions: Sequence[Question],
    policy: InferencePolicy,
    *,
    seed: int,
    baselines: Baselines,
    max_calls: int | None = None,
    trained_on: Collection[str] = (),
    guard: Sequence[Question] = (),
    dataset: str | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    keep: Callable[[Results, QuestionTasks], None] = lambda results, tasks: None,
    show: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Return the report on `questions` as plain JSON types: every method, who answered, from what.

    `guard` are requests that should be refused: no answer to them is scored. `dataset` names questions that are not the
    held-out ones of the training. It is a report even if no question could be scored; `check_report` raises for too
    many of those. `task` has the rules of the policy's episodes. `max_calls` bounds the calls by a random sample of the
    questions, which grows while calls are left; those about targets in `trained_on` are a group. `on_plan` is called
    with the best plan, `keep` with the outcomes. After an interruption it is called with those that all methods
    finished, if any, and `show` with the report on them.
    """
    whole = _cost(task, questions, baselines, num_guard=len(guard))
    cost, bound = whole.within(max_calls), min(whole.calls, max_calls or whole.calls)
    note(f"evaluation: {cost.announced(whole, bound)}")
    search = _search(evaluator, task, baselines, max_calls=cost.search_calls, seed=seed)
    calls_left = bound - (search.calls if search else 0)
    if search is not None:
        cost = cost.with_plan(plan_task(search.chosen.plan, task).max_episode_calls, max_calls)
        on_plan(search.chosen.plan)
    sample, requests = GrowingSample.of(questions, most=bound), GrowingSample.of(guard, most=bound)
    embed_questions(models.encoder, sample.questions)
    tasks, methods = _tasks(task, sample, requests, cost), _methods(task, policy, baselines, search, seed=seed)
    comparison = Comparison(evaluator, tasks, methods)

    def report() -> dict[str, Any]:
        about = {"dataset": dataset, "available": len(questions), "eval_calls": max_calls, "calls_at_most": bound}
        made = {"asked": comparison.asked, "calls": bound - calls_left + len(comparison.calls)}
        return _report(comparison, models, trained_on, baselines, search) | about | made

    try:
        _run(comparison, sample, requests, cost, whole=whole, calls_left=calls_left)
    except KeyboardInterrupt:
        if comparison.results().questions:
            keep(comparison.results(), tasks)  # first: the process ends soon, whatever is left to do
            show(report())
        raise
    keep(comparison.results(), tasks)
    return report()


@dataclass(frozen=True, kw_only=True)
class GrowingSample:
    """Questions in their order, and the order of indices in which a random sample of them grows."""

    questions: Sequence[Question]
    order: Sequence[int]

    @classmethod
    def of(cls, questions: Sequence[Question], *, most: int) -> Self:
        """Return at most so many of the questions; the order is the same for all evaluations."""
        drawn = np.random.default_rng(SAMPLE_SEED).permutation(len(questions))[:most]
        kept = np.sort(drawn)
        return cls(questions=[questions[index] for index in kept], order=np.searchsorted(kept, drawn).tolist())


def _search(evaluator: Evaluator, task: Task, baselines: Baselines, *, max_calls: int, seed: int) -> PlanChoice | None:
    """Return what a search of `max_calls` finds on the questions of the training, None without a call."""
    if not max_calls:
        return None
    return find_plan(
        evaluator,
        task,
        max_calls=max_calls,
        seed=seed,
        budget=baselines.budget,
        learned=task.rules.answer == "learned",
        progress=evaluator.progress,
    )


def _run(
    comparison: Comparison,
    sample: GrowingSample,
    requests: GrowingSample,
    cost: EvaluationCost,
    *,
    whole: EvaluationCost,
    calls_left: int,
) -> None:
    """Ask samples that grow while calls are left."""
    more: EvaluationCost | None = cost
    while more is not None:
        comparison.run(test=sample.order[: more.num_test], guard=requests.order[: more.num_guard])
        more = more.grown(whole, calls_left - len(comparison.calls))


def _tasks(task: Task, sample: GrowingSample, requests: GrowingSample, cost: EvaluationCost) -> QuestionTasks:
    return QuestionTasks(
        test=task.on(sample.questions),
        guard=task.on(requests.questions) if requests.questions else None,
        ranking=task.on(fixed_sample(task.train_questions, cost.num_ranking)),
    )


def _methods(
    task: Task, policy: InferencePolicy, baselines: Baselines, search: PlanChoice | None, *, seed: int
) -> list[Method]:
    """Return the methods that need no results of others."""
    methods = standard_methods(task, by_policy(policy), seed=seed)
    return methods if search is None else [*methods, _plan_row(search, task)]


def _plan_row(search: PlanChoice, task: Task) -> Method:
    plan = search.chosen.plan

    def rules(task: Task) -> Task:
        return replace(plan_task(plan, task), confidence=search.confidence or task.confidence)

    return Method(name=PLAN, make=by_policy(plan_policy(plan, task)), rules=rules)


def _cost(task: Task, questions: Sequence[Question], baselines: Baselines, *, num_guard: int) -> EvaluationCost:
    return EvaluationCost(
        num_test=len(questions),
        num_guard=num_guard,
        num_train=len(task.train_questions),
        num_operators=task.num_rewrites,
        num_asked=task.num_asked,
        asking=task.reward.asking,
        episode_calls=task.max_episode_calls,
        search_calls=baselines.calls_to_search,
        plan_calls=PLAN_CALLS if baselines.calls_to_search else 0,
    )


def _report(
    comparison: Comparison,
    models: OpenModels,
    trained_on: Collection[str],
    baselines: Baselines,
    search: PlanChoice | None,
) -> dict[str, Any]:
    results = comparison.results()
    seen = [target_key(question) in trained_on for question in results.questions]
    groups = {SEEN: seen, UNSEEN: [not was for was in seen]} if any(seen) else {}
    return {
        **summarize(results, groups=groups, is_plan=baselines.is_plan),
        "best_single_operator": comparison.ranking[0] if comparison.ranking else None,
        "k": comparison.k,
        "plan_search": search.to_json() if search else None,
        "target": models.target_model,
        "mutator": models.mutator_model,
        "encoder": models.encoder.source,
    }


def write_rows(path: Path, results: Results, tasks: QuestionTasks) -> None:
    """Write a row for each method and question, in place of those of a file."""
    with closing(JsonLines(path, cut_at=0)) as file:
        file.append(*results.rows())
