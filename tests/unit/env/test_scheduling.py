"""Flows over real calls: order, bound, retries, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.encoder.base import HashEncoder
from query_mutator.env.flow import Call, Encode, Flow, Prepare
from query_mutator.env.scheduling import (
    PooledScheduler,
    Scheduler,
    SequentialScheduler,
    run_flow,
)
from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.retry import RetryPolicy
from query_mutator.types import ChatRequest, Completion, FloatArray

MakeScheduler = Callable[[Client], Scheduler]


NEVER = RetryPolicy(max_retries=0)
AT_ONCE_TWICE = RetryPolicy(max_retries=2, first_delay_s=0.0)


def ask(text: str, model: str = "librarian") -> Call:
    return Call(ChatRequest.user(text, model=model))


def two_calls(text: str) -> Flow:
    rewritten: Completion = yield ask(f"<question>{text}</question>", "softener")
    answered: Completion = yield ask(rewritten.text)
    vectors = yield Encode((rewritten.text, answered.text))
    return answered.text, vectors.shape


class Counting:
    """Counts the calls in flight around a real client; the first `failures` calls fail."""

    def __init__(self, client: Client, failures: int = 0) -> None:
        self.client, self.failures = client, failures
        self.calls = self.now = self.most = 0
        self.lock = threading.Lock()

    def complete(self, request: ChatRequest) -> Completion:
        with self.lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
            failing = self.calls <= self.failures
        try:
            return Completion.failed("connect", "refused") if failing else self.client.complete(request)
        finally:
            with self.lock:
                self.now -= 1

    def close(self) -> None:
        self.client.close()


@pytest.fixture(params=[None, 1, 4])
def make(request: pytest.FixtureRequest, hash_encoder: Encoder) -> Iterator[MakeScheduler]:
    made: list[Scheduler] = []

    def build(client: Client) -> Scheduler:
        shared = {"client": client, "encoder": hash_encoder, "retry_policy": AT_ONCE_TWICE}
        scheduler = (
            PooledScheduler(**shared, batch_size=request.param) if request.param else SequentialScheduler(**shared)
        )
        made.append(scheduler)
        return scheduler

    yield build
    for scheduler in made:
        scheduler.close()


def test_every_flow_ends_with_its_own_result(make: MakeScheduler, tiny_client: Client, hash_encoder: Encoder) -> None:
    scheduler = make(tiny_client)
    texts = {"sort it now": "sorted", "join it": "os.path.join", "kill it": "os.kill", "length please": "len"}
    for text in texts:
        scheduler.start(text, two_calls(text))
    results = dict(scheduler.finished() for _ in texts)
    assert {text: result[0].split("`")[1] for text, result in results.items()} == texts
    assert {result[1] for result in results.values()} == {(2, hash_encoder.dim)}


def test_calls_in_flight_never_pass_the_batch_size(hash_encoder: Encoder, tiny_client: Client) -> None:
    counting = Counting(tiny_client)
    scheduler = PooledScheduler(client=counting, encoder=hash_encoder, retry_policy=NEVER, batch_size=3)
    for index in range(20):
        scheduler.start(index, two_calls(f"sort {index} now"))
    assert {key for key, _ in (scheduler.finished() for _ in range(20))} == set(range(20))
    assert counting.most <= 3
    assert counting.calls == 40
    scheduler.close()


def test_failed_calls_are_tried_again_and_counted(make: MakeScheduler, tiny_client: Client) -> None:
    def one() -> Flow:
        completion: Completion = yield ask("sort it")
        return completion

    scheduler = make(Counting(tiny_client, failures=2))
    scheduler.start("a", one())
    _, completion = scheduler.finished()
    assert completion.ok
    assert completion.attempts == 3


@pytest.mark.parametrize(("seconds", "calls"), [(600.0, 2), (10.0, 1)])
def test_no_retry_starts_after_the_deadline_of_its_call(
    seconds: float, calls: int, hash_encoder: Encoder, tiny_client: Client
) -> None:
    def flow() -> Flow:
        call = ask("why?")
        return (yield replace(call, request=replace(call.request, deadline=time.monotonic() + seconds)))

    client = Counting(tiny_client, failures=1)
    policy = RetryPolicy(first_delay_s=0.0) if calls == 2 else RetryPolicy(first_delay_s=100.0, max_delay_s=100.0)
    reply = run_flow(flow(), client=client, encoder=hash_encoder, retry_policy=policy)
    assert (reply.ok, client.calls) == (calls == 2, calls)


def test_call_that_fails_for_good_reaches_the_flow_as_data(make: MakeScheduler, tiny_client: Client) -> None:
    def one() -> Flow:
        completion: Completion = yield ask("sort it")
        return completion.error

    scheduler = make(Counting(tiny_client, failures=99))
    scheduler.start("a", one())
    _, error = scheduler.finished()
    assert (error.kind, error.message) == ("connect", "refused")


def test_exception_in_a_flow_comes_out_of_finished(make: MakeScheduler, tiny_client: Client) -> None:
    def broken() -> Flow:
        yield ask("sort it")
        raise RuntimeError("a bug")

    scheduler = make(tiny_client)
    scheduler.start("a", broken())
    with pytest.raises(RuntimeError, match="a bug"):
        scheduler.finished()


def test_sequential_run_of_one_flow_gives_the_same_result(hash_encoder: Encoder, tiny_client: Client) -> None:
    text, shape = run_flow(two_calls("kill it"), client=tiny_client, encoder=hash_encoder, retry_policy=NEVER)
    assert text == "`os.kill` is what you want."
    assert shape == (2, hash_encoder.dim)


def test_texts_named_in_advance_hold_nothing_up_and_give_the_same_rows(
    make: MakeScheduler, tiny_client: Client, hash_encoder: Encoder
) -> None:
    def flow(text: str) -> Flow:
        assert (yield Prepare((text,))) is None
        answered: Completion = yield ask(text)
        vectors = yield Encode((text, answered.text))
        return vectors

    scheduler = make(tiny_client)
    texts = [f"sort {number} now, says {make}" for number in range(12)]
    for text in texts:
        scheduler.start(text, flow(text))
    results = dict(scheduler.finished() for _ in texts)
    assert all((results[text][0] == hash_encoder.encode([text])[0]).all() for text in texts)


def test_texts_wait_for_others_while_more_calls_wait(tiny_client: Client) -> None:
    passes: list[int] = []

    class Noted(HashEncoder):
        def encode(self, texts: Sequence[str]) -> FloatArray:
            passes.append(len(texts))
            return super().encode(texts)

    class Slow(Counting):
        def complete(self, request: ChatRequest) -> Completion:
            time.sleep(0.01)
            return super().complete(request)

    def flow(text: str) -> Flow:
        answered: Completion = yield ask(text)
        return (yield Encode((f"{text}: {answered.text}",)))

    encoder = CachedEncoder(Noted())
    encoder.gathers = True
    scheduler = PooledScheduler(client=Slow(tiny_client), encoder=encoder, retry_policy=NEVER, batch_size=1)
    for number in range(8):
        scheduler.start(number, flow(f"question {number}"))
    assert {scheduler.finished()[0] for _ in range(8)} == set(range(8))
    scheduler.close()
    assert sum(passes) == 8
    assert len(passes) <= 5  # of four, two, one and one


def test_the_call_that_is_furthest_behind_goes_first(hash_encoder: Encoder, tiny_client: Client) -> None:
    order: list[str] = []

    class Noting(Counting):
        def complete(self, request: ChatRequest) -> Completion:
            order.append(request.messages[-1].content)
            if len(order) == 1:
                may_go_on.wait(10)
            return super().complete(request)

    def one(text: str) -> Flow:
        yield ask(text)

    may_go_on = threading.Event()
    scheduler = PooledScheduler(client=Noting(tiny_client), encoder=hash_encoder, retry_policy=NEVER, batch_size=1)
    for done, text in enumerate(["first", "d", "c", "b", "a"]):
        scheduler.start(text, one(text), done=-done)
    may_go_on.set()
    assert [scheduler.finished()[0] for _ in range(5)] == ["first", "a", "b", "c", "d"] == order
    scheduler.close()


def test_batch_size_below_one_is_refused(hash_encoder: Encoder, tiny_client: Client) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        PooledScheduler(client=tiny_client, encoder=hash_encoder, retry_policy=NEVER, batch_size=0)


def test_calls_that_a_closed_scheduler_drops_are_free_to_be_made_again(
    tiny_client: Client, hash_encoder: Encoder
) -> None:
    gate, entered = threading.Event(), threading.Event()

    class Slow:
        """Waits with every call."""

        def complete(self, request: ChatRequest) -> Completion:
            entered.set()
            gate.wait(10)
            return tiny_client.complete(request)

    client = Coalesce(Slow())
    scheduler = PooledScheduler(client=client, encoder=hash_encoder, retry_policy=NEVER, batch_size=1)
    for text in ("sort my list", "join my words"):
        scheduler.start(text, two_calls(text))
    assert entered.wait(10)
    threading.Timer(0.1, gate.set).start()
    scheduler.close()
    reply: list[Completion] = []
    asking = threading.Thread(
        target=lambda: reply.append(client.complete(ask("<question>join my words</question>", "softener").request)),
        daemon=True,
    )
    asking.start()
    asking.join(10)
    assert [one.ok for one in reply] == [True]
