"""Which failures are tried again, after how long; several servers as one, and away; the bound on calls in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import BackendError, ModelMissingError, ServerDownError, UsageError
from query_mutator.llm.cache import Cache
from query_mutator.llm.client import DEFAULT_POLICY, Client, ModelServer, Retry, RetryPolicy
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import (
    MAX_ABSENCES,
    ClientStack,
    Limit,
    Pool,
    SpareCalls,
    build_client,
    identity_of,
    is_lost,
)
from query_mutator.testing import Echo, StubServer, start_server
from query_mutator.types import ERROR_KINDS, ChatRequest, Completion, ErrorInfo
from tests.fake_client import FakeClient, Gate, kind_of, script
from tests.patience import until

REQUEST = ChatRequest.user("why?", model="m")
AGAIN = {"connect", "busy", "server", "malformed", "empty", "incomplete"}
POOLED = ChatRequest.user("why?", model="echo")


def delays(kind: str, *, max_retries: int = 4, retry_after_s: float | None = None) -> list[float | None]:
    error = ErrorInfo(kind=kind, message="", retry_after_s=retry_after_s)
    return [RetryPolicy(max_retries=max_retries).delay_s(error, attempt, key="k") for attempt in range(1, 7)]


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_each_kind_is_tried_again_as_often_as_it_can_help(kind: str) -> None:
    assert delays(kind, max_retries=0) == [None] * 6
    expected = 4 if kind in AGAIN else 1 if kind == "timeout" else 0
    assert [delay is not None for delay in delays(kind)] == [attempt <= expected for attempt in range(1, 7)]


def test_a_time_out_after_other_failures_is_the_first_time_out() -> None:
    error = ErrorInfo(kind="timeout", message="")
    asked = [DEFAULT_POLICY.delay_s(error, 3, key="k", timeouts=timeouts) is not None for timeouts in (1, 2)]
    assert asked == [True, False]
    assert DEFAULT_POLICY.delay_s(error, 5, key="k", timeouts=1) is None  # four retries are all there are


def test_waits_double_and_keep_half_of_their_length_under_jitter() -> None:
    for attempt, delay in enumerate(delays("server", max_retries=6)):
        assert delay is not None
        assert 0.125 * 2**attempt <= delay <= 0.25 * 2**attempt
    late = RetryPolicy(max_retries=100).delay_s(failure("busy"), 60, key="k")
    assert late is not None
    assert 15 <= late <= 30


def test_a_server_that_says_when_to_come_back_is_heeded_up_to_two_minutes() -> None:
    assert delays("busy", retry_after_s=20.0)[:4] == [20.0] * 4
    assert delays("busy", retry_after_s=9000.0)[0] == 120.0


@pytest.mark.parametrize(
    ("kinds", "policy", "outcome", "attempts"),
    [
        (["server", "empty"], DEFAULT_POLICY, None, 3),
        (["request"], DEFAULT_POLICY, "request", 1),
        (["malformed", "server", "empty"], RetryPolicy(max_retries=1), "server", 2),
    ],
    ids=["passes", "is final", "comes too often"],
)
def test_a_failure_that_passes_is_tried_until_the_answer_comes_and_the_last_one_is_returned(
    kinds: list[str], policy: RetryPolicy, outcome: str | None, attempts: int
) -> None:
    failures = [Completion.failed(kind, "x") for kind in kinds]
    client = script(*failures, Completion(text="because"))
    reply = Retry(client, policy).complete(REQUEST)
    assert (kind_of(reply), reply.attempts) == (outcome, attempts)
    assert [request.attempt for request in client.requests] == [*range(1, attempts + 1)]  # the server sees the number


def test_close_wakes_a_waiting_call_and_closes_the_client_within() -> None:
    asked, busy = threading.Event(), Completion.failed("busy", "x", retry_after_s=100.0)
    client = FakeClient(lambda _: asked.set() or busy)
    retry = Retry(client)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(retry.complete, REQUEST)
        assert asked.wait(10)
        retry.close()
        assert not call.result(10).ok
    assert (client.calls, client.closed) == (1, True)


@pytest.mark.parametrize(("in_flight", "chosen"), [([2, 1, 3], 1), ([1, 1, 1], 2)], ids=["fewest", "a tie"])
def test_the_next_call_goes_to_the_server_with_the_fewest_used_longest_ago(in_flight: list[int], chosen: int) -> None:
    backends = [Scripted(None) for _ in in_flight]
    pool = Pool(backends)
    for server, calls, turn in zip(pool.servers, in_flight, (3, 2, 1), strict=True):
        server.in_flight, server.last_used = calls, turn
    pool.complete(POOLED)
    assert [backend.asked for backend in backends] == [int(number == chosen) for number in range(3)]


class Scripted(ModelServer):
    """A server that answers as scripted, and notes how often it was asked."""

    def __init__(self, *kinds: str | None) -> None:
        super().__init__("scripted")
        self.kinds = list(kinds)
        self.asked = 0
        self.closed = False

    def complete(self, request: ChatRequest) -> Completion:
        kind = self.kinds[min(self.asked, len(self.kinds) - 1)]
        self.asked += 1
        return Completion(text="ok") if kind is None else Completion.failed(kind, "scripted")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("kind", ["connect", "busy", "memory", "timeout", "request", "empty", "server"])
def test_a_call_that_was_not_taken_goes_to_the_next_server_and_one_that_was_is_not_made_twice(kind: str) -> None:
    bad, good = Scripted(kind), Scripted(None)
    reply = Pool([bad, good]).complete(POOLED)
    is_taken = kind not in ("connect", "busy", "memory")
    assert kind_of(reply) == (kind if is_taken else None)
    assert (bad.asked, good.asked) == (1, 0 if is_taken else 1)


def failure(kind: str) -> ErrorInfo:
    return ErrorInfo(kind=kind, message="")


def test_a_server_that_fails_is_left_alone_and_asked_again_later() -> None:
    now = [100.0]
    flaky, good = Scripted("connect", None), Scripted(None)
    pool = Pool([flaky, good], clock=lambda: now[0])
    for _ in range(10):
        assert pool.complete(POOLED).ok
    assert flaky.asked == 1
    now[0] = 101.5
    for _ in range(10):
        assert pool.complete(POOLED).ok
    assert flaky.asked == 6


def test_while_all_servers_rest_a_call_is_tried_all_the_same() -> None:
    first, second = Scripted("connect", "connect", None), Scripted("connect")
    pool = Pool([first, second])
    assert not pool.complete(POOLED).ok
    assert not pool.complete(POOLED).ok
    assert pool.complete(POOLED).ok


class Other(Echo):
    """The same name, other weights."""


def test_models_of_one_name_must_have_one_digest() -> None:
    with start_server({}) as one, start_server({"echo": Other()}) as other:
        servers = [OllamaBackend(one.url), OllamaBackend(other.url)]
        assert identity_of("echo", [servers[0], servers[0]], num_ctx=None)
        with pytest.raises(UsageError, match=rf"echo is not the same.*{other.url} has [0-9a-f]{{12}}.*install"):
            identity_of("echo", servers, num_ctx=None)
        with pytest.raises(ModelMissingError, match="ollama pull elsewhere"):
            identity_of("elsewhere", servers, num_ctx=None)
        for server in servers:
            server.close()


@pytest.mark.parametrize("wrap", [lambda gate: Limit(gate, limit=1), Cache], ids=["for room", "for a twin"])
def test_a_call_does_not_wait_beyond_its_deadline(wrap: Callable[[Client], Client]) -> None:
    gate = Gate()
    client = wrap(gate)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.complete, replace(REQUEST, deadline=time.monotonic() + 30))
        assert gate.entered.acquire(timeout=10)
        late = client.complete(replace(REQUEST, deadline=time.monotonic() + 0.05))
        assert kind_of(late) == "timeout"
        gate.open.set()
        assert first.result(10).ok
    assert client.complete(REQUEST).ok


def test_a_spare_call_waits_until_no_other_does() -> None:
    gate = Gate()
    limit, made = Limit(gate, limit=1), list[str]()

    def call(client: Client, name: str) -> None:
        client.complete(replace(REQUEST, model=name))
        made.append(name)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, limit, "first")]
        assert gate.entered.acquire(timeout=10)
        calls += [pool.submit(call, SpareCalls(limit), "spare")]
        until(lambda: len(limit._has_spare._waiters) == 1)  # type: ignore[attr-defined]
        calls += [pool.submit(call, limit, name) for name in ("second", "third")]
        until(lambda: limit._waiting == 2)
        gate.open.set()
        for each in calls:
            each.result(10)
    assert sorted(made[:3]) == ["first", "second", "third"]
    assert limit._in_flight == 0


class Slots:
    """A client with the times of a server of `slots` slots on which each call works for a second."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.outcome: Callable[[int], Completion] = self.answer
        self.in_flight: Callable[[], int] = lambda: 0

    def answer(self, in_flight: int) -> Completion:
        waited_s = max(0.0, in_flight / self.slots - 1.0)
        return Completion(text="ok", total_s=waited_s + 1.0, eval_s=1.0)

    def complete(self, request: ChatRequest) -> Completion:
        return self.outcome(self.in_flight())

    def close(self) -> None:
        """Nothing is held."""


def course(limit: Limit, server: Slots, rounds: int) -> list[int]:
    """Keep the limit full, one call ending at a time, and return where it stood after each round of calls."""
    server.in_flight = lambda: limit.limit
    stood = []
    for _ in range(rounds):
        for _ in range(limit.limit):
            limit._in_flight = limit.limit - 1  # the other places are taken
            limit.complete(REQUEST)
            limit._in_flight = 0
        stood.append(limit.limit)
    return stood


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_limit_finds_the_servers_slots_and_stays_near_them(slots: int) -> None:
    server = Slots(slots)
    late = course(Limit(server, limit=16, is_adaptive=True), server, 60)[20:]
    assert min(late) >= slots - slots // 3
    assert max(late) <= 1.5 * slots + 1


def test_a_limit_that_was_halved_grows_again_while_it_is_full() -> None:
    server = Slots(64)
    limit = Limit(server, limit=8, is_adaptive=True)
    assert set(course(limit, server, 10)) == {8}
    window = limit._window
    for _ in range(8):  # calls that fail together lower it once
        limit._learn(Completion.failed("busy", "x"), window)
    assert limit.limit == 4
    assert course(limit, server, 6) == [5, 6, 7, 8, 8, 8]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.llm.stack.POLL_S", 0.02)


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
    return start_server([], port=server.port, **settings)  # type: ignore[arg-type]


def ask(stack: ClientStack, text: str = "why?") -> Completion:
    return stack.client.complete(ChatRequest.user(text, model="echo", seed=0))


def went_away(connect: Callable[..., ClientStack], **settings: Any) -> tuple[StubServer, ClientStack]:
    """Return a server that is closed, and a stack that it has answered."""
    with start_server([]) as server:
        stack = connect(server, **settings)
        assert ask(stack).ok
    return server, stack


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


def test_a_server_that_never_answered_is_not_waited_for_nor_any_for_zero_seconds(
    connect: Callable[..., ClientStack], shown: list[str]
) -> None:
    server, stack = went_away(connect, wait_s=0.0)
    for gone in (stack, connect(server)):
        assert kind_of(ask(gone)) == "connect"
    assert not shown


def test_when_the_time_is_up_calls_fail_at_once_until_it_answers_again(
    connect: Callable[..., ClientStack], shown: list[str]
) -> None:
    server, stack = went_away(connect, wait_s=0.1)
    assert [kind_of(ask(stack)) for _ in range(3)] == ["connect"] * 3
    assert len(shown) == 2  # one wait, not three
    server = again(server)
    assert ask(stack).ok
    server.close()
    assert kind_of(ask(stack)) == "connect"
    assert len(shown) == 4
    assert shown[-1] == ""


class Returning(Scripted):
    """A server that is asked whether it is there: away or loading where `states` has an error, else there."""

    def __init__(self, *kinds: str | None, states: Sequence[Exception | None]) -> None:
        super().__init__(*kinds)
        self.states = list(states)

    def version(self, *, timeout_s: float = 0.0) -> str:
        if (state := self.states.pop(0)) is not None:
            raise state
        return ""


AWAY, LOADING = ServerDownError("away"), BackendError("Loading model", kind="busy")


@pytest.mark.parametrize(
    ("kinds", "states", "outcome", "asked"),
    [
        (("connect", None), (AWAY, LOADING, None), None, 2),
        (("connect",), (AWAY, None) * MAX_ABSENCES, "connect", MAX_ABSENCES + 1),
    ],
    ids=["a model that loads is waited for", "a request that ends the server is not repeated for ever"],
)
def test_a_server_that_comes_back(
    kinds: tuple[str | None, ...], states: tuple[Exception | None, ...], outcome: str | None, asked: int
) -> None:
    server = Returning(*kinds, states=states)
    pool = Pool([server], wait_s=30.0)
    pool.has_answered = True
    assert kind_of(pool.complete(POOLED)) == outcome
    assert (server.states, server.asked) == ([], asked)


def test_a_reply_cut_by_the_servers_death_is_asked_for_again() -> None:
    assert is_lost(ErrorInfo(kind="malformed", message="the reply was truncated"))
    assert not is_lost(ErrorInfo(kind="malformed", message="not a JSON object", status=200))
