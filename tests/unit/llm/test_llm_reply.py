"""A reply never answers another request, and no reply takes more memory or time than its bounds allow."""

from __future__ import annotations

import select
import threading
import tracemalloc
from typing import Any

import pytest

from query_mutator.llm.connection import BadReply, NoReply, Reply
from tests.scripted_server import CLOSE, RESET, STALL, chunks, failure, http

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "extra",
    [http('{"a": "stale"}'), http('{"a": "stale"}')[:20], b'{"a": "stale"}', b"H"],
    ids=["a reply", "half a reply", "a body", "a byte"],
)
@pytest.mark.parametrize("first", [http('{"a": 1}'), chunks(b'{"a": 1}') + b"0\r\n\r\n", b"HTTP/1.1 204 None\r\n\r\n"])
def test_bytes_after_a_reply_never_answer_the_next_request(serve: Any, first: bytes, extra: bytes) -> None:
    server, transport = serve(first + extra, http('{"a": 2}'))
    transport.get("/")
    assert transport.get("/") == {"a": 2}
    assert server.accepted == 2


def test_bytes_that_arrive_between_two_requests_answer_neither(serve: Any) -> None:
    is_read = threading.Event()
    server, transport = serve((http('{"a": 1}'), is_read, http('{"a": "stale"}')), http('{"a": 2}'))
    assert transport.get("/") == {"a": 1}
    is_read.set()
    assert select.select([transport._idle[0]._sock], [], [], 10)[0]
    assert transport.get("/") == {"a": 2}
    assert server.accepted == 2


def test_the_reply_after_an_informational_one_answers_the_same_request(serve: Any) -> None:
    server, transport = serve((b"HTTP/1.1 102 Processing\r\nX: 1\r\n\r\n", http('{"a": 1}')), http('{"a": 2}'))
    assert [transport.get("/") for _ in range(2)] == [{"a": 1}, {"a": 2}]
    assert server.accepted == 1


@pytest.mark.parametrize("end", [CLOSE, RESET])
def test_a_kept_connection_that_closes_before_the_first_byte_is_replaced(serve: Any, end: str) -> None:
    server, transport = serve(http('{"a": 1}'), (end,), http('{"a": 2}'))
    assert [transport.get("/") for _ in range(2)] == [{"a": 1}, {"a": 2}]
    assert (server.accepted, len(server.requests)) == (2, 3)


def test_a_new_connection_that_closes_before_the_first_byte_is_a_failure(serve: Any) -> None:
    server, transport = serve(http('{"a": 1}'), (CLOSE,), (CLOSE,), http('{"a": 2}'))
    assert transport.get("/") == {"a": 1}
    assert failure(transport.get("/")).kind == "connect"
    assert server.accepted == 2


def test_a_kept_connection_that_closes_within_a_reply_is_a_failure(serve: Any) -> None:
    server, transport = serve(http('{"a": 1}'), (b"HTTP/1.1 200", CLOSE), http('{"a": 2}'))
    transport.get("/")
    assert failure(transport.get("/")).kind == "malformed"
    assert len(server.requests) == 2


DIGITS = b"9" * 5000


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: " + DIGITS + b"\r\n\r\n",
        OK + b"Content-Length: 99999999999999999999\r\n\r\n",
        OK + b"Content-Length: 999999999999\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        OK + b"Content-Length: 1_0\r\n\r\n1234567890",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + DIGITS + b"\r\n",
        CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n",
        b"HTTP/1.1 " + DIGITS + b" OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
        OK + b"X: 1\r\n" * 20_000,
        OK + b"X" * 100_000,
    ],
    ids=lambda answer: f"{answer[:40]!r} {len(answer)}",
)
def test_a_reply_that_breaks_the_protocol_is_malformed_at_once(serve: Any, answer: bytes) -> None:
    _, transport = serve((answer, STALL))
    error = failure(transport.get("/"))
    assert error.kind == "malformed"
    assert len(error.message) <= 300


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a": ' + DIGITS + b"}", b'{"a": "' + b"x" * 9])
def test_json_that_cannot_be_read_is_malformed(serve: Any, body: bytes) -> None:
    assert failure(serve(http(body))[1].get("/")).kind == "malformed"


@pytest.mark.parametrize(
    "head", [b"Content-Length: 900000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\ndbba0\r\n", b"\r\n"]
)
def test_a_reply_is_read_up_to_the_cap(serve: Any, head: bytes) -> None:
    endless = (OK + head + b" " * 900_000, STALL)
    error = failure(serve(endless, max_reply_bytes=100_000)[1].get("/"))
    assert error.kind == "malformed"
    assert "0.1 MB; --max-reply-mb" in error.message


def test_a_large_chunk_is_not_allocated_before_it_arrives(serve: Any) -> None:
    _, transport = serve((CHUNKED + b"7fffffff\r\n{", CLOSE), (OK + b"Content-Length: 15000000\r\n\r\n{", CLOSE))
    tracemalloc.start()
    for _ in range(2):
        assert "truncated" in failure(transport.get("/")).message
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_an_endless_error_page_is_read_to_its_beginning(serve: Any) -> None:
    page = (b"HTTP/1.1 500 Broken\r\n\r\n" + b"it broke " * 20_000, STALL)
    error = failure(serve(page)[1].get("/"))
    assert (error.kind, error.status) == ("server", 500)


def test_a_line_in_many_pieces_is_put_together_in_linear_time(serve: Any) -> None:
    _, transport = serve(chunks(*[b"x"] * 200_000, b"\nend") + b"0\r\n\r\n")
    lines: list[bytes] = []
    assert transport.stream("/", {}, lambda line: lines.append(line) is None) is None
    assert lines == [b"x" * 200_000, b"end"]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_reply_is_the_same_however_its_bytes_are_split(step: int) -> None:
    data = b"HTTP/1.1 100 Continue\r\nY: 1\r\n\r\n" + CHUNKED + b"4\r\n{}  \r\n0\r\nX: 1\r\n\r\n"
    parts = iter([*(data[at : at + step] for at in range(0, len(data), step)), b""])
    reply = Reply(lambda: next(parts))
    reply.read_head()
    assert (reply.status, reply.read(), reply.is_reusable) == (200, b"{}  ", True)
    assert reply.headers == {"transfer-encoding": "chunked"}  # neither those before it nor its trailers


def test_the_end_before_a_reply_and_within_one_are_told_apart() -> None:
    with pytest.raises(NoReply):
        Reply(lambda: b"").read_head()
    parts = iter([b"HTTP/1.1", b""])
    with pytest.raises(BadReply, match="truncated"):
        Reply(lambda: next(parts)).read_head()
