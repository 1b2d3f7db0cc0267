"""A training, its resume and an evaluation on llama.cpp's own server, with a question that does not fit its context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from query_mutator.files.json_lines import read_json_lines
from tests.integration.conftest import EVERY_STEP
from tests.integration.killing import kill_when, start, train
from tests.integration.llama_server import CONTEXT, MODEL, LlamaServer
from tests.qm_command import qm

pytestmark = pytest.mark.slow

STEPS = 96


@pytest.fixture(scope="module", params=[1, 4])
def server(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LlamaServer]:
    with LlamaServer(tiny_gguf, slots=request.param) as running:
        yield running


@pytest.fixture
def flags(dataset: Path, tmp_path: Path) -> list[str]:
    with dataset.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"id": "long", "query": "word " * CONTEXT, "accept": ["bisect.insort"]}))
    return [
        *("--target-model", MODEL, "--encoder", "hash", "--dataset", str(dataset), "--embedding-dims", "4"),
        *("--operators", "spelling,neutral,filler", "--save-dir", str(tmp_path / "runs"), "--save-interval", "1"),
        *EVERY_STEP,
        *("--num-processes", "8", "--num-steps", "4", "--batch-size", "8", "--num-mini-batch", "2"),
        *("--num-env-steps", str(STEPS), "--eval-questions", "3", "--target-max-tokens", "32"),
        *("--mutator-max-tokens", "24", "--cache", "eval"),  # the advice on slots comes after enough calls
    ]


def steps_taken(run: Path) -> list[tuple[int, int]]:
    return sorted((row["env"], row["step"]) for row in read_json_lines(run / "transcripts.jsonl"))


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_training_that_is_killed_and_resumed_and_an_evaluation(
    server: LlamaServer, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "latest"
    checkpoint = run / "checkpoints" / "step_32.pt"
    assert kill_when(start([*flags, "--openai-url", server.url], tmp_path), checkpoint.exists)
    train(["--resume", str(run)], tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert steps_taken(run) == [(env, step) for env in range(8) for step in range(STEPS // 8)]
    assert f"server answers {server.slots} call{'s' * (server.slots > 1)} at a time: start it with 8 slots" in said
    assert ("batching cannot help" in said) == (server.slots == 1)

    found = summary(run)
    assert f"does not fit the context of {MODEL} ({CONTEXT} tokens) and will not be scored; start it with" in said
    assert set(found["prompts_too_long"]) == {"long"}
    assert "long" not in {row["question_id"] for row in read_json_lines(run / "transcripts.jsonl")}
    assert found["invalid_steps"] == 0
    assert f"of the replies ({found['cut_replies']}) ended at the token limit" in said

    assert qm("eval", "--checkpoint", run, "--openai-url", server.url) == 0
    assert f"3 held-out questions, answered by {MODEL}" in capsys.readouterr().out


def test_a_training_waits_for_a_server_that_is_killed_and_returns(
    tiny_gguf: Path, flags: list[str], tmp_path: Path
) -> None:
    with LlamaServer(tiny_gguf, slots=4) as server:
        trainer = start([*flags, "--openai-url", server.url, "--no-evaluate"], tmp_path)
        rows = tmp_path / "runs" / "latest" / "transcripts.jsonl"
        while trainer.is_alive() and not (rows.exists() and rows.stat().st_size):
            trainer.join(0.01)
        server.kill()
        trainer.join(1.0)
        assert trainer.is_alive()
        server.start()
        trainer.join()
    assert trainer.exitcode == 0, (tmp_path / "output.txt").read_text()
    assert len(steps_taken(rows.parent)) == STEPS
    assert summary(rows.parent)["invalid_steps"] == 0
