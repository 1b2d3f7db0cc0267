"""Whatever a server's JSON holds, a call returns an answer or a failed call, and a question to a server one error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from query_mutator.errors import BackendError, ModelMissingError
from query_mutator.llm.early_stop import EarlyStop
from query_mutator.llm.http_server import HttpServer
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import MAX_ERROR_CHARS, ChatRequest, Completion, ErrorInfo
from tests.scripted_server import CLOSE, ScriptedServer, chunks, http

ASK = ChatRequest.user("why?", model="m")
Connect = Callable[..., tuple[ScriptedServer, Any]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Start a scripted server and a backend for it."""
    opened: list[Any] = []

    def start(kind: type[HttpServer], *script: Any) -> tuple[ScriptedServer, HttpServer]:
        server = ScriptedServer(*script)
        backend = kind(server.url, timeout_s=10.0)
        opened.extend([backend, server])
        return server, backend

    yield start
    for thing in opened:
        thing.close()


def ollama(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "message": {"content": "because"}, "done": True, "done_reason": "stop", **fields}


def openai(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"message": {"content": "because"}, "finish_reason": "stop"}], **fields}


def says(content: object) -> list[dict[str, Any]]:
    return [{"message": {"content": content}, "finish_reason": "stop"}]


HUGE = int("9" * 400)
DEEP = '{"a": ' * 900 + "1" + "}" * 900

MALFORMED = [
    (OllamaBackend, json.dumps(ollama(message="because"))),
    (OllamaBackend, json.dumps(ollama(message={"content": {"text": "because"}}))),
    (OllamaBackend, json.dumps(ollama(message={"content": 7}))),
    (OllamaBackend, json.dumps(ollama(eval_count=HUGE))),
    (OllamaBackend, json.dumps(ollama(eval_count=1e300))),
    (OllamaBackend, json.dumps(ollama(total_duration=2)).replace(": 2", ": 1e400")),
    (OllamaBackend, json.dumps(ollama(total_duration=float("nan")))),
    (OllamaBackend, json.dumps(ollama(eval_count=[1]))),
    (OpenAIBackend, "{}"),
    (OpenAIBackend, json.dumps(openai(choices=[]))),
    (OpenAIBackend, json.dumps(openai(choices=[{}]))),
    (OpenAIBackend, json.dumps(openai(choices=3))),
    (OpenAIBackend, json.dumps(openai(choices={}))),
    (OpenAIBackend, json.dumps(openai(choices=[7]))),
    (OpenAIBackend, json.dumps(openai(choices=says(["because"])))),
    (OpenAIBackend, json.dumps(openai(usage={"prompt_tokens": HUGE}))),
    (OpenAIBackend, json.dumps(openai(usage=7))),
    (OpenAIBackend, json.dumps(openai(timings={"prompt_ms": "soon"}))),
    (OpenAIBackend, json.dumps(openai(model={"name": "m"}))),
    (OpenAIBackend, "[" * 200_000),
    (OllamaBackend, '{"a": [' + "[]," * 2_100_000 + "1]}"),
]


@pytest.mark.parametrize(("kind", "body"), MALFORMED, ids=range(len(MALFORMED)))
def test_fields_of_another_type_are_malformed(connect: Connect, kind: type[HttpServer], body: str) -> None:
    _, backend = connect(kind, http(body))
    completion = backend.complete(ASK)
    assert completion.error is not None
    assert (completion.error.kind, completion.text) == ("malformed", "")
    assert len(completion.error.message) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (OllamaBackend, '{"message": {"content": "a\\ud800b"}, "done": true}', "a\N{REPLACEMENT CHARACTER}b"),
        (OpenAIBackend, '{"choices": [{"message": {"content": "\\udfff"}, "finish_reason": "stop"}]}', "\ufffd"),
        (OllamaBackend, json.dumps(ollama(eval_count=-5, total_duration=None)), "because"),
        (OpenAIBackend, json.dumps(openai(usage=None, timings=None)), "because"),
    ],
)
def test_what_can_be_read_is_an_answer(connect: Connect, kind: type[HttpServer], body: str, text: str) -> None:
    _, backend = connect(kind, http(body))
    completion = backend.complete(ASK)
    assert (completion.error, completion.text, completion.completion_tokens) == (None, text, 0)
    completion.text.encode()


@pytest.mark.parametrize("size", [500, 500_000])
@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "500 Broken"])
@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_an_error_text_has_300_characters(connect: Connect, kind: type[HttpServer], status: str, size: int) -> None:
    _, backend = connect(kind, http(json.dumps({"error": "so much " * size}), status=status))
    error = backend.complete(ASK).error
    assert "so much so much so much" in error.message
    assert len(error.message) <= MAX_ERROR_CHARS


def test_every_error_is_one_short_line_from_its_birth() -> None:
    error = ErrorInfo(kind="server", message="no\nway " * 1000 + "\ud800")
    assert (len(error.message), error.message[:7], error.message[-1]) == (MAX_ERROR_CHARS, "no way ", "…")
    assert Completion.from_ollama({"error": "x" * 5000}).error == ErrorInfo(kind="server", message="x" * 5000)


@pytest.mark.parametrize("body", ['{"version": {}}', '{"version": "%s"}' % ("1" * 9000), "{}", DEEP])
def test_a_version_is_short_whatever_is_sent(connect: Connect, body: str) -> None:
    _, backend = connect(OllamaBackend, http(body))
    assert len(backend.version()) <= 100


@pytest.mark.parametrize("body", ["[" * 200_000, '{"models": 7, "data": 7}', "[]", "", "x"])
@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_an_unreadable_list_of_models_is_a_backend_error(connect: Connect, kind: type[HttpServer], body: str) -> None:
    _, backend = connect(kind, http(body))
    with pytest.raises(BackendError, match="check that it is the address"):
        backend.models()


@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_a_list_of_models_is_read_as_far_as_it_holds_names(connect: Connect, kind: type[HttpServer]) -> None:
    rows = [7, {}, {"name": None, "id": None}, {"name": {}, "id": []}, {"name": "x" * 400, "id": "x" * 400}]
    rows += [{"name": f"m{number}", "id": f"m{number}"} for number in range(9000)]
    _, backend = connect(kind, http(json.dumps({"models": rows, "data": rows})))
    assert backend.models()[:2] == ("m0", "m1")
    with pytest.raises(ModelMissingError, match="8,980 more") as raised:
        backend.require_model("m9999")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("path_reply", ["7", "[]", '{"model_info": 7, "capabilities": 7, "parameters": 7}', DEEP])
def test_what_is_said_about_a_model_may_be_anything(connect: Connect, path_reply: str) -> None:
    _, backend = connect(OllamaBackend, http(path_reply))
    assert backend.model_info("m") == {}


# --- streamed --------------------------------------------------------------------------------------------------------


def stream(*lines: object) -> bytes:
    return chunks(*[json.dumps(line).encode() + b"\n" for line in lines]) + b"0\r\n\r\n"


def events(*lines: object) -> bytes:
    encoded = [line.encode() if isinstance(line, str) else json.dumps(line).encode() for line in lines]
    return chunks(*[b"data: " + line + b"\n\n" for line in encoded]) + b"0\r\n\r\n"


PIECE = {"message": {"content": "be"}}
DELTA = {"choices": [{"delta": {"content": "be"}}]}
STOP = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("kind", "answer", "error"),
    [
        (OllamaBackend, stream(PIECE, ollama(), PIECE, ollama()), "malformed"),
        (OllamaBackend, stream(PIECE, {"error": "out of slots"}, ollama()), "server"),
        (OllamaBackend, stream(PIECE, {"message": {"content": ["x"]}}, ollama()), "malformed"),
        (OllamaBackend, stream(PIECE, {"message": "x"}, ollama()), "malformed"),
        (OllamaBackend, stream(PIECE, ollama(eval_count=HUGE)), "malformed"),
        (OllamaBackend, stream([PIECE]), "malformed"),
        (OllamaBackend, chunks(b'{"a":' * 100_000 + b"\n") + b"0\r\n\r\n", "malformed"),
        (OllamaBackend, chunks(b"{}\n" * 300_000) + b"0\r\n\r\n", "malformed"),
        (OpenAIBackend, events(DELTA, STOP, "[DONE]", DELTA, STOP, "[DONE]"), "malformed"),
        (OpenAIBackend, events({"choices": [{"delta": {"content": 7}}]}, STOP, "[DONE]"), "malformed"),
        (OpenAIBackend, events({"choices": 7}, STOP, "[DONE]"), "malformed"),
        (OpenAIBackend, events(DELTA, {**STOP, "usage": {"prompt_tokens": HUGE}}, "[DONE]"), "malformed"),
        (OpenAIBackend, events(DELTA, {"error": {"message": "no"}}, "[DONE]"), "server"),
    ],
)
def test_a_stream_of_another_shape_is_an_error(
    connect: Connect, kind: type[HttpServer], answer: bytes, error: str
) -> None:
    _, backend = connect(kind, (answer, CLOSE))
    completion = backend.complete_until(ASK, lambda text: False)
    assert completion.error is not None
    assert (completion.error.kind, completion.text) == (error, "")


def test_a_stream_of_many_pieces_is_put_together_in_linear_time(connect: Connect) -> None:
    _, backend = connect(OllamaBackend, stream(*[PIECE] * 60_000, ollama(message={"content": ""})))
    asked: list[int] = []
    completion = backend.complete_until(ASK, lambda text: asked.append(len(text)) is not None)
    assert completion.text == "be" * 60_000
    assert max(asked) <= 4097


def test_a_stream_cut_for_another_request_is_named_and_replies_are_then_read_whole(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server, backend = connect(OpenAIBackend, (events(DELTA, "[DONE]"), CLOSE), http(json.dumps(openai())))
    early = EarlyStop(backend, is_refusal=lambda text: False)
    with caplog.at_level(logging.WARNING):
        first, second, third = (early.complete(ASK) for _ in range(3))
    assert first.error is not None
    assert first.error.kind == "incomplete"
    assert "--interrupt_requests false" in first.error.message
    assert [second.text, third.text] == ["because"] * 2
    assert [record.message.count("interrupt_requests") for record in caplog.records] == [1]
    assert b'"stream"' not in server.requests[-1]


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    ["[[1, NaN]]", "[[1, null]]", "[[1, 1e39]]", "[[1, 1e400]]", "[null]", "[7]", "[[[1]]]", '[["x"]]', "[[1], [2]]",
     "7", "null", "[[1, {}]]", "{}"],
)  # fmt: skip
def test_embeddings_that_are_not_finite_numbers_are_malformed(connect: Connect, rows: str) -> None:
    _, backend = connect(OllamaBackend, http(f'{{"embeddings": {rows}}}'))
    reply = backend.embed("m", ["text"])
    assert isinstance(reply, ErrorInfo)
    assert reply.kind == "malformed"


def test_embeddings_of_openai_are_in_the_order_of_their_indices(connect: Connect) -> None:
    rows = [{"index": index, "embedding": [index, 1]} for index in (2, 0, 1)]
    _, backend = connect(OpenAIBackend, http(json.dumps({"data": rows})))
    assert backend.embed("m", ["a", "b", "c"]).tolist() == [[0, 1], [1, 1], [2, 1]]


def test_embeddings_of_openai_with_other_indices_are_malformed(connect: Connect) -> None:
    _, backend = connect(OpenAIBackend, http('{"data": [{"index": 1e400, "embedding": [1]}]}'))
    assert isinstance(backend.embed("m", ["text"]), ErrorInfo)
