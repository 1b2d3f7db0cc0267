"""The embedded server over real HTTP: Ollama's formats, errors, slots, queue, latency and cancelling."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.runners import BUSY
from query_mutator.embedded.server import EmbeddedServer, start_server
from query_mutator.errors import UsageError
from query_mutator.types import Completion

FOREVER_MS = 3_600_000.0
COMMAND = [sys.executable, "-m", "query_mutator.embedded"]


class Upper:
    """Answers in capitals; remembers each batch it was given."""

    name = "upper"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.batches.append(list(prompts))
        return [prompt.upper() for prompt in prompts]


class Gate:
    """Answers nothing until `opened` is set."""

    name = "gate"

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.batches: list[list[str]] = []

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.batches.append(list(prompts))
        self.opened.wait()
        return list(prompts)


class Fragile:
    """Fails on the prompt "bad" alone."""

    name = "fragile"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        if "bad" in prompts:
            raise RuntimeError("no answer to that")
        return ["fine"] * len(prompts)


class TwoNumbers:
    """An encoder of two dimensions: the share of vowels, and the rest."""

    name, dim, source, fingerprint = "two", 2, "tests", "two"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vowels = np.array([sum(c in "aeiou" for c in text) for text in texts], dtype=np.float32)
        others = np.array([len(text) for text in texts], dtype=np.float32) - vowels
        rows = np.stack([vowels, others], axis=1)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with start_server([Upper(), Fragile()], encoder=TwoNumbers()) as running:
        yield running


def send(server: EmbeddedServer, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def get(server: EmbeddedServer, path: str) -> Any:
    status, body = send(server, "GET", path)
    assert status == 200
    return json.loads(body)


def post(server: EmbeddedServer, path: str, **body: Any) -> tuple[int, Any]:
    status, reply = send(server, "POST", path, body)
    return status, json.loads(reply)


def chat(server: EmbeddedServer, text: str, *, model: str = "upper", **more: Any) -> Any:
    status, reply = post(server, "/api/chat", model=model, messages=[user(text)], stream=False, **more)
    assert status == 200, reply
    return reply


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the server's own counters will show; a hang is a failure."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the server did not get there"


def count(server: EmbeddedServer, name: str) -> Any:
    return get(server, "/debug/stats")[name]


def under_way(server: EmbeddedServer) -> tuple[int, int]:
    """Return how many calls are in a slot, and how many wait for one."""
    counted = get(server, "/debug/stats")
    return counted["in_service"], counted["waiting"]


class Held:
    """A chat request whose reply nobody reads; `leave()` closes the connection."""

    def __init__(self, server: EmbeddedServer, text: str, *, model: str = "echo", **more: Any) -> None:
        body = json.dumps({"model": model, "messages": [user(text)], "stream": False, **more}).encode()
        head = b"POST /api/chat HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self.socket.sendall(head + body)

    def leave(self) -> None:
        self.socket.close()


# --- formats ---------------------------------------------------------------------------------------------------------


def test_root_and_version_say_what_runs(server: EmbeddedServer) -> None:
    assert send(server, "GET", "/") == (200, b"Ollama is running")
    assert send(server, "HEAD", "/") == (200, b"")
    assert "embedded" in get(server, "/api/version")["version"]


def test_tags_list_every_model_with_tag_and_digest(server: EmbeddedServer) -> None:
    models = get(server, "/api/tags")["models"]
    assert [model["name"] for model in models] == ["upper:latest", "fragile:latest", "echo:latest", "all-minilm:latest"]
    assert len({model["digest"] for model in models}) == 4
    assert all(len(model["digest"]) == 64 for model in models)


def test_show_tells_text_models_from_the_encoder(server: EmbeddedServer) -> None:
    assert post(server, "/api/show", model="upper")[1]["capabilities"] == ["completion"]
    status, shown = post(server, "/api/show", model="all-minilm:latest")
    assert (status, shown["capabilities"]) == (200, ["embedding"])
    assert shown["model_info"]["query-mutator.embedding_length"] == 2


def test_chat_answers_the_last_user_message_and_its_durations_add_up(server: EmbeddedServer) -> None:
    messages = [{"role": "system", "content": "be loud"}, user("first"), {"role": "assistant", "content": "x"}]
    status, reply = post(
        server, "/api/chat", model="upper", messages=[*messages, user("second one")], stream=False, think=False
    )
    assert (status, reply["message"]) == (200, {"role": "assistant", "content": "SECOND ONE"})
    assert (reply["done"], reply["done_reason"], reply["model"]) == (True, "stop", "upper")
    assert (reply["prompt_eval_count"], reply["eval_count"]) == (2, 2)
    parts = reply["load_duration"], reply["prompt_eval_duration"], reply["eval_duration"]
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert reply["total_duration"] >= sum(parts)


def test_generate_streams_one_line_per_token_unless_told_not_to(server: EmbeddedServer) -> None:
    status, body = send(server, "POST", "/api/generate", {"model": "upper", "prompt": "one two, three"})
    *pieces, last = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    assert [piece["response"] for piece in pieces] == ["ONE", " TWO", ",", " THREE"]
    assert not any(piece["done"] or "done_reason" in piece for piece in pieces)
    assert (last["response"], last["done"], last["done_reason"], last["eval_count"]) == ("", True, "stop", 4)
    assert post(server, "/api/generate", model="upper", prompt="one two", stream=False)[1]["response"] == "ONE TWO"


def test_replies_become_completions_of_our_own_client(server: EmbeddedServer) -> None:
    completion = Completion.from_ollama(chat(server, "well"))
    assert (completion.text, completion.ok, completion.completion_tokens) == ("WELL", True, 1)


def test_an_empty_prompt_only_loads(server: EmbeddedServer) -> None:
    status, reply = post(server, "/api/generate", model="upper")
    assert (status, reply["response"], reply["done"], reply["done_reason"]) == (200, "", True, "load")
    assert post(server, "/api/chat", model="upper", messages=[])[1]["done_reason"] == "load"
    assert post(server, "/api/generate", model="upper", keep_alive=0)[1]["done_reason"] == "unload"
    assert "upper:latest" not in [model["name"] for model in get(server, "/api/ps")["models"]]


def test_num_predict_and_stop_cut_the_reply(server: EmbeddedServer) -> None:
    cut = chat(server, "one two three four", options={"num_predict": 2, "seed": 7, "temperature": 0})
    assert (cut["message"]["content"], cut["done_reason"], cut["eval_count"]) == ("ONE TWO", "length", 2)
    stopped = chat(server, "one two three four", options={"stop": [" THREE"]})
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("ONE TWO", "stop")
    assert chat(server, "one two", options={"num_predict": -1})["message"]["content"] == "ONE TWO"


def test_format_puts_the_answer_into_the_first_string_field(server: EmbeddedServer) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}, "answer": {"type": "string"}}}
    assert json.loads(chat(server, "yes", format=schema)["message"]["content"]) == {"sure": False, "answer": "YES"}
    assert json.loads(chat(server, "yes", format="json")["message"]["content"]) == {"response": "YES"}


def test_embed_takes_a_text_or_a_list_and_an_empty_text_has_an_empty_vector(server: EmbeddedServer) -> None:
    status, reply = post(server, "/api/embed", model="all-minilm", input=["abbb", "", "ab"])
    assert status == 200
    assert np.allclose(reply["embeddings"][0], np.array([1, 3]) / 10**0.5)
    assert reply["embeddings"][1] == []
    assert reply["prompt_eval_count"] == 2
    assert len(post(server, "/api/embed", model="all-minilm", input="abbb")[1]["embeddings"]) == 1
    assert post(server, "/api/embed", model="all-minilm", input="")[1]["embeddings"] == []
    assert post(server, "/api/embed", model="all-minilm", input="ab", dimensions=1)[1]["embeddings"] == [[1.0]]
    assert len(post(server, "/api/embeddings", model="all-minilm", prompt="ab")[1]["embedding"]) == 2


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "none", "messages": [user("x")]}, 404, "model 'none' not found"),
        ("/api/show", {"model": "none"}, 404, "model 'none' not found"),
        ("/api/embed", {"model": "none", "input": "x"}, 404, 'model "none" not found, try pulling it first'),
        ("/api/chat", {"messages": [user("x")]}, 400, "model is required"),
        ("/api/chat", b"", 400, "missing request body"),
        ("/api/chat", b'{"model": "upper", ', 400, "unexpected EOF"),
        ("/api/chat", b"{x}", 400, "invalid character 'x' looking for beginning of value"),
        ("/api/chat", b"[]", 400, "json: cannot unmarshal array"),
        ("/api/chat", {"model": 3}, 400, "json: cannot unmarshal number into Go struct field model of type string"),
        ("/api/chat", {"model": "upper", "messages": ["x"]}, 400, "json: cannot unmarshal string"),
        ("/api/chat", {"model": "all-minilm", "messages": [user("x")]}, 400, '"all-minilm" does not support chat'),
        ("/api/chat", {"model": "upper", "messages": [user("x")], "think": True}, 400, "does not support thinking"),
        ("/api/generate", {"model": "upper", "prompt": "x", "format": "yaml"}, 400, "invalid format"),
        ("/api/generate", {"model": "upper", "prompt": "x", "keep_alive": "soon"}, 400, "time: invalid duration"),
        ("/api/generate", {"model": "upper", "options": {"num_ctx": "x"}}, 400, 'option "num_ctx" must be of type int'),
        ("/api/embed", {"model": "all-minilm", "input": [1]}, 400, "invalid input type"),
        ("/api/embed", {"model": "upper", "input": "x"}, 501, "does not support embeddings"),
        ("/api/chat", {"model": "fragile", "messages": [user("bad")]}, 500, "no answer to that"),
    ],
)
def test_errors_have_ollamas_status_and_body(
    server: EmbeddedServer, path: str, body: Any, status: int, text: str
) -> None:
    found, reply = send(server, "POST", path, body)
    assert found == status
    assert text in json.loads(reply)["error"]


def test_unknown_paths_and_wrong_methods(server: EmbeddedServer) -> None:
    assert send(server, "GET", "/api/nothing") == (404, b"404 page not found")
    assert send(server, "GET", "/api/chat") == (405, b"405 method not allowed")


def test_a_failing_prompt_fails_alone_in_its_batch() -> None:
    class Once(Gate):
        def reply_many(self, prompts: Sequence[str]) -> list[str]:
            super().reply_many(prompts)
            return Fragile().reply_many(prompts)

    model = Once()
    with start_server([model], num_parallel=8) as server, ThreadPoolExecutor(8) as pool:

        def ask(text: str) -> Future[int]:
            return pool.submit(lambda: post(server, "/api/chat", model="gate", messages=[user(text)])[0])

        first = ask("first")
        until(lambda: len(model.batches) == 1)
        others = [
            pool.submit(send, server, "POST", "/api/generate", generate(text)) for text in ("good", "bad", "fair")
        ]
        until(lambda: count(server, "in_service") == 4)
        model.opened.set()
        first.exception()
        assert [future.result()[0] for future in others] == [200, 500, 200]
    assert sorted(model.batches[1]) == ["bad", "fair", "good"]


def generate(text: str) -> dict[str, Any]:
    return {"model": "gate", "prompt": text, "stream": False}


# --- HTTP ------------------------------------------------------------------------------------------------------------


def raw(server: EmbeddedServer, *pieces: bytes) -> bytes:
    """Send the pieces and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_one_connection_carries_many_requests_even_sent_at_once(server: EmbeddedServer) -> None:
    ask = b"GET /api/version HTTP/1.1\r\nHost: here\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
    replies = raw(server, ask + ask + last)
    assert replies.count(b"HTTP/1.1 200 OK") == 3
    assert replies.endswith(b"Ollama is running")


def test_a_chunked_request_body_is_read(server: EmbeddedServer) -> None:
    body = json.dumps({"model": "upper", "prompt": "hi", "stream": False}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    head = b"POST /api/generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert b'"response":"HI"' in raw(server, head, chunks + b"0\r\n\r\n")


def test_an_old_client_gets_a_stream_without_chunks(server: EmbeddedServer) -> None:
    body = json.dumps({"model": "upper", "prompt": "hi"}).encode()
    head = b"POST /api/generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    lines = raw(server, head + body).partition(b"\r\n\r\n")[2].splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["HI", ""]


def test_a_client_that_expects_100_continue_gets_it(server: EmbeddedServer) -> None:
    body = json.dumps({"model": "upper", "prompt": "hi", "stream": False}).encode()
    head = b"POST /api/generate HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head % len(body))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
    ],
)
def test_what_is_no_http_is_refused_and_closed(server: EmbeddedServer, request_bytes: bytes, status: int) -> None:
    assert raw(server, request_bytes).startswith(b"HTTP/1.1 %d " % status)


# --- slots, queue, loads ---------------------------------------------------------------------------------------------


def test_calls_wait_for_slots_first_come_first_served_and_a_leaver_frees_its_place() -> None:
    model = Upper()
    with start_server([model], latency_ms=FOREVER_MS) as server:
        held = []
        for i, text in enumerate(("a", "b", "c", "d")):
            held.append(Held(server, text, model="upper"))
            until(lambda i=i: under_way(server) == (1, i))
        until(lambda: model.batches == [["a"]])
        held[1].leave()  # from the queue
        until(lambda: count(server, "waiting") == 2)
        held[0].leave()  # from the slot
        until(lambda: model.batches == [["a"], ["c"]])
        held[2].leave()
        until(lambda: model.batches == [["a"], ["c"], ["d"]])
        assert count(server, "cancelled") == 3
        assert count(server, "max_in_service") == 1


def test_slots_bound_what_runs_at_once_and_belong_to_one_model() -> None:
    with start_server([Upper()], num_parallel=3, latency_ms=FOREVER_MS) as server:
        held = [Held(server, str(i)) for i in range(5)]
        until(lambda: under_way(server) == (3, 2))
        held += [Held(server, str(i), model="upper") for i in range(4)]
        until(lambda: under_way(server) == (6, 3))


def test_a_wait_for_a_slot_is_total_minus_the_rest() -> None:
    with start_server([], latency_ms=20) as server, ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda text: chat(server, text, model="echo"), "abc"))
        stats = server.stats()
    waits_s = [Completion.from_ollama(reply).queue_wait_s for reply in replies]
    assert sum(waits_s) == pytest.approx(stats["queue_wait_s"], abs=1e-4)
    assert sorted(waits_s)[1] >= 0.02
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


def test_a_full_queue_is_503_only_while_a_load_is_pending() -> None:
    with start_server([], max_queue=1, latency_ms=FOREVER_MS) as server:
        first = Held(server, "runs")
        until(lambda: count(server, "in_service") == 1)
        waiting = [Held(server, "waits") for _ in range(3)]  # more than max_queue: a loaded model takes any number
        until(lambda: count(server, "waiting") == 3)
        pending = [Held(server, "loads", options={"num_ctx": 64}), Held(server, "queues")]
        until(lambda: count(server, "pending_loads") == 2)
        status, reply = post(server, "/api/chat", model="echo", messages=[user("x")])
        assert (status, reply) == (503, {"error": BUSY})
        for held in (first, *waiting):
            held.leave()
        until(lambda: count(server, "loads") == 2)
        assert len(pending) == 2


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


def test_closing_a_stream_early_frees_the_slot() -> None:
    with start_server([], latency_ms=FOREVER_MS) as server:
        held = Held(server, "x", stream=True)
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


def test_a_reset_is_a_reset_and_a_stall_holds_the_slot() -> None:
    with start_server([], faults=FaultPlan(1.0, kinds=["reset"])) as server, pytest.raises(ConnectionResetError):
        send(server, "POST", "/api/generate", {"model": "echo", "prompt": "x"})
    with start_server([], faults=FaultPlan(1.0, kinds=["stall"])) as server:
        held = Held(server, "x")
        until(lambda: count(server, "in_service") == 1)
        held.leave()
        until(lambda: count(server, "in_service") == 0)


def test_debug_stats_count_and_can_start_anew() -> None:
    with start_server([Upper()]) as server:
        chat(server, "x")
        chat(server, "x", model="echo")
        counted = json.loads(send(server, "DELETE", "/debug/stats")[1])
        assert (counted["calls"], counted["calls_by_model"]) == (2, {"upper": 1, "echo": 1})
        assert counted["routes"] == {"/api/chat": 2}
        assert get(server, "/debug/stats")["calls"] == 0


# --- life ------------------------------------------------------------------------------------------------------------


def test_close_is_idempotent_and_leaves_no_thread_and_no_socket() -> None:
    before = set(threading.enumerate())
    server = start_server([Upper()], encoder=TwoNumbers(), latency_ms=FOREVER_MS)
    held = Held(server, "x", model="upper")
    until(lambda: count(server, "in_service") == 1)
    server.close()
    server.close()
    assert set(threading.enumerate()) == before
    assert held.socket.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_two_servers_live_side_by_side_and_a_taken_port_is_a_usage_error() -> None:
    with start_server([]) as one, start_server([]) as other:
        assert one.port != other.port
        with pytest.raises(UsageError, match="in use"):
            start_server([], port=one.port)


@pytest.mark.parametrize(
    "setting",
    [
        {"num_parallel": 0},
        {"max_queue": 0},
        {"latency_ms": -1},
        {"latency_ms": 1, "running_speed": 1},
        {"port": 70_000},
    ],
)
def test_settings_out_of_range_are_usage_errors(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        start_server([], **setting)


def test_the_command_serves_on_a_free_port_until_it_is_told_to_end() -> None:
    environment = {"OLLAMA_NUM_PARALLEL": "3"}
    command = ["env", *(f"{k}={v}" for k, v in environment.items()), *COMMAND, "--model", "echo", "--port", "0"]
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"Ollama is running"
            taken = subprocess.run([*COMMAND, "--model", "echo", "--port", str(port)], capture_output=True, text=True)
            process.send_signal(number)
            assert process.wait(20) == 0
            connection.close()
        assert (taken.returncode, len(taken.stderr.splitlines())) == (2, 1)
        assert "in use" in taken.stderr


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--prot", "3"], "did you mean --port?"),
        (["--model", "ecko"], "did you mean 'echo'?"),
        (["--model", "echo", "--num-parallel", "0"], "at least 1"),
        (["--model", "echo", "--faults", "0.1", "--fault-kinds", "rest"], "did you mean 'reset'?"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(flags: list[str], hint: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert hint in done.stderr


def test_help_and_echo_need_no_torch() -> None:
    code = (
        "import sys; from query_mutator.embedded.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--num-parallel" in done.stdout
