"""A training, its resume and an evaluation on transformers' own server, with a question that does not fit its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.files.json_lines import read_json_lines
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest
from tests.integration.conftest import EVERY_STEP
from tests.integration.killing import kill_when, start, train
from tests.integration.transformers_server import CONTEXT, TransformersServer, write_model
from tests.qm_command import qm

pytestmark = pytest.mark.slow

LONG = "how do i sort my list " * 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersServer]:
    with TransformersServer(write_model(tmp_path_factory.mktemp("served"))) as running:
        yield running


def test_a_prompt_beyond_the_context_fails_where_num_ctx_says_what_it_is(server: TransformersServer) -> None:
    backend = OpenAIBackend(server.url, runner_options={"num_ctx": CONTEXT})
    assert backend.require_model(server.model) == server.model
    request = ChatRequest.user("how do i sort", model=server.model, max_tokens=8, seed=0)
    whole = backend.complete(request)
    assert whole.text != ""
    assert (whole.completion_tokens, whole.hit_limit) == (8, True)
    error = backend.complete(ChatRequest.user(LONG, model=server.model, max_tokens=8)).error
    backend.close()
    assert error is not None
    assert error.kind == "prompt_too_long"


def test_a_training_that_is_killed_and_resumed_and_an_evaluation(
    server: TransformersServer, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dataset.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"id": "long", "query": LONG, "accept": ["bisect.insort"]}))
    flags = [
        *("--openai-url", server.url, "--target-model", server.model, "--num-ctx", str(CONTEXT), "--encoder", "hash"),
        *("--dataset", str(dataset), "--embedding-dims", "4", "--operators", "neutral,filler"),
        *("--save-dir", str(tmp_path / "runs"), "--save-interval", "1", "--no-evaluate", "--eval-interval", "0"),
        *("--num-processes", "4", "--num-steps", "4", "--batch-size", "4", "--num-mini-batch", "2"),
        *("--num-env-steps", "48", "--target-max-tokens", "8", "--config", str(tmp_path / "short.json"), *EVERY_STEP),
    ]
    (tmp_path / "short.json").write_text('{"mutator_max_tokens": 8}')
    run = tmp_path / "runs" / "latest"
    assert kill_when(start(flags, tmp_path), (run / "resume.previous.pt").exists)
    train(["--resume", str(run), "--openai-url", server.url, "--dataset", str(dataset)], tmp_path)
    said = (tmp_path / "output.txt").read_text()
    rows = list(read_json_lines(run / "transcripts.jsonl"))
    assert sorted((row["env"], row["step"]) for row in rows) == [(env, step) for env in range(4) for step in range(12)]
    assert "long" not in {row["question_id"] for row in rows}
    too_long = json.loads((run / "summary.json").read_text())["prompts_too_long"]
    assert set(too_long) <= {"long"}
    assert ("question long: its prompt" in said) == bool(too_long)
    assert qm("eval", "--checkpoint", run, "--openai-url", server.url, "--dataset", dataset) == 0
    assert f"3 held-out questions, answered by {server.model}" in capsys.readouterr().out
