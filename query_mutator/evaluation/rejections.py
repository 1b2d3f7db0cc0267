"""How often a guard rejected a rewrite, by operator: the wording stayed as it was."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from query_mutator.evaluation.outcomes import Outcome
from query_mutator.types import CONTROLS, Question

__all__ = ["count_rewrites", "rejections_in_words", "rewrites_of"]


def count_rewrites(found: Iterable[tuple[str, str | None]]) -> dict[str, dict[str, Any]]:
    """Return by operator its `rewrites` and how often each guard `rejected` one, from pairs (operator, guard)."""
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    for operator, guard in found:
        counts[operator][guard] += 1
    return {
        operator: {
            "rewrites": guards.total(),
            "rejected": {guard: count for guard, count in guards.most_common() if guard is not None},
        }
        for operator, guards in sorted(counts.items())
    }


def rewrites_of(pairs: Iterable[tuple[Question, Outcome]]) -> Iterator[tuple[str, str | None]]:
    """Yield operator and rejecting guard (None: used) of each rewrite that differs from its wording, once."""
    seen = set()
    for question, outcome in pairs:
        before = question.text
        for operator, text, guard in zip(outcome.actions, outcome.rewrites, outcome.guards, strict=False):
            key = question.id, operator, before
            if operator not in CONTROLS and (guard or text != before) and key not in seen:
                seen.add(key)
                yield operator, guard
            before = text


def rejections_in_words(counts: Mapping[str, Any]) -> str:
    """Return one line on the rate of each operator with a rejection, "" without a rewrite."""
    total = sum(found["rewrites"] for found in counts.values())
    if not total:
        return ""
    rates = [_of_operator(name, found) for name, found in counts.items() if found["rejected"]]
    if not rates:
        return f"rejected rewrites: none of {total:,}"
    return f"rejected rewrites (the wording stays): {'; '.join(rates)}"


def _of_operator(name: str, found: Mapping[str, Any]) -> str:
    rejected = found["rejected"]
    guards = ", ".join(f"{guard} {count}" for guard, count in rejected.items())
    return f"{name} {sum(rejected.values()) / found['rewrites']:.0%} of {found['rewrites']:,} ({guards})"
