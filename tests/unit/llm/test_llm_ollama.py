"""What every backend does against the test server, scripted faults and streams included; Ollama's own requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.errors import BackendError, ModelMissingError, ServerDownError
from query_mutator.llm.http_server import HttpServer
from query_mutator.llm.ollama import OllamaBackend, chat_payload, with_tag
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.testing import FaultPlan, StubServer, start_server
from query_mutator.types import ChatRequest, ErrorInfo, Message
from tests.conftest import Upper


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Upper()], encoder=resolve_encoder("hash"), num_parallel=4) as running:
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


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("500", "server"),
        ("503", "busy"),
        ("reset", "connect"),
        ("stall", "timeout"),
        ("cut", "malformed"),
        ("empty", "empty"),
        ("incomplete", "incomplete"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("make", [OllamaBackend, OpenAIBackend])
def test_a_faulty_reply_is_an_error_of_its_kind_and_never_text(
    make: type[HttpServer], streamed: bool, fault: str, kind: str
) -> None:
    with start_server([Upper()], faults=FaultPlan(1.0, kinds=(fault,))) as faulty:
        backend = make(faulty.url, timeout_s=0.3 if fault == "stall" else 20.0)
        request = ChatRequest.user("why?", model="upper")
        reply = backend.complete_until(request, lambda text: False) if streamed else backend.complete(request)
        backend.close()
    assert reply.error is not None
    assert (reply.error.kind, reply.text) == (kind, "")


def test_a_streamed_reply_read_to_its_end_is_the_whole_one(each: HttpServer) -> None:
    request = ChatRequest.user("one two three four", model="upper")
    streamed, whole = each.complete_until(request, lambda text: False), each.complete(request)
    assert streamed.text == whole.text
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)


def test_a_model_that_is_not_there_is_an_error_of_the_call(each: HttpServer) -> None:
    request = ChatRequest.user("why?", model="nowhere")
    errors = [each.complete(request).error, each.complete_until(request, lambda text: False).error]
    errors.append(each.embed("nowhere", ["text"]))
    assert [(error.kind, error.status) for error in errors if error is not None] == [("model_missing", 404)] * 3


def test_embeddings_are_rows_in_the_order_of_the_texts(each: HttpServer) -> None:
    texts = ["sort a list", "read a file", "sort a list"]
    rows = each.embed("all-minilm", texts)
    assert not isinstance(rows, ErrorInfo)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, resolve_encoder("hash").encode(texts), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "flag"), [(OllamaBackend, r"ollama serve.*--ollama-url.*--openai-url"), (OpenAIBackend, "--openai-url")]
)
def test_nothing_at_the_address_names_the_flag(make: type[HttpServer], flag: str) -> None:
    with start_server({}) as gone:
        url = gone.url
    with pytest.raises(ServerDownError, match=rf"nothing answers at .*{flag}"):
        make(url).models()


@pytest.mark.parametrize("make", [OllamaBackend, OpenAIBackend])
def test_a_server_of_another_kind_is_told_apart_from_none(make: type[HttpServer], server: StubServer) -> None:
    with pytest.raises(BackendError, match=r"check that it is the address of|answers /models with an error"):
        make(f"{server.url}/elsewhere").models()


@pytest.mark.parametrize("make", [OllamaBackend, OpenAIBackend])
def test_a_closed_backend_fails_calls_as_cancelled(make: type[HttpServer], server: StubServer) -> None:
    backend = make(server.url)
    assert backend.complete(ChatRequest.user("why?", model="upper")).ok
    backend.close()
    backend.close()
    reply = backend.complete(ChatRequest.user("why?", model="upper"))
    assert reply.error is not None
    assert reply.error.kind == "cancelled"


# --- Ollama -----------------------------------------------------------------------------------------------------------


def test_a_reply_comes_with_its_counts_and_times(backend: OllamaBackend) -> None:
    reply = backend.complete(ChatRequest.user("why?", model="upper"))
    assert (reply.text, reply.model, reply.error) == ("WHY?", "upper", None)
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens > 0
    assert 0 < reply.total_s <= reply.latency_s


def test_many_threads_get_their_own_replies(backend: OllamaBackend) -> None:
    texts = [f"question {number}" for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda text: backend.complete(ChatRequest.user(text, model="upper")), texts))
    assert [reply.text for reply in replies] == [text.upper() for text in texts]


def test_the_payload_asks_for_one_whole_unthinking_reply() -> None:
    request = ChatRequest(
        model="m",
        messages=(Message(role="system", content="be brief"), Message(role="user", content="why?")),
        max_tokens=64,
        temperature=0.5,
        seed=7,
        options={"num_ctx": 2048},
    )
    assert chat_payload(request, keep_alive="30m") == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}],
        "stream": False,
        "think": False,
        "truncate": False,
        "shift": False,
        "options": {"temperature": 0.5, "num_predict": 64, "seed": 7, "num_ctx": 2048},
        "keep_alive": "30m",
    }


def test_a_request_without_a_seed_sends_none() -> None:
    assert "seed" not in chat_payload(ChatRequest.user("why?", model="m"), keep_alive="1m")["options"]


def test_the_server_tells_its_version_and_models(backend: OllamaBackend) -> None:
    assert backend.version().endswith("+testing")
    assert {"upper:latest", "echo:latest"} <= set(backend.models())


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
