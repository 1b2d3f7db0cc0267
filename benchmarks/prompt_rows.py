"""Rows of `benchmarks/prompt_optimizers.py`: our plans on recorded replies, and the table of all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.general import CLEAN, percent, plan_jobs
from benchmarks.learned_answer import best_at
from benchmarks.learning import World
from benchmarks.plain_prompts import Spent
from query_mutator.cli.console import table
from query_mutator.data.split import target_key
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Found, Job, by_policy
from query_mutator.evaluation.plan_search import find_plan
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.stats.paired import difference_interval
from query_mutator.stats.resampling import rate_intervals
from query_mutator.types import DoubleArray, Question

__all__ = ["Played", "Questions", "Row", "in_words", "our_rows", "report"]

#: Plans that nobody searched for.
FIXED = {"no prompt": (CLEAN,), "the seed prompt": (CLEAN, "statement")}
SEEDS = (1, 2, 3)  # of our searches: as many as the rivals have settings
BUDGETS = (2.0, 3.0)  # of plans that submit by P(right): calls per question
MIN_LEARNED = 600  # calls: with fewer there are too few answers to learn P(right) from
SAME_CALLS = 0.05  # per question: a plan with so many more has as many


@dataclass(frozen=True, kw_only=True)
class Played:
    """A method on questions: whether each answer is right [n], and what it took per question."""

    right: Sequence[float]
    calls: float
    tokens: float
    empty: int = 0

    @property
    def rate(self) -> float:
        """Return the share that is right."""
        return float(np.mean(self.right))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method in the setting that was best on the validation questions."""

    name: str
    setting: str
    validation: Played
    shown: Played  # on the questions of the table
    search: Spent  # of this setting
    all_calls: int = 0  # of the searches of all settings

    @property
    def is_ours(self) -> bool:
        """Return whether the row is a plan of ours."""
        return self.name.startswith("ours")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The parts: to learn from, to choose a setting by, and those of the table."""

    train: Sequence[Question]
    validation: Sequence[Question]
    shown: Sequence[Question]


def our_rows(world: World, task: Task, parts: Questions, calls: int) -> list[Row]:
    """Return the rows of plans, from recorded replies."""
    rows = [_plan_row(world, task, parts, name, {"": _job(Plan(steps=steps))}, {}) for name, steps in FIXED.items()]
    found: dict[str, dict[str, Callable[[Task, str], Job]]] = {}
    spent: dict[str, dict[str, int]] = {}
    for seed in SEEDS:
        search = find_plan(world.evaluator, task, max_calls=calls, seed=seed)
        name, plan = "ours: qm plan", best_at(search, 1.0, learned=False).plan
        found.setdefault(name, {})[f"seed {seed}: {plan}"] = _job(plan)
        spent.setdefault(name, {})[f"seed {seed}: {plan}"] = search.calls
        if calls < MIN_LEARNED:
            continue
        search = find_plan(world.evaluator, task, max_calls=calls, seed=seed, learned=True)
        for budget in BUDGETS:
            name, plan = (
                f"ours: qm plan --answer learned --budget {budget:g}",
                best_at(search, budget, learned=True).plan,
            )
            found.setdefault(name, {})[f"seed {seed}"] = _job(plan, search.confidence)
            spent.setdefault(name, {})[f"seed {seed}"] = search.calls
    return rows + [_plan_row(world, task, parts, name, jobs, spent[name]) for name, jobs in found.items()]


def _job(plan: Plan, confidence: Any = None) -> Callable[[Task, str], Job]:
    def job(task: Task, name: str) -> Job:
        if confidence is None:
            return plan_jobs({name: plan}, task)[0]
        acting = replace(plan_task(plan, task), confidence=confidence)
        return Job(name=name, task=acting, make=by_policy(plan_policy(plan, task)))

    return job


def _plan_row(
    world: World,
    task: Task,
    parts: Questions,
    name: str,
    jobs: Mapping[str, Callable[[Task, str], Job]],
    spent: Mapping[str, int],
) -> Row:
    """Return the row of the setting that is best on the validation questions."""

    def played(setting: str, questions: Sequence[Question]) -> Played:
        found = Found()
        world.evaluator.run_all([jobs[setting](task.on(questions), "one")], found, title=name)
        outcomes = list(found["one"].values())
        calls, tokens = (float(np.mean([getattr(one, what) for one in outcomes])) for what in ("calls", "tokens"))
        return Played(right=[float(one.is_right) for one in outcomes], calls=calls, tokens=tokens)

    tried = {setting: played(setting, parts.validation) for setting in jobs}
    best = max(tried, key=lambda setting: tried[setting].rate)
    return Row(
        name=name,
        setting=best,
        validation=tried[best],
        shown=played(best, parts.shown),
        search=Spent(calls=spent.get(best, 0)),
        all_calls=sum(spent.values()),
    )


def report(rows: Sequence[Row], questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Return the figures of the rows; the lead over ours is that over the plan with at most as many calls."""
    keys = [target_key(question) for question in questions]
    rates = rate_intervals(np.array([row.shown.right for row in rows], np.float64).T, keys)
    found = []
    for row, interval in zip(rows, rates, strict=True):
        figures = {
            "name": row.name, "setting": row.setting, "success": row.shown.rate, "ci": list(interval),
            "validation": row.validation.rate, "calls": row.shown.calls, "tokens": row.shown.tokens,
            "empty": row.shown.empty, "search": asdict(row.search), "all_calls": row.all_calls,
        }  # fmt: skip
        if (own := rival_of(row, rows)) is not None:
            lead: DoubleArray = np.array(row.shown.right) - np.array(own.shown.right)
            figures |= {
                "against": own.name,
                "lead": float(lead.mean()),
                "lead_ci": list(difference_interval(lead, keys)),
            }
        found.append(figures)
    return found


def rival_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return our row that a rival is compared with: the best on validation questions with at most as many calls."""
    if row.is_ours:
        return None
    within = [one for one in rows if one.is_ours and one.shown.calls <= max(1.0, row.shown.calls) + SAME_CALLS]
    return max(within, key=lambda one: one.validation.rate, default=None)


def in_words(found: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return the table of a report."""
    body = [
        (
            row["name"], percent(row["success"], row["ci"]),
            percent(row["lead"], row["lead_ci"], sign="+") if "lead" in row else "",
            f"{100 * row['validation']:.1f}", f"{row['calls']:.2f}", f"{row['tokens']:.0f}",
            f"{row['search']['calls']:,}", f"{row['all_calls']:,}", str(row["empty"]),
        )
        for row in found
    ]  # fmt: skip
    columns = ("", "right, %", "minus ours", "validation", "calls", "tokens", "search", "of all settings", "empty")
    settings = [f"{row['name']}: {row['setting']}" for row in found if row["setting"]]
    return "\n".join([table(title, columns, body), *settings])
