"""The client and a run against a real server that is not ours: llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from query_mutator.commands.main import main
from query_mutator.files.json_lines import read_json_lines
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.stack import build_client
from query_mutator.types import ChatRequest
from tests.integration.conftest import EVERY_STEP
from tests.integration.killing import start
from tests.integration.llama_server import CONTEXT, MODEL, LlamaServer

pytestmark = pytest.mark.slow
STEPS = 96


@pytest.fixture(scope="module", params=[1, 4])
def server(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LlamaServer]:
    with LlamaServer(tiny_gguf, slots=request.param) as running:
        yield running


def ask(text: str, **fields: object) -> ChatRequest:
    return ChatRequest.user(text, model=MODEL, max_tokens=24, **fields)


def test_replies_have_counts_and_times(server: LlamaServer) -> None:
    backend = OpenAIBackend(server.url)
    for number in range(6):
        request = ask(f"question {number}", seed=number)
        whole = backend.complete(request)
        assert whole.ok
        assert min(whole.prompt_tokens, whole.completion_tokens) > 0
        assert 0 < whole.eval_s < whole.latency_s
    assert backend.models() == (MODEL,)
    backend.close()


def test_as_many_calls_as_there_are_slots_and_more_get_their_own_reply(server: LlamaServer) -> None:
    backend = OpenAIBackend(server.url, pool_size=8)
    requests = [ask(f"number {number}", seed=0) for number in range(32)]
    alone = [backend.complete(request).text for request in requests]
    with ThreadPoolExecutor(8) as pool:
        together = [reply.text for reply in pool.map(backend.complete, requests)]
    backend.close()
    assert len(set(alone)) > 16
    assert together == alone


def test_a_prompt_beyond_the_context_of_a_slot_is_an_error_with_both_numbers(server: LlamaServer) -> None:
    backend = OpenAIBackend(server.url)
    reply = backend.complete(ask("word " * CONTEXT))
    backend.close()
    assert reply.error is not None
    assert (reply.error.kind, reply.error.status, reply.text) == ("prompt_too_long", 400, "")
    assert f"exceeds the available context size ({CONTEXT} tokens)" in reply.error.message
    assert "--ctx-size" in reply.error.message


def test_the_server_reports_its_slots_and_its_context(server: LlamaServer) -> None:
    backend = OpenAIBackend(server.url)
    assert (backend.slots(MODEL), backend.context(MODEL)) == (server.slots, CONTEXT)
    backend.close()


def test_doctor_says_the_slots_that_the_server_reports(server: LlamaServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--openai-url", server.url]) == 0
    doctor = capsys.readouterr().out
    fix = "start it with {} slots (vLLM --max-num-seqs, llama-server --parallel)"
    answers = f"server answers {server.slots} call{'s' * (server.slots > 1)} at a time: {fix}"
    assert f"slots:   {server.slots}, as the server reports" in doctor
    assert f"set:     --batch-size {server.slots} --num-processes {2 * server.slots}: at most" in doctor
    assert f"context: {CONTEXT} tokens: a reply of 256 leaves {CONTEXT - 256} for a prompt" in doctor
    assert "reload:  none, calls set no options of the loaded model" in doctor
    assert answers.format(8) in doctor
    assert ("batching cannot help" in doctor) == (server.slots == 1)


def test_a_reply_that_ends_at_the_token_limit_is_marked(server: LlamaServer) -> None:
    backend = OpenAIBackend(server.url)
    replies = [backend.complete(ask(f"how long {number}")) for number in range(20)]
    backend.close()
    assert {reply.hit_limit for reply in replies} == {True, False}
    assert all(reply.hit_limit == (reply.completion_tokens == 24) for reply in replies)


def test_a_server_that_is_killed_and_restarted_is_used_again(tiny_gguf: Path) -> None:
    with LlamaServer(tiny_gguf) as server:
        stack = build_client(server.url, backend="openai", max_retries=0)
        first = stack.client.complete(ask("one", seed=0))
        server.kill()
        gone = stack.client.complete(ask("two"))
        server.start()
        again = stack.client.complete(ask("one", seed=0))
        stack.close()
    assert gone.error is not None
    assert gone.error.kind == "connect"
    assert (first.ok, again.text) == (True, first.text)


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
        *("--cache", "eval"),  # the advice on slots comes after enough calls
    ]


def steps_taken(run: Path) -> list[tuple[int, int]]:
    return sorted((row["env"], row["step"]) for row in read_json_lines(run / "transcripts.jsonl"))


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


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
