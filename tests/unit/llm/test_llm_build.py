"""Which backend a run gets, the client composed for it, addresses of servers, and prompts that do not fit."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.errors import BackendError, ModelMissingError, ServerDownError, UsageError
from query_mutator.llm.address import is_loopback, proxy_for, route_to, server_url
from query_mutator.llm.backends import resolve_backend
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.recorded import BUNDLED_RECORDINGS
from query_mutator.llm.stack import build_client
from query_mutator.operators.base import DEFAULT_REFUSAL, clean_rewrite
from query_mutator.rewards.matching import is_refusal
from query_mutator.testing import Echo, StubServer, start_server
from query_mutator.types import ChatRequest


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server({}, encoder=resolve_encoder("hash")) as running:
        yield running


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is taken and not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_auto_takes_a_server_that_answers(server: StubServer) -> None:
    choice = resolve_backend("auto", target_model="echo", environ={"OLLAMA_HOST": f":{server.port}"})
    assert (choice.kind, choice.url) == ("ollama", server.url)
    assert server.url in choice.reason


def test_auto_without_a_target_model_lists_the_installed_ones(server: StubServer) -> None:
    with pytest.raises(UsageError, match=r"Give --target-model, one of: .*echo:latest"):
        resolve_backend("auto", environ={"OLLAMA_HOST": server.url})


def test_auto_falls_back_on_the_recording_for_its_questions_and_says_so(nobody: str, server: StubServer) -> None:
    choice = resolve_backend("auto", environ={"OLLAMA_HOST": nobody}, has_recording=True)
    assert (choice.kind, choice.urls) == ("recorded", BUNDLED_RECORDINGS)
    assert choice.reason == f"backend: recorded replies, because no Ollama server answers at http://{nobody}"
    elsewhere = {"OLLAMA_HOST": f"{server.url}/elsewhere"}  # what answers is not Ollama
    assert resolve_backend("auto", environ=elsewhere, has_recording=True).kind == "recorded"
    with pytest.raises(ServerDownError, match=r"--openai-url or --gguf FILE \(smollm2 to try\)"):
        resolve_backend("auto", environ={"OLLAMA_HOST": nobody})


@pytest.mark.parametrize("asked", [{"backend": "ollama"}, {"ollama_url": ...}, {"target_model": "echo"}])
def test_what_was_asked_for_by_name_never_falls_back(asked: dict[str, Any], nobody: str) -> None:
    asked = {key: nobody if value is ... else value for key, value in asked.items()}
    with pytest.raises(ServerDownError, match=f"nothing answers at http://{nobody}: start it with `ollama serve`"):
        resolve_backend(**asked, environ={"OLLAMA_HOST": nobody}, has_recording=True)


@pytest.mark.parametrize("models", [{"target_model": "missing"}, {"target_model": "echo", "mutator_model": "missing"}])
def test_either_model_missing_is_refused(server: StubServer, models: dict[str, str]) -> None:
    with pytest.raises(ModelMissingError, match="run `ollama pull missing`"):
        resolve_backend("ollama", ollama_url=server.url, **models)


def test_the_address_is_the_one_given_then_the_environments_then_ollamas_own() -> None:
    environ = {"OLLAMA_HOST": "gpu-box"}
    assert OllamaBackend.address("other:1", environ=environ) == "http://other:1"
    assert OllamaBackend.address(environ=environ) == "http://gpu-box:11434"
    assert OllamaBackend.address(environ={"OLLAMA_HOST": " "}) == "http://127.0.0.1:11434"


def test_the_composed_client_prints_its_nesting_and_answers(server: StubServer) -> None:
    stack = build_client(server.url, batch_size=2)
    assert repr(stack.retry) == f"Retry(Limit(Ollama('{server.url}')))"
    assert stack.retry.complete(ChatRequest.user("why?", model="echo")).ok
    assert stack.limit.limit == 2
    stack.close()
    assert not stack.limit.complete(ChatRequest.user("why?", model="echo")).ok


def test_every_layer_that_is_asked_for_is_printed(server: StubServer, tmp_path: Path) -> None:
    stack = build_client(
        [server.url, "127.0.0.1:1"],
        adaptive=True,
        cache="all",
        cache_path=tmp_path / "c",
        is_refusal=lambda text: False,
    )
    servers = f"Pool([EarlyStop(Ollama('{server.url}')), EarlyStop(Ollama('http://127.0.0.1:1'))])"
    assert repr(stack.retry) == f"Retry(AdaptiveLimit({servers}))"
    assert repr(stack.client) == repr(stack.eval_client) == f"Cache(Coalesce(Counted(AdaptiveLimit({servers}))))"
    stack.close()


@pytest.mark.parametrize(
    ("mode", "cached"),
    [("off", (False, False)), ("eval", (False, True)), ("all", (True, True))],
)
def test_the_mode_says_whose_calls_are_cached(
    server: StubServer, tmp_path: Path, mode: Any, cached: tuple[bool, bool]
) -> None:
    stack = build_client(server.url, cache=mode, cache_path=tmp_path / "c")
    clients = (stack.client, stack.eval_client)
    assert tuple(repr(client).startswith("Cache(") for client in clients) == cached
    assert (tmp_path / "c").exists() == (mode != "off")
    stack.close()


def test_calls_are_counted_apart_and_shared_replies_not_at_all(server: StubServer, tmp_path: Path) -> None:
    stack = build_client(server.url, cache="eval", cache_path=tmp_path / "c")
    for _ in range(3):
        assert stack.eval_client.complete(ChatRequest.user("why?", model="echo")).ok
        assert stack.client.complete(ChatRequest.user("why?", model="echo")).ok
    assert (stack.counted.totals.calls, stack.eval_counted.totals.calls, stack.cache_hits) == (3, 1, 2)
    stack.close()


def test_a_cache_that_cannot_be_had_costs_a_warning_unless_it_was_named(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    impossible = tmp_path / "file" / "c"
    monkeypatch.setenv("QUERY_MUTATOR_REPLIES", str(impossible))
    stack = build_client(server.url, cache="eval")
    assert "continuing without a cache" in caplog.text
    assert stack.eval_client.complete(ChatRequest.user("why?", model="echo")).ok
    stack.close()
    with pytest.raises(UsageError, match="--cache-path"):
        build_client(server.url, cache="eval", cache_path=impossible)


def test_an_openai_address_makes_an_openai_backend(server: StubServer) -> None:
    choice = resolve_backend("auto", openai_url=server.url, target_model="echo")
    assert (choice.kind, choice.urls) == ("openai", (f"{server.url}/v1",))
    stack = build_client(choice.urls, backend="openai")
    assert stack.retry.complete(ChatRequest.user("why?", model="echo")).ok
    assert repr(stack.limit) == f"Limit(OpenAI('{server.url}/v1'))"
    stack.close()


def test_openai_takes_its_address_from_the_environment_or_asks_for_it(server: StubServer) -> None:
    environ = {"OPENAI_BASE_URL": f"{server.url}/v1"}
    assert resolve_backend("openai", target_model="echo", environ=environ).url == f"{server.url}/v1"
    with pytest.raises(UsageError, match="--openai-url"):
        resolve_backend("openai", target_model="echo", environ={})
    with pytest.raises(UsageError, match=r"Give --target-model, one of: echo:latest"):
        resolve_backend("openai", environ=environ)


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "openai", "ollama_url": "a:1"},
        {"backend": "ollama", "openai_url": "a:1"},
        {"ollama_url": "a:1", "openai_url": "a:1"},
    ],
)
def test_addresses_of_another_kind_of_server_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"leave one (of them )?out"):
        resolve_backend(**asked, target_model="m")


def test_each_of_several_servers_must_answer_and_have_the_models(server: StubServer, nobody: str) -> None:
    with start_server({"other": Echo()}) as other:
        choice = resolve_backend(ollama_url=[server.url, other.url, server.url], target_model="echo")
        assert choice.urls == (server.url, other.url)
        assert choice.reason.count("Ollama 0.1.0+testing at") == 2
        with pytest.raises(ModelMissingError, match=server.url):
            resolve_backend(ollama_url=[other.url, server.url], target_model="other")
    with pytest.raises(ServerDownError, match=nobody):
        resolve_backend(ollama_url=[server.url, nobody], target_model="echo")


def test_the_stack_embeds_through_the_server(server: StubServer) -> None:
    stack = build_client(server.url)
    encoder = resolve_encoder("ollama:all-minilm", embed=stack.embed)
    texts = ["sort a list", "read a file"]
    np.testing.assert_allclose(encoder.encode(texts), resolve_encoder("hash").encode(texts), atol=1e-6)
    with pytest.raises(BackendError, match=r"no embeddings from 'nowhere' \(model_missing"):
        stack.embed("nowhere", texts)
    stack.close()


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:11434"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        (":8080", "http://127.0.0.1:8080"),
        ("gpu-box", "http://gpu-box:11434"),
        ("gpu-box:1", "http://gpu-box:1"),
        (" gpu-box ", "http://gpu-box:11434"),
        ("http://gpu-box", "http://gpu-box:80"),
        ("https://gpu-box", "https://gpu-box:443"),
        ("https://gpu-box:11434/", "https://gpu-box:11434"),
        ("http://gpu-box/ollama/", "http://gpu-box:80/ollama"),
        ("gpu-box/ollama", "http://gpu-box:11434/ollama"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("http://0.0.0.0:5000", "http://127.0.0.1:5000"),
        ("::1", "http://[::1]:11434"),
        ("[::1]", "http://[::1]:11434"),
        ("[::1]:99", "http://[::1]:99"),
        ("[::]:99", "http://[::1]:99"),
    ],
)
def test_every_form_that_ollama_accepts_becomes_a_url(typed: str, url: str) -> None:
    assert server_url(typed) == url
    assert server_url(url) == url


@pytest.mark.parametrize(
    "typed",
    ["ftp://gpu-box", "gpu-box:port", "gpu-box:99999", "my box", "http://..", "gpu-bóx", "http://me:secret@gpu-box"],
)
def test_what_is_no_address_is_a_usage_error_in_one_line(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        server_url(typed)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_loopback_is_known_by_name_and_by_number() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["gpu-box", "10.0.0.1", "localhost.example.org", "::2"]))


def test_a_proxy_is_taken_from_the_environment_unless_no_proxy_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy.test:3128")
    monkeypatch.setenv("no_proxy", "inside.test,10.0.0.0/8")
    assert route_to("http://outside.test").host == "proxy.test"
    assert route_to("http://inside.test").host == "inside.test"
    assert route_to("http://10.1.2.3").host == "10.1.2.3"
    assert route_to("localhost").host == "localhost"


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://proxy.test:1080")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UsageError, match="socks5 proxy is not supported"):
        proxy_for("http://outside.test")


QUESTION = "How do I copy a file?"


@pytest.mark.parametrize(
    "reply",
    [
        QUESTION,
        f"  {QUESTION}\n",
        f'"{QUESTION}"',
        f"'{QUESTION}'",
        f"“{QUESTION}”",
        f"`{QUESTION}`",
        f"**{QUESTION}**",
        f'"**{QUESTION}**"',
        f"```\n{QUESTION}\n```",
        f"```text\n{QUESTION}\n```",
        f"```{QUESTION}```",
        f"<question>\n{QUESTION}\n</question>",
        f"Rewritten question: {QUESTION}",
        f'Rewritten Question:\n"{QUESTION}"',
        f"**Rewritten question:** {QUESTION}",
        f"**Rewritten question**: {QUESTION}",
        f"Question: {QUESTION}",
        f"Rephrased: {QUESTION}",
        f"Corrected query (shorter): {QUESTION}",
        f"Sure, here is the rewritten question:\n\n{QUESTION}",
        f"Here's the question rephrased in plain English: {QUESTION}",
        f"Sure! {QUESTION}",
        f"Sure! Rewritten: {QUESTION}",
        f"{QUESTION}\n\nI replaced the slang and kept the meaning.",
        f"<think>The user wants\n\na question.</think>\n\n{QUESTION}",
        f"the user wants a question</think>{QUESTION}",
        f"<thinking>hm</thinking>{QUESTION}",
        "How do I\ncopy a file?",
    ],
)
def test_what_a_model_adds_around_the_question_is_stripped(reply: str) -> None:
    assert clean_rewrite(reply) == QUESTION


@pytest.mark.parametrize(
    "question",
    [
        "In Python 3: how do I copy a file?",
        "Here is my code: f(x). Why does it fail?",
        "The output of my script is: 3. How do I round it?",
        '"rb" or "wb"?',
        "`os.path` or `pathlib`?",
        "'r' mode, what's it do? I mean 'r'",
        "What does `__init__` do?",
        "Sure, but how do I copy a file?",
        "What's a dict: a table?",
        "2 * 3 or 2 ** 3?",
        "don't",
    ],
)
def test_a_question_that_only_looks_like_it_is_left_alone(question: str) -> None:
    assert clean_rewrite(question) == question


@pytest.mark.parametrize("reply", ["", "  ", "<think>never ends", '""', "```\n```", "Rewritten question:"])
def test_a_reply_without_a_question_is_empty(reply: str) -> None:
    assert clean_rewrite(reply) == ""


def test_the_stand_in_for_a_failed_answer_counts_as_a_refusal() -> None:
    assert is_refusal(DEFAULT_REFUSAL)
