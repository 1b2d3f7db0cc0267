"""The test server: slots and queue, loads, contexts, latency, faults, models, counters, and `qm test-server`."""

from __future__ import annotations

import json
import math
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from query_mutator.errors import UsageError
from query_mutator.testing import FaultPlan, Latency, StubServer, start_server
from query_mutator.testing.calls import BUSY
from query_mutator.types import ChatRequest, Completion, Message
from tests.conftest import OnUpper, Upper
from tests.integration.raw_http import FOREVER_MS, Fragile, Held, chat, count, get, in_flight, post, send, user
from tests.patience import until

LONG = "begin " + "word " * 300 + "end"
COMMAND = [sys.executable, "-m", "query_mutator", "test-server"]


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """Return a function that sends a request and leaves it open; all are closed at the end."""
    held: list[Held] = []

    def send_it(server: StubServer, text: str, **more: Any) -> Held:
        held.append(Held(server, text, **more))
        return held[-1]

    yield send_it
    for each in held:
        each.leave()


# --- slots and loads -------------------------------------------------------------------------------------------------


def test_calls_wait_for_slots_in_order_and_closing_the_connection_frees_the_slot(hold: Callable[..., Held]) -> None:
    model = Upper()
    with start_server([model], latency_ms=FOREVER_MS) as server:
        held = []
        for i, text in enumerate(("a", "b", "c", "d")):
            held.append(hold(server, text, model="upper"))
            until(lambda i=i: in_flight(server) == (1, i))
        until(lambda: model.prompts == ["a"])
        held[1].leave()  # from the queue
        until(lambda: count(server, "waiting") == 2)
        held[0].leave()  # from the slot
        until(lambda: model.prompts == ["a", "c"])
        held[2].leave()
        until(lambda: model.prompts == ["a", "c", "d"])
        assert (count(server, "cancelled"), count(server, "max_in_service")) == (3, 1)
        assert json.loads(send(server, "DELETE", "/debug/stats")[1])["cancelled"] == 3
        assert count(server, "cancelled") == 0


def test_changed_runner_options_load_the_model_again() -> None:
    with start_server([], load_ms=2) as server:
        first = chat(server, "x", model="echo", options={"temperature": 0})
        same = chat(server, "x", model="echo", options={"temperature": 1})
        other = chat(server, "x", model="echo", options={"num_ctx": 8192})
        running = get(server, "/api/ps")["models"]
    assert [reply["load_duration"] >= 2_000_000 for reply in (first, same, other)] == [True, False, True]
    assert [(model["name"], model["context_length"]) for model in running] == [("echo:latest", 8192)]
    assert server.stats()["loads"] == 2


def test_models_of_the_same_weights_share_a_runner_under_the_name_of_the_first() -> None:
    with start_server([Upper(), OnUpper("short", num_ctx=128)]) as server:
        chat(server, "x", model="short")
        assert [(row["name"], row["context_length"]) for row in get(server, "/api/ps")["models"]] == [
            ("short:latest", 128)
        ]
        assert post(server, "/api/show", model="short")[1]["parameters"].split() == ["num_ctx", "128"]
        chat(server, "x", model="upper")
        assert [row["name"] for row in get(server, "/api/ps")["models"]] == ["upper:latest"]


def test_a_full_queue_is_503_only_while_a_load_is_pending(hold: Callable[..., Held]) -> None:
    with start_server([], max_queue=1, latency_ms=FOREVER_MS) as server:
        first = hold(server, "runs")
        until(lambda: count(server, "in_service") == 1)
        waiting = [hold(server, "waits") for _ in range(3)]  # more than max_queue: a loaded model takes any number
        until(lambda: count(server, "waiting") == 3)
        hold(server, "loads", options={"num_ctx": 64})
        hold(server, "queues")
        until(lambda: count(server, "pending_loads") == 2)
        status, reply = post(server, "/api/chat", model="echo", messages=[user("x")])
        assert (status, reply) == (503, {"error": BUSY})
        for held in (first, *waiting):
            held.leave()
        until(lambda: count(server, "loads") == 2)


# --- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.9", "0.24"])
def test_what_does_not_fit_the_context_is_cut_or_refused(version: str) -> None:
    with start_server([Upper()], behave_as=version, num_ctx=128) as server:
        body = {"model": "upper", "messages": [user(LONG)], "stream": False}
        cut = post(server, "/api/chat", **body)[1]
        status, refused = post(server, "/api/chat", **body, truncate=False, shift=False)
        short = post(server, "/api/chat", **body | {"messages": [user("word " * 120)]}, shift=False)[1]
    assert cut["prompt_eval_count"] == 128
    assert cut["message"]["content"].endswith(" END")
    assert "BEGIN" not in cut["message"]["content"]
    if version == "0.9":
        assert (status, short["done_reason"], short["eval_count"]) == (200, "stop", 121)
    else:
        assert (status, refused) == (400, {"error": "the input length exceeds the context length"})
        assert (short["done_reason"], short["eval_count"]) == ("length", 7)


# --- latency ---------------------------------------------------------------------------------------------------------


def test_latency_depends_on_the_prompt_alone_and_has_its_mean_and_spread() -> None:
    latency = Latency(mean_s=0.1, sigma=1.0)
    times = [latency.total_s(f"prompt {i}") for i in range(4000)]
    assert times[7] == latency.total_s("prompt 7") != Latency(mean_s=0.1, sigma=1.0, seed=1).total_s("prompt 7")
    assert statistics.fmean(times) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(map(math.log, times)) == pytest.approx(1.0, rel=0.05)


def test_a_stream_hands_out_its_tokens_over_the_time_the_call_takes() -> None:
    with start_server([], latency_ms=60) as server:
        status, body = send(server, "POST", "/api/generate", {"model": "echo", "prompt": "x"})
    *pieces, last = [json.loads(line) for line in body.splitlines()]
    assert (status, len(pieces)) == (200, last["eval_count"])
    assert len({piece["created_at"][:23] for piece in pieces}) > 3  # milliseconds: not all at once


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_calls_fails_and_a_retry_may_succeed() -> None:
    plan, again = FaultPlan(0.25, seed=3), FaultPlan(0.25, seed=3)
    bodies = [b"%d" % i for i in range(2000)]
    picked = [plan.pick(body) for body in bodies]
    assert picked == [again.pick(body, attempt=0) for body in bodies]
    assert 400 < sum(kind is not None for kind in picked) < 600
    assert picked != [plan.pick(body) for body in bodies]
    with pytest.raises(UsageError, match="did you mean 'reset'"):
        FaultPlan(0.1, kinds=["rest"])


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_function_sees_the_whole_request_and_says_more_than_a_text() -> None:
    asked: list[ChatRequest] = []

    def model(request: ChatRequest) -> Completion:
        asked.append(request)
        return Completion(text="So be it.", logprob=-0.5, hit_limit=True, prompt_tokens=40, completion_tokens=9)

    messages = [{"role": "system", "content": "be short"}, user("hello")]
    with start_server({"function": model}) as server:
        reply = post(
            server, "/api/chat", model="function", messages=messages, stream=False, logprobs=True,
            options={"seed": 3, "temperature": 0.5, "num_predict": 9, "num_ctx": 99}, format={"type": "object"},
        )[1]  # fmt: skip
        post(server, "/v1/chat/completions", model="function", messages=messages)
    assert asked[0] == ChatRequest(
        model="function", messages=(Message(role="system", content="be short"), Message(role="user", content="hello")),
        seed=3, temperature=0.5, max_tokens=9, options={"num_ctx": 99}, json_schema={"type": "object"},
        logprobs=True,
    )  # fmt: skip
    assert asked[1].max_tokens == -1
    completion = Completion.from_ollama(reply)
    assert (completion.prompt_tokens, completion.completion_tokens) == (40, 9)
    assert (completion.logprob, completion.hit_limit) == (-0.5, True)


def test_a_model_that_fails_is_500_unless_it_names_a_status() -> None:
    def no_answer(request: ChatRequest) -> Completion:
        return Completion.failed("prompt_too_long", "that is too much", status=413)

    with start_server({"fragile": Fragile(), "none": no_answer}) as server:
        asked = {
            name: post(server, "/api/chat", model=name, messages=[user("bad")], stream=False)
            for name in ("fragile", "none", "other")
        }
    assert {name: status for name, (status, _) in asked.items()} == {"fragile": 500, "none": 413, "other": 404}
    assert asked["none"][1] == {"error": "that is too much"}


# --- life, and the command -------------------------------------------------------------------------------------------


def test_close_is_idempotent_and_leaves_no_thread_and_no_socket() -> None:
    before = set(threading.enumerate())
    server = start_server([Upper()], latency_ms=FOREVER_MS)
    held = Held(server, "x", model="upper")
    until(lambda: count(server, "in_service") == 1)
    server.close()
    server.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    held.leave()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_echoed_canned_and_recorded_replies_until_a_signal(
    ending: signal.Signals, tmp_path: Path
) -> None:
    canned = tmp_path / "replies.jsonl"
    canned.write_text('{"prompt": "one", "reply": "two"}\n', encoding="utf-8")
    flags = ["--model", "echo,other", "--canned", str(canned), "--recording", "smollm2-135m", "--num-parallel", "2"]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = SimpleNamespace(port=int(process.stdout.readline().rsplit(":", 1)[1]))
        names = [row["name"] for row in get(server, "/api/tags")["models"]]
        assert names[:3] == ["echo:latest", "other:latest", "canned:latest"]
        assert chat(server, "one", model="canned")["message"]["content"] == "two"
        assert post(server, "/api/chat", model="canned", messages=[user("two")])[0] == 400
        status, reply = post(server, "/api/chat", model=names[3], messages=[user("never asked")], stream=False)
        assert (status, "is recorded" in reply["error"]) == (400, True)
        process.send_signal(ending)
        assert process.wait(20) == 0
