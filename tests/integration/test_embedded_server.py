"""The embedded server's routes over real HTTP: formats, errors, and HTTP itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_http import Fragile, TwoNumbers, chat, get, post, send, user

from query_mutator.embedded.server import EmbeddedServer, start_server
from query_mutator.types import Completion
from tests.conftest import Upper


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with start_server([Upper(), Fragile()], encoder=TwoNumbers()) as running:
        yield running


def test_root_and_version_say_what_runs(server: EmbeddedServer) -> None:
    assert send(server, "GET", "/") == (200, b"Ollama is running")
    assert send(server, "HEAD", "/") == (200, b"")
    assert "embedded" in get(server, "/api/version")["version"]


def test_tags_list_every_model_with_tag_and_digest(server: EmbeddedServer) -> None:
    models = get(server, "/api/tags")["models"]
    assert [model["name"] for model in models] == ["upper:latest", "fragile:latest", "echo:latest", "all-minilm:latest"]
    assert len({model["digest"] for model in models}) == 4
    assert all(len(model["digest"]) == 64 for model in models)


def test_show_distinguishes_text_models_from_the_encoder(server: EmbeddedServer) -> None:
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


def test_generate_streams_one_line_per_token_unless_stream_is_false(server: EmbeddedServer) -> None:
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
        ("/api/generate", {"model": "upper", "options": {"num_ctx": 10**400}}, 400, 'option "num_ctx"'),
        ("/api/generate", b'{"model": "upper", "keep_alive": NaN}', 400, "invalid character"),
        ("/api/generate", {"model": "upper", "prompt": "x", "logprobs": True}, 400, "does not support logprobs"),
        ("/api/generate", {"model": "upper", "prompt": "x", "images": ["aGk="]}, 400, "does not support images"),
        ("/api/chat", {"model": "upper", "messages": [user("x") | {"images": ["aGk="]}]}, 400, "support images"),
        ("/api/chat", b"[" + b"[]," * 1_000_000 + b"0]", 413, "1,000,000 values"),
        ("/api/embed", {"model": "all-minilm", "input": [1]}, 400, "invalid input type"),
        ("/api/embed", {"model": "all-minilm", "input": ["a"] * 9000}, 400, "send at most 8,192"),
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
    status, reply = send(server, "GET", "/api/nothing")
    assert (status, json.loads(reply)["error"]) == (404, "GET /api/nothing: 404 page not found")
    status, reply = send(server, "GET", "/api/chat")
    assert (status, json.loads(reply)["error"]) == (405, "GET /api/chat: 405 method not allowed; use POST")
    status, reply = send(server, "POST", "/v1/completions", {})
    assert (status, json.loads(reply)["error"]["message"]) == (404, "POST /v1/completions: 404 page not found")
    assert send(server, "GET", "/nothing") == (404, b"GET /nothing: 404 page not found")


# --- HTTP ------------------------------------------------------------------------------------------------------------


def raw(server: EmbeddedServer, *pieces: bytes) -> bytes:
    """Send the pieces and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_one_connection_carries_many_requests_even_sent_at_once(server: EmbeddedServer) -> None:
    ask = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
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
def test_invalid_http_is_rejected_and_closed(server: EmbeddedServer, request_bytes: bytes, status: int) -> None:
    assert raw(server, request_bytes).startswith(b"HTTP/1.1 %d " % status)
