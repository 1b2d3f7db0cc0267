"""Of the plans that a search finds, the best one, and the best one that fits into an episode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from query_mutator.env.task import Task
from query_mutator.evaluation import found_plan
from query_mutator.learners.plan import Plan


@pytest.mark.parametrize("longest", [0, 1, 2, 3, 4])
def test_the_teacher_is_the_best_plan_that_fits_into_an_episode(
    longest: int, tiny_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["spelling", "ask", "neutral", "ask"]
    plans = [Plan(steps=tuple(steps[:count]), answer="best") for count in (4, 3, 2, 1, 0)]
    sizes = {plan: len(plan.items) for plan in plans}
    points = [SimpleNamespace(plan=plan) for plan in plans]
    search = SimpleNamespace(points=points, chosen=points[0], confidence=None, memories={}, to_json=dict[str, Any])
    monkeypatch.setattr(found_plan, "find_plan", lambda *args, **settings: search)
    task = tiny_task(ask="form", max_episode_steps=max(1, longest))
    found = found_plan.search_plan(SimpleNamespace(), task, max_calls=1, seed=0)  # type: ignore[arg-type]
    assert found.best == plans[0]
    assert sizes[found.teacher] == max(size for size in sizes.values() if size <= max(1, longest))
