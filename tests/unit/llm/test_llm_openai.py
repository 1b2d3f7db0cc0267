"""The OpenAI-compatible backend against the test server, faults and streams included, and the `openai` client."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.errors import ModelMissingError, UsageError
from query_mutator.llm.backends import resolve_backend
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend, base_url, chat_payload, completion_of
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, ErrorInfo
from tests.conftest import Librarian, Upper
from tests.scripted_server import chunks, http

KEY = "sk-very-secret-0123"


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Upper()], encoder=resolve_encoder("hash"), num_parallel=4) as running:
        yield running


@pytest.fixture
def backend(server: StubServer) -> Iterator[OpenAIBackend]:
    client = OpenAIBackend(server.url, timeout_s=20.0, environ={"OPENAI_API_KEY": KEY})
    yield client
    client.close()


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://api.example.com", "https://api.example.com:443/v1"),
        ("https://example.com/openai/v2", "https://example.com:443/openai/v2"),
    ],
)
def test_an_address_without_a_path_means_v1(typed: str, url: str) -> None:
    assert base_url(typed) == url


def test_the_payload_has_openais_names_and_options_as_fields() -> None:
    request = ChatRequest.user("why?", model="m", max_tokens=64, temperature=0.5, seed=7, options={"top_p": 0.9})
    assert chat_payload(request) == {
        "model": "m",
        "messages": [{"role": "user", "content": "why?"}],
        "max_tokens": 64,
        "temperature": 0.5,
        "seed": 7,
        "top_p": 0.9,
    }


def test_the_server_lists_its_models_and_tells_what_is_missing(backend: OpenAIBackend) -> None:
    assert backend.require_model("upper") == "upper:latest"
    with pytest.raises(ModelMissingError, match=r"no model 'uper'.*upper:latest"):
        backend.require_model("uper")
    assert backend.digest("upper") == ""


class _NoList(BaseHTTPRequestHandler):
    """Answers a chat with `known`; has no list of models, as some gateways do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "known":
            self._answer(404, {"error": {"message": f"The model {body['model']} does not exist"}})
            return
        message = {"role": "assistant", "content": "Hello"}
        self._answer(200, {"choices": [{"message": message, "finish_reason": "length"}]})

    def _answer(self, status: int, payload: dict[str, object]) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_server_that_lists_no_models_is_asked_for_one_token() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _NoList) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        choice = resolve_backend(openai_url=url, target_model="known")
        assert (choice.kind, choice.urls) == ("openai", (f"{url}/v1",))
        with pytest.raises(ModelMissingError, match="has no model 'other' and lists none"):
            resolve_backend(openai_url=url, target_model="other")
        server.shutdown()


@pytest.mark.parametrize(
    ("reported", "num_ctx", "context"),
    [
        ({"max_model_len": 8192}, 4096, 4096),
        ({"max_model_len": 2048}, 4096, 2048),
        ({"meta": {"n_ctx": 8192}}, None, 8192),
        ({"meta": {"n_ctx": 8192}}, 4096, 4096),
        ({"meta": 7}, 4096, 4096),
        ({}, None, None),
    ],
)
def test_the_context_is_the_smaller_of_the_reported_one_and_num_ctx(
    serve: Any, reported: dict[str, object], num_ctx: int | None, context: int | None
) -> None:
    server, _ = serve(http(json.dumps({"data": [{"id": "m", **reported}]})))
    backend = OpenAIBackend(server.url, runner_options={"num_ctx": num_ctx})
    assert backend.context("m") == context
    backend.close()


def test_the_key_is_in_no_repr_and_a_bad_one_is_refused_unseen(backend: OpenAIBackend) -> None:
    assert KEY not in repr(backend) + repr(vars(backend)["_transport"])
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        OpenAIBackend("127.0.0.1:1", environ={"OPENAI_API_KEY": f"{KEY}\nX-Other: 1"})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("line", ['{"error": {"message": "the key %s is not valid"}}', "the key %s is not valid"])
def test_a_key_that_a_stream_repeats_is_in_no_error(serve: Any, line: str) -> None:
    server, _ = serve(chunks(f"data: {line % KEY}\n\ndata: [DONE]\n\n".encode()) + b"0\r\n\r\n")
    backend = OpenAIBackend(server.url, environ={"OPENAI_API_KEY": KEY})
    error = backend.complete_until(ChatRequest.user("why?", model="m"), lambda text: False).error
    backend.close()
    assert error is not None
    assert "the key" in error.message
    assert KEY[:12] not in error.message


@pytest.mark.parametrize(
    ("environ", "advice"),
    [({}, "; set OPENAI_API_KEY"), ({"OPENAI_API_KEY": KEY}, "refuses the key in OPENAI_API_KEY")],
)
def test_a_refused_key_names_its_variable(environ: dict[str, str], advice: str) -> None:
    refused = ErrorInfo(kind="request", message="bad token", status=401)
    assert advice in OpenAIBackend("127.0.0.1:1", environ=environ).hint(refused)


def test_times_are_read_where_a_server_adds_them() -> None:
    payload = {
        "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
        "timings": {"prompt_ms": 100, "predicted_ms": 300},
    }
    reply = completion_of(payload, latency_s=1.0)
    assert reply.queue_wait_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("logprobs", "mean"),
    [
        ({"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"token": "x"}]}, -1.0),
        ({"content": [{"logprob": -0.5}, {"logprob": None}, {"logprob": float("-inf")}, 3]}, -0.5),
        ({"content": []}, None),
        (None, None),
    ],
)
def test_the_mean_log_probability_of_a_replys_tokens(logprobs: object, mean: float | None) -> None:
    choice = {"message": {"content": "yes"}, "finish_reason": "stop", "logprobs": logprobs}
    assert completion_of({"choices": [choice]}).logprob == mean


def test_a_hosted_models_refusal_is_an_answer() -> None:
    message = {"content": None, "refusal": "I can't help with that."}
    reply = completion_of({"choices": [{"message": message, "finish_reason": "stop"}]})
    assert (reply.text, reply.error) == ("I can't help with that.", None)


def test_replies_of_a_server_that_refuses_log_probabilities_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with start_server([Librarian()]) as server, caplog.at_level(logging.INFO):
        backend = OllamaBackend(server.url)
        requests = [ChatRequest.user(f"How do I sort {n} lists?", model="librarian", logprobs=True) for n in range(3)]
        replies = [backend.complete(request) for request in requests]
        backend.close()
        assert [reply.error for reply in replies] == [None] * 3
        assert {reply.logprob for reply in replies} == {None}
        assert server.stats()["calls"] == 3  # a refused request does not reach the model
    assert caplog.text.count("no log probabilities") == 1
