"""The picture and the table of a run, and the rows of the batching benchmark."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from query_mutator.files.json_lines import JsonLines
from query_mutator.report.benchmark import BenchmarkPlan, Measurement, Results
from query_mutator.report.curve import draw_learning_curve, smoothed
from query_mutator.report.table import result_table

ROWS = [
    {"step": 0, "validation/success": 0.3, "validation/identity_success": 0.3},
    {"step": 512, "charts/success": 0.4},
    {"step": 1024, "charts/success": 0.5, "validation/success": 0.45, "validation/identity_success": 0.3},
]
METHOD = {
    "success": 0.5,
    "success_ci": [0.4, 0.6],
    "score": 0.61,
    "false_refusal": 0.0,
    "false_refusal_ci": [0.0, 0.02],
    "guard_refusal": 1.0,
    "guard_refusal_ci": [0.9, 1.0],
    "calls_per_question": 2.25,
    "target_calls_per_question": 1.25,
}
REPORT: dict[str, Any] = {
    "n": 100,
    "asked": 100,
    "target": "pydoc-assistant",
    "best_single_operator": "spelling",
    "plan_search": {"calls": 2843, "seconds": 83.6, "best": {"plan": "slang > neutral"}},
    "k": 3,
    "methods": {"identity": {**METHOD, "success": 0.25}, "policy": METHOD},
    "policy_minus": {"identity": {"success": 0.25, "success_ci": [0.2, 0.3]}},
    "by_tag": {
        "slang": {"n": 40, "methods": {"identity": {"success": 0.1}, "policy": {"success": 0.425}}},
        "plain": {"n": 60, "methods": {"identity": {"success": None}, "policy": {"success": 0.55}}},
    },
    "by_group": {},
    "unscored": [],
    "examples": [],
    "verdict": {"deploy": "policy", "sentence": "Deploy the policy."},
}


def test_smoothing_is_a_corrected_moving_average() -> None:
    # weights of the past 1/2: (1 * 0 + 2 * 1) / 3, then (1 * 0 + 2 * 1 + 4 * 1) / 7
    assert smoothed([0.0, 1.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3, 6 / 7])
    assert smoothed([]) == []


def draw(folder: Path, rows: Sequence[Mapping[str, float]]) -> Path:
    """Write rows to metrics.jsonl as a run does; return the picture drawn from them."""
    metrics = JsonLines(folder / "metrics.jsonl")
    metrics.append(*rows)
    metrics.close()
    draw_learning_curve(folder / "metrics.jsonl", folder / "curve.png", title="a target")
    return folder / "curve.png"


def test_picture_is_a_png_of_some_size(tmp_path: Path) -> None:
    content = draw(tmp_path, ROWS).read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (960, 540)


def test_run_without_a_row_still_has_a_picture(tmp_path: Path) -> None:
    assert draw(tmp_path, []).exists()


def test_table_is_in_per_cent_and_says_who_answered() -> None:
    lines = result_table(REPORT).splitlines()
    assert lines[0].startswith("100 held-out questions, answered by pydoc-assistant; percent")
    identity = next(line for line in lines if line.startswith("identity"))
    assert "25.0 [40.0, 60.0]" in identity
    assert identity.endswith("+25.0 [+20.0, +30.0]")
    policy = next(line for line in lines if line.startswith("policy"))
    assert policy.split()[1] == "50.0"
    assert policy.split()[-3:] == ["2.2", "1.0", "1.2"]  # calls, those to the mutator, those to the target
    assert "best_single: spelling" in lines
    assert any(line.startswith("best_of_k: a vote, k = 3, the smallest") for line in lines)
    assert "best_plan: slang > neutral; found in 2,843 calls and 84 s, apart from the calls of the table" in lines
    assert lines[-1] == "Deploy the policy."
    assert next(line for line in lines if line.startswith("slang")).split() == ["slang", "40", "10.0", "42.5"]


def test_table_of_an_interrupted_evaluation_says_how_many_are_missing() -> None:
    assert result_table({**REPORT, "asked": 130}).startswith("100 held-out questions (30 more were not finished), ans")


def test_the_first_lines_say_which_questions_and_how_many_of_them() -> None:
    of_file = result_table({**REPORT, "dataset": "own.jsonl"})
    assert of_file.startswith("100 questions of own.jsonl that training did not have, answered by")
    assert result_table({**REPORT, "available": 300, "eval_calls": 9000}).startswith(
        "100 of 300 held-out questions, as many as 9,000 calls allow, answered by"
    )
    warning, title, *_ = result_table({**REPORT, "n": 9, "asked": 9}).splitlines()
    assert warning == "9 held-out questions: differences under 38 points mean nothing."
    assert title.startswith("9 held-out questions, answered by")


def test_a_table_without_calls_to_the_mutator_has_no_column_for_them() -> None:
    assert "to mutator" in result_table(REPORT)
    asked = {name: {**method, "target_calls_per_question": 2.25} for name, method in REPORT["methods"].items()}
    assert "to mutator" not in result_table({**REPORT, "methods": asked})


def test_a_table_without_guard_requests_has_no_column_for_them() -> None:
    unasked = {name: {**method, "guard_refusal": None} for name, method in REPORT["methods"].items()}
    assert "guard" not in result_table({**REPORT, "methods": unasked})
    assert "guard refusals" in result_table(REPORT)


def test_answers_none_of_which_is_right_stand_next_to_what_is_accepted() -> None:
    example = {"question": "plz sort", "answer": "`len` is what\nyou want.", "accepted": ["sorted", "list.sort"]}
    lines = result_table({**REPORT, "examples": [example]}).splitlines()
    assert "  plz sort -> `len` is what you want. (accepted: sorted | list.sort)" in lines


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
