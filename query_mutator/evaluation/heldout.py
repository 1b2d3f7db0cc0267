"""Evaluation of a policy: on a fold of the training questions during training, on held-out questions at its end.

With `data`, this is the only code that reads held-out questions. The maximum cost of an evaluation is known
before it starts, and the questions that fit into a number of calls: calls that methods share are made once, and most
episodes end early, so the calls that are made are usually half of this. Retries of failed calls come in addition.
`power_in_words` says what that many questions can show.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tqdm import tqdm

from query_mutator.cli.console import note
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data import target_key
from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.env.task import Task
from query_mutator.errors import DiskError, UsageError
from query_mutator.evaluation.comparison import (
    Comparison,
    Evaluator,
    Found,
    Job,
    Method,
    ranked_jobs,
    standard_methods,
    with_models,
)
from query_mutator.evaluation.summary import PLAN, Results, failure_kinds, mean, scored, summarize
from query_mutator.files import JsonLines, atomic_write, encode, user_cache_folder
from query_mutator.learners import Plan, PlanPolicy, Policy, plan_task
from query_mutator.learners.direct import PRICES
from query_mutator.plan.choose import MIN_QUESTIONS, PlanChoice
from query_mutator.plan.race import MIN_CALLS, find_plan
from query_mutator.session.models import OpenModels
from query_mutator.session.play import check_failures, greedy, script
from query_mutator.stats import CORRELATION, DISCORDANT, design_effect, detectable_difference
from query_mutator.types import SUBMIT, Question

logger = logging.getLogger(__name__)

RANKING_QUESTIONS = 120  # of training, on which operators are compared
SEARCH_SHARE = 1 / 3  # of bounded calls, for the plan search
PLAN_CALLS = 12  # of a plan for one question, before it is found
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
    """Return `size` of the questions, the same ones each time, in their order; a larger sample has all of a smaller."""
    chosen = np.random.default_rng(SAMPLE_SEED).permutation(len(questions))[:size]
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
    search: Callable[[], PlanChoice | None] | None = None,
    on_plan: Callable[[Plan, ConfidenceModel | None, GainModel | None], None] = lambda plan, confidence, gains: None,
    keep: Callable[[Results], None] = lambda results: None,
    show: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Return the report on `questions` as plain JSON types: every method, who answered, from what.

    `task` has the rules of the policy's episodes. `search_calls` bounds the search for the best plan within a `budget`
    of mean calls per question; a policy that `is_plan` needs none. `search` returns what it found if it began before.
    `max_calls` bounds all calls, by a random sample of the questions. `guard` are requests that should be refused: no
    answer to them is scored. `dataset` names questions that are not the held-out ones of the training; those about
    targets in `trained_on` are a group. `on_plan` is called with the best plan, its P(right) and gains, `keep` with the
    outcomes. After an interruption it is called with those that all methods finished, if any, and `show` with the
    report on them. It is a report even if no question could be scored; `check_report` raises for too many of those.
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
    methods = standard_methods(acting, greedy(policy), seed=seed)
    found = search() if search else search_plan(evaluator, task, cost, seed=seed, budget=budget)
    if found is not None:
        plan, confidence = found.chosen.plan, found.confidence or task.confidence
        gains = found.gains if plan.gain_at is not None else None
        on_plan(plan, confidence, gains)
        cost = replace(cost, plan_calls=plan_task(plan, task).max_episode_calls, search_calls=found.calls)
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
            "plan_search": found.to_json() if found else None,
            "target": ", ".join(models.targets),
            "mutator": models.mutator_model,
            "encoder": models.encoder.source,
            "dataset": dataset,
            "available": len(questions),
            "eval_calls": max_calls,
            "calls_at_most": bound,
            "asked": len(asked),
            "calls": len(comparison.calls) + (found.calls if found else 0),
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


def rank(evaluator: Evaluator, models: OpenModels, task: Task, num_ranking: int) -> None:
    """Make the calls by which an evaluation ranks actions, which finds them stored."""
    ranking = with_models(task, models.targets).on(fixed_sample(task.train_questions, num_ranking))
    evaluator.run_all([*ranked_jobs(ranking).values()], {}, title="ranking of actions")


def search_plan(
    evaluator: Evaluator, task: Task, cost: EvaluationCost, *, seed: int, budget: float | None
) -> PlanChoice | None:
    """Return the plans found on training questions, if an evaluation searches any.

    They submit by P(right) as well where the policy of the task does.
    """
    if not cost.search_calls:
        return None
    learned = task.rules.answer == "learned"
    return find_plan(evaluator, task, max_calls=cost.search_calls, seed=seed, budget=budget, learned=learned)


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

    price = prices[-1]  # first, with the shortest episodes: where it is too low, so are all others
    if calls_at(price) <= budget:
        price = prices[bisect_left(prices, True, hi=NUM_PRICES - 1, key=lambda price: calls_at(price) <= budget)]
    return price, calls_at(price)


# --- its cost --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """The questions of an evaluation and its calls at most."""

    num_test: int
    num_guard: int
    num_train: int
    num_operators: int  # and forms
    num_asked: int  # of them, those that a model carries out
    episode_calls: int  # of the policy
    asking: int = 0  # parts of the reward that ask a model, about each answer but those to the guard's requests
    search_calls: int = 0  # of the plan search
    plan_calls: int = PLAN_CALLS  # of the plan for one question, if there is a search
    num_models: int = 1  # that answer

    @property
    def num_ranking(self) -> int:
        """Return the number of training questions on which operators are compared."""
        return min(RANKING_QUESTIONS, self.num_train)

    @property
    def per_request(self) -> int:
        """Return the calls for a request that should be refused: of policy, random and best_of_k, and of the plan.

        best_of_k, which shares its first ones, exceeds the policy's calls by one at most. Several models are asked
        alone, and as the policy asks them for another question.
        """
        several = self.episode_calls + self.num_models if self.num_models > 1 else 0
        return 3 * self.episode_calls + 1 + several + (self.plan_calls if self.search_calls else 0)

    @property
    def per_question(self) -> int:
        """Return the calls for a question, those of judges included."""
        return (1 + self.asking) * self.per_request

    @property
    def calls(self) -> int:
        """Return the calls at most."""
        per_ranked = (1 + self.asking) * (1 + self.num_operators + self.num_asked)
        asked = self.num_test * self.per_question + self.num_guard * self.per_request
        return asked + self.num_ranking * per_ranked + self.search_calls

    def within(self, max_calls: int | None) -> EvaluationCost:
        """Return the largest evaluation that fits into a number of calls; all sets shrink by the same share.

        The plan search gets a third of the calls, or more where the sets leave it more: few calls find no plan. It is
        left out when it would be too small. Training questions shrink further if fewer held-out ones than a verdict
        needs would fit. UsageError when not even one question of each set fits.
        """
        if max_calls is None or self.calls <= max_calls:
            return self
        others = self.calls - self.search_calls
        search = min(self.search_calls, max(int(SEARCH_SHARE * max_calls), max_calls - others))
        share = (max_calls - search) / others
        guard, train = (int(share * count) or min(1, count) for count in (self.num_guard, self.num_ranking))
        search = search if search >= MIN_CALLS else 0
        smallest = [
            replace(self, num_test=1, num_guard=min(most, guard), num_train=min(most, train), search_calls=search_calls)
            for most, search_calls in ((max(guard, train), search), (MIN_QUESTIONS, search), (1, 0))
        ]
        found = [one.filled(max_calls, available=self.num_test) for one in smallest if one.calls <= max_calls]
        if not found:
            least = smallest[-1].calls
            raise UsageError(
                f"--eval-calls {max_calls} does not allow one question of each method; give at least {least}"
            )
        return next((one for one in found[:2] if one.num_test >= min(MIN_QUESTIONS, self.num_test)), found[0])

    def filled(self, max_calls: int, *, available: int) -> EvaluationCost:
        """Return the evaluation on as many of the `available` questions as the calls allow, at least one."""
        left = max_calls - replace(self, num_test=0).calls
        return replace(self, num_test=min(available, max(1, left // self.per_question)))

    def announced(self, bound: int, *, available: int) -> str:
        """Return what is said before the first call, of an evaluation on some of the `available` questions."""
        of = "" if self.num_test == available else f" of {available}"
        parts = [f"at most {bound:,} model calls for {self.num_test}{of} questions"]
        if self.num_guard:
            requests = f"{self.num_guard} request{'s' * (self.num_guard > 1)} that should be refused"
            parts.append(f"{self.num_guard * self.per_request:,} of them for {requests}")
        if self.search_calls:
            parts.append(f"{self.search_calls:,} of them to search for a plan")
        return f"{', '.join(parts)}; fewer where shared"


def power_in_words(questions: Sequence[Question]) -> str:
    """Return the smallest difference that a comparison on held-out questions shows."""
    targets = [target_key(question) for question in questions]
    design = design_effect(targets, correlation=CORRELATION)
    least = detectable_difference(len(questions), discordant=DISCORDANT, design=design)
    one, n = len(questions) == 1, len(questions)
    few = f"{'is' if one else 'are'} too few to show a difference"
    shown = f"can show differences of {100 * least:.1f} points or more" if least <= 1 else few
    return (
        f"{n} held-out question{'' if one else 's'} {shown} (80 % power at the 5 % level, if two methods "
        f"differ on {DISCORDANT:.0%} of the questions, with correlation {CORRELATION:.2g} within a target)"
    )
