"""The report of `benchmarks/eight_seeds.py` from its outcomes: rates with intervals, leads, seeds, and tables of them.

S seeds, n questions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from query_mutator.cli.console import table
from query_mutator.data import guard_questions
from query_mutator.data.split import target_key
from query_mutator.evaluation.methods import Found
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.evaluation.plan_result import PlanSearch
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import Floats
from query_mutator.stats.paired import difference_interval
from query_mutator.stats.resampling import crossed_intervals
from query_mutator.types import Question

__all__ = ["BUDGETS", "MOST_K", "Results", "Sets", "in_words", "report"]

BUDGETS = range(2, 9)
MOST_K = 8  # of best_of_k
SEEDED = ("random", "bandit", "policy")
POOLED = "all questions"

Sets = Mapping[str, Sequence[Question]]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Outcomes by method (with "@SEED" for those that differ by seed) on the questions of all sets, and on others."""

    seeds: Sequence[int]
    sets: Sets
    found: Found  # "NAME", "NAME, guard", "NAME, training"

    @property
    def keys(self) -> list[str]:
        """Return what each question [n] is about."""
        return [target_key(question) for questions in self.sets.values() for question in questions]

    def of(self, name: str, part: str = "") -> list[list[Outcome]]:
        """Return the outcomes [S][n] of a method; those of one without a seed count for each."""
        names = [f"{name}@{seed}" if name in SEEDED else name for seed in self.seeds]
        return [list(self.found[f"{one}{part}"].values()) for one in names]

    def column(self, name: str, measure: str, part: str = "") -> Floats:
        """Return a field of the outcomes [S, n]; NaN where a question is unscored."""
        return np.array(
            [[np.nan if o.error else float(getattr(o, measure)) for o in row] for row in self.of(name, part)]
        )

    def inside(self) -> dict[str, Floats]:
        """Return for each set, and for all of them, 1 for its questions [n] and NaN for the others."""
        labels = np.array([label for label, questions in self.sets.items() for _ in questions])
        masks = {label: np.where(labels == label, 1.0, np.nan) for label in self.sets}
        return masks if len(masks) == 1 else {POOLED: np.ones(len(labels)), **masks}


def report(
    results: Results, search: PlanSearch, front: Mapping[int, Plan], costs: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """Return everything as plain JSON types."""
    rows = table_rows(results, search, front)
    baselines = {row: name for row, name in rows.items() if row != "policy"}
    return {
        "seeds": list(results.seeds),
        "questions": {label: int(np.nansum(mask)) for label, mask in results.inside().items()},
        "methods": {row: {"method": name, **figures(results, name)} for row, name in rows.items()},
        "policy_minus": differences(results, baselines),
        "by_seed": by_seed(results, costs),
        "plans": {str(budget): {"plan": str(plan), **figures(results, str(plan))} for budget, plan in front.items()},
        "best_of_k": {
            str(k): figures(results, f"best_of_{k}") for k in range(2, MOST_K + 1) if f"best_of_{k}" in results.found
        },
        "plan_search": search.to_json(),
    }


def table_rows(results: Results, search: PlanSearch, front: Mapping[int, Plan]) -> dict[str, str]:
    """Return the methods of the table by the name of their row; budgets are chosen on training questions."""
    calls = float(np.nanmean(results.column("policy", "calls", ", training")))
    ks = [name for name in results.found if name.startswith("best_of_") and "," not in name]
    enough = [name for name in ks if np.nanmean(results.column(name, "calls", ", training")) >= calls]
    within = [front[budget] for budget in BUDGETS if budget <= calls]
    return {
        "identity": "identity",
        "random": "random",
        "best_single": "best_single",
        "best_of_k at the policy's calls": (enough or ks[-1:])[0],
        "best_plan": str(search.best.plan),
        "plan at the policy's calls": str(within[-1] if within else front[min(BUDGETS)]),
        "bandit": "bandit",
        "policy": "policy",
    }


def figures(results: Results, name: str) -> dict[str, Any]:
    """Return the rates and costs of a method in every set; guard refusals are those of each seed."""
    columns = [(label, results.column(name, "is_right") * mask) for label, mask in results.inside().items()]
    intervals = crossed(results, [column for _, column in columns])
    refused, calls = results.column(name, "refused"), results.column(name, "calls")
    return {
        label: {
            "success": float(np.nanmean(column)),
            "success_ci": interval,
            "calls": float(np.nanmean(calls * mask)),
            "false_refusal": float(np.nanmean(refused * mask)),
        }
        for (label, column), interval, mask in zip(columns, intervals, results.inside().values(), strict=True)
    } | {"guard_refusals": guard_refusals(results, name), "guard_questions": len(guard_questions())}


def differences(results: Results, baselines: Mapping[str, str]) -> dict[str, Any]:
    """Return the lead of the policy in success over each method in every set."""
    right, found = results.column("policy", "is_right"), {}
    for row, name in baselines.items():
        columns = [(right - results.column(name, "is_right")) * mask for mask in results.inside().values()]
        found[row] = {
            label: {"success": float(np.nanmean(column)), "ci": ci if ci[0] < ci[1] else agreeing(results, column)}
            for label, column, ci in zip(results.inside(), columns, crossed(results, columns), strict=True)
        }
    return found


def crossed(results: Results, columns: Sequence[Floats]) -> list[list[float]]:
    """Return the intervals of the means of columns [S, n]; the same draws in every call."""
    return [list(interval) for interval in crossed_intervals(np.stack(columns, axis=2), results.keys).tolist()]


def agreeing(results: Results, differences: Floats) -> list[float]:
    """Return the interval of differences [S, n] that are all equal, which resampling takes for certain."""
    return list(difference_interval(differences[0], results.keys))


def by_seed(results: Results, costs: Mapping[int, Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return the figures of each seed's policy."""
    guard = guard_refusals(results, "policy")
    measures = {"success": "is_right", "calls": "calls", "false_refusal": "refused"}
    found = []
    for place, seed in enumerate(results.seeds):
        rates = {
            name: {
                label: float(np.nanmean(results.column("policy", measure)[place] * mask))
                for label, mask in results.inside().items()
            }
            for name, measure in measures.items()
        }
        found.append({"seed": seed, **rates, "guard_refusals": guard[place], **costs[seed]})
    return found


def guard_refusals(results: Results, name: str) -> list[int]:
    """Return how many of the requests that should be refused are, for each seed."""
    return [int(count) for count in np.nansum(results.column(name, "refused", ", guard"), axis=1)]


def in_words(found: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    tables = []
    for label, count in found["questions"].items():
        rows = [
            (
                name,
                percent(row[label]["success"], row[label]["success_ci"]),
                f"{row[label]['calls']:.2f}",
                f"{100 * row[label]['false_refusal']:.1f}",
                f"{min(row['guard_refusals'])} of {row['guard_questions']}",
                percent(*found["policy_minus"][name][label].values(), sign="+") if name != "policy" else "",
            )
            for name, row in found["methods"].items()
        ]
        header = ("", "success", "calls", "false refusals", "guard refusals", "policy minus this")
        tables.append(table(f"{label}: {count}, {len(found['seeds'])} seeds", header, rows))
    first = next(iter(found["questions"]))
    seeds = [
        (
            str(row["seed"]), f"{100 * row['success'][first]:.1f}", f"{row['calls'][first]:.2f}",
            f"{100 * row['false_refusal'][first]:.1f}", str(row["guard_refusals"]), f"{row['training_calls']:,}",
            f"{row['search_calls']:,}",
        )
        for row in found["by_seed"]
    ]  # fmt: skip
    header = ("seed", "success", "calls", "false refusals", "guard refusals", "training calls", "search calls")
    rules = {row: method["method"] for row, method in found["methods"].items() if row != method["method"]}
    return "\n\n".join(
        [*tables, table(f"each seed's policy, {first}", header, seeds), "\n".join(map(": ".join, rules.items()))]
    )


def percent(rate: float, interval: Sequence[float], *, sign: str = "") -> str:
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
