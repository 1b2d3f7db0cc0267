"""`qm train grpo`: TRL trains a small model by the answers of a model server, half of whose calls fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is in an environment of its own: make install-peers")

from query_mutator.embedded.server import start_server
from query_mutator.llm.hf import local_models
from query_mutator.types import ChatRequest
from tests.conftest import Librarian
from tests.qm_command import qm
from tests.tiny_lm import pairs, save_model, write_rows

STEPS = 3


class Flaky(Librarian):
    """A target that fails on every other question."""

    def reply(self, prompt: str) -> str:
        if int(prompt.split()[-1].rstrip("?")) % 2 == 0:
            raise RuntimeError("out of memory")
        return super().reply(prompt)


def test_a_model_is_trained_by_the_answers_that_its_rewrites_get(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", pairs(8))
    questions = [{"id": str(n), "query": f"how do i sort my list {n}", "accept": ["sorted"]} for n in range(12)]
    write_rows(tmp_path / "questions.jsonl", questions)
    sft, run = tmp_path / "sft", tmp_path / "grpo"
    model = save_model(tmp_path / "base")
    assert qm("train", "sft", "--model", model, "--dataset", rows, "--out", sft, "--max-steps", "1") == 0
    with start_server([Flaky()]) as server:
        argv = ["--model", sft / "model", "--out", run, "--max-steps", str(STEPS), "--group-size", "4"]
        argv += [
            "--dataset",
            tmp_path / "questions.jsonl",
            "--ollama-url",
            server.url,
            "--encoder",
            "hash",
            "--target-model",
            "librarian",
        ]
        assert qm("train", "grpo", *argv, "--max-retries", "0", "--write-tokens", "8", "--reward", "right=1") == 0
        assert qm("train", "grpo", *argv) == 2
    assert f"{run} exists; choose another" in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0 < summary["failed_calls"] < STEPS * 4
    logged = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [*range(1, STEPS + 1)]
    assert all(0 <= row["grpo/reward"] <= 1 for row in logged)
    (trained,) = local_models(f"hf:{run}")
    assert trained.complete(ChatRequest.user("how do i sort", model=trained.name, max_tokens=4)).completion_tokens
    trained.close()
