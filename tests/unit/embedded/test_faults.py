"""Scripted faults: the share asked for, and the same ones whatever the order of calls."""

from __future__ import annotations

import pytest

from query_mutator.embedded.faults import KINDS, FaultPlan
from query_mutator.errors import UsageError


def test_faults_depend_on_the_request_and_its_attempt() -> None:
    plan, again = FaultPlan(0.25, seed=1), FaultPlan(0.25, seed=1)
    bodies = [b"%d" % i for i in range(2000)]
    drawn = {body: [plan.pick(body) for _ in range(2)] for body in bodies}
    assert {body: [again.pick(body)] for body in reversed(bodies)} == {b: kinds[:1] for b, kinds in drawn.items()}
    assert sum(kinds[0] is not None for kinds in drawn.values()) / 2000 == pytest.approx(0.25, abs=0.03)
    retried = [kinds[1] for kinds in drawn.values() if kinds[0] is not None]
    assert sum(kind is not None for kind in retried) / len(retried) == pytest.approx(0.25, abs=0.08)


def test_an_explicit_attempt_always_has_the_same_fault() -> None:
    plan = FaultPlan(0.5, seed=1)
    first = [plan.pick(b"body", attempt=attempt) for attempt in range(20)]
    assert [plan.pick(b"body", attempt=attempt) for attempt in range(20)] == first
    assert len(set(first)) > 2


def test_all_kinds_are_equally_frequent() -> None:
    plan = FaultPlan(1.0)
    drawn = [plan.pick(b"%d" % i) for i in range(7000)]
    assert [drawn.count(kind) for kind in KINDS] == pytest.approx([1000] * len(KINDS), abs=120)


@pytest.mark.parametrize(("share", "kinds"), [(1.5, KINDS), (-0.1, KINDS), (0.1, ["rest"]), (0.1, [])])
def test_an_invalid_plan_is_a_usage_error(share: float, kinds: list[str]) -> None:
    with pytest.raises(UsageError):
        FaultPlan(share, kinds=kinds)
