"""The Ollama backend against the test server, its scripted faults included."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.errors import BackendError, ModelMissingError, ServerDownError
from query_mutator.llm.ollama import OllamaBackend, chat_payload, with_tag
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
def test_a_faulty_reply_is_an_error_of_its_kind_and_never_text(fault: str, kind: str) -> None:
    with start_server([Upper()], faults=FaultPlan(1.0, kinds=(fault,))) as faulty:
        backend = OllamaBackend(faulty.url, timeout_s=0.5 if fault == "stall" else 20.0)
        reply = backend.complete(ChatRequest.user("why?", model="upper"))
        backend.close()
    assert reply.error is not None
    assert (reply.error.kind, reply.text) == (kind, "")


def test_a_model_that_is_not_there_is_an_error_of_the_call(backend: OllamaBackend) -> None:
    reply = backend.complete(ChatRequest.user("why?", model="nowhere"))
    assert reply.error is not None
    assert (reply.error.kind, reply.error.status) == ("model_missing", 404)


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


def test_nothing_at_the_address_is_said_with_what_to_do() -> None:
    with start_server({}) as gone:
        url = gone.url
    with pytest.raises(ServerDownError, match=r"nothing answers at .*ollama serve.*--ollama-url.*--openai-url"):
        OllamaBackend(url).version()


def test_a_server_of_another_kind_is_told_apart_from_none(server: StubServer) -> None:
    with pytest.raises(BackendError, match="check that it is the address of Ollama"):
        OllamaBackend(f"{server.url}/elsewhere").version()


def test_embeddings_are_rows_in_the_order_of_the_texts(backend: OllamaBackend) -> None:
    texts = ["sort a list", "read a file", "sort a list"]
    rows = backend.embed("all-minilm", texts)
    assert not isinstance(rows, ErrorInfo)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, resolve_encoder("hash").encode(texts), atol=1e-6)


def test_embeddings_of_a_model_that_is_not_there_are_an_error(backend: OllamaBackend) -> None:
    error = backend.embed("nowhere", ["text"])
    assert isinstance(error, ErrorInfo)
    assert error.kind == "model_missing"


def test_a_closed_backend_fails_calls_as_cancelled(server: StubServer) -> None:
    backend = OllamaBackend(server.url)
    assert backend.complete(ChatRequest.user("why?", model="upper")).ok
    backend.close()
    backend.close()
    reply = backend.complete(ChatRequest.user("why?", model="upper"))
    assert reply.error is not None
    assert reply.error.kind == "cancelled"


def test_repr_names_the_server(backend: OllamaBackend) -> None:
    assert repr(backend) == f"Ollama('{backend.url}')"
