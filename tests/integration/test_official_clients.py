"""The `ollama` and `openai` packages against the test server: every route it offers, streaming, errors, formats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import ollama
import openai
import pytest
from pydantic import BaseModel

from query_mutator.encoder import resolve_encoder
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest
from tests.conftest import Upper

pytestmark = pytest.mark.slow

TEXT = "How do I sort a list?"


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


def test_ollama_list_show_ps(theirs: ollama.Client) -> None:
    listed = {model.model: model for model in theirs.list().models}
    assert set(listed) == {"upper:latest", "echo:latest", "all-minilm:latest"}
    shown = theirs.show("upper")
    assert shown.capabilities == ["completion"]
    assert shown.modified_at == listed["upper:latest"].modified_at
    theirs.chat("upper", user(), keep_alive="10m", options={"num_ctx": 2048})
    running = {model.model: model for model in theirs.ps().models}
    assert running["upper:latest"].context_length == 2048
    assert running["upper:latest"].digest == listed["upper:latest"].digest
    assert running["upper:latest"].expires_at > datetime.now(UTC) + timedelta(minutes=5)


def test_ollama_structured_format(theirs: ollama.Client) -> None:
    reply = theirs.chat("upper", user(), format=Answer.model_json_schema())
    assert Answer.model_validate_json(reply.message.content) == Answer(sure=False, answer=TEXT.upper())
    assert theirs.generate("upper", TEXT, format="json").response == f'{{"response": "{TEXT.upper()}"}}'


def test_ollama_embed(theirs: ollama.Client) -> None:
    reply = theirs.embed("all-minilm", [TEXT, "", TEXT])
    assert reply.embeddings[0] == reply.embeddings[2]
    assert reply.embeddings[1] == []
    assert np.linalg.norm(reply.embeddings[0]) == pytest.approx(1, abs=1e-5)
    assert theirs.embed("all-minilm", TEXT).embeddings == [reply.embeddings[0]]


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


def test_openai_structured_format(openai_client: openai.OpenAI) -> None:
    reply = openai_client.chat.completions.parse(model="upper", messages=user(), response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(sure=False, answer=TEXT.upper())


def test_openai_embeddings_as_numbers_and_in_base64(openai_client: openai.OpenAI, theirs: ollama.Client) -> None:
    expected = theirs.embed("all-minilm", TEXT).embeddings[0]
    coded = openai_client.embeddings.create(model="all-minilm", input=[TEXT, "b"])
    assert np.allclose(coded.data[0].embedding, expected, atol=1e-7)
    assert [item.index for item in coded.data] == [0, 1]


def test_both_clients_are_refused_log_probabilities_and_paths_that_are_not_there(
    theirs: ollama.Client, openai_client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support logprobs"):
        openai_client.chat.completions.create(model="upper", messages=user(), logprobs=True)
    with pytest.raises(openai.NotFoundError, match="POST /v1/completions: Not Found"):
        openai_client.completions.create(model="upper", prompt=TEXT)
    with pytest.raises(ollama.ResponseError, match="POST /api/pull: Not Found"):
        theirs.pull("upper")


def test_both_clients_get_dictionaries_of_numbers(theirs: ollama.Client, openai_client: openai.OpenAI) -> None:
    reply = theirs.chat("upper", user(), format=Scores.model_json_schema())
    assert Scores.model_validate_json(reply.message.content) == Scores(scores={}, note=TEXT.upper())
    parsed = openai_client.chat.completions.create(
        model="upper",
        messages=user(),
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": Scores.model_json_schema()}},
    )
    assert Scores.model_validate_json(parsed.choices[0].message.content) == Scores(scores={}, note=TEXT.upper())


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
