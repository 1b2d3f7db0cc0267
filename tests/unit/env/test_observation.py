"""The observation vector, slice by slice; the rules of an episode; schedulers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.encoder.base import HashEncoder
from query_mutator.env.flow import Call, Encode, Flow, Prepare
from query_mutator.env.observation import AnswerFeatures, Observer, Projection
from query_mutator.env.scheduling import (
    PooledScheduler,
    Scheduler,
    SequentialScheduler,
    run_flow,
)
from query_mutator.env.task import EpisodeRules
from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.retry import RetryPolicy
from query_mutator.types import ChatRequest, Completion, FloatArray

NORTH = np.array([0.0, 1.0, 0.0], dtype=np.float32)
SIGHT: dict[str, Any] = {
    "original": "sort a lsit",
    "current": "sort a list? now!",
    "drift": 1.0,
    "current_vector": NORTH,
    "answer": AnswerFeatures(vector=NORTH, closeness=0.0, fit=1.0, refused=True, not_sure=False),
    "first_verdicts": (False, True),
}
BEST = AnswerFeatures(vector=NORTH, closeness=0.75, fit=0.25, refused=False, not_sure=True)
MOMENT: dict[str, Any] = {
    "best": BEST,
    "step_fraction": 0.4,
    "used": [False, True, False],
    "action_mask": [False, True, True, False, True],
}
MakeScheduler = Callable[[Client], Scheduler]
NEVER = RetryPolicy(max_retries=0)
AT_ONCE_TWICE = RetryPolicy(max_retries=2, first_delay_s=0.0)


def observer(*, policy_asks: bool = False) -> Observer:
    vectors = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    return Observer(
        projection=Projection.fit(vectors, dims=2),
        known_words={"sort", "a", "list"},
        num_operators=3,
        policy_asks=policy_asks,
    )


def test_every_slice_holds_what_its_line_says() -> None:
    see = observer()
    obs = see(see.draw(**SIGHT), **MOMENT)
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.dtype == np.float32
    assert obs.shape == (see.size,) == (2 + 2 + 3 + 1 + 4 + 4 + 2 + 3 + 5,)
    assert part["similarity"] == pytest.approx([-2.5, 2.5, -1.25])
    assert part["drift"] == pytest.approx([5.0])
    assert part["verdicts"] == [1, 0, 0, 1]
    assert part["words"] == pytest.approx([4 * 1 / 4, np.log1p(4) / 2, 2 / 3, 0.5])
    assert part["progress"] == pytest.approx([0.4, 0.0])
    assert part["used"] == [0, 1, 0]
    assert part["closed"] == [1, 0, 0, 1, 0]


def test_an_observation_without_an_answer_says_so() -> None:
    see = observer(policy_asks=True)
    moment = MOMENT | {"best": None, "action_mask": [True] * 6, "is_asked": False, "call_price": 0.02}
    obs = see(see.draw(**(SIGHT | {"answer": None})), **moment)
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.shape == (see.size,)
    assert part["answer"] == [0, 0]
    assert part["similarity"] == [0, 0, 0]
    assert part["verdicts"] == [0, 0, 0, 1]
    assert part["closed"] == [0] * 6
    assert part["asked"] == part["best"] == [0, 0, 0]
    assert part["price"] == pytest.approx([1.0])


def test_with_answers_the_policy_that_asks_sees_the_best_one() -> None:
    see = observer(policy_asks=True)
    obs = see(see.draw(**SIGHT), **(MOMENT | {"action_mask": [True] * 6, "ask_fraction": 0.5}))
    assert obs[see.slices["asked"]].tolist() == [1, 1, 0.5]
    assert obs[see.slices["best"]] == pytest.approx([0, 1, 1.25])


@pytest.mark.parametrize("policy_asks", [False, True])
def test_slices_cover_the_vector_without_gap(policy_asks: bool) -> None:
    pieces = list(observer(policy_asks=policy_asks).slices.values())
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]


def test_projection_whitens_what_it_was_fitted_on() -> None:
    data = np.random.default_rng(1).normal(size=(400, 5)).astype(np.float32) * np.array([5, 3, 1, 0.5, 0.1], np.float32)
    projected = np.array([Projection.fit(data, dims=3)(row) for row in data])
    assert projected.mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-5)
    assert np.cov(projected.T) == pytest.approx(np.eye(3), abs=1e-4)


def test_projection_of_few_texts_pads_with_zeros() -> None:
    few = np.eye(3, dtype=np.float32)[:2]
    assert Projection.fit(few, dims=3)(few[0])[1:] == pytest.approx(np.zeros(2))


def test_an_episode_ends_at_submit_and_after_its_steps() -> None:
    rules = EpisodeRules(max_episode_steps=3)
    taken = (("submit", 1), ("spelling", 2), ("spelling", 3))
    assert [rules.ends(name, steps=number) for name, number in taken] == [True, False, True]


@pytest.mark.parametrize(
    ("ask", "steps", "max_asks", "asked", "calls"),
    [
        ("every_step", 1, None, 1, 3),  # the original's answer, a rewrite and its answer
        ("every_step", 5, None, 1, 11),
        ("form", 1, None, 1, 2),  # a rewrite, and the answer at the end
        ("form", 4, None, 1, 5),
        ("every_step", 6, None, 0, 7),  # the original's answer, and one after each step
        ("every_step", 6, 3, 0, 3),
        ("form", 6, None, 0, 6),
        ("form", 6, 4, 0, 4),
        ("form", 6, 4, 2, 7),  # six steps and the answer at the end
        ("form", 6, 1, 0, 1),
        ("form", 6, 1, 2, 7),
    ],
)
def test_an_episode_takes_fewer_calls_where_operators_are_local_or_asks_few(
    ask: str, steps: int, max_asks: int | None, asked: int, calls: int
) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=steps, max_asks=max_asks)  # type: ignore[arg-type]
    assert rules.max_calls(asked=asked) == calls


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
