"""`qm serve` in front of a server that has OpenAI's API only: Ollama's clients chat, generate and list models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import ollama
import pytest
import requests

from query_mutator.apply.proxy.both_apis import BothApis, openai_body
from query_mutator.commands.serve import ServeFlags, limit_line, mode_line
from query_mutator.embedded.server import EmbeddedServer
from query_mutator.encoder import Encoder
from query_mutator.learners.plan import Plan
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, proxy
from tests.scripted_server import ScriptedServer, http


class OpenAIOnly(BothApis):
    """A server without Ollama's API."""

    has_ollama = False


@pytest.fixture(scope="module")
def url(tiny_server: EmbeddedServer, hash_encoder: Encoder) -> Iterator[str]:
    with proxy(tiny_server.url, hash_encoder, upstream_class=OpenAIOnly) as found:
        yield found


@pytest.mark.parametrize(
    ("model", "question", "text"),
    [
        (MODEL, SORT, "`sorted` is what you want."),
        (VIRTUAL, KILL, "`os.kill` is what you want."),  # refused, rewritten, answered
        (VIRTUAL, SORT, "`sorted` is what you want."),
    ],
)
def test_ollamas_client_chats_and_generates(url: str, model: str, question: str, text: str) -> None:
    client = ollama.Client(url)
    messages = [{"role": "user", "content": question}]
    chatted = client.chat(model, messages)
    assert (chatted.message.content, chatted.model, chatted.done_reason) == (text, model, "stop")
    assert chatted.eval_count
    pieces = list(client.chat(model, messages, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == text
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert client.generate(model, question).response == text
    assert "".join(piece.response or "" for piece in client.generate(model, question, stream=True)) == text
    assert client.generate(model, question, options={"num_predict": 1}).done_reason == "length"


def test_models_are_listed_in_both_apis(url: str) -> None:
    names = [model.model for model in ollama.Client(url).list().models]
    assert {MODEL, VIRTUAL} <= set(names)
    rows = requests.get(f"{url}/v1/models", timeout=20).json()["data"]
    assert {row["id"] for row in rows} == set(names)


def test_what_the_server_lacks_names_the_address_that_has_it(url: str, tiny_server: EmbeddedServer) -> None:
    shown = requests.post(f"{url}/api/show", json={"model": MODEL}, timeout=20)
    assert shown.status_code == 404
    assert f"use /v1/ here, or {tiny_server.url} for all that it has" in shown.json()["error"]
    tools = requests.post(f"{url}/api/chat", json={"model": MODEL, "tools": [{}], "messages": []}, timeout=20)
    assert (tools.status_code, "'tools' needs a server with Ollama's API" in tools.text) == (400, True)
    missing = requests.post(f"{url}/api/generate", json={"model": "nobody", "prompt": "a"}, timeout=20)
    assert (missing.status_code, "nobody" in missing.json()["error"]) == (404, True)


@pytest.mark.parametrize(
    ("version", "path"),
    [
        (http('{"version": "0.9"}'), b"POST /api/chat "),
        (http("", status="404 Not Found"), b"POST /v1/chat/completions "),
        (http('{"error": "no such path"}'), b"POST /v1/chat/completions "),  # as LM Studio says it
        (http("", status="401 Unauthorized"), b"POST /api/chat "),  # not known yet
    ],
)
def test_the_server_is_asked_once_whether_it_has_ollamas_api(
    version: bytes, path: bytes, hash_encoder: Encoder
) -> None:
    with (
        closing(ScriptedServer(version, http('{"choices": []}'))) as upstream,
        proxy(upstream.url, hash_encoder, upstream_class=BothApis) as url,
    ):
        body = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "hi"}]}
        requests.post(f"{url}/api/chat", json=body, timeout=20)
    assert upstream.requests[0].startswith(b"GET /api/version ")
    assert upstream.requests[1].startswith(path)


def test_a_stream_that_ends_early_has_no_last_line(hash_encoder: Encoder) -> None:
    events = 'data: {"choices": [{"delta": {"content": "He"}}]}\n\n'
    with (
        closing(ScriptedServer(http(events))) as upstream,
        proxy(upstream.url, hash_encoder, upstream_class=OpenAIOnly) as url,
        pytest.raises(requests.RequestException),
    ):
        requests.post(f"{url}/api/generate", json={"model": "m", "prompt": "hi"}, timeout=20)


def test_a_request_keeps_what_both_apis_have() -> None:
    body: dict[str, Any] = {
        "model": "m", "prompt": "Hi", "system": "Be brief.", "images": ["aGk="], "stream": False,
        "format": {"type": "object"}, "options": {"seed": 3, "num_predict": 9, "top_k": 5, "num_ctx": 512},
    }  # fmt: skip
    made = openai_body(b"/api/generate", body)
    assert json.loads(json.dumps(made)) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Hi"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                ],
            },
        ],
        "seed": 3,
        "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "object"}}},
        "stream": False,
    }


class Saved:
    """A checkpoint's flags."""

    algo = "ppo"

    def __init__(self, **flags: str) -> None:
        self.flags = flags


@pytest.mark.parametrize(
    ("mode", "flags", "said"),
    [
        ("gate", {"plan": "expand > neutral"}, "only if the answer refuses, the plan expand > neutral rewrites it"),
        ("gate", {}, "a model that never does so gets no rewrite. Every question is rewritten with --mode blind"),
        ("blind", {}, "every question is rewritten by the ppo policy and then asked once, with at most 9 calls"),
        ("full", {"plan": str(Plan())}, "the plan is the original question, so nothing is rewritten"),
    ],
)
def test_the_start_says_what_the_mode_does_with_the_policy(mode: Any, flags: dict[str, str], said: str) -> None:
    checkpoint: Any = Saved(**flags)
    assert said in mode_line(ServeFlags(mode=mode), checkpoint, blind=True)


def test_what_a_model_thought_is_kept(hash_encoder: Encoder) -> None:
    message = {"role": "assistant", "content": "Use sorted.", "reasoning_content": "A list."}
    whole = http(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))
    deltas = [{"reasoning_content": "A list."}, {"content": "Use sorted."}]
    rows = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [{"finish_reason": "stop"}]}]
    events = http("".join(f"data: {json.dumps(row)}\n\n" for row in rows))
    with (
        closing(ScriptedServer(whole, events)) as upstream,
        proxy(upstream.url, hash_encoder, upstream_class=OpenAIOnly) as url,
    ):
        client = ollama.Client(url)
        said = client.chat("m", [{"role": "user", "content": "hi"}]).message
        assert (said.thinking, said.content) == ("A list.", "Use sorted.")
        first, second, _ = client.generate("m", "hi", stream=True)
        assert (first.thinking, second.response) == ("A list.", "Use sorted.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "answers: at most 384 tokens (4 x the 96 of the training; --max-tokens)"),
        ({"max_tokens": 500}, "answers: at most 500 tokens (--max-tokens), where a client of +qm sets no limit"),
        ({"max_tokens": 0}, "answers: as long as the model writes, where a client sets no limit"),
    ],
)
def test_the_start_says_how_long_answers_are(given: dict[str, int], said: str) -> None:
    rewriter: Any = SimpleNamespace(task=SimpleNamespace(calls=SimpleNamespace(target_max_tokens=96)))
    assert limit_line(ServeFlags(**given), rewriter).startswith(said)
