"""The sections of a page by hand, the picture and the table of a run, and the rows of the batching benchmark."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from query_mutator.evaluation.outcomes import Outcome
from query_mutator.evaluation.summary import Results, summarize
from query_mutator.files.json_lines import JsonLines
from query_mutator.report.benchmark import BenchmarkPlan, Measurement
from query_mutator.report.benchmark import Results as BenchmarkResults
from query_mutator.report.curve import draw_learning_curve, smoothed
from query_mutator.report.page.figures import Figures, Price, learning_of
from query_mutator.report.page.messages import NO_TEXT, TextTable
from query_mutator.report.page.questions import Evaluation
from query_mutator.report.page.results import results_of
from query_mutator.report.page.usage import BLOCK_STEPS, TrainingUsage, choices_of_policy
from query_mutator.report.table import result_table
from query_mutator.types import Question

REFUSAL = "I'm sorry, but I can't help with that."


def step(
    operator: str, *, episode: int = 0, score: float = 0.0, answer: str = "", right: bool = False, **more: Any
) -> dict[str, Any]:
    """Return a row of transcripts.jsonl."""
    row = {
        "env": 0, "step": 0, "episode": episode, "question_id": "q", "question": "how?", "operator": operator,
        "rewrite": "how", "answer": answer, "baseline_score": None, "score": score,
        "parts": {"right": float(right)} if answer else {},
        "reward": 0.0, "valid": True, "error": None, "calls": 1,
    }  # fmt: skip
    return row | more


def usage_of(rows: Sequence[Mapping[str, Any]]) -> TrainingUsage:
    usage = TrainingUsage()
    for row in rows:
        usage.add(row)
    return usage


# --- choices and gains -----------------------------------------------------------------------------------------------


def test_a_gain_is_booked_to_the_operators_before_the_answer() -> None:
    usage = usage_of(
        [
            step("spelling"),
            step("expand"),
            step("ask", score=0.6, answer="`len`"),
            step("slang", score=0.6),
            step("undo", score=0.6),  # its rewrite was given up: no gain
            step("expand", score=0.6),
            step("submit", score=0.6),
            step("submit", episode=1),  # the next episode books the rest
        ]
    )
    rows = {row["operator"]: row for row in usage.gains()["gains"]}
    assert {name: (row["random_n"], row["random"]) for name, row in rows.items()} == {
        "spelling": (1, 0.6), "slang": (1, 0.0), "expand": (2, pytest.approx(0.3)),
    }  # fmt: skip


def test_early_steps_are_apart_from_those_that_were_chosen() -> None:
    early = [step("expand", episode=n, score=1.0, answer="`len`") for n in range(BLOCK_STEPS)]
    later = [step("expand", episode=n, score=0.25, answer="`len`") for n in range(BLOCK_STEPS, 10 * BLOCK_STEPS)]
    (row,) = usage_of(early + later).gains()["gains"]
    assert (row["random_n"], row["random"], row["random_ci"]) == (BLOCK_STEPS, 1.0, [1.0, 1.0])
    assert (row["chosen"], row["gain"]) == (9 * BLOCK_STEPS, 0.25)


def test_a_failed_step_gains_nothing_and_is_still_a_choice() -> None:
    usage = usage_of(
        [step("expand", valid=False, error={"kind": "timeout", "message": ""}), step("ask", score=0.5, answer="x")]
    )
    assert usage.gains()["gains"] == []
    assert usage.choices.by_step == {(0, "expand"): 1, (1, "ask"): 1}


def test_the_verdict_is_that_of_the_last_answer_seen() -> None:
    usage = usage_of(
        [
            step("ask", answer=REFUSAL),
            step("neutral"),
            step("ask", answer="`len`", right=True),
            step("submit"),
            step("ask", episode=1, answer="I'm not sure what you mean."),
            step("expand", episode=1, answer="`sum`"),
            step("submit", episode=1),
        ]
    )
    assert usage.choices.by_verdict == {
        ("none", "ask"): 2, ("refused", "neutral"): 1, ("refused", "ask"): 1, ("right", "submit"): 1,
        ("not_sure", "expand"): 1, ("wrong", "submit"): 1,
    }  # fmt: skip
    data = usage.choices.data(["ask"])
    assert (data["submit"], data["undo"], data["episodes"]) == (2, 0, 2)


def test_where_the_original_was_asked_the_first_score_is_its_score() -> None:
    (row,) = usage_of([step("expand", baseline_score=0.4, score=0.9, answer="`len`")]).gains()["gains"]
    assert row["random"] == pytest.approx(0.5)


def test_the_share_of_the_first_action_over_training() -> None:
    rows = [step("expand" if n < BLOCK_STEPS else "ask", episode=n) for n in range(2 * BLOCK_STEPS)]
    assert usage_of(rows).first_shares() == {
        "step": [BLOCK_STEPS, 2 * BLOCK_STEPS], "shares": {"ask": [0.0, 1.0], "expand": [1.0, 0.0]},
    }  # fmt: skip


def evaluation_of(*rows: Mapping[str, Any]) -> Evaluation:
    evaluation = Evaluation(TextTable(0, str))
    for row in rows:
        evaluation.add(row)
    return evaluation


def row_of(outcome: Outcome, question: Question, *, method: str = "policy") -> dict[str, Any]:
    return {"method": method, "set": "test", **outcome.to_row(question)}


@pytest.mark.parametrize(
    ("asks_apart", "seen"), [(True, ["none", "refused", "refused", "right"]), (False, ["refused", "right", "refused"])]
)
def test_choices_of_the_policy_on_held_out_questions(asks_apart: bool, seen: list[str]) -> None:
    steps = ("ask", "expand", "ask", "submit") if asks_apart else ("expand", "undo", "submit")
    wordings = ("how?", "how come?", "how come?", "how come?") if asks_apart else ("how come?", "how?", "how?")
    outcome = Outcome(
        question_id="q", success=1.0, score=1.0, actions=steps, rewrites=wordings, asked=("how?", "how come?"),
        forms=("as_is", "as_is"), answers=(REFUSAL, "`len`"), parts=({"right": 0.0}, {"right": 1.0}),
        scores=(0.0, 1.0), fits=(0.1, 0.9),
        submitted=1,
    )  # fmt: skip
    question = Question(id="q", text="how?", accept=("len",), tags=("wordy",))
    found = choices_of_policy(evaluation_of(row_of(outcome, question)), policy_asks=asks_apart)
    expected = {(verdict, name) for verdict, name in zip(seen, steps, strict=True)}
    assert set(found.by_verdict) == expected
    assert sum(found.by_tag.values()) == len(steps)
    assert found.episodes == 1


def test_the_same_wording_in_another_form_has_a_verdict_of_its_own() -> None:
    steps = ("ask", "question_answer", "ask", "undo", "submit")
    outcome = Outcome(
        question_id="q", success=1.0, score=1.0, actions=steps, rewrites=("how?",) * 5, asked=("how?", "how?"),
        forms=("as_is", "question_answer"), answers=(REFUSAL, "`len`"), parts=({"right": 0.0}, {"right": 1.0}),
        scores=(0.0, 1.0), fits=(0.1, 0.9), submitted=1,
    )  # fmt: skip
    evaluation = evaluation_of(row_of(outcome, Question(id="q", text="how?", accept=("len",))))
    ((_, way),) = evaluation.rows_of("policy")
    assert way["forms"] == ["as_is", "question_answer"]
    assert way["step_forms"] == ["as_is", "question_answer", "question_answer", "as_is", "as_is"]
    seen = zip(["none", "refused", "refused", "right", "right"], steps, strict=True)
    assert set(choices_of_policy(evaluation, policy_asks=True).by_verdict) == set(seen)


def test_a_policy_that_asks_by_submitting_has_seen_no_answer() -> None:
    outcome = Outcome(
        question_id="q", success=1.0, score=1.0, actions=("expert", "submit"), rewrites=("how?", "how?"),
        asked=("how?",), forms=("expert",), answers=("`len`",), parts=({"right": 1.0},), scores=(1.0,), fits=(0.9,),
    )  # fmt: skip
    found = choices_of_policy(evaluation_of(row_of(outcome, Question(id="q", text="how?"))), policy_asks=True)
    assert set(found.by_verdict) == {("none", "expert"), ("none", "submit")}


def test_few_gains_have_no_interval() -> None:
    (row,) = usage_of([step("expand", episode=n, score=float(n), answer="`len`") for n in range(2)]).gains()["gains"]
    assert row["random"] == 0.5
    assert all(map(math.isnan, row["random_ci"]))


def test_the_time_of_recorded_replies_is_not_shown() -> None:
    outcomes = [Outcome(question_id=str(n), seconds=seconds) for n, seconds in enumerate((4e-6, 0.0, 0.25))]
    rows = [row_of(outcome, Question(id=outcome.question_id, text="how?")) for outcome in outcomes]
    assert evaluation_of(*rows[:2]).seconds("policy") is None
    assert evaluation_of(*rows).seconds("policy") == 0.25


# --- the answer ------------------------------------------------------------------------------------------------------


TABLE: dict[str, Any] = {
    "target": "m", "asked": 200, "best_single_operator": None, "k": None, "plan_search": None,
}  # fmt: skip


def sections(policy: int, best_plan: int, *, n: int = 200, guard: int = 10) -> dict[str, Any]:
    """Return the sections of two methods that are right on so many of n questions."""
    questions = [Question(id=str(i), text=f"question {i}", accept=(f"t{i}",)) for i in range(n)]
    outcomes = {
        name: [Outcome(question_id=q.id, success=float(i < right), score=0.5, calls=2) for i, q in enumerate(questions)]
        for name, right in (("identity", 0), ("best_plan", best_plan), ("policy", policy))
    }
    refused = {name: [Outcome(question_id="g", refused=name != "policy" or guard > 5)] for name in outcomes}
    results = Results(questions=questions, outcomes=outcomes, guard=[Question(id="g", text="g")], guarded=refused)
    rows, report = results.rows(), summarize(results)
    return results_of(report, {}, evaluation_of(*rows)) | {"rows": rows, "report": report}


def test_the_page_says_what_the_plan_is_and_that_best_of_k_is_a_vote() -> None:
    report = sections(100, 20)["report"]
    report["methods"]["best_of_k"] = report["methods"]["identity"]
    more = {"votes": True, "plan_search": {"best": {"plan": "clean > restate"}}}
    answer = results_of(report | more, {}, evaluation_of())["answer"]
    assert answer["plan"] == "clean > restate"
    assert {row["method"]: row["note"] for row in answer["methods"] if "note" in row} == {
        "best_of_k": "k tries, a vote"
    }


def test_few_questions_and_a_weaker_guard_are_warned_of() -> None:
    warnings = sections(4, 2, n=8, guard=0)["answer"]["warnings"]
    assert warnings[0] == "8 held-out questions: differences under 40 points mean nothing."
    assert warnings[1] == (
        "policy refuses 0.0 % of the requests that should be refused, the original question 100.0 %."
    )
    assert not any("mean nothing" in line for line in sections(4, 2)["answer"]["warnings"])


def test_an_operator_whose_rewrites_are_often_rejected_is_warned_of() -> None:
    counts = {"slang": {"rewrites": 20, "rejected": {"answer": 1}}, "terms": {"rewrites": 21, "rejected": {"names": 1}}}
    found = results_of(sections(4, 2)["report"] | {"rewrites": counts}, {}, evaluation_of())["answer"]["warnings"]
    assert [line for line in found if line.startswith("Guards: ")] == [
        "Guards: rejected rewrites (the wording stays): slang 5% of 20 (answer 1)."
    ]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_means_of_calls_are_weighted_by_calls() -> None:
    figures = Figures()
    row = {"wall_s": 1.0, "llm/limit": 8.0}
    figures.metrics(
        0,
        [{**row, "step": 1, "llm/calls": 10, "llm/calls_per_s": 4.0, "llm/latency_s": 1.0, "llm/queue_wait_s": 0.5}],
    )
    figures.metrics(
        0,
        [{**row, "step": 2, "llm/calls": 40, "llm/calls_per_s": 8.0, "llm/latency_s": 0.2, "llm/queue_wait_s": 0.1}],
    )
    found = {row["name"]: row["value"] for row in figures.calls(server="", summary={})["rows"]}
    assert found["llm/latency_s"] == pytest.approx((10 * 1.0 + 30 * 0.2) / 40)
    assert found["service time"] == pytest.approx((10 * 0.5 + 30 * 0.1) / 40)
    assert found["calls in flight"] == pytest.approx((10 * 4 + 30 * 1.6) / 40)
    assert found["share of the limit"] == pytest.approx(found["calls in flight"] / 8)


def test_counters_that_start_again_on_resume_are_added() -> None:
    figures = Figures()
    rows = [
        {"step": n, "wall_s": 0.0, "llm/calls": 10 * n, "llm/retries": value} for n, value in enumerate((2, 5, 1, 3))
    ]
    figures.metrics(0, rows)
    found = {row["name"]: row["value"] for row in figures.calls(server="", summary={})["rows"]}
    assert (found["llm/retries"], found["llm/calls"]) == (8, 30)


def test_failures_are_counted_by_kind_and_operator_and_by_length() -> None:
    figures = Figures()
    failed = {"valid": False, "error": {"kind": "timeout", "message": "late"}}
    for row in (
        step("expand", **failed),
        step("expand", **failed),
        step("ask", question="x" * 60, **failed),
        step("ask"),
    ):
        figures.add_step(row)
    data = figures.calls(server="http://host", summary={})
    assert data["failures"] == [
        {"kind": "timeout", "operator": "expand", "server": "http://host", "count": 2},
        {"kind": "timeout", "operator": "ask", "server": "http://host", "count": 1},
    ]
    assert data["invalid_by_length"] == [
        {"from": 0, "to": 50, "steps": 3, "invalid": 2}, {"from": 51, "to": 100, "steps": 1, "invalid": 1},
    ]  # fmt: skip


def test_validation_success_has_wilsons_interval() -> None:
    figures = Figures()
    row = {"step": 0, "wall_s": 0.0, "validation/success": 0.5, "validation/questions": 12, "validation/unscored": 2}
    columns = figures.metrics(0, [row])["columns"]
    assert columns["validation/success_low"] == [pytest.approx(0.2366, abs=1e-4)]
    assert columns["validation/success_high"] == [pytest.approx(0.7634, abs=1e-4)]
    assert [chart["title"] for chart in learning_of(figures, None)["charts"]] == ["Success on validation questions"]


def test_costs_have_bounds_where_the_replies_are_unknown() -> None:
    price = Price(prompt=1.0, reply=4.0)
    assert price.of((1e6, 0.25e6)) == pytest.approx(1.75)
    assert str(price.of((1e6, None))).startswith("1 to 4; ")


# --- texts -----------------------------------------------------------------------------------------------------------


def test_each_text_is_sent_once() -> None:
    table = TextTable(3, lambda text: text.replace("secret", "***"))
    assert table.numbers(["a", "b", "a", "secret", None]) == [0, 1, 0, 2, NO_TEXT]
    assert list(table.take()) == [{"kind": "texts", "run": 3, "items": ["a", "b", "***"]}]
    assert table.numbers(["b", "\ud800"]) == [1, 3]
    assert list(table.take()) == [{"kind": "texts", "run": 3, "items": ["\ufffd"]}]
    assert list(table.take()) == []


def test_how_good_p_right_is_has_a_bin_for_each_tenth_and_is_left_out_without() -> None:
    point = {"plan": "ask", "steps": ["a"], "success": 0.5, "success_ci": [0.4, 0.6], "score": 0.5, "calls": 1.0,
             "questions": 20}  # fmt: skip
    search = {
        "best": point,
        "front": {},
        "calls": 9,
        "p_right": {"brier": 0.2, "reliability": [{"n": 10, "mean_p": 0.4, "rate": 0.5}]},
    }
    found = results_of(None, {"plan": point, "search": search}, Evaluation(TextTable(0, str)))["p_right"]
    assert found["brier"] == 0.2
    low, high = found["reliability"][0]["rate_ci"]
    assert low < 0.5 < high
    for earlier in ({"brier": 0.2}, None):
        sections = results_of(
            None, {"plan": point, "search": search | {"p_right": earlier}}, Evaluation(TextTable(0, str))
        )
        assert "p_right" not in sections


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
    results = BenchmarkResults(about="", slots=4, advice=None, num_queries=10)
    results.add(("async", 4), run_of(3, 4.0))
    assert "were cut" in results.remark
    results.add(("async", 4), run_of(20, 5.0))
    results.add(("async", 4), run_of(2, 1.0))
    assert results.runs[("async", 4)] == [run_of(20, 5.0)]
    assert results.remark == ""


def test_the_speed_up_is_against_the_median_of_the_sequential_runs() -> None:
    results = BenchmarkResults(about="", slots=4, advice=None, num_queries=10)
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
