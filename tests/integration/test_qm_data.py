"""`qm data`, `qm gym`: lengths, plans, shards, batches, puzzles, and training rows of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from query_mutator.batching import LengthCache, ReplayBuffer
from query_mutator.cli.console import exit_code
from query_mutator.files import read_json_lines
from tests.qm_command import qm
from tests.tiny_lm import pairs, write_rows
from train_query_mutator import main as train_main


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", pairs(60))


@pytest.fixture
def cache(rows: Path, tiny_tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "lengths.jsonl"
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_tokenizer, "-o", path) == 0
    capsys.readouterr()
    return path


def build(cache: Path, folder: Path, *flags: str | Path) -> Path:
    assert qm("data", "batchplan", "build", "-l", cache, "-o", folder, "-b", "256", *flags) == 0
    return folder


@pytest.fixture
def plan(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = build(cache, tmp_path / "plan", "-e", "2")
    capsys.readouterr()
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("suffix", ["jsonl", "bin"])
def test_lengths_are_built_and_described(
    rows: Path, tiny_tokenizer: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = rows.with_name(f"lengths.{suffix}")
    assert qm("data", "lengths", "build", "-d", rows, "-t", tiny_tokenizer, "-o", out, "--json") == 0
    built = told(capsys)
    assert (built["samples"], built["bad_rows"]) == (60, 0)
    assert qm("data", "lengths", "stats", "-c", out, "--json") == 0
    stats = told(capsys)
    assert (stats["samples"], stats["total"]) == (60, built["tokens"])
    assert stats["min"] <= stats["p10"] <= stats["median"] <= stats["p99"] <= stats["max"]
    assert LengthCache.load_sync(out).lengths.sum() == built["tokens"]


def test_a_row_that_gives_nothing_is_named_or_counted(
    tmp_path: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "bad.jsonl", [{"text": "sort"}, {"titel": "x"}, {"instruction": "a", "response": ""}])
    build = ("data", "lengths", "build", "-d", data, "-t", tiny_tokenizer, "-o", tmp_path / "l.bin")
    assert qm(*build) == 2
    assert capsys.readouterr().err.startswith(f"qm: {data}:2: no text in the row")
    assert not (tmp_path / "l.bin").exists()
    assert qm(*build, "--skip-bad", "--json") == 0
    report = told(capsys)
    assert (report["samples"], report["bad_rows"]) == (1, 2)
    assert ":2:" in report["first_errors"][0]


def test_verify_says_what_differs_with_exit_code_1(
    plan: Path, tmp_path: Path, tiny_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_rows(tmp_path / "other.jsonl", pairs(59))
    assert qm("data", "lengths", "build", "-d", other, "-t", tiny_tokenizer, "-o", tmp_path / "o.bin") == 0
    capsys.readouterr()
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", tmp_path / "o.bin") == 1
    assert "num_samples differs" in capsys.readouterr().out
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", tmp_path / "lengths.jsonl", "--json") == 0
    assert told(capsys)["match"] is True
    edited = write_rows(tmp_path / "edited.jsonl", [*pairs(59), {**pairs(60)[59], "score": 1}])
    assert qm("data", "lengths", "build", "-d", edited, "-t", tiny_tokenizer, "-o", tmp_path / "e.bin") == 0
    assert qm("data", "batchplan", "verify", "-p", plan, "-l", tmp_path / "e.bin") == 1
    assert "the plan was made for data set" in capsys.readouterr().out


def test_info_of_a_rank_and_shards_agree(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("data", "batchplan", "shard", "-p", plan, "-w", "2", "-o", tmp_path / "shards", "--json") == 0
    assert sum(one["total_samples"] for one in told(capsys)["ranks"].values()) == 2 * 60
    samples = 0
    for rank in range(2):
        assert qm("data", "batchplan", "info", "-p", plan, "-r", str(rank), "-w", "2", "--json") == 0
        asked = told(capsys)
        assert qm("data", "batchplan", "info", "-p", tmp_path / "shards" / f"rank_{rank}", "--json") == 0
        stored = told(capsys)
        assert stored["epochs"] == asked["epochs"]
        samples += stored["epochs"][0]["samples"]
    assert samples == 60
    assert qm("data", "batchplan", "shard", "-p", plan, "-w", "500", "-o", tmp_path / "many") == 2
    assert "500 ranks cannot share" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there_is_one_line(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert qm("data", "lengths", "build", "-d", rows, "-t", tmp_path / "empty", "-o", tmp_path / "l.bin") == 2
    assert "the folder has no loadable tokenizer" in capsys.readouterr().err


def test_gym_run_plays_generated_puzzles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mock = ("gym", "run", "-t", "bytes", "--mock", "--num-episodes", "4", "--steps-per-episode", "3", "--json")
    assert qm(*mock, "--success-rate", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["solved"]) == (12, 4)
    assert qm(*mock, "--max-samples", "5", "--buffer-size", "2", "-o", tmp_path / "b.json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["kept"], report["evicted"]) == (5, 2, 3)
    assert ReplayBuffer.load(tmp_path / "b.json").size == 2


def step(operator: str, rewrite: str, right: float, **fields: Any) -> dict[str, Any]:
    parts = {"right": right, "similarity": 0.0, "answered": 1.0, "meaning": 1.0}
    about = {"env": 0, "episode": 0, "question_id": "q1", "question": "plz sort", "baseline_score": 0.15}
    return {**about, "operator": operator, "rewrite": rewrite, "parts": parts, "valid": True, **fields}


#: Steps of a run, and the instruction, the response and the operators of the one row that they become.
EXPORTED = {
    "the best rewrite of each question, once": (
        [
            step("spelling", "please sort", 0.0),
            step("undo", "plz sort", 0.0),
            step("filler", "sort", 1.0),
            step("neutral", "sort it now", 1.0),
            step("submit", "sort it now", 1.0),
            step("filler", "sort", 1.0, env=1),
            step("filler", "broken", 0.0, env=1, valid=False),
            step("filler", "join", 0.0, question_id="q2", question="join plz", env=2),
            step("submit", "len", 1.0, question_id="q3", question="len", baseline_score=0.85, env=3),
        ],
        ("plz sort", "sort", ["filler"]),
    ),
    "no rewrite that a form gained": (
        [
            step("steps", "plz sort", 1.0, form="steps"),
            step("filler", "sort", 1.0, form="steps"),
            step("as_is", "sort", 0.0, form="as_is"),
            step("steps", "plz sort", 1.0, form="steps", env=1),
            step("spelling", "please sort", 1.0, form="steps", env=1),
            step("as_is", "please sort", 1.0, form="as_is", env=1),
        ],
        ("plz sort", "please sort", ["spelling"]),
    ),
    "no rewrite that a guard rejected": (
        [
            step("spelling", "please sort", 1.0, answer=""),  # asked with the next one only
            step("filler", "please sort", 1.0, guard="length"),
            step("neutral", "join plz", 1.0, guard="answer", question_id="q2", question="join plz", env=1),
        ],
        ("plz sort", "please sort", ["spelling"]),
    ),
    "a line separator within a text": (
        [step("filler", "sort\u2028it", 1.0)],
        ("plz sort", "sort\u2028it", ["filler"]),
    ),
}


def transcript(folder: Path, *lines: str) -> None:
    (folder / "transcripts.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("case", EXPORTED)
def test_steps_become_a_row(case: str, tmp_path: Path) -> None:
    steps, row = EXPORTED[case]
    transcript(tmp_path, *(json.dumps(one, ensure_ascii=False) for one in steps), '{"torn')
    assert qm("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl") == 0
    (found,) = read_json_lines(tmp_path / "rows.jsonl")
    assert (found["instruction"], found["response"], found["operators"]) == row
    assert (found["score"], found["baseline_score"], found["success"]) == (0.85, 0.15, True)


def test_what_is_no_transcript_or_has_other_rewards_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ("data", "export", "--run", tmp_path, "-o", tmp_path / "rows.jsonl")
    transcript(tmp_path, '{"a": 1}', '{"a": 2}', "")
    assert qm(*export) == 2
    assert ":1: not a step of a run, it lacks env" in capsys.readouterr().err
    transcript(tmp_path, json.dumps(step("filler", "sort", 1.0)), "")
    (tmp_path / "config.json").write_text(json.dumps({"flags": {"reward": "similarity=1"}}))
    assert qm(*export) == 2


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
