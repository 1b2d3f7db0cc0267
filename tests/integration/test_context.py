"""Prompts and replies that do not fit the context, on servers that behave as Ollama 0.9 and as 0.24."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from query_mutator.commands.main import main
from query_mutator.encoder import resolve_encoder
from query_mutator.env.flow import Encode, Flow
from query_mutator.env.scheduling import PooledScheduler
from query_mutator.errors import BackendError
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.retry import DEFAULT_POLICY
from query_mutator.llm.stack import build_client
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion, ErrorInfo
from tests.conftest import OnUpper, Upper
from tests.integration.raw_http import chat

LONG = "begin " + "word " * 300 + "end"


class Talker:
    """Writes 500 tokens whatever is asked."""

    name = "talker"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        return ["I talk. " + "on " * 496] * len(prompts)


@pytest.fixture(scope="module", params=["0.9", "0.24"])
def server(request: pytest.FixtureRequest) -> Iterator[StubServer]:
    models = [Upper(), Talker(), OnUpper("short", num_ctx=128), OnUpper("plain")]
    with start_server(models, encoder=resolve_encoder("hash"), num_parallel=4, behave_as=request.param) as running:
        running.version = request.param  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def ollama(server: StubServer) -> Iterator[OllamaBackend]:
    client = OllamaBackend(server.url, timeout_s=20.0, runner_options={"num_ctx": 128})
    yield client
    client.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_beyond_the_context_is_a_failed_call_that_names_the_flag(
    ollama: OllamaBackend, *, streamed: bool
) -> None:
    def ask(text: str) -> Completion:
        request = ChatRequest.user(text, model="upper")
        return ollama.complete_until(request, lambda text: len(text) > 20) if streamed else ollama.complete(request)

    assert ask("fits").ok
    reply = ask(LONG)
    assert reply.error is not None
    assert (reply.error.kind, reply.text) == ("prompt_too_long", "")
    assert "--num-ctx" in reply.error.message
    assert ask("fits " * 10).text.startswith("FITS FITS")


def test_a_prompt_beyond_the_context_fails_whatever_the_context_comes_from(server: StubServer) -> None:
    with start_server([Upper()], behave_as=server.version) as other:  # type: ignore[attr-defined]
        for url, model, text in ((server.url, "short", LONG), (other.url, "upper", LONG * 14)):
            ours = OllamaBackend(url)
            errors = [ours.complete(ChatRequest.user(text, model=model)).error for _ in range(2)]
            ours.close()
            assert [error and error.kind for error in errors] == ["prompt_too_long"] * 2


def test_a_reply_that_ends_at_a_limit_or_slides_is_marked(ollama: OllamaBackend) -> None:
    def marked(text: str, **fields: Any) -> bool:
        reply = ollama.complete(ChatRequest.user(text, **fields))
        assert reply.ok
        return reply.hit_limit

    assert marked("one two three", model="upper", max_tokens=2)
    assert not marked("one two three", model="upper", max_tokens=20)
    assert marked("go", model="talker", max_tokens=1000)  # 0.24 ends it at the context, 0.9 slides past it


def test_a_text_beyond_the_context_has_no_embedding(server: StubServer) -> None:
    ours = OllamaBackend(server.url, runner_options={"num_ctx": 128})
    error = ours.embed("all-minilm", ["fits", LONG])
    ours.close()
    assert isinstance(error, ErrorInfo)
    assert error.kind == "prompt_too_long"
    assert "--num-ctx" in error.message
    stack = build_client(server.url, num_ctx=128)
    with pytest.raises(BackendError, match=r"longest of 2 texts has 1509 characters: 'begin word word .*--num-ctx"):
        stack.embed("all-minilm", ["fits", LONG])
    stack.close()


def test_a_text_beyond_the_context_fails_alone_among_those_sent_with_it(server: StubServer) -> None:
    def flow(text: str) -> Flow:
        return (yield Encode((text,)))

    stack = build_client(server.url, num_ctx=128)
    encoder = resolve_encoder("ollama:all-minilm", embed=stack.embed)
    scheduler = PooledScheduler(client=stack.client, encoder=encoder, retry_policy=DEFAULT_POLICY, batch_size=4)
    for text in ("one", "two", LONG, "four"):
        scheduler.start(text, flow(text))
    found = dict(scheduler.finished() for _ in range(4))
    scheduler.close()
    stack.close()
    assert [text for text, vectors in found.items() if isinstance(vectors, ErrorInfo)] == [LONG]
    assert found[LONG].kind == "prompt_too_long"


def test_doctor_says_the_memory_of_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Upper(), OnUpper("plain")], latency_ms=20) as server:
        chat(server, "a")
        assert main(["doctor", "--ollama-url", server.url, "--target-model", "upper", "--batch-size", "2"]) == 0
        assert "\ncaches: " in capsys.readouterr().out


def test_a_reply_of_ollamas_openai_routes_is_marked_too(server: StubServer) -> None:
    ours = OpenAIBackend(server.url)
    assert ours.complete(ChatRequest.user("one two three", model="upper", max_tokens=2)).hit_limit
    assert not ours.complete(ChatRequest.user("one two three", model="upper", max_tokens=9)).hit_limit
    ours.close()


def test_a_server_that_reports_no_context_is_believed_to_have_num_ctx(server: StubServer) -> None:
    request = ChatRequest.user("word " * 5000, model="upper")  # Ollama's OpenAI routes cut it to the default, 4,096
    unaware, aware = OpenAIBackend(server.url), OpenAIBackend(server.url, runner_options={"num_ctx": 4096})
    assert unaware.complete(request).prompt_tokens == 4096
    assert "context unknown; give --num-ctx" in unaware.describe_options("upper")
    error = aware.complete(request).error
    assert error is not None
    assert error.kind == "prompt_too_long"
    assert aware.complete(ChatRequest.user("word", model="upper")).ok
    for ours in (unaware, aware):
        ours.close()


def test_a_prompt_goes_to_the_server_that_has_the_context(server: StubServer) -> None:
    with start_server([OnUpper("upper", num_ctx=128)], behave_as=server.version) as small:  # type: ignore[attr-defined]
        stack = build_client([small.url, server.url], batch_size=2, max_retries=0)
        replies = [stack.client.complete(ChatRequest.user(LONG, model="upper", seed=n)) for n in range(6)]
        stack.close()
        assert small.stats()["routes"]["/api/chat"] >= 2
    assert all(reply.ok and reply.text.startswith("BEGIN") for reply in replies)


def test_the_first_streamed_reply_to_a_long_prompt_is_not_cut_early(server: StubServer) -> None:
    ours = OllamaBackend(server.url)
    request = ChatRequest.user("word " * 5000, model="upper")
    errors = [ours.complete_until(request, lambda text: True).error for _ in range(2)]
    ours.close()
    assert [error and error.kind for error in errors] == ["prompt_too_long"] * 2
