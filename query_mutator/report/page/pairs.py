"""Run next to run: the same method of two runs, paired by question as `qm compare` does: the second minus the first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from query_mutator.report.page.messages import Message, section
from query_mutator.report.page.questions import Evaluation
from query_mutator.runs.pairs import pair_rows

__all__ = ["pairs_of"]

_ALL_RUNS = -1


def pairs_of(runs: Sequence[tuple[str, Evaluation]]) -> Message:
    """Return the message that compares every two runs, given by name, method by method."""
    rows: list[dict[str, Any]] = []
    names = [name for name, _ in runs]
    numbered = [(f"{name} ({n})" if names.count(name) > 1 else name, rows) for n, (name, rows) in enumerate(runs, 1)]
    for (a, ours), (b, theirs) in combinations(numbered, 2):
        for method in ours.methods:
            if method in theirs.methods:
                pair = pair_rows(theirs.held_out(method), ours.held_out(method))
                left_out = pair.only_ours + pair.only_theirs + pair.changed
                rows.append({"a": a, "b": b, "method": method, **pair.to_json(), "left_out": left_out})
    return section(_ALL_RUNS, "pairs", {"rows": rows})
