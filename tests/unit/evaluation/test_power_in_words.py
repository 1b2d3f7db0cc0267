"""What held-out questions can show, by assumption and by an earlier evaluation of the same questions and models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.commands.plan_run import PlanFlags
from query_mutator.evaluation.cost import power_in_words
from query_mutator.types import Question

QUESTIONS = [Question(id=str(n), text=f"{n}?", accept=("yes",), about=str(n // 2)) for n in range(400)]


def write_run(folder: Path, settings: PlanFlags, outcomes: dict[str, list[float | None]], **more: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"flags": {**asdict(settings), **more}}))
    rows = [
        {
            "method": method,
            "set": "test",
            "question_id": str(n),
            "question": f"{n}?",
            "accepted": ["yes"],
            "target": str(n // 2),
            "success": value,
        }
        for method, values in outcomes.items()
        for n, value in enumerate(values)
    ]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> PlanFlags:
    return PlanFlags(save_dir=str(tmp_path), dataset="general", backend="recorded")


def test_without_an_evaluation_shares_are_assumed(settings: PlanFlags) -> None:
    assert power_in_words(QUESTIONS, settings) == (
        "400 held-out questions show differences of 8.5 points or more, 2 points take 7,193 (paired, 5 % two-sided, "
        "80 % power; methods that differ on 33% of the questions, correlation 0.1 within a target: assumed)"
    )
    few = "3 held-out questions are too few to show a difference, 2 points take"
    assert power_in_words(QUESTIONS[:3], settings).startswith(few)
    assert power_in_words([], settings).startswith("0 held-out questions are too few to show a difference")


def test_an_evaluation_of_the_same_questions_and_models_is_taken(settings: PlanFlags, tmp_path: Path) -> None:
    half = {"identity": [0.0] * 40, "policy": [1.0, 1, 0, 0] * 10}  # two questions a target: both or none differ
    run = write_run(tmp_path / "one", settings, half)
    write_run(tmp_path / "other", settings, {"identity": [0.0] * 40, "policy": [1.0] * 40}, target_model="x")
    write_run(tmp_path / "alike", settings, {"identity": [0.0] * 40, "policy": [0.0] * 40})
    write_run(tmp_path / "few", settings, {"identity": [0.0] * 19 + [None] * 9, "policy": [1.0] * 28})
    said = power_in_words(QUESTIONS, settings)
    assert said.endswith(f"methods that differ on 50% of the questions, correlation 1 within a target: as in {run})")
    assert "assumed" in power_in_words(QUESTIONS, replace(settings, dataset="questions.jsonl"))


@pytest.mark.parametrize("damaged", ["not JSON\n", "{}\n", "[]\n", '{"method": "a", "question_id": "b"}\n', ""])
def test_a_damaged_evaluation_is_skipped(damaged: str, settings: PlanFlags, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings, {"a": [0.0, 1] * 20, "b": [1.0] * 40})
    assert "assumed" not in power_in_words(QUESTIONS, settings)
    (run / "evaluation.jsonl").write_text(damaged)
    assert "assumed" in power_in_words(QUESTIONS, settings)
    (run / "config.json").write_text(damaged)
    assert "assumed" in power_in_words(QUESTIONS, settings)
