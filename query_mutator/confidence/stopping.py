"""When to stop asking: once P(right) of what would be submitted is above a threshold.

    n questions

An episode is the P(right) of what would be submitted after 1, 2, ... calls, out of fold. The threshold is that with
which training questions have the most P(right) less the price of their calls, or an average number of calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.submission import submitted
from query_mutator.errors import UsageError
from query_mutator.types import DoubleArray

_THRESHOLDS = np.linspace(0, 1, 201)  # of a price

Episodes = Sequence[Sequence[float]]

_PRIOR_QUESTIONS = 20.0  # on which a form adds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """Ask again while P(right) is below `threshold` and fewer than `max_calls` were made."""

    threshold: float
    max_calls: int

    def ask_again(self, p_right: float, *, calls: int) -> bool:
        """Return whether to ask again after so many calls, when the answer to submit has this P(right)."""
        return calls < self.max_calls and p_right < self.threshold


def rule_for_price(episodes: Episodes, price: float, *, max_calls: int) -> StoppingRule:
    """Return the rule for the price of a call, in units of P(right), by the episodes of training questions.

    UsageError for a price that is not one, and without an episode.
    """
    if not (math.isfinite(price) and price >= 0):
        raise UsageError(f"a call cannot cost {price}; give a number from 0, in units of P(right)")
    _check(episodes)
    paths = _paths(episodes, max_calls, 0)

    def value(threshold: float) -> float:
        reached = paths >= threshold
        reached[:, -1] = True
        stops = reached.argmax(axis=1)
        return float((paths[np.arange(len(paths)), stops] - price * stops).mean())

    return StoppingRule(threshold=float(max(_THRESHOLDS, key=value)), max_calls=max_calls)


def rule_for_budget(episodes: Episodes, budget: float, *, max_calls: int | None = None, seed: int = 0) -> StoppingRule:
    """Return the rule with which training questions take `budget` calls on average, and no more than `max_calls`.

    `max_calls` is the budget rounded up where it is None. Calls that an episode lacks are drawn from first ones.
    """
    _check(episodes)
    most = math.ceil(budget) if max_calls is None and math.isfinite(budget) else max_calls or 0
    if not 1 <= budget <= most:
        raise UsageError(f"{budget} calls on average is not between 1 and the {most} calls allowed; change one of them")
    paths = _paths(episodes, most, seed)
    reached = np.sort(np.maximum.accumulate(paths[:, : most - 1], axis=1), axis=None)  # [n * (most - 1)]
    # A further call is made for each number below the threshold, because P(right) of the path rises.
    wanted = round((budget - 1) * len(paths))
    if wanted >= len(reached):
        return StoppingRule(threshold=1.0 + 1e-9, max_calls=most)
    return StoppingRule(threshold=float(reached[wanted]), max_calls=most)


def _paths(episodes: Episodes, calls: int, seed: int) -> DoubleArray:
    """Return the P(right) [n, calls] after each call."""
    rng = np.random.default_rng(seed)
    first = np.array([episode[0] for episode in episodes], dtype=np.float64)
    paths = rng.choice(first, size=(len(episodes), calls))
    for path, episode in zip(paths, episodes, strict=True):
        path[: len(episode)] = episode[:calls]
        for at in range(len(episode), calls):
            path[at] = max(path[at - 1], path[at])
    return paths


def _check(episodes: Episodes) -> None:
    if not episodes or not all(episodes) or not all(0 <= p <= 1 for episode in episodes for p in episode):
        raise UsageError(
            "stopping is learned from episodes with a P(right) from 0 to 1 after each call; give at least one"
        )


def greedy_order(
    table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, first: str, agreement: float, most: int | None = None
) -> list[str]:
    """Return at most `most` forms of a table in an order chosen one by one, by out-of-fold P(right) [n]."""
    chosen = [first]
    while (rest := [form for form in forms if form not in chosen]) and (most is None or len(chosen) < most):
        chosen.append(max(rest, key=lambda form: _gain(table, p, [*chosen, form], agreement=agreement)))
    return chosen


def places_by_question(table: TrainingTable, forms: Sequence[str]) -> list[list[int]]:
    """Return the rows of each question that was asked in all of these forms, in their order."""
    order = {form: place for place, form in enumerate(forms)}
    places: dict[int, list[int]] = {}
    for at in np.flatnonzero(np.isin(table.forms, forms)).tolist():
        places.setdefault(int(table.questions[at]), []).append(at)
    whole = (rows for rows in places.values() if len(rows) == len(forms) == len({table.forms[at] for at in rows}))
    return [sorted(rows, key=lambda at: order[table.forms[at]]) for rows in whole]


def _gain(table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, agreement: float) -> float:
    """Return what the last form adds to the rate of right submissions where all were asked, drawn to 0 where few."""

    def right(rows: Sequence[int]) -> float:
        chosen = submitted(p[rows], table.answer_groups[rows].tolist(), agreement=agreement)
        return float(table.right[rows[chosen]])

    gains = [right(rows) - right(rows[:-1]) for rows in places_by_question(table, forms)]
    return sum(gains) / (len(gains) + _PRIOR_QUESTIONS) if gains else -math.inf
