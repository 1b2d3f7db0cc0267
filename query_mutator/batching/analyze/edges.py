"""Suggest bucket edges: optimal ones for padding or attention, quantiles for balance."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError


class OptimizationGoal(StrEnum):
    """Objective of the edges."""

    MINIMIZE_WASTE = "minimize_waste"  # fewest padding tokens
    BALANCE_BUCKETS = "balance_buckets"  # equally many samples in each bucket
    MINIMIZE_MEMORY = "minimize_memory"  # smallest sum of squared padded lengths: the attention scores of all rows


class BucketSuggestion(Record):
    """Edges up to the longest length covered, and `max_length` as `overflow_max`; `num_left_out` samples are longer."""

    edges: tuple[int, ...]
    overflow_max: int
    rationale: str
    estimated_efficiency: float = Field(ge=0, le=1)
    optimization_goal: OptimizationGoal
    num_left_out: int = 0


def suggest_bucket_edges(
    lengths: LengthSource,
    num_buckets: int = 4,
    goal: OptimizationGoal | str = OptimizationGoal.MINIMIZE_WASTE,
    max_length: int | None = None,
    *,
    multiple: int = 1,
) -> BucketSuggestion:
    """Return the best `num_buckets` edges (fewer if there are fewer lengths) for a goal, multiples of `multiple`."""
    if num_buckets < 1 or multiple < 1:
        raise UsageError(f"num_buckets={num_buckets} and multiple={multiple} must be at least 1")
    values = as_lengths(lengths).lengths
    counts = np.bincount(values)
    covered = counts if max_length is None else counts[: max_length + 1]
    if not covered.any():
        raise UsageError("there are no lengths to choose edges for; raise max_length or check the input")
    goal = OptimizationGoal(goal)
    # Only lengths that occur, rounded up to the multiple, can be optimal edges.
    sizes, shares = _candidates(covered, multiple)
    if goal is OptimizationGoal.BALANCE_BUCKETS:
        chosen = _quantiles(shares, num_buckets)
    else:
        weights = sizes if goal is OptimizationGoal.MINIMIZE_WASTE else sizes**2
        chosen = _optimal(weights.tolist(), np.cumsum(shares).tolist(), num_buckets)
    edges = sizes[chosen]
    padded = int(np.diff(np.cumsum(shares)[chosen], prepend=0) @ edges)
    return BucketSuggestion(
        edges=tuple(edges.tolist()),
        overflow_max=max(int(edges[-1]), max_length or 0),
        rationale=_RATIONALES[goal].format(edges=len(edges), lengths=len(sizes)),
        estimated_efficiency=int(covered @ np.arange(len(covered))) / padded,
        optimization_goal=goal,
        num_left_out=int(counts.sum() - covered.sum()),
    )


_RATIONALES = {
    OptimizationGoal.MINIMIZE_WASTE: "dynamic programming over {lengths} lengths: no other {edges} edges pad less",
    OptimizationGoal.BALANCE_BUCKETS: "quantiles over {lengths} lengths: {edges} buckets of about equally many samples",
    OptimizationGoal.MINIMIZE_MEMORY: "dynamic programming over {lengths} lengths: no other {edges} edges need fewer "
    "attention scores for the padded rows",
}


def _candidates(counts: NDArray[np.int64], multiple: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the possible edges, ascending, and the number of samples between each and the one before, both [m]."""
    present = np.flatnonzero(counts)
    rounded = -(-present // multiple) * multiple
    sizes, first = np.unique(rounded, return_index=True)
    return sizes, np.add.reduceat(counts[present], first)


def _quantiles(shares: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Return the positions of edges with as equal shares of the samples as the lengths allow."""
    upto = np.cumsum(shares)
    wanted = upto[-1] * np.arange(1, num_buckets + 1) / num_buckets
    above = np.searchsorted(upto, wanted)
    below = np.maximum(above - 1, 0)
    nearest = np.where(wanted - upto[below] < upto[above] - wanted, below, above)
    return np.unique(np.append(nearest[:-1], len(shares) - 1))


def _optimal(weights: list[int], upto: list[int], num_buckets: int) -> NDArray[np.int64]:
    """Return the positions of edges that minimize the sum over buckets of weight at the edge * samples in the bucket.

    Dynamic programming: best[j] = min over i < j of before[i] + weights[j] * (upto[j] - upto[i]). Each i is a line in
    weights[j]; slopes fall and weights rise, so the lower envelope of the lines gives each j in constant time on
    average (convex hull trick).
    """
    count = len(weights)
    num_buckets = min(num_buckets, count)
    best = [weight * total for weight, total in zip(weights, upto, strict=True)]
    choices: list[list[int]] = []
    for _ in range(num_buckets - 1):
        best, chosen = _one_more_edge(weights, upto, best)
        choices.append(chosen)
    # Walk back from the last edge through the choices of each round.
    places = [count - 1]
    for chosen in reversed(choices):
        if chosen[places[-1]] >= 0:
            places.append(chosen[places[-1]])
    return np.array(places[::-1], np.int64)


def _one_more_edge(weights: list[int], upto: list[int], before: list[int]) -> tuple[list[int], list[int]]:
    """Return the minimal cost up to each position with one more edge, and the position of the edge before it."""
    best, chosen = list(before), [-1] * len(before)
    lines: list[int] = []
    head = 0
    for place in range(1, len(before)):
        _add_line(lines, place - 1, upto, before, head)
        weight = weights[place]
        # Weights rise, so lines that are no longer minimal never become minimal again.
        while head + 1 < len(lines) and _cost(lines[head + 1], weight, upto, before) <= _cost(
            lines[head], weight, upto, before
        ):
            head += 1
        cost = _cost(lines[head], weight, upto, before) + weight * upto[place]
        if cost < best[place]:
            best[place], chosen[place] = cost, lines[head]
    return best, chosen


def _cost(line: int, weight: int, upto: list[int], before: list[int]) -> int:
    return before[line] - weight * upto[line]


def _add_line(lines: list[int], line: int, upto: list[int], before: list[int], head: int) -> None:
    """Add a line, steeper than all others, to the envelope, and remove the lines above it."""
    while len(lines) - head >= 2:
        first, second = lines[-2], lines[-1]
        # The second is above the envelope if the new line meets the first no later than it does (exact, in integers).
        if (before[line] - before[first]) * (upto[second] - upto[first]) <= (before[second] - before[first]) * (
            upto[line] - upto[first]
        ):
            lines.pop()
        else:
            break
    lines.append(line)
