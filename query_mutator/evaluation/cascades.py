"""Baselines of several models, at the price that the policy paid on the same questions.

    n questions, K models, the cheapest first

    MODEL alone          each model, in the arm of it that did best on training questions
    random_cascade       what the policy did, each time for another question: every model gets the same share of calls
    logprob_cascade      the next model where the mean log probability of an answer is below a threshold
    question_classifier  the model with the highest P(right) by the question alone minus a multiple of its price
                         (RouteLLM, arXiv:2406.18665): regressions on words and embeddings of training questions

The last two are put together from the answers of each model alone. Threshold and multiple are those that spend most
within the policy's price; no grade of a held-out answer decides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np

from query_mutator.confidence.gain import WEIGHT, gain_inputs
from query_mutator.confidence.scorers import LinearScorer
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.task import Task
from query_mutator.evaluation.outcomes import Outcome, mean
from query_mutator.forms import arms
from query_mutator.session.play import Player
from query_mutator.types import SUBMIT, DoubleArray, IntArray, Question

RANDOM_CASCADE, LOGPROB_CASCADE, CLASSIFIER = "random_cascade", "logprob_cascade", "question_classifier"
_SLACK = 1 + 1e-9  # of a price, for its rounding
_MULTIPLES = 513
_SUMS = ("calls", "price", "tokens", "reply_tokens", "seconds")
_ROWS = ("asked", "forms", "answers", "models", "logprobs", "parts", "scores", "fits")

#: Outcomes of each of K models alone on the same n questions.
Alone = Mapping[str, Sequence[Outcome]]


def with_models(task: Task, models: Sequence[str]) -> Task:
    """Return the task with an arm for each of several models, also for those that the policy never asks."""
    known = {task.model_of(form.name) for form in task.forms}
    missing = [arm for arm in arms((), models) if arm.model not in known] if len(models) > 1 else ()
    return replace(task, forms=(*task.forms, *missing))


def shuffled(outcomes: Mapping[Question, Outcome], *, seed: int) -> Player:
    """Return the player that does for each question what was done for one drawn without replacement."""
    steps = [one.steps or (SUBMIT,) for one in outcomes.values()]
    order = np.random.default_rng(seed).permutation(len(steps)).tolist()
    drawn = {question: steps[place] for question, place in zip(outcomes, order, strict=True)}

    def choose(engine: EpisodeEngine) -> int:
        question = engine.task.questions[engine.episode.index]
        return engine.task.actions.index(drawn[question][engine.episode.steps])

    return Player(choose)


def logprob_cascade(alone: Alone, *, price: float) -> list[Outcome]:
    """Return the outcomes [n] of a cascade by mean log probability, none where no server reports it."""
    found = [alone[name] for name in _by_price(alone)]
    rows = [[(one.logprobs or (None,))[-1] for one in each] for each in found[:-1]]
    logprobs = np.array(rows, dtype=np.float64).T  # [n, K - 1]; NaN for None
    if np.isnan(logprobs).all():
        return []
    logprobs = np.nan_to_num(logprobs, nan=-math.inf)  # the answer is asked for again
    known = np.column_stack([logprobs, np.full(len(logprobs), math.inf)])
    return _costliest(found, (np.argmax(known >= least, axis=1) for least in np.unique(known)), price=price, adds=True)


def question_classifier(alone: Alone, test: Task, training: Alone, trained: Task, *, price: float) -> list[Outcome]:
    """Return the outcomes [n] of choices by the question of `test`, learned from outcomes on that of `trained`."""
    names = _by_price(alone)
    found, learned = [alone[name] for name in names], [training[name] for name in names]
    inputs, known = (
        gain_inputs(task.question_vectors.astype(np.float64), [one.text for one in task.questions])
        for task in (test, trained)
    )
    p = np.zeros((len(inputs), len(names)))
    for place, outcomes in enumerate(learned):
        rows = [row for row, one in enumerate(outcomes) if one.error is None]
        if not rows:  # all its calls failed
            continue
        right = np.array([outcomes[row].is_right for row in rows], dtype=np.float64)
        scorer = LinearScorer.fit(known[rows], right, np.full(len(rows), WEIGHT))
        p[:, place] = 1 / (1 + np.exp(-np.clip(scorer.log_odds(inputs), -30, 30)))
    prices = np.array([mean(each, "price", default=0.0) for each in found])
    pairs = combinations(range(len(names)), 2)
    worth = [(p[:, more] - p[:, less]) / max(1e-12, prices[more] - prices[less]) for less, more in pairs]
    multiples = np.append(0.0, np.quantile(np.maximum(0, worth), np.linspace(0, 1, _MULTIPLES)))
    return _costliest(found, (np.argmax(p - each * prices, axis=1) for each in multiples), price=price, adds=False)


def _by_price(alone: Alone) -> list[str]:
    return sorted(alone, key=lambda name: mean(alone[name], "price", default=math.inf))


def _costliest(
    found: Sequence[Sequence[Outcome]], choices: Iterable[IntArray], *, price: float, adds: bool
) -> list[Outcome]:
    """Return the outcomes [n] of the choice [n] among K that costs most within a mean price, else of the cheapest.

    Where it `adds`, those before the chosen one are asked too.
    """
    paid: DoubleArray = np.array([[one.price for one in each] for each in found]).T
    paid = np.cumsum(paid, axis=1) if adds else paid
    questions = np.arange(len(paid))
    costs = [(float(paid[questions, chosen].mean()), chosen.tolist()) for chosen in choices]
    within = [one for one in costs if one[0] <= price * _SLACK]
    _, best = max(within, key=lambda one: (one[0], -sum(one[1]))) if within else min(costs)
    parts = [
        [each[question] for each in found[0 if adds else place : place + 1]] for question, place in enumerate(best)
    ]
    return [*map(_joined, parts)]


def _joined(asked: Sequence[Outcome]) -> Outcome:
    """Return the last of some outcomes of a question with the calls and answers of all."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in asked) for name in _SUMS}
    rows: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(one, name) for one in asked)) for name in _ROWS}
    return replace(asked[-1], **sums, **rows, submitted=None if asked[-1].error else len(rows["answers"]) - 1)
