"""Clients that people use, through the proxy and against the test server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from langchain_ollama import ChatOllama
from pydantic import BaseModel

from query_mutator.apply.proxy.answers import Mode
from query_mutator.encoder import Encoder, resolve_encoder
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest
from tests.conftest import Upper
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, proxy

STOPPED = "`os.kill` is what you want."
TIMES = ("created_at", "created", "id", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_LITELLM = """
import json, sys
import litellm
messages = [{"role": "user", "content": %r}]
def asked(provider, url, model):
    base = url + "/v1" if provider == "openai" else url
    settings = dict(model=provider + "/" + model, messages=messages, api_base=base, api_key="x")
    whole = litellm.completion(**settings)
    parts = litellm.completion(stream=True, **settings)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    headers = (whole._hidden_params or {}).get("additional_headers") or {}
    decision = [value for name, value in headers.items() if name.endswith("x-qm-decision")]
    return [whole.choices[0].message.content, text, whole.usage.completion_tokens, decision]
print(json.dumps([asked(*one) for one in json.loads(sys.argv[1])]))
"""
TEXT = "How do I sort a list?"


@pytest.fixture(scope="module")
def gate(tiny_server: StubServer, hash_encoder: Encoder) -> Iterator[str]:
    with proxy(tiny_server.url, hash_encoder) as url:
        yield url


def untimed(found: Any) -> Any:
    """Return a record without what depends on the clock."""
    if isinstance(found, dict):
        return {name: untimed(value) for name, value in found.items() if name not in TIMES}
    return [untimed(one) for one in found] if isinstance(found, list) else found


def test_langchain_ollama_gets_equal_objects_and_the_rewritten_answer(gate: str, tiny_server: StubServer) -> None:
    def asked(url: str) -> list[Any]:
        model = ChatOllama(model=MODEL, base_url=url)
        whole, parts = model.invoke(KILL), list(model.stream(KILL))
        return [(one.content, untimed(one.response_metadata), one.usage_metadata) for one in (whole, *parts)]

    assert asked(gate) == asked(tiny_server.url)
    seen: list[httpx.Response] = []
    virtual = ChatOllama(model=VIRTUAL, base_url=gate, client_kwargs={"event_hooks": {"response": [seen.append]}})
    assert virtual.invoke(KILL).content == STOPPED
    assert "".join(str(part.content) for part in virtual.stream(KILL)) == STOPPED
    assert [reply.headers["x-qm-decision"] for reply in seen] == ["rewritten", "rewritten"]


@pytest.mark.slow
def test_litellm_gets_the_same_and_the_rewritten_answer(gate: str, tiny_server: StubServer) -> None:
    places = ((gate, MODEL), (tiny_server.url, MODEL), (gate, VIRTUAL))
    calls = [(provider, *place) for provider in ("openai", "ollama_chat") for place in places]
    command = [sys.executable, "-c", _LITELLM % KILL, json.dumps(calls)]
    settings = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, timeout=120, env=settings)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for through_gate, direct, rewritten in (found[:3], found[3:]):
        assert through_gate == direct
        assert rewritten[0] == rewritten[1] == STOPPED
    assert found[2][3] == ["rewritten"]  # the other provider of LiteLLM drops headers


@pytest.mark.parametrize("mode", ["gate", "blind", "full"])
def test_an_answer_without_a_limit_of_the_client_has_that_of_the_proxy(
    mode: Mode, tiny_server: StubServer, hash_encoder: Encoder
) -> None:
    with proxy(tiny_server.url, hash_encoder, mode=mode, max_tokens=2) as url:
        theirs, ours = ollama.Client(url), openai.OpenAI(base_url=f"{url}/v1", api_key="x").chat.completions
        for question in (SORT, KILL):
            messages: Any = [{"role": "user", "content": question}]
            ends = [theirs.chat(VIRTUAL, messages, options=options).done_reason for options in (None, {"seed": 1})]
            ends += [list(theirs.chat(VIRTUAL, messages, stream=True))[-1].done_reason]
            ends += [theirs.generate(VIRTUAL, question).done_reason]
            ends += [ours.create(model=VIRTUAL, messages=messages).choices[0].finish_reason]
            ends += [list(ours.create(model=VIRTUAL, messages=messages, stream=True))[-1].choices[0].finish_reason]
            assert set(ends) == {"length"}


def test_a_limit_of_the_client_and_a_forwarded_request_are_left_alone(
    tiny_server: StubServer, hash_encoder: Encoder
) -> None:
    with proxy(tiny_server.url, hash_encoder, max_tokens=2) as url:
        theirs, ours = ollama.Client(url), openai.OpenAI(base_url=f"{url}/v1", api_key="x").chat.completions
        messages: Any = [{"role": "user", "content": SORT}]
        for limit, end in ((1, "length"), (90, "stop"), (-1, "stop")):
            assert theirs.chat(VIRTUAL, messages, options={"num_predict": limit}).done_reason == end
            assert theirs.generate(VIRTUAL, SORT, options={"num_predict": limit}).done_reason == end
        fields: list[dict[str, Any]] = [{"max_tokens": 90}, {"max_completion_tokens": 90}]
        whole = [ours.create(model=VIRTUAL, messages=messages, **field) for field in fields]
        whole.append(ours.create(model=MODEL, messages=messages))
        assert {one.choices[0].finish_reason for one in whole} == {"stop"}
        assert theirs.chat(MODEL, messages).done_reason == "stop"
        passed: Any = [*messages, {"role": "assistant", "content": "sorted"}, {"role": "user", "content": "list it"}]
        assert theirs.chat(VIRTUAL, passed).done_reason == "stop"  # goes to the upstream's model


class Answer(BaseModel):
    sure: bool
    answer: str


class Scores(BaseModel):
    scores: dict[str, float]
    note: str


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Upper()], encoder=resolve_encoder("hash"), num_parallel=2) as running:
        yield running


@pytest.fixture(scope="module")
def theirs(server: StubServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(server: StubServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str = TEXT) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- ollama ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ollama_structured_format(theirs: ollama.Client) -> None:
    reply = theirs.chat("upper", user(), format=Answer.model_json_schema())
    assert Answer.model_validate_json(reply.message.content) == Answer(sure=False, answer=TEXT.upper())
    assert theirs.generate("upper", TEXT, format="json").response == f'{{"response": "{TEXT.upper()}"}}'


@pytest.mark.slow
def test_ollama_embed(theirs: ollama.Client) -> None:
    reply = theirs.embed("all-minilm", [TEXT, "", TEXT])
    assert reply.embeddings[0] == reply.embeddings[2]
    assert reply.embeddings[1] == []
    assert np.linalg.norm(reply.embeddings[0]) == pytest.approx(1, abs=1e-5)
    assert theirs.embed("all-minilm", TEXT).embeddings == [reply.embeddings[0]]


@pytest.mark.slow
def test_our_ollama_client_reads_what_theirs_reads(server: StubServer, theirs: ollama.Client) -> None:
    ours = OllamaBackend(server.url)
    reply, expected = (
        ours.complete(ChatRequest.user(TEXT, model="upper", max_tokens=3)),
        theirs.chat("upper", user(), options={"num_predict": 3, "temperature": 0}, think=False),
    )
    assert (reply.text, reply.model) == (expected.message.content, expected.model)
    assert (reply.prompt_tokens, reply.completion_tokens) == (expected.prompt_eval_count, expected.eval_count)
    assert np.allclose(ours.embed("all-minilm", [TEXT, "b"]), theirs.embed("all-minilm", [TEXT, "b"]).embeddings)
    assert ours.models() == tuple(model.model for model in theirs.list().models)
    assert ours.digest("upper") == theirs.list().models[0].digest
    missing = ours.complete(ChatRequest.user(TEXT, model="none")).error
    with pytest.raises(ollama.ResponseError) as raised:
        theirs.chat("none", user())
    assert missing is not None
    assert (missing.status, missing.message) == (raised.value.status_code, raised.value.error)
    ours.close()


# --- openai ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_openai_structured_format(openai_client: openai.OpenAI) -> None:
    reply = openai_client.chat.completions.parse(model="upper", messages=user(), response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(sure=False, answer=TEXT.upper())


@pytest.mark.slow
def test_openai_embeddings_as_numbers_and_in_base64(openai_client: openai.OpenAI, theirs: ollama.Client) -> None:
    expected = theirs.embed("all-minilm", TEXT).embeddings[0]
    coded = openai_client.embeddings.create(model="all-minilm", input=[TEXT, "b"])
    assert np.allclose(coded.data[0].embedding, expected, atol=1e-7)
    assert [item.index for item in coded.data] == [0, 1]


@pytest.mark.slow
def test_both_clients_are_refused_log_probabilities_and_paths_that_are_not_there(
    theirs: ollama.Client, openai_client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support logprobs"):
        openai_client.chat.completions.create(model="upper", messages=user(), logprobs=True)
    with pytest.raises(openai.NotFoundError, match="POST /v1/completions: Not Found"):
        openai_client.completions.create(model="upper", prompt=TEXT)
    with pytest.raises(ollama.ResponseError, match="POST /api/pull: Not Found"):
        theirs.pull("upper")


@pytest.mark.slow
def test_both_clients_get_dictionaries_of_numbers(theirs: ollama.Client, openai_client: openai.OpenAI) -> None:
    reply = theirs.chat("upper", user(), format=Scores.model_json_schema())
    assert Scores.model_validate_json(reply.message.content) == Scores(scores={}, note=TEXT.upper())
    parsed = openai_client.chat.completions.create(
        model="upper",
        messages=user(),
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": Scores.model_json_schema()}},
    )
    assert Scores.model_validate_json(parsed.choices[0].message.content) == Scores(scores={}, note=TEXT.upper())


@pytest.mark.slow
def test_our_openai_client_reads_what_theirs_reads(server: StubServer, openai_client: openai.OpenAI) -> None:
    ours = OpenAIBackend(f"{server.url}/v1")
    reply = ours.complete(ChatRequest.user(TEXT, model="upper", max_tokens=3))
    expected = openai_client.chat.completions.create(model="upper", messages=user(), max_tokens=3, temperature=0)
    assert reply.text == expected.choices[0].message.content
    assert (reply.prompt_tokens, reply.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    vectors = openai_client.embeddings.create(model="all-minilm", input=[TEXT, "b"])
    assert np.allclose(ours.embed("all-minilm", [TEXT, "b"]), [item.embedding for item in vectors.data], atol=1e-7)
    assert ours.models() == tuple(model.id for model in openai_client.models.list())
    missing = ours.complete(ChatRequest.user(TEXT, model="none")).error
    with pytest.raises(openai.NotFoundError) as raised:
        openai_client.chat.completions.create(model="none", messages=user())
    assert missing is not None
    assert (missing.status, missing.message) == (raised.value.status_code, raised.value.body["message"])
    ours.close()
