"""What pairs of real traffic show, by hand: rates, differences, the judge, and when nothing is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import UsageError
from query_mutator.files import encode
from query_mutator.runs.shadow import HEADER, read_shadow, shadow_result

REFUSAL = "I'm sorry, but I can't help with that."


def way(answer: str = "Use sorted.", **more: Any) -> dict[str, Any]:
    refused = answer == REFUSAL
    fields = {"fit": 0.5, "chars": len(answer), "tokens": 3, "calls": 1, "seconds": 0.5, "not_sure": False}
    return {"answer": answer, "refused": refused, **fields, **more}


def pair(number: int, original: dict[str, Any], rewritten: dict[str, Any], **more: Any) -> dict[str, Any]:
    question = f"question {number}"
    about = {"time": f"2026-01-01T00:00:{number % 60:02}", "model": "m+qm", "mode": "gate", "decision": "rewritten"}
    row = {**about, "sent": "rewritten", "operators": ["neutral"], "question": question, "rewrite": f"{question}?"}
    return {**row, "original": original, "rewritten": rewritten, "judge": None, **more}


def rows(*, refused: int, both: int, neither: int) -> list[dict[str, Any]]:
    kinds = [(REFUSAL, "fine")] * refused + [(REFUSAL, REFUSAL)] * both + [("fine", "fine")] * neither
    return [pair(number, way(one), way(other)) for number, (one, other) in enumerate(kinds)]


def row_of(result: dict[str, Any], metric: str, comparison: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in result["comparisons"][comparison]["rows"] if row["metric"] == metric)
    return found


def test_fewer_refusals_are_counted_and_tested() -> None:
    result = shadow_result(rows(refused=20, both=10, neither=30))
    found = row_of(result, "refused")
    assert (found["theirs"], found["ours"], found["difference"]) == (0.5, pytest.approx(1 / 6), pytest.approx(-1 / 3))
    assert (found["more"], found["less"], found["verdict"]) == (0, 20, "less")
    assert found["p"] == pytest.approx(2 * 0.5**20)
    low, high = found["ci"]
    assert low < -1 / 3 < high < 0
    assert result["sentence"].startswith(
        "With rewriting, on 60 questions of real traffic: refused less often (-33.3 points"
    )
    assert '"not sure" inconclusive (+0.0 points' in result["sentence"]


def test_an_interval_that_includes_0_is_inconclusive() -> None:
    result = shadow_result(rows(refused=2, both=1, neither=30))
    assert row_of(result, "refused")["verdict"] == "inconclusive"
    assert "refused inconclusive (-6.1 points" in result["sentence"]


def test_a_question_asked_again_counts_once() -> None:
    said = ("the same", "The  SAME ")
    again = [{**row, "question": said[n % 2]} for n, row in enumerate(rows(refused=30, both=0, neither=0))]
    result = shadow_result([*again, *rows(refused=0, both=0, neither=3)])
    assert result["questions"] == 4
    assert row_of(result, "refused")["verdict"] == "inconclusive"
    mean = row_of(result, "chars")
    assert mean["less"] == 1
    assert mean["difference"] == pytest.approx((4 - len(REFUSAL)) / 4)


def test_what_was_sent_is_compared_where_it_is_another_way() -> None:
    kept = [pair(n, way("fine"), way("finer"), sent="original") for n in range(100, 110)]
    result = shadow_result([*rows(refused=10, both=0, neither=0), *kept])
    assert [found["ours"] for found in result["comparisons"]] == ["rewritten", "sent"]
    assert row_of(result, "chars")["difference"] == pytest.approx((10 * (4 - len(REFUSAL)) + 10) / 20)
    assert row_of(result, "chars", 1)["difference"] == pytest.approx(10 * (4 - len(REFUSAL)) / 20)
    assert len(shadow_result(rows(refused=1, both=0, neither=0))["comparisons"]) == 1


def test_the_judge_has_an_exact_sign_test() -> None:
    choices = ["rewritten"] * 9 + ["original"] + ["tie"] * 5
    judged = [pair(n, way("a"), way("b"), judge={"model": "j", "choice": one}) for n, one in enumerate(choices)]
    found = shadow_result(judged)["comparisons"][0]["judge"]
    assert (found["wins"], found["losses"], found["ties"], found["models"]) == (9, 1, 5, ["j"])
    assert found["p"] == pytest.approx(2 * (1 + 10) / 2**10)
    assert found["verdict"] == "more"
    even = [
        {**row, "judge": {"model": "j", "choice": ("original", "rewritten")[n % 2]}} for n, row in enumerate(judged)
    ]
    assert shadow_result(even)["comparisons"][0]["judge"]["verdict"] == "inconclusive"


def test_figures_that_a_server_does_not_report_are_left_out() -> None:
    result = shadow_result([pair(0, way(tokens=None), way()), pair(1, way(tokens=2), way())])
    assert row_of(result, "tokens")["pairs"] == 1
    result = shadow_result([pair(0, way(tokens=None), way())])
    assert "tokens" not in [row["metric"] for row in result["comparisons"][0]["rows"]]


def test_no_pair_is_no_verdict() -> None:
    assert shadow_result([])["sentence"] == "No question was answered both ways yet."


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    good = pair(0, way(), way())
    for name, lines in (
        ("other", [good]),
        ("empty", []),
        ("lacks", [HEADER, {**good, "original": {}}]),
        ("newer", [{**HEADER, "version": 2}, good]),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
        with pytest.raises(UsageError, match=name):
            read_shadow(path)
