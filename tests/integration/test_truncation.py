"""Runs in which a prompt does not fit the context, or replies end at the token limit: never a score, always a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from query_mutator.files.json_lines import read_json_lines
from query_mutator.testing import start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import EVERY_STEP
from tests.qm_command import qm
from train_query_mutator import main

CONTEXT = 512
LONG = "how do i sort " + "every single one of these words " * 100 + "my list"


def add_long_question(path: Path, name: str, *, text: str = LONG) -> None:
    """Append a question that does not fit the context to a dataset."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"id": "long", "query": text, "accept": [name]}))


def summary(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "latest" / "summary.json").read_text())
    return found


@pytest.mark.parametrize("behave_as", ["0.9", "0.24"])
def test_a_question_that_does_not_fit_is_reported_counted_and_never_scored(
    behave_as: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"id": "other", "query": "plz sort it", "accept": ["min"]}), encoding="utf-8")
    add_long_question(dataset, "bisect.insort")
    add_long_question(held_out, "max", text=f"{LONG} again")  # a text that was trained on is left out
    runs = tmp_path / "runs"
    with start_server([Librarian(), Softener()], num_parallel=8, behave_as=behave_as) as server:
        flags = [
            *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
            *("--encoder", "hash", "--dataset", str(dataset), "--operators", "spelling,neutral,filler"),
            *("--save-dir", str(runs), "--num-processes", "4", "--num-steps", "8", "--num-env-steps", "96"),
            *("--num-ctx", str(CONTEXT), "--embedding-dims", "4", "--num-mini-batch", "2", "--eval-questions", "3"),
            *(*EVERY_STEP, "--cache", "eval"),
        ]
        assert main(flags) == 0
        said = capsys.readouterr().err
        assert qm("eval", "--checkpoint", runs / "latest", "--dataset", held_out, "--max-failure-rate", "1") == 0
        table = capsys.readouterr()
    assert "long" not in {row["question_id"] for row in read_json_lines(runs / "latest" / "transcripts.jsonl")}
    before, after = said.split("question long: its prompt", 1)
    assert f"question long: the prompt (up to about {len(LONG) // 2} tokens) does not fit the context" in before
    assert "give a larger --num-ctx" in before
    found = summary(runs)
    count = found["prompts_too_long"]["long"]
    assert count > 0
    assert f"{count} prompts of question long did not fit the model's context and were not scored" in after
    last = list(read_json_lines(runs / "latest" / "metrics.jsonl"))[-1]
    assert last["llm/prompts_too_long"] == count
    assert last["llm/failed_calls"] >= count
    assert "question long: the prompt" in table.err
    assert "prompt_too_long" in table.out


def test_a_run_whose_replies_end_by_themselves_says_nothing_of_limits(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny_flags) == 0
    found = summary(tmp_path / "runs")
    assert (found["cut_replies"], found["prompts_too_long"]) == (0, {})
    said = capsys.readouterr().err
    assert "token limit" not in said
    assert "context" not in said
