"""The result of a plan search as a run keeps it: `--teacher search` imitates its plan, the final table reuses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from query_mutator.confidence import ConfidenceModel
from query_mutator.env.memory import QuestionMemory
from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError
from query_mutator.evaluation.plan_search import find_plan
from query_mutator.evaluation.plans import Caller
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.learners.plan import Plan

__all__ = ["FoundPlan", "load_or_search", "search_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The best plan of a search, the best one that fits into an episode of the task, and the search's figures."""

    best: Plan
    teacher: Plan
    search: Mapping[str, Any]
    # Not in the file of a run:
    confidence: ConfidenceModel | None = None  # by which the best plan submits
    memories: Mapping[int, QuestionMemory] = field(default_factory=dict)  # what was rewritten and answered, by question

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {"best": asdict(self.best), "teacher": asdict(self.teacher), "search": dict(self.search)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the record of `to_json`."""
        best, teacher = (
            Plan(**{**values[name], "steps": tuple(values[name]["steps"])}) for name in ("best", "teacher")
        )
        return cls(best=best, teacher=teacher, search=values["search"])


def search_plan(
    caller: Caller,
    task: Task,
    *,
    max_calls: int,
    seed: int,
    budget: float | None = None,
    learned: bool = False,
    progress: Callable[[str, int], Any] | None = None,
) -> FoundPlan:
    """Return the best plan on the questions of a task (training questions), found with at most `max_calls` calls.

    `budget` bounds its mean calls per question. With `learned` it may submit by P(right), where the calls suffice.
    """
    search = find_plan(
        caller,
        task,
        max_calls=max_calls,
        seed=seed,
        budget=budget,
        learned=learned,
        progress=progress,
    )
    longest = task.rules.max_episode_steps  # the plan without a step fits
    plans = [point.plan for point in search.points if point.plan.answer != "learned"]
    teacher = next(plan for plan in plans if len(plan.items) <= longest)
    return FoundPlan(
        best=search.chosen.plan,
        teacher=teacher,
        search=search.to_json(),
        confidence=search.confidence,
        memories=search.memories,
    )


def load_or_search(path: Path, search: Callable[[], FoundPlan]) -> FoundPlan:
    """Return the plan in the file of a run folder; without a file, that of `search`, which is written there."""
    if path.exists():
        try:
            return FoundPlan.from_json(read_checked_json(path))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} holds no plan ({error}); restore it, or remove it to search again"
            ) from error
    found = search()
    write_checked_json(path, found.to_json())
    return found
