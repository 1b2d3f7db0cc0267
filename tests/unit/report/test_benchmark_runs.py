"""Runs of the batching benchmark: which count, and what they are compared with."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from query_mutator.report.benchmark import BenchmarkPlan, Measurement, Results


def run_of(calls: int, seconds: float) -> Measurement:
    return Measurement(calls=calls, wall_s=seconds, service_s=seconds, p50_s=1.0, p95_s=1.0, queue_wait_s=0.0)


def test_a_whole_run_takes_the_place_of_one_that_was_cut() -> None:
    results = Results(about="", slots=4, advice=None, num_queries=10)
    results.add(("async", 4), run_of(3, 4.0))
    assert "were cut" in results.remark
    results.add(("async", 4), run_of(20, 5.0))
    results.add(("async", 4), run_of(2, 1.0))
    assert results.runs[("async", 4)] == [run_of(20, 5.0)]
    assert results.remark == ""


def test_the_speed_up_is_against_the_median_of_the_sequential_runs() -> None:
    results = Results(about="", slots=4, advice=None, num_queries=10)
    for seconds in (20.0, 10.0, 10.0):
        results.add(("sequential", 1), run_of(20, seconds))
    results.add(("async", 4), run_of(20, 2.5))
    assert results.row(("sequential", 1)).speedup == pytest.approx(1)
    assert results.row(("async", 4)).speedup == pytest.approx(4)


def test_runs_on_schedule_get_the_time_that_was_planned_for_them() -> None:
    plan = BenchmarkPlan(cases=(("sequential", 1), ("async", 2)), case_s=(8.0, 4.0), num_queries=10, repeats=1)
    ends_at = time.perf_counter() + 12
    shares = [share for _, share in islice(plan.runs(ends_at=ends_at), 2)]
    assert shares[0] == pytest.approx(8, abs=0.5)
    assert shares[1] == pytest.approx(12, abs=0.5)  # all that is left, since the first took no time
