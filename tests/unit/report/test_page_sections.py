"""The sections of a page by hand, and the table of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from query_mutator.evaluation.summary import Outcome, Results, summarize
from query_mutator.files import write_checked_json
from query_mutator.report.build import write_page
from query_mutator.report.charts import (
    compact,
    fixed,
    interval,
    measure,
    points,
    probability,
    seconds,
    signed,
)  # fmt: skip
from query_mutator.report.run_reader import (
    Evaluation,
    Figures,
    TrainingUsage,
    episodes_of,
    results_of,
    way_of,
    word_diff,
)
from query_mutator.report.table import result_table
from query_mutator.types import Question
from tests.run_page import texts_of

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
    for episode in episodes_of(rows):
        usage.add(episode)
    return usage


# --- choices and gains -----------------------------------------------------------------------------------------------


def test_a_gain_is_booked_to_the_operators_before_the_answer() -> None:
    names = ("spelling", "expand", "ask", "slang", "undo", "expand", "submit")  # undo gives up a rewrite: no gain
    scores = (0.0, 0.0, *[0.6] * 5)
    steps = [
        step(name, score=score, answer="`len`" * (name == "ask")) for name, score in zip(names, scores, strict=True)
    ]
    usage = usage_of([*steps, step("submit", episode=1)])  # the next episode books the rest
    rows = {row["operator"]: (row["chosen"], row["gain"]) for row in usage.gains()}
    assert rows == {"spelling": (1, 0.6), "slang": (1, 0.0), "expand": (2, pytest.approx(0.3))}


def test_a_failed_step_gains_nothing_and_is_still_a_choice() -> None:
    usage = usage_of(
        [step("expand", valid=False, error={"kind": "timeout", "message": ""}), step("ask", score=0.5, answer="x")]
    )
    assert usage.gains() == []
    assert usage.choices.by_step == {0: {"expand": 1}, 1: {"ask": 1}}


def evaluation_of(*rows: Mapping[str, Any]) -> Evaluation:
    evaluation = Evaluation()
    for row in rows:
        evaluation.add(row)
    return evaluation


def row_of(outcome: Outcome, question: Question, *, method: str = "policy") -> dict[str, Any]:
    return {"method": method, "set": "test", **outcome.to_row(question)}


def test_an_answer_belongs_to_the_step_that_asked_its_wording_in_its_form() -> None:
    steps = ("ask", "question_answer", "ask", "undo", "expand", "submit")
    outcome = Outcome(
        question_id="q", success=1.0, score=1.0, steps=steps, rewrites=("how?",) * 4 + ("how come?",) * 2,
        asked=("how?", "how?", "how come?"), forms=("as_is", "question_answer", "as_is"),
        answers=(REFUSAL, "`len`", "`sum`"), parts=({"right": 0.0}, {"right": 1.0}, {"right": 0.0}),
        scores=(0.0, 1.0, 0.0), fits=(0.1, 0.9, 0.2), submitted=1, why="fits best",
    )  # fmt: skip
    way = way_of(row_of(outcome, Question(id="q", text="how?", accept=("len",))))
    assert [step["name"] for step in way] == ["", *steps]
    assert [[answer["answer"] for answer in step["answers"]] for step in way] == [
        [], [REFUSAL], [], ["`len`"], [], [], ["`sum`"],
    ]  # fmt: skip
    assert [answer["submitted"] for step in way for answer in step["answers"]] == [False, True, False]


def test_the_answer_to_the_original_question_comes_before_the_first_rewrite() -> None:
    outcome = Outcome(
        question_id="q", success=1.0, score=1.0, steps=("expand", "submit"), rewrites=("how come?",) * 2,
        asked=("how?", "how come?"), forms=("as_is", "as_is"), answers=("`len`", "`sum`"), parts=({}, {}),
        scores=(0.0, 1.0), fits=(0.1, 0.9),
    )  # fmt: skip
    way = way_of(row_of(outcome, Question(id="q", text="how?")))
    assert [[answer["answer"] for answer in step["answers"]] for step in way] == [["`len`"], [], ["`sum`"]]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("sort it plz", "sort it please", [("span", "sort it "), ("del", "plz"), ("ins", "please")]),
        ("a b c", "x y c", [("del", "a b"), ("ins", "x y"), ("span", " c")]),  # a changed phrase reads as one
        ("a", "a b", [("span", "a"), ("ins", " b")]),
        ("a " * 1000, "b " * 1000, [("del", "a " * 1000), ("ins", "b " * 1000)]),
    ],
)
def test_two_texts_differ_by_words(before: str, after: str, expected: list[tuple[str, str]]) -> None:
    assert word_diff(before, after) == expected


def test_where_the_original_was_asked_the_first_score_is_its_score() -> None:
    (row,) = usage_of([step("expand", baseline_score=0.4, score=0.9, answer="`len`")]).gains()
    assert row["gain"] == pytest.approx(0.5)
    assert all(map(math.isnan, row["gain_ci"]))  # too few


def test_the_time_of_recorded_replies_is_not_shown() -> None:
    outcomes = [Outcome(question_id=str(n), seconds=seconds) for n, seconds in enumerate((4e-6, 0.0, 0.25))]
    rows = [row_of(outcome, Question(id=outcome.question_id, text="how?")) for outcome in outcomes]
    report = sections(4, 2)["report"]
    for is_timed, expected in ((True, 0.25), (False, None)):
        found = results_of({"eval": report}, evaluation_of(*rows), is_timed=is_timed)
        assert found["seconds"].get("policy") == expected
    figures = Figures()
    figures.add({"step": 1, "llm/calls": 10, "llm/latency_s": 1e-5, "llm/queue_wait_s": 0.0, "llm/limit": 8})
    assert {*figures.calls()} - {*figures.calls(is_timed=False)} == {
        "llm/latency_s", "llm/queue_wait_s", "service time", "calls in flight", "share of the limit",
    }  # fmt: skip


# --- the answer ------------------------------------------------------------------------------------------------------


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
    return results_of({"eval": report}, evaluation_of(*rows)) | {"rows": rows, "report": report}


def test_what_a_reader_must_know_stands_above_the_table(tmp_path: Path) -> None:
    report = sections(4, 2, guard=0)["report"] | {"asked": 210, "available": 300, "eval_calls": 9000}
    report["methods"]["best_plan"] |= {"unscored": {"timeout": 3}}
    write_checked_json(tmp_path / "config.json", {"flags": {}})
    write_checked_json(tmp_path / "summary.json", {"eval": report})
    write_page([tmp_path], tmp_path / "page.html")
    texts = texts_of(tmp_path / "page.html")
    for line in (
        "210 of 300 questions were asked: the limit was 9,000 calls.",
        "10 more questions were not finished by all methods.",
        "best_plan: 3 of 200 questions are unscored and excluded from all rates (timeout ×3).",
        "policy refuses 0.0 % of the requests that should be refused, the original question 100.0 %.",
        "One seed: the intervals say nothing about other seeds.",
    ):
        assert line in texts


# --- figures ---------------------------------------------------------------------------------------------------------


def test_means_of_calls_are_weighted_by_calls() -> None:
    figures = Figures()
    row = {"wall_s": 1.0, "llm/limit": 8.0}
    for step, calls, rate, latency, wait in ((1, 10, 4.0, 1.0, 0.5), (2, 40, 8.0, 0.2, 0.1)):
        times = {"llm/calls_per_s": rate, "llm/latency_s": latency, "llm/queue_wait_s": wait}
        figures.add({**row, "step": step, "llm/calls": calls, **times})
    found = figures.calls()
    assert found["llm/latency_s"] == pytest.approx((10 * 1.0 + 30 * 0.2) / 40)
    assert found["service time"] == pytest.approx((10 * 0.5 + 30 * 0.1) / 40)
    assert found["calls in flight"] == pytest.approx((10 * 4 + 30 * 1.6) / 40)
    assert found["share of the limit"] == pytest.approx(found["calls in flight"] / 8)


def test_counters_that_start_again_on_resume_are_added() -> None:
    figures = Figures()
    for n, value in enumerate((2, 5, 1, 3)):
        figures.add({"step": n, "wall_s": 0.0, "llm/calls": 10 * n, "llm/retries": value})
    found = figures.calls()
    assert (found["llm/retries"], found["llm/calls"]) == (8, 30)


def test_failures_are_counted_by_kind_and_operator() -> None:
    figures = Figures()
    failed = {"valid": False, "error": {"kind": "timeout", "message": "late"}}
    for row in (step("expand", **failed), step("expand", **failed), step("ask", **failed), step("ask")):
        figures.add_steps([row])
    assert figures.failures == {("timeout", "expand"): 2, ("timeout", "ask"): 1}


# --- geometry and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fixed(-0.004, 2), "0.00"), (fixed(-1234.5, 1), "−1,234.5"), (fixed(None), "–"), (signed(0.25, 2), "+0.25"),
        (points(-0.028), "−2.8"), (interval((0.1, 0.25)), "[10.0, 25.0]"), (interval(None), ""),
        (compact(0.000012), "1.2e−05"), (compact(0.375), "0.375"), (compact(31.26), "31.3"), (compact(52345), "52.3k"),
        (compact(2_000_000), "2.0M"), (compact(0), "0"), (seconds(0.0042), "4.2 ms"), (seconds(75), "75.0 s"),
        (seconds(7300), "2.0 h"), (measure(0.5, "share"), "50.0 %"), (measure(8192.0, "calls"), "8,192 calls"),
        (probability(1e-5), "< 0.001"),
    ],
)  # fmt: skip
def test_numbers_as_text(shown: str, expected: str) -> None:
    assert shown == expected


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
    "by_group": {
        "slang": {"n": 40, "methods": {"identity": {"success": 0.1}, "policy": {"success": 0.425}}},
        "plain": {"n": 60, "methods": {"identity": {"success": None}, "policy": {"success": 0.55}}},
    },
    "unscored": [],
    "examples": [],
    "verdict": {"deploy": "policy", "sentence": "Deploy the policy."},
}


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"asked": 130}, "100 held-out questions (30 more were not finished), ans"),
        ({"dataset": "own.jsonl"}, "100 questions of own.jsonl that training did not have, answered by"),
        ({"available": 300, "eval_calls": 9000}, "100 of 300 held-out questions, limited to 9,000 calls, answered by"),
        ({"n": 9, "asked": 9}, "9 held-out questions: differences under 38 points mean nothing.\n9 held-out questions"),
    ],
)
def test_the_first_lines_say_which_questions_and_how_many_of_them(changed: dict[str, Any], words: str) -> None:
    assert result_table({**REPORT, **changed}).startswith(words)


@pytest.mark.parametrize(
    ("changed", "column"),
    [({"target_calls_per_question": 2.25}, "to mutator"), ({"guard_refusal": None}, "guard refusals")],
)
def test_a_table_has_no_column_without_a_number(changed: dict[str, Any], column: str) -> None:
    assert column in result_table(REPORT)
    methods = {name: {**method, **changed} for name, method in REPORT["methods"].items()}
    assert column not in result_table({**REPORT, "methods": methods})
