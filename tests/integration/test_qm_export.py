"""`qm data export`: a real run's transcripts become rows, and made-up steps become the rows they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.files.json_lines import read_json_lines
from tests.qm_command import qm
from tests.tiny_lm import write_rows
from train_query_mutator import main as train_main


def step(operator: str, rewrite: str, right: float, **fields: Any) -> dict[str, Any]:
    parts = {"right": right, "similarity": 0.0, "answered": 1.0, "meaning": 1.0}
    about = {"env": 0, "episode": 0, "question_id": "q1", "question": "plz sort", "baseline_score": 0.15}
    return {**about, "operator": operator, "rewrite": rewrite, "parts": parts, "valid": True, **fields}


STEPS = [
    step("spelling", "please sort", 0.0),
    step("undo", "plz sort", 0.0),
    step("filler", "sort", 1.0),
    step("neutral", "sort it now", 1.0),
    step("submit", "sort it now", 1.0),
    step("filler", "sort", 1.0, env=1),
    step("filler", "broken", 0.0, env=1, valid=False),
    step("filler", "join", 0.0, question_id="q2", question="join plz", env=2),
    step("submit", "len", 1.0, question_id="q3", question="len", baseline_score=0.85, env=3),
]


def exported(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    write_rows(tmp_path / "transcripts.jsonl", STEPS)
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl", *flags) == 0
    return list(read_json_lines(tmp_path / "rows.jsonl"))


def test_the_best_rewrite_of_each_question_is_kept_once(tmp_path: Path) -> None:
    assert exported(tmp_path) == [
        {"id": "q1", "instruction": "plz sort", "response": "sort", "score": 0.85, "baseline_score": 0.15,
         "success": True, "operators": ["filler"]},
    ]  # fmt: skip


def test_every_rewrite_that_gained_with_the_way_to_it(tmp_path: Path) -> None:
    rows = exported(tmp_path, "--every")
    assert [(row["id"], row["response"], row["operators"]) for row in rows] == [
        ("q1", "sort", ["filler"]),
        ("q1#2", "sort it now", ["filler", "neutral"]),
    ]


def test_what_a_form_gained_is_no_rewrite(tmp_path: Path) -> None:
    framed = [
        step("steps", "plz sort", 1.0, form="steps"),
        step("filler", "sort", 1.0, form="steps"),
        step("as_is", "sort", 0.0, form="as_is"),
        step("steps", "plz sort", 1.0, form="steps", env=1),
        step("spelling", "please sort", 1.0, form="steps", env=1),
        step("as_is", "please sort", 1.0, form="as_is", env=1),
    ]
    write_rows(tmp_path / "transcripts.jsonl", framed)
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl", "--every") == 0
    (row,) = read_json_lines(tmp_path / "rows.jsonl")
    assert (row["response"], row["operators"]) == ("please sort", ["spelling"])


def test_a_rejected_rewrite_is_none_and_its_operator_none_of_the_way(tmp_path: Path) -> None:
    steps = [
        step("spelling", "please sort", 1.0, answer=""),  # asked with the next one only
        step("filler", "please sort", 1.0, guard="length"),
        step("neutral", "join plz", 1.0, guard="answer", question_id="q2", question="join plz", env=1),
    ]
    write_rows(tmp_path / "transcripts.jsonl", steps)
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl") == 0
    (row,) = read_json_lines(tmp_path / "rows.jsonl")
    assert (row["instruction"], row["response"], row["operators"]) == ("plz sort", "please sort", ["spelling"])


def test_questions_that_are_right_already_stay_as_they_are(tmp_path: Path) -> None:
    rows = exported(tmp_path, "--keep-unchanged")
    assert [(row["instruction"], row["response"]) for row in rows] == [("plz sort", "sort"), ("len", "len")]


def test_rewards_of_the_run_decide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"flags": {"reward": "similarity=1"}}))
    write_rows(tmp_path / "transcripts.jsonl", STEPS)
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl") == 2


def test_a_line_separator_within_a_text_is_no_end_of_line(tmp_path: Path) -> None:
    text = "sort\u2028it"
    rows = [json.dumps(step("filler", text, 1.0), ensure_ascii=False), '{"torn']
    (tmp_path / "transcripts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl", "--json") == 0
    (row,) = read_json_lines(tmp_path / "rows.jsonl")
    assert row["response"] == text


def test_a_real_run_becomes_rows(tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(train_main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    capsys.readouterr()
    out = tmp_path / "rows.jsonl"
    assert qm("data", "export", "--run", tmp_path / "runs" / "latest", "-o", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    rows = list(read_json_lines(out))
    assert report["rows"] == len(rows) > 0
    assert report["steps"] == 64
    assert all(row["score"] > row["baseline_score"] and row["response"] != row["instruction"] for row in rows)
    assert len({row["instruction"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file; give a run folder"), ('{"a": 1}\n{"a": 2}\n', ":1: not a step of a run, it lacks baseline")],
)
def test_what_is_no_transcript_is_one_line(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "transcripts.jsonl").write_text(content)
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl") == 2
    assert said in capsys.readouterr().err
