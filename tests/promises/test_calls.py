"""Model calls: how many are in flight, what they do not change, and what a failed one is worth."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import ollama_utils
from tests.promises.helpers import (
    TRAIN,
    Command,
    ModelServer,
    good,
    last_metrics,
    latest,
    model_server,
    questions,
    resume,
    run,
    server_flags,
    summary,
    train,
    train_flags,
    transcript,
    weights,
    write_questions,
)


def test_in_flight_never_above_batch_size(own_server: ModelServer, tmp_path: Path) -> None:
    """Calls in flight, of mutator and target together, never exceed --batch-size in training and its evaluation."""
    own_server.set(latency_ms=50, latency_sigma=1)
    train(own_server, tmp_path, "--num-processes", "8", "--batch-size", "3", "--evaluate", "--plan-calls", "0")
    seen = own_server.stats()
    assert seen["max_in_service"] == 3
    assert min(seen["calls_by_model"][model] for model in ("librarian", "softener")) > 10


def test_functions_keep_order_and_batch_size(own_server: ModelServer) -> None:
    """The batch functions of `ollama_utils` answer in the order of the queries with batch_size calls in flight."""
    own_server.set(latency_ms=200, latency_sigma=1)
    texts = [row["query"] for row in questions()]
    answers = ollama_utils.batch_query_target_model(texts, model="echo", url=own_server.url, batch_size=5)
    assert answers == texts
    assert own_server.stats()["max_in_service"] == 5


@pytest.mark.parametrize("algo", ["ppo", "direct"])
def test_batching_changes_no_bit(algo: str, own_server: ModelServer, tmp_path: Path) -> None:
    """With --deterministic, --no-batching and 1, 3 and 16 calls in flight give the same transcript and weights."""
    own_server.set(latency_ms=3, latency_sigma=1.5)
    found = []
    for number, how in enumerate((["--no-batching"], *(["--batch-size", size] for size in ("1", "3", "16")))):
        where = ("--save-dir", str(tmp_path / str(number)))
        flags = [*train_flags(own_server, tmp_path, algo=algo), "--deterministic", *how, *where]
        good(run([*TRAIN, *flags], cwd=tmp_path))
        found.append((tmp_path / str(number) / "latest").resolve())
    rows = transcript(found[0])
    assert len(rows) == 64
    assert len({row["answer"] for row in rows}) > 5
    for other in found[1:]:
        assert transcript(other) == rows
        assert weights(other) == weights(found[0])


def test_failed_call_is_never_a_reward(own_server: ModelServer, tmp_path: Path) -> None:
    """A step whose call failed has an error and no reward, is masked from learning, and is counted."""
    own_server.set(faults=0.3)
    found = train(own_server, tmp_path, "--max-retries", "0", "--max-failure-rate", "1", "--num-steps", "16")
    rows, last = transcript(found), last_metrics(found)
    invalid = [row for row in rows if not row["valid"]]
    assert len(rows) == 64
    assert 5 < len(invalid) < 40
    assert all(row["error"]["kind"] and row["reward"] == 0 for row in invalid)
    assert not any(row["error"] for row in rows if row["valid"])
    assert last["llm/invalid_steps"] == summary(found)["invalid_steps"] == len(invalid)
    assert last["counters/samples_learned"] == 4 * (len(rows) - len(invalid))  # four passes over each rollout
    # A connection that is reset is opened again: the call is not failed yet.
    assert 0 < last["llm/failed_calls"] <= sum(own_server.stats()["faults"].values())


def test_retried_call_is_no_failure(own_server: ModelServer, tmp_path: Path) -> None:
    """A call that fails once is retried, and the run ends with the transcript of a run without failures."""
    whole = transcript(train(own_server, tmp_path, "--deterministic"))
    own_server.set(faults=0.15, seed=3)
    found = train(own_server, tmp_path, "--deterministic")
    assert sum(own_server.stats()["faults"].values()) > 3
    assert [{**row, "calls": 0} for row in transcript(found)] == [{**row, "calls": 0} for row in whole]


def test_too_many_failures_stop_the_run(own_server: ModelServer, tmp_path: Path) -> None:
    """Past --max-failure-rate a run stops with exit code 3 and a checkpoint; --resume that allows more continues it."""
    own_server.set(faults=0.5)
    flags = train_flags(own_server, tmp_path, steps=128)
    stopped = run([*TRAIN, *flags, "--max-retries", "0", "--max-failure-rate", "0.1"], cwd=tmp_path)
    assert stopped.returncode == 3
    assert "Traceback" not in stopped.stderr
    assert f"--resume {latest(tmp_path)}" in stopped.stderr
    assert (latest(tmp_path) / "resume.pt").exists()
    own_server.set(faults=0)
    good(run([*TRAIN, *resume(own_server, latest(tmp_path)), "--max-failure-rate", "1"], cwd=tmp_path))
    assert len(transcript(latest(tmp_path))) == 128


@pytest.mark.parametrize("away_s", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_server_that_is_away_costs_no_step(away_s: float, tmp_path: Path) -> None:
    """A run waits for a server that is away for some seconds, and no step of it is invalid."""
    with model_server(latency_ms=5) as server:
        command = Command([*TRAIN, *train_flags(server, tmp_path), "--max-retries", "0"], cwd=tmp_path)
        assert command.wait_for(lambda: server.stats()["calls_by_model"].get("librarian", 0) > 10)
        server.kill()
        time.sleep(away_s)
        assert command.poll() is None
        server.start()
        good(command.wait())
        assert server.stats()["calls_by_model"]["librarian"] > 5
    rows = transcript(latest(tmp_path))
    assert len(rows) == 64
    assert all(row["valid"] for row in rows)


@pytest.mark.parametrize("version", ["0.9", "0.24"])
def test_prompt_that_does_not_fit_is_reported(version: str, tmp_path: Path) -> None:
    """A prompt that the context cuts, or that the server refuses, is reported, counted, and never scored."""
    rows = questions()
    for number in (0, 3, 6):
        rows[number]["query"] += " please answer in plain words" * 150
    with model_server(num_ctx=512, behave_as=version) as server:
        flags = train_flags(server, tmp_path)
        write_questions(tmp_path / "questions.jsonl", rows)
        said = good(run([*TRAIN, *flags, "--max-failure-rate", "1"], cwd=tmp_path)).stderr
    assert "does not fit" in said or "did not fit" in said
    assert "--num-ctx" in said
    counted = summary(latest(tmp_path))["prompts_too_long"]
    assert counted
    assert counted.keys() <= {"q0", "q3", "q6"}
    assert sum(counted.values()) == last_metrics(latest(tmp_path))["llm/prompts_too_long"]
    scored = {row["question_id"] for row in transcript(latest(tmp_path)) if row["valid"]}
    assert not scored & counted.keys()


def test_reply_that_is_cut_is_reported(own_server: ModelServer, tmp_path: Path) -> None:
    """Replies that end at the token limit are counted and reported at the end of the run."""
    flags = [*train_flags(own_server, tmp_path), "--target-max-tokens", "3"]
    said = good(run([*TRAIN, *flags], cwd=tmp_path)).stderr
    count = summary(latest(tmp_path))["cut_replies"]
    assert count > 10
    assert f"({count}) ended at the token limit" in said
    assert "--target-max-tokens" in said


def test_several_servers_share_the_calls(own_server: ModelServer, tmp_path: Path) -> None:
    """Several --ollama-url share the calls within one --batch-size, and one that dies costs no step."""
    with model_server(latency_ms=10) as second:
        own_server.set(latency_ms=10)
        flags = [*train_flags(own_server, tmp_path, steps=96), *server_flags(own_server, second)]
        command = Command([*TRAIN, *flags], cwd=tmp_path)
        assert command.wait_for(lambda: second.stats()["calls"] > 10)
        peaks = [server.stats()["max_in_service"] for server in (second, own_server)]
        assert sum(peaks) <= 4 + 1  # peaks of two moments
        second.kill()
        good(command.wait())
    assert own_server.stats()["calls"] > 20
    assert all(row["valid"] for row in transcript(latest(tmp_path)))


def test_adaptive_keeps_a_slow_server_from_queueing(tmp_path: Path) -> None:
    """With --adaptive, calls in flight come down to what the server computes at once."""
    flags = ("--num-processes", "16", "--num-steps", "16", "--num-env-steps", "256", "--batch-size", "16")
    with model_server(latency_ms=20, num_parallel=2) as server:
        at_once = last_metrics(train(server, tmp_path, *flags, "--adaptive"))["llm/limit"]
    assert 1 <= at_once <= 8


def test_second_run_asks_nothing(own_server: ModelServer, tmp_path: Path) -> None:
    """With --cache all, an identical second run asks no model, and ends with the same transcript."""
    first = transcript(train(own_server, tmp_path, "--deterministic", "--cache", "all"))
    own_server.reset()
    second = train(own_server, tmp_path, "--deterministic", "--cache", "all")
    assert own_server.stats()["calls_by_model"] == {}
    rows = transcript(second)
    assert [{**row, "calls": 0} for row in rows] == [{**row, "calls": 0} for row in first]


def test_failed_call_of_a_function_has_its_fallback(own_server: ModelServer) -> None:
    """`ollama_utils` returns the query or the refusal in place of a failed call, and says so with return_errors."""
    own_server.set(fail_word="gas")
    settings = {"url": own_server.url, "max_retries": 0, "return_errors": True}
    texts = ["plz tell me the gas umm", "plz tell me the tree umm"]
    rewrites = ollama_utils.batch_mutate_queries(texts, "neutral", model="softener", **settings)
    assert [text for text, _ in rewrites] == [texts[0], "tell me the tree"]
    assert [error is None for _, error in rewrites] == [False, True]
    answers = ollama_utils.batch_query_target_model(texts, model="librarian", **settings)
    assert answers[0][0] == ollama_utils.DEFAULT_REFUSAL
    assert answers[0][1] is not None
    assert answers[1][1] is None
