"""Which failures are tried again, after how long, and what the waiting client does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from query_mutator.llm.retry import DEFAULT_POLICY, Retry, RetryPolicy
from query_mutator.types import ERROR_KINDS, ChatRequest, Completion, ErrorInfo

REQUEST = ChatRequest.user("why?", model="m")
AGAIN = {"connect", "busy", "server", "malformed", "empty", "incomplete"}


def delays(kind: str, *, max_retries: int = 4, retry_after_s: float | None = None) -> list[float | None]:
    error = ErrorInfo(kind=kind, message="", retry_after_s=retry_after_s)
    return [RetryPolicy(max_retries=max_retries).delay_s(error, attempt, key="k") for attempt in range(1, 7)]


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_each_kind_is_tried_again_as_often_as_it_can_help(kind: str) -> None:
    expected = 4 if kind in AGAIN else 1 if kind == "timeout" else 0
    assert [delay is not None for delay in delays(kind)] == [attempt <= expected for attempt in range(1, 7)]


def test_a_time_out_after_other_failures_is_the_first_time_out() -> None:
    error = ErrorInfo(kind="timeout", message="")
    asked = [DEFAULT_POLICY.delay_s(error, 3, key="k", timeouts=timeouts) is not None for timeouts in (1, 2)]
    assert asked == [True, False]
    assert DEFAULT_POLICY.delay_s(error, 5, key="k", timeouts=1) is None  # four retries are all there are


def test_no_retries_means_none_for_any_kind() -> None:
    assert all(delays(kind, max_retries=0) == [None] * 6 for kind in ERROR_KINDS)


def test_waits_double_and_keep_half_of_their_length_under_jitter() -> None:
    for attempt, delay in enumerate(delays("server", max_retries=6)):
        assert delay is not None
        assert 0.125 * 2**attempt <= delay <= 0.25 * 2**attempt


def test_waits_end_at_thirty_seconds() -> None:
    delay = RetryPolicy(max_retries=100).delay_s(ErrorInfo(kind="busy", message=""), 60, key="k")
    assert delay is not None
    assert 15 <= delay <= 30


def test_jitter_depends_on_key_and_attempt_alone() -> None:
    error = ErrorInfo(kind="server", message="")
    spread = {DEFAULT_POLICY.delay_s(error, 1, key=str(key)) for key in range(50)}
    assert spread == {DEFAULT_POLICY.delay_s(error, 1, key=str(key)) for key in range(50)}
    assert len(spread) == 50


def test_a_server_that_says_when_to_come_back_is_heeded_up_to_two_minutes() -> None:
    assert delays("busy", retry_after_s=20.0)[:4] == [20.0] * 4
    assert delays("busy", retry_after_s=9000.0)[0] == 120.0


def test_no_attempt_begins_after_the_deadline_of_a_call() -> None:
    error = ErrorInfo(kind="busy", message="", retry_after_s=10.0)
    policy = RetryPolicy(deadline_s=30.0)
    asked = [policy.delay_s(error, 1, key="k", elapsed_s=elapsed_s) for elapsed_s in (0.0, 19.0, 21.0)]
    assert asked == [10.0, 10.0, None]


class Script:
    """A client that plays replies back and counts the calls."""

    def __init__(self, *replies: Completion) -> None:
        self.replies = list(replies)
        self.asked = threading.Semaphore(0)
        self.closed = False
        self.attempts: list[int] = []

    def __repr__(self) -> str:
        return "Script()"

    def complete(self, request: ChatRequest) -> Completion:
        self.attempts.append(request.attempt)
        self.asked.release()
        return self.replies.pop(0)

    def close(self) -> None:
        self.closed = True


def test_a_failure_that_passes_is_tried_until_the_answer_comes() -> None:
    client = Script(Completion.failed("server", "x"), Completion.failed("empty", "x"), Completion(text="because"))
    reply = Retry(client).complete(REQUEST)
    assert (reply.text, reply.attempts, client.replies) == ("because", 3, [])
    assert client.attempts == [1, 2, 3]  # the server sees the number


def test_a_final_failure_is_returned_at_once() -> None:
    client = Script(Completion.failed("request", "x"), Completion(text="never asked"))
    reply = Retry(client).complete(REQUEST)
    assert reply.error is not None
    assert (reply.error.kind, reply.attempts, len(client.replies)) == ("request", 1, 1)


def test_the_last_failure_is_returned_when_retries_run_out() -> None:
    client = Script(*[Completion.failed("malformed", str(number)) for number in range(5)])
    reply = Retry(client, RetryPolicy(max_retries=1)).complete(REQUEST)
    assert reply.error is not None
    assert (reply.error.message, reply.attempts) == ("1", 2)


def test_a_deadline_ends_the_retries_of_a_client() -> None:
    client = Script(Completion.failed("busy", "x", retry_after_s=100.0), Completion(text="never asked"))
    reply = Retry(client, RetryPolicy(deadline_s=60.0)).complete(REQUEST)
    assert (reply.ok, reply.attempts, len(client.replies)) == (False, 1, 1)


def test_close_wakes_a_waiting_call_and_closes_the_client_within() -> None:
    client = Script(Completion.failed("busy", "x", retry_after_s=100.0), Completion(text="never asked"))
    retry = Retry(client)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(retry.complete, REQUEST)
        assert client.asked.acquire(timeout=10)
        retry.close()
        assert not call.result(10).ok
    assert client.closed


def test_calls_of_other_kinds_are_tried_again_too() -> None:
    outcomes: list[ErrorInfo | str] = [ErrorInfo(kind="connect", message="x"), "vectors"]
    retry = Retry(Script())
    got = retry.call(
        lambda attempt: outcomes.pop(0), error_of=lambda reply: reply if isinstance(reply, ErrorInfo) else None, key="k"
    )
    assert got == ("vectors", 2)


def test_repr_prints_the_nesting() -> None:
    assert repr(Retry(Script())) == "Retry(Script())"
