"""The benchmark on logs: its result, and one line for what it cannot read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import logged_arms
from query_mutator.cli.console import exit_code
from tests.unit.confidence.arithmetic_world import write_logs, write_rows

ROW: dict[str, Any] = {"question": "1 + 1?", "gold": 2, "part": "train", "right": {"a": True}, "answers": {"a": "2"}}


def run(*arguments: object) -> int:
    return exit_code(logged_arms.main, [str(argument) for argument in arguments], prog="logged_arms")


@pytest.fixture(autouse=True)
def _few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_arms, "CANDIDATES", ("linear",))


@pytest.mark.parametrize("texts", [("steps",), ("plain", "steps", "short")])
def test_learned_submission_beats_the_vote(tmp_path: Path, texts: tuple[str, ...], capsys: Any) -> None:
    logs = write_logs(tmp_path / "logs", train=150, test=120, texts=texts)
    assert run("--logs", logs, "--json", tmp_path / "result.json", "--refits", 1) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["n"] == 120
    assert result["learned"]["3"] > result["vote"]["3"]
    assert result["learned"]["1"] <= result["learned"]["2"] <= result["learned"]["3"]
    assert result["learned"]["3"] == result["learned"]["6"]  # there are three prompts
    assert 1.35 < result["mean_calls"]["1.5"] < 1.65
    assert set(result["learned"]) == set(result["vote"]) == set(result["rule_vote"]) == {"1", "1.5", "2", "3", "6"}
    out = capsys.readouterr().out
    assert "prompts steps" in out if texts == ("steps",) else "| 3 |" in out


def test_a_question_without_the_first_prompt_begins_with_the_best_that_it_has(tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", train=150, test=120)
    rows = [json.loads(line) for line in gzip.decompress((logs / "logs.jsonl.gz").read_bytes()).splitlines()]
    for at, row in enumerate(rows):
        if row["part"] == "test":
            del row["answers"][("plain", "steps", "short")[at % 3]]
    write_rows(logs, rows)
    assert run("--logs", logs, "--json", tmp_path / "result.json", "--refits", 1) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["learned"]["1"] == result["vote"]["1"]
    assert result["learned"]["2"] > result["vote"]["2"]


def test_few_wrong_answers_suffice_for_every_refit(tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", train=200, test=20, texts=("plain",))
    rows = [json.loads(line) for line in gzip.decompress((logs / "logs.jsonl.gz").read_bytes()).splitlines()]
    wrong = [row for row in rows if row["part"] == "train" and not row["right"]["plain"]]
    for row in wrong[12:]:
        row["right"]["plain"] = True
    write_rows(logs, rows)
    assert run("--logs", logs, "--json", tmp_path / "result.json", "--refits", 5) == 0


def test_the_test_part_is_not_read_for_choices(tmp_path: Path, capsys: Any) -> None:
    logs = write_logs(tmp_path / "logs", train=120, test=30, texts=("plain",))
    assert run("--logs", logs, "--train-only") == 0
    first = capsys.readouterr().out
    rows = [json.loads(line) for line in gzip.decompress((logs / "logs.jsonl.gz").read_bytes()).splitlines()]
    write_rows(logs, [row for row in rows if row["part"] == "train"])
    assert run("--logs", logs, "--train-only") == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": 3}, "`question`"), ({"part": None}, "`part`"), ({"right": []}, "`right`"),
        ({"right": {"a": "perhaps"}}, "'perhaps'"), ({"answers": {"a": 3}}, "'a' is not a text"),
        ({"answers": "x"}, "`answers`"), ({"gold": {}}, "`gold`"), ({"part": "test"}, "has the part 'train'"),
        ({}, "too few"), ({"answers": {}}, "no graded answers"),
    ],
)  # fmt: skip
def test_malformed_rows_end_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str, capsys: Any) -> None:
    (tmp_path / "prompts.json").write_text('{"a": "x"}', encoding="utf-8")
    write_rows(tmp_path, [ROW | changes])
    assert run("--logs", tmp_path, "--json", tmp_path.parent / "result.json") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # or the name of a test depends on the second of its collection


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", packed(b"{}")[:-9], packed(b"[1]\n"), packed(b"\xff\n"), None],
)
def test_unreadable_files_end_in_one_line(tmp_path: Path, content: bytes | None, capsys: Any) -> None:
    (tmp_path / "prompts.json").write_text("{}", encoding="utf-8")
    if content is not None:
        (tmp_path / "logs.jsonl.gz").write_bytes(content)
    assert run("--logs", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_grades_and_gold_of_any_type_are_read(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('{"b": ""}', encoding="utf-8")
    rows = [ROW | {"gold": gold, "right": {"a": grade, "b": None}} for gold, grade in
            [(2.0, "True"), ("2", "false"), (None, 1), (["two", "2"], 0.0), (2.5, False)]]  # fmt: skip
    write_rows(tmp_path, rows)
    prompts, logs = logged_arms.read_logs(tmp_path)
    assert prompts == ["b", "a"]
    assert [log.right["a"] for log in logs] == [True, False, True, False, False]
    assert [log.gold for log in logs] == ["2", "2", None, "two", "2.5"]
    assert all("b" not in log.right for log in logs)
