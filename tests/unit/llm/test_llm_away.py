"""A server that stops answering is waited for: no call fails, none costs an attempt, others carry on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.llm import away
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion, ErrorInfo

SLOW_MS = 60_000


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "POLL_S", 0.02)


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def connect(shown: list[str]) -> Iterator[Callable[..., ClientStack]]:
    stacks = []

    def make(*servers: StubServer, wait_s: float = 30.0, backend: str = "ollama") -> ClientStack:
        urls = [server.url for server in servers]
        settings = {"batch_size": 4, "wait_for_server_s": wait_s, "max_retries": 0}
        stacks.append(build_client(urls, backend=backend, show=shown.append, **settings))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close()


def again(server: StubServer, **settings: object) -> StubServer:
    """Start a server where one was."""
    return start_server([], port=server.port, encoder=resolve_encoder("hash"), **settings)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def ask(stack: ClientStack, text: str = "why?") -> Completion:
    return stack.client.complete(ChatRequest.user(text, model="echo", seed=0))


def kind_of(completion: Completion) -> str | None:
    return completion.error and completion.error.kind


def test_calls_in_flight_and_later_ones_wait_and_cost_no_attempt(
    connect: Callable[..., ClientStack], shown: list[str]
) -> None:
    server = start_server([], num_parallel=8)
    stack = connect(server)
    assert ask(stack).ok
    server.close()
    server = again(server, num_parallel=8, latency_ms=SLOW_MS)  # four calls will be in flight when it goes away
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(ask, stack, f"question {number}") for number in range(8)]
        until(lambda: server.stats()["in_service"] == 4)
        server.close()
        until(lambda: bool(shown))
        assert not any(reply.done() for reply in replies)
        with again(server, num_parallel=8) as server:
            completions = [reply.result(timeout=20) for reply in replies]
            assert server.stats()["calls"] == 8
    assert [(reply.error, reply.attempts) for reply in completions] == [(None, 1)] * 8
    assert stack.counted.totals.failed == 0
    assert shown[0].startswith("server away since ")
    assert shown[0].endswith(", waiting")
    assert shown[1:] == [""]


def test_embeddings_wait_too(connect: Callable[..., ClientStack], shown: list[str]) -> None:
    server = start_server([], encoder=resolve_encoder("hash"))
    stack = connect(server)
    stack.require_models(["all-minilm"])  # it answered
    server.close()
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(stack.embed, "all-minilm", ["a text"])
        until(lambda: bool(shown))
        with again(server):
            assert rows.result(timeout=20).shape[0] == 1


def test_known_replies_are_found_while_the_server_is_away(shown: list[str], tmp_path: Path) -> None:
    request = ChatRequest.user("why?", model="echo", seed=0)
    with start_server([]) as server:
        for is_away in (False, True):
            stack = build_client(
                server.url, cache="eval", cache_path=tmp_path / "replies", wait_for_server_s=30, show=shown.append
            )
            stack.require_models(["echo"])
            if is_away:
                server.close()
            assert stack.eval_client.complete(request).attempts == (0 if is_away else 1)
            stack.close()
    assert not shown


def test_a_server_that_never_answered_is_not_waited_for(connect: Callable[..., ClientStack], shown: list[str]) -> None:
    server = start_server([])
    server.close()
    assert kind_of(ask(connect(server))) == "connect"
    assert not shown


def test_a_wait_of_zero_seconds_is_none(connect: Callable[..., ClientStack], shown: list[str]) -> None:
    server = start_server([])
    stack = connect(server, wait_s=0.0)
    assert ask(stack).ok
    server.close()
    assert kind_of(ask(stack)) == "connect"
    assert not shown


def test_when_the_time_is_up_calls_fail_at_once_until_it_answers_again(
    connect: Callable[..., ClientStack], shown: list[str]
) -> None:
    server = start_server([])
    stack = connect(server, wait_s=0.1)
    assert ask(stack).ok
    server.close()
    assert [kind_of(ask(stack)) for _ in range(3)] == ["connect"] * 3
    assert len(shown) == 2  # one wait, not three
    server = again(server)
    assert ask(stack).ok
    server.close()
    assert kind_of(ask(stack)) == "connect"
    assert len(shown) == 4
    assert shown[-1] == ""


def test_other_servers_carry_on(connect: Callable[..., ClientStack], shown: list[str]) -> None:
    with start_server([], num_parallel=8) as good:
        bad = start_server([], num_parallel=8, latency_ms=SLOW_MS)
        stack = connect(good, bad)
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(ask, stack, f"question {number}") for number in range(12)]
            until(lambda: bad.stats()["in_service"] >= 1)
            bad.close()
            assert all(reply.result(timeout=20).ok for reply in replies)
    assert not shown


def test_closing_ends_the_wait_as_a_cancelled_call(connect: Callable[..., ClientStack], shown: list[str]) -> None:
    server = start_server([])
    stack = connect(server)
    assert ask(stack).ok
    server.close()
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(ask, stack, f"question {number}") for number in range(2)]
        until(lambda: bool(shown))
        stack.close()
        assert [kind_of(reply.result(timeout=20)) for reply in replies] == ["cancelled"] * 2


class Suicidal:
    """Answers, but the request "die" closes the server and starts it again."""

    name = "suicidal"

    def __init__(self) -> None:
        self.deaths = 0
        self.die: Callable[[], None] = lambda: None

    def reply_many(self, prompts: list[str]) -> list[str]:
        if "die" in prompts:
            self.deaths += 1
            threading.Thread(target=self.die).start()
            time.sleep(0.2)
        return prompts


def test_a_request_that_ends_the_server_is_not_repeated_for_ever(connect: Callable[..., ClientStack]) -> None:
    model = Suicidal()
    server = start_server([model])
    servers = [server]

    def die() -> None:
        servers[-1].close()
        time.sleep(0.1)
        servers.append(start_server([model], port=server.port))

    model.die = die
    stack = connect(server)
    assert ask(stack).ok
    reply = stack.client.complete(ChatRequest.user("die", model="suicidal", seed=0))
    assert kind_of(reply) == "connect"
    assert model.deaths == away.MAX_ABSENCES + 1
    until(lambda: len(servers) == model.deaths + 1)
    servers[-1].close()


class Loading:
    """A server that answers 503, as llama-server does while it loads its model; its list of models is there already."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.asked = 0
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        refusal, models = b'{"error": {"message": "Loading model"}}', b'{"data": [{"id": "echo"}]}'
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                is_list = b"/v1/models" in connection.recv(65536)
                body, status = (models, b"200 OK") if is_list else (refusal, b"503 Service Unavailable")
                head = b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
                connection.sendall(head + body)
                self.asked += 1

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.mark.parametrize("backend", ["ollama", "openai"])
def test_a_server_that_comes_back_and_still_loads_its_model_is_waited_for(
    connect: Callable[..., ClientStack], shown: list[str], backend: str
) -> None:
    server = start_server([])
    stack = connect(server, backend=backend)
    assert ask(stack).ok
    server.close()
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(ask, stack, "how?")]
        until(lambda: bool(shown))
        loading = Loading(server.port)
        until(lambda: loading.asked >= 3)
        replies.append(pool.submit(ask, stack, "and why?"))  # does not start: it would be refused
        until(lambda: loading.asked >= 6)
        loading.close()
        assert not any(reply.done() for reply in replies)
        with again(server):
            assert all(reply.result(timeout=20).ok for reply in replies)


def test_a_reply_cut_by_the_servers_death_is_asked_for_again() -> None:
    assert away._is_lost(ErrorInfo(kind="malformed", message="the reply was truncated"))
    assert not away._is_lost(ErrorInfo(kind="malformed", message="not a JSON object", status=200))
