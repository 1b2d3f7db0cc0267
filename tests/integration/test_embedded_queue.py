"""The embedded server under load: slots, queue, loads, batches, latency, faults, counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from raw_http import (
    FOREVER_MS,
    Fragile,
    Gate,
    Held,
    chat,
    count,
    generate,
    get,
    in_flight,
    post,
    send,
    until,
    user,
)

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.runners import BUSY
from query_mutator.embedded.server import EmbeddedServer, start_server
from query_mutator.types import Completion
from tests.conftest import Upper


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """Return a function that sends a request and leaves it open; all are closed at the end."""
    held: list[Held] = []

    def send_it(server: EmbeddedServer, text: str, **more: Any) -> Held:
        held.append(Held(server, text, **more))
        return held[-1]

    yield send_it
    for each in held:
        each.leave()


def test_calls_wait_for_slots_in_order_and_closing_the_connection_frees_the_slot(hold: Callable[..., Held]) -> None:
    model = Upper()
    with start_server([model], latency_ms=FOREVER_MS) as server:
        held = []
        for i, text in enumerate(("a", "b", "c", "d")):
            held.append(hold(server, text, model="upper"))
            until(lambda i=i: in_flight(server) == (1, i))
        until(lambda: model.batches == [["a"]])
        held[1].leave()  # from the queue
        until(lambda: count(server, "waiting") == 2)
        held[0].leave()  # from the slot
        until(lambda: model.batches == [["a"], ["c"]])
        held[2].leave()
        until(lambda: model.batches == [["a"], ["c"], ["d"]])
        assert count(server, "cancelled") == 3
        assert count(server, "max_in_service") == 1


def test_slots_bound_what_runs_at_once_and_belong_to_one_model(hold: Callable[..., Held]) -> None:
    with start_server([Upper()], num_parallel=3, latency_ms=FOREVER_MS) as server:
        for i in range(5):
            hold(server, str(i))
        until(lambda: in_flight(server) == (3, 2))
        for i in range(4):
            hold(server, str(i), model="upper")
        until(lambda: in_flight(server) == (6, 3))


def test_a_wait_for_a_slot_is_total_minus_the_rest() -> None:
    with start_server([], latency_ms=20) as server, ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda text: chat(server, text, model="echo"), "abc"))
        stats = server.stats()
    waits_s = [Completion.from_ollama(reply).queue_wait_s for reply in replies]
    assert sum(waits_s) == pytest.approx(stats["queue_wait_s"], abs=1e-4)
    assert sorted(waits_s)[1] > 0
    assert stats["service_s"] == pytest.approx(
        sum(r["prompt_eval_duration"] + r["eval_duration"] for r in replies) / 1e9
    )
    assert all(reply["prompt_eval_duration"] + reply["eval_duration"] >= 20_000_000 for reply in replies)


def test_a_model_gets_all_waiting_prompts_at_once() -> None:
    model = Gate()
    with start_server([model], num_parallel=8) as server, ThreadPoolExecutor(4) as pool:
        first = pool.submit(send, server, "POST", "/api/generate", generate("1"))
        until(lambda: model.batches == [["1"]])
        rest = [pool.submit(send, server, "POST", "/api/generate", generate(text)) for text in "234"]
        until(lambda: count(server, "in_service") == 4)
        model.opened.set()
        assert {future.result()[0] for future in (first, *rest)} == {200}
    assert sorted(model.batches[1]) == ["2", "3", "4"]


def test_changed_runner_options_load_the_model_again() -> None:
    with start_server([], load_ms=2) as server:
        first = chat(server, "x", model="echo", options={"temperature": 0})
        same = chat(server, "x", model="echo", options={"temperature": 1, "num_gpu": -1})
        other = chat(server, "x", model="echo", options={"num_ctx": 8192}, keep_alive="30m")
        running = get(server, "/api/ps")["models"]
    assert [reply["load_duration"] >= 2_000_000 for reply in (first, same, other)] == [True, False, True]
    assert [(model["name"], model["context_length"]) for model in running] == [("echo:latest", 8192)]
    assert server.stats()["loads"] == 2


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


def test_a_failing_prompt_fails_alone_in_its_batch() -> None:
    class FragileGate(Gate):
        def reply_many(self, prompts: Sequence[str]) -> list[str]:
            super().reply_many(prompts)
            return Fragile().reply_many(prompts)

    model = FragileGate()
    with start_server([model], num_parallel=8) as server, ThreadPoolExecutor(4) as pool:

        def ask(text: str) -> int:
            return send(server, "POST", "/api/generate", generate(text))[0]

        first = pool.submit(ask, "first")
        until(lambda: model.batches == [["first"]])
        others = [pool.submit(ask, text) for text in ("good", "bad", "fair")]
        until(lambda: count(server, "in_service") == 4)
        model.opened.set()
        assert [future.result() for future in (first, *others)] == [200, 200, 500, 200]
    assert sorted(model.batches[1]) == ["bad", "fair", "good"]


# --- latency ---------------------------------------------------------------------------------------------------------


def test_running_speed_is_sixteen_seconds_over_x() -> None:
    with start_server([], running_speed=800) as server:
        reply = chat(server, "x", model="echo")
    assert reply["prompt_eval_duration"] + reply["eval_duration"] >= 20_000_000


def test_a_stream_hands_out_its_tokens_over_the_time_the_call_takes() -> None:
    with start_server([], latency_ms=60) as server:
        status, body = send(server, "POST", "/api/generate", {"model": "echo", "prompt": "x"})
    *pieces, last = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    assert len(pieces) == last["eval_count"]
    assert len({piece["created_at"][:23] for piece in pieces}) > 3  # milliseconds: not all at once


def test_closing_a_stream_early_frees_the_slot(hold: Callable[..., Held]) -> None:
    with start_server([], latency_ms=FOREVER_MS) as server:
        held = hold(server, "x", stream=True)
        until(lambda: count(server, "in_service") == 1)
        held.leave()
        until(lambda: count(server, "in_service") == 0)
        assert count(server, "cancelled") == 1


# --- faults and counters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error"),
    [("500", "server"), ("503", "server"), ("empty", "empty"), ("incomplete", "incomplete")],
)
def test_scripted_faults_look_like_the_real_ones(kind: str, error: str) -> None:
    with start_server([], faults=FaultPlan(1.0, kinds=[kind])) as server:
        status, reply = post(server, "/api/chat", model="echo", messages=[user("x")], stream=False)
        assert Completion.from_ollama(reply).error.kind == error
        assert status == {"500": 500, "503": 503}.get(kind, 200)
        assert count(server, "faults") == {kind: 1}


@pytest.mark.parametrize("stream", [False, True])
def test_cut_json_cannot_be_read(stream: bool) -> None:
    with start_server([], faults=FaultPlan(1.0, kinds=["cut"])) as server:
        _, body = send(server, "POST", "/api/generate", {"model": "echo", "prompt": "x", "stream": stream})
    with pytest.raises(json.JSONDecodeError):
        json.loads(body.splitlines()[-1])


def test_a_reset_is_a_reset_and_a_stall_holds_the_slot(hold: Callable[..., Held]) -> None:
    with start_server([], faults=FaultPlan(1.0, kinds=["reset"])) as server, pytest.raises(ConnectionResetError):
        send(server, "POST", "/api/generate", {"model": "echo", "prompt": "x"})
    with start_server([], faults=FaultPlan(1.0, kinds=["stall"])) as server:
        held = hold(server, "x")
        until(lambda: count(server, "in_service") == 1)
        held.leave()
        until(lambda: count(server, "in_service") == 0)


def test_debug_stats_count_and_can_be_reset() -> None:
    with start_server([Upper()]) as server:
        chat(server, "x")
        chat(server, "x", model="echo")
        counted = json.loads(send(server, "DELETE", "/debug/stats")[1])
        assert (counted["calls"], counted["calls_by_model"]) == (2, {"upper": 1, "echo": 1})
        assert counted["routes"] == {"/api/chat": 2}
        assert get(server, "/debug/stats")["calls"] == 0
