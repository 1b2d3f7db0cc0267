"""Summaries of evaluations: an unscored question counts in no rate, mean or difference, and is reported."""

from __future__ import annotations

import math

import pytest

from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.outcomes import Outcome, check_failures, check_report, difference, summarize
from query_mutator.types import ErrorInfo

GOOD = Outcome(question_id="a", success=1.0, score=0.8, calls=2, target_calls=1)
POOR = Outcome(question_id="b", success=0.0, score=0.2, calls=4, target_calls=3, refused=True)
LOST = Outcome(question_id="c", error=ErrorInfo(kind="timeout", message="no reply"))


def test_unscored_questions_are_counted_apart() -> None:
    summary = summarize([GOOD, POOR, LOST], [POOR, LOST])
    assert (summary["scored"], summary["unscored"], summary["guard_unscored"]) == (2, {"timeout": 1}, {"timeout": 1})
    assert (summary["success"], summary["score"], summary["false_refusal"]) == (0.5, 0.5, 0.5)
    assert (summary["guard_refusal"], summary["calls_per_question"]) == (1.0, 3.0)


def test_a_difference_is_over_the_questions_that_both_scored() -> None:
    found = difference([GOOD, GOOD, LOST, POOR], [POOR, LOST, GOOD, POOR])
    assert (found["success"], found["questions"]) == (0.5, 2)
    assert all(-1 <= end <= 1 for end in found["success_ci"])
    assert math.isnan(difference([GOOD], [LOST])["success"])


def test_failures_past_the_share_end_an_evaluation_and_up_to_it_do_not() -> None:
    check_failures({}, 0, max_failure_rate=0.0)
    check_failures({"timeout": 3, "empty": 2}, 50, max_failure_rate=0.1)
    with pytest.raises(TooManyFailuresError, match=r"6 of 50 questions .* most often 'timeout'.*--max-failure-rate"):
        check_failures({"empty": 2, "timeout": 4}, 50, max_failure_rate=0.1)


def test_the_share_of_a_report_is_that_of_all_its_methods() -> None:
    report = {"n": 10, "methods": {"one": {"unscored": {"timeout": 2}}, "other": {"unscored": {"timeout": 1}}}}
    check_report(report, max_failure_rate=0.15)
    with pytest.raises(TooManyFailuresError, match="3 of 20"):
        check_report(report, max_failure_rate=0.14)
