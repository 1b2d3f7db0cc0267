"""Backends of Ollama's and OpenAI's routes: what they send, how replies are read, and rid of thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from query_mutator.confidence import Attempt
from query_mutator.errors import BackendError, ModelMissingError, UsageError
from query_mutator.llm.backends import resolve_backend
from query_mutator.llm.cache import request_key
from query_mutator.llm.client import RetryPolicy
from query_mutator.llm.http_server import HttpServer, completion_of
from query_mutator.llm.ollama import OllamaBackend, with_tag
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.testing import FaultPlan, StubServer, start_server
from query_mutator.types import ChatRequest, Completion, Message, without_thought
from tests.conftest import Upper
from tests.fake_client import kind_of
from tests.scripted_server import ScriptedServer, failure, http


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Upper()], num_parallel=4) as running:
        yield running


@pytest.fixture
def backend(server: StubServer) -> Iterator[OllamaBackend]:
    client = OllamaBackend(server.url, timeout_s=20.0)
    yield client
    client.close()


@pytest.fixture(params=[OllamaBackend, OpenAIBackend])
def each(request: pytest.FixtureRequest, server: StubServer) -> Iterator[HttpServer]:
    made = request.param(server.url, timeout_s=20.0)
    yield made
    made.close()


# --- every backend ----------------------------------------------------------------------------------------------------


FAULTS = {"500": "server", "503": "busy", "reset": "connect", "stall": "timeout", "cut": "malformed"}


@pytest.mark.parametrize(("fault", "kind"), [*FAULTS.items(), ("empty", "empty"), ("incomplete", "incomplete")])
@pytest.mark.parametrize("make", [OllamaBackend, OpenAIBackend])
def test_a_faulty_reply_is_an_error_of_its_kind_and_never_text(make: type[HttpServer], fault: str, kind: str) -> None:
    with start_server([Upper()], faults=FaultPlan(1.0, kinds=(fault,))) as faulty:
        backend = make(faulty.url, timeout_s=0.3 if fault == "stall" else 20.0)
        reply = backend.complete(ChatRequest.user("why?", model="upper"))
        backend.close()
    assert (kind_of(reply), reply.text) == (kind, "")


def test_a_model_that_is_not_there_is_an_error_of_the_call(each: HttpServer) -> None:
    request = ChatRequest.user("why?", model="nowhere")
    error = failure(each.complete(request).error)
    assert (error.kind, error.status) == ("model_missing", 404)


@pytest.mark.parametrize("make", [OllamaBackend, OpenAIBackend])
def test_a_server_of_another_kind_is_told_apart_from_none(make: type[HttpServer], server: StubServer) -> None:
    with pytest.raises(BackendError, match=r"check that it is the address of|answers /models with an error"):
        make(f"{server.url}/elsewhere").models()


def test_a_closed_backend_fails_calls_as_cancelled(each: HttpServer) -> None:
    assert each.complete(ChatRequest.user("why?", model="upper")).ok
    each.close()
    assert kind_of(each.complete(ChatRequest.user("why?", model="upper"))) == "cancelled"


# --- Ollama -----------------------------------------------------------------------------------------------------------


def test_the_payload_asks_for_one_whole_unthinking_reply() -> None:
    request = ChatRequest(
        model="m",
        messages=(Message(role="system", content="be brief"), Message(role="user", content="why?")),
        max_tokens=64,
        temperature=0.5,
        seed=7,
        options={"num_ctx": 2048},
    )
    assert OllamaBackend("m").chat_body(request) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}],
        "stream": False,
        "think": False,
        "truncate": False,
        "shift": False,
        "options": {"temperature": 0.5, "num_predict": 64, "seed": 7, "num_ctx": 2048},
        "keep_alive": "30m",
    }


def test_a_name_without_tag_means_latest(backend: OllamaBackend) -> None:
    assert [with_tag(name) for name in ("a", "a:7b", "host:5000/a", "lib/a:7b")] == [
        "a:latest",
        "a:7b",
        "host:5000/a:latest",
        "lib/a:7b",
    ]
    assert backend.require_model("upper") == backend.require_model("upper:latest") == "upper:latest"


def test_a_missing_model_is_refused_with_the_command_that_fetches_it(backend: OllamaBackend) -> None:
    with pytest.raises(ModelMissingError, match=r"run `ollama pull uper`, or did you mean upper:latest\?"):
        backend.require_model("uper")
    with pytest.raises(ModelMissingError, match=r"run `ollama pull upper:70b`.*installed: .*upper:latest"):
        backend.require_model("upper:70b")


KEY = "sk-very-secret-0123"


@pytest.fixture
def keyed(server: StubServer) -> Iterator[OpenAIBackend]:
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
    assert OpenAIBackend(typed).url == url


def test_the_payload_has_openais_names_and_options_as_fields() -> None:
    request = ChatRequest.user("why?", model="m", max_tokens=64, temperature=0.5, seed=7, options={"top_p": 0.9})
    assert OpenAIBackend("m", environ={}).chat_body(request) == {
        "model": "m",
        "messages": [{"role": "user", "content": "why?"}],
        "max_tokens": 64,
        "temperature": 0.5,
        "seed": 7,
        "top_p": 0.9,
    }


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
    keyed = OpenAIBackend(server.url, runner_options={"num_ctx": num_ctx})
    assert keyed.context("m") == context
    keyed.close()


def test_the_key_is_in_no_repr_and_a_bad_one_is_refused_unseen(keyed: OpenAIBackend) -> None:
    assert KEY not in repr(keyed) + repr(vars(keyed)["_transport"])
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        OpenAIBackend("127.0.0.1:1", environ={"OPENAI_API_KEY": f"{KEY}\nX-Other: 1"})
    assert KEY not in str(caught.value)


NOT_FOUND = http('{"error": {"message": "Not Found"}}', status="404 Not Found")
ANSWER = http('{"choices": [{"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "length"}]}')


def test_a_server_that_lists_no_models_is_asked_for_one_token() -> None:
    with closing(ScriptedServer(NOT_FOUND, ANSWER)) as server:
        choice = resolve_backend(openai_url=server.url, target_model="known")
        assert (choice.kind, choice.urls) == ("openai", (f"{server.url}/v1",))
        assert b'"max_tokens":1' in next(sent for sent in server.requests if sent.startswith(b"POST"))
    no_other = http('{"error": {"message": "The model other does not exist"}}', status="404 Not Found")
    with (
        closing(ScriptedServer(no_other)) as server,
        pytest.raises(ModelMissingError, match="has no model 'other' and lists none"),
    ):
        resolve_backend(openai_url=server.url, target_model="other")


@pytest.mark.parametrize(
    ("environ", "advice"),
    [({}, "; set OPENAI_API_KEY"), ({"OPENAI_API_KEY": KEY}, "refuses the key in OPENAI_API_KEY")],
)
def test_a_refused_key_names_its_variable(environ: dict[str, str], advice: str) -> None:
    refusal = http('{"error": {"message": "bad token"}}', status="401 Unauthorized")
    with closing(ScriptedServer(refusal)) as server, pytest.raises(BackendError, match=advice):
        OpenAIBackend(server.url, environ=environ).models()


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
        ({"content": [{"logprob": -0.5}, {"logprob": None}, {"logprob": float("-inf")}, 3]}, -50.25),
        ({"content": [{"logprob": 0.0}, {"logprob": float("nan")}]}, 0.0),
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


REPLIES: list[list[str]] = json.loads(Path(__file__).with_name("thoughts.json").read_text("utf-8"))


def from_ollama(text: str) -> Completion:
    return Completion.from_ollama({"message": {"content": text}, "done": True, "logprobs": [{"logprob": -0.5}]})


def from_generate(text: str) -> Completion:
    return Completion.from_ollama({"response": text, "done": True})


def from_openai(text: str) -> Completion:
    logprobs = {"content": [{"logprob": -0.5}]}
    return completion_of({"choices": [{"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}]})


@pytest.mark.parametrize("read", [from_ollama, from_generate, from_openai, lambda text: Completion(text=text)])
@pytest.mark.parametrize(("reply", "said"), REPLIES)
def test_a_thought_is_not_in_the_text_of_a_reply(read: Callable[[str], Completion], reply: str, said: str) -> None:
    found = read(reply)
    assert found.text == said
    assert kind_of(found) == (None if said else "empty")
    assert without_thought(said) == said


def test_the_log_probability_of_a_thought_is_not_that_of_the_answer() -> None:
    assert from_ollama("Paris.").logprob == from_openai("Paris.").logprob == -0.5
    assert from_ollama("<think>Rome?</think>Paris.").logprob is None
    assert from_openai("Rome?</think>Paris.").logprob is None


@pytest.mark.parametrize("field", ["thinking", "reasoning_content", "reasoning"])
def test_a_thought_in_a_field_of_its_own_is_not_the_answer(field: str) -> None:
    for text, kind in (("Paris.", None), ("", "empty"), (None, "empty")):
        message = {"content": text, field: "Is it Rome?"}
        replies = [
            Completion.from_ollama({"message": message, "done": True, field: "Is it Bonn?"}),
            Completion.from_ollama({"response": text, field: "Is it Bonn?", "done": True}),
            completion_of({"choices": [{"message": message, "finish_reason": "stop"}]}),
        ]
        assert [(one.text, kind_of(one)) for one in replies] == [(text or "", kind)] * 3
        assert {one.thought for one in replies} <= {"Is it Rome?", "Is it Bonn?"}


@pytest.mark.parametrize("message", [{"content": "<think>Is it"}, {"content": "", "reasoning_content": "Is it"}])
def test_a_limit_that_went_into_the_thought_is_a_failure_that_no_retry_helps(message: dict[str, str]) -> None:
    reply = completion_of({"choices": [{"message": message, "finish_reason": "length"}]})
    error = failure(reply.error)
    assert error.kind == "thought"
    assert all(flag in error.message for flag in ("--target-max-tokens", "--think off"))
    assert RetryPolicy().delay_s(error, 1, key="") is None


@pytest.mark.parametrize(
    ("think", "ollama", "openai"),
    [
        ("auto", False, {}),
        ("off", False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("on", True, {"chat_template_kwargs": {"enable_thinking": True}}),
        ("low", "low", {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_asked_for_in_each_servers_own_way(think: Any, ollama: object, openai: dict[str, object]) -> None:
    request = ChatRequest.user("Why?", model="m", think=think)
    assert OllamaBackend("http://127.0.0.1:1").chat_body(request)["think"] == ollama
    body = OpenAIBackend("http://127.0.0.1:1").chat_body(request)
    assert {
        name: value for name, value in body.items() if name in ("chat_template_kwargs", "reasoning_effort")
    } == openai
    assert (request_key(request) == request_key(ChatRequest.user("Why?", model="m"))) == (think == "auto")


@pytest.mark.parametrize(
    ("message", "refused", "instead"),
    [
        ("chat_template_kwargs: Extra inputs are not permitted", b"enable_thinking", b""),
        (
            "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
            b'"max_tokens"',
            b'"max_completion_tokens":64',
        ),
        ("Unsupported value: 'temperature' does not support 0 with this model.", b'"temperature"', b""),
        ("logprobs are not supported with reasoning models.", b'"logprobs"', b""),
    ],
)
def test_a_field_that_a_server_refuses_is_left_out_from_then_on(message: str, refused: bytes, instead: bytes) -> None:
    refusal = http(json.dumps({"error": {"message": message}}), status="400 Bad Request")
    answer = http('{"choices": [{"message": {"content": "Paris."}, "finish_reason": "stop"}]}')
    request = ChatRequest.user("Capital?", model="m", think="off", logprobs=True, max_tokens=64)
    with closing(ScriptedServer(refusal, answer)) as server, closing(OpenAIBackend(server.url, environ={})) as backend:
        assert [backend.complete(request).text for _ in range(2)] == ["Paris.", "Paris."]
        first, *later = [sent for sent in server.requests if sent.startswith(b"POST")]
    assert refused in first
    assert [refused in sent for sent in later] == [False, False]
    assert all(instead in sent for sent in later)


def test_a_limit_that_is_too_high_is_an_error_of_the_request() -> None:
    refusal = http('{"error": {"message": "max_tokens is too large: 9000, at most 4096"}}', status="400 Bad Request")
    with closing(ScriptedServer(refusal)) as server, closing(OpenAIBackend(server.url, environ={})) as backend:
        reply = backend.complete(ChatRequest.user("Capital?", model="m", max_tokens=9000))
    assert (kind_of(reply), len(server.requests)) == ("request", 1)


def test_logged_answers_are_read_without_their_thought() -> None:
    assert Attempt(text="<think>7</think>The answer is 4.").text == "The answer is 4."
