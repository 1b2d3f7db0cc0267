"""Reading HTTP requests: however the bytes are cut, the same requests come out."""

from __future__ import annotations

import contextlib
from collections import deque as consume
from itertools import chain, pairwise, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.embedded.http import MAX_BODY_BYTES, BodyBudget, HttpError, IncomingBody, Request, RequestReader

PLAIN = b"GET /v1/models/a%20b?x=1 HTTP/1.1\r\nHost: here\r\nX-Odd:  yes \r\n\r\n"
SIZED = b"POST /api/chat HTTP/1.1\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello\r\n\r\nab"
CHUNKED = (
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;note=x\r\nhello\r\nA\r\n0123456789\r\n"
    b"0\r\nHost: evil\r\nX-Sum: 1\r\n\r\n"
)
UPGRADE = (
    b"POST /h2 HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
    b"GET /next HTTP/1.1\r\nHost: here\r\n\r\n"
)
OLD = b"GET / HTTP/1.0\r\n\r\n"
WHOLE = PLAIN + CHUNKED + UPGRADE + SIZED


def take_all(*pieces: bytes) -> list[Request]:
    reader = RequestReader(BodyBudget(4 * MAX_BODY_BYTES))
    taken = [request for piece in pieces for request in reader.feed(piece)]
    assert not reader.is_within
    return taken


def test_requests_are_read_with_path_headers_and_body() -> None:
    plain, chunked, sized = take_all(PLAIN + CHUNKED + SIZED)
    (old,) = take_all(OLD)
    assert (plain.method, plain.path, plain.headers) == ("GET", "/v1/models/a b", {"host": "here", "x-odd": "yes"})
    assert (sized.body, chunked.body, plain.body) == (b"hello\r\n\r\nab", b"hello0123456789", b"")
    assert [each.keep_alive for each in (plain, sized, chunked, old)] == [True, False, True, False]
    assert [each.chunked_reply for each in (plain, old)] == [True, False]
    assert chunked.headers == {"transfer-encoding": "chunked"}  # trailers are not headers


def test_an_offer_of_another_protocol_is_declined_and_the_request_is_read() -> None:
    upgrade, following = take_all(UPGRADE)
    assert (upgrade.method, upgrade.path, upgrade.body, upgrade.keep_alive) == ("POST", "/h2", b"hi", True)
    assert following.path == "/next"


@settings(deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_the_cuts_between_pieces_do_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[start:end] for start, end in pairwise(edges)]
    assert take_all(*pieces) == take_all(WHOLE)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_an_error_or_not_yet_complete(data: bytes) -> None:
    with contextlib.suppress(HttpError):
        assert all(request.method for request in RequestReader(BodyBudget(4 * MAX_BODY_BYTES)).feed(data + b"\r\n\r\n"))


@pytest.mark.parametrize("length", [b"x", b"-1", b"1_0", "٣".encode(), b"5\r\nContent-Length: 6", b"9" * 5000])
def test_a_content_length_is_one_number(length: bytes) -> None:
    with pytest.raises(HttpError) as raised:
        take_all(b"POST / HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")
    assert raised.value.status == 400


def test_a_valid_request_is_returned_before_the_error_of_the_next() -> None:
    reader = RequestReader(BodyBudget(4 * MAX_BODY_BYTES))
    assert len(reader.feed(OLD.replace(b"1.0", b"1.1") + b"hello\r\n\r\n")) == 1
    assert reader.has_failed
    with pytest.raises(HttpError, match="malformed"):
        reader.feed(b"")


def test_a_body_of_many_chunks_is_read_in_pieces() -> None:
    chunks, size = b"4\r\nabcd\r\n" * 300_000, 64 * 1024
    data = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    (request,) = take_all(*(data[at : at + size] for at in range(0, len(data), size)))
    assert request.body == b"abcd" * 300_000


@pytest.mark.parametrize(
    ("head", "flood", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 10_000, 431),
        (b"GET / HTTP/1.1\r\n", b"X-Same: aaaaaaaaaaaaaaaaaa\r\n" * 500, 431),
        (b"GET /", b"a" * 10_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: aaaaaaaaaaa\r\n" * 500, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;", b"a" * 10_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n" % (2**20, b"a" * 2**20), 413),
    ],
)
def test_whatever_does_not_end_is_refused(head: bytes, flood: bytes, status: int) -> None:
    reader = RequestReader(BodyBudget(4 * MAX_BODY_BYTES))
    with pytest.raises(HttpError) as raised:
        consume(map(reader.feed, chain([head], repeat(flood, 1000))), maxlen=0)
    assert raised.value.status == status


def test_a_large_head_that_arrives_at_once_is_refused() -> None:
    with pytest.raises(HttpError) as raised:
        take_all(b"GET / HTTP/1.1\r\n" + b"X-Same: aaaaaaaaaaaaaaaaaa\r\n" * 5000 + b"\r\n")
    assert raised.value.status == 431


def test_the_bodies_of_all_connections_share_a_budget() -> None:
    budget = BodyBudget(100)
    one, other = RequestReader(budget), RequestReader(budget)
    half = b"POST / HTTP/1.1\r\nContent-Length: 60\r\n\r\n" + b"a" * 60
    (request,) = one.feed(half)
    with pytest.raises(HttpError) as raised:
        other.feed(half)
    assert raised.value.status == 503
    one.release(request)
    (request,) = RequestReader(budget).feed(half)
    assert len(request.body) == 60


def test_a_connection_that_ends_within_a_body_gives_back_its_memory_once() -> None:
    budget = BodyBudget(100)
    for _ in range(3):
        reader = RequestReader(budget)
        assert reader.feed(b"POST / HTTP/1.1\r\nContent-Length: 80\r\n\r\n" + b"a" * 70) == []
        reader.close()
        reader.close()
    with pytest.raises(HttpError):
        budget.take(101)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
    ],
)
def test_what_the_server_does_not_speak_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(HttpError) as raised:
        take_all(head)
    assert raised.value.status == status


def test_an_announced_body_that_is_too_large_is_refused_before_it_arrives() -> None:
    with pytest.raises(HttpError) as raised:
        RequestReader(BodyBudget(4 * MAX_BODY_BYTES)).feed(
            b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
        )
    assert raised.value.status == 413


@given(st.lists(st.integers(1, 9_000), max_size=20), st.integers(1, 30_000))
def test_the_ends_of_a_body_are_joined_and_its_bytes_stay(sizes: list[int], num_bytes: int) -> None:
    body = IncomingBody(0, release=lambda _: None)
    for place, size in enumerate(sizes):
        body.feed(bytes([place]) * size)
    body.join_ends(num_bytes)
    assert b"".join(body.held) == b"".join(bytes([place]) * size for place, size in enumerate(sizes))
    assert len(body.held) < 2 or min(len(body.held[0]), len(body.held[-1])) >= num_bytes


def test_a_body_that_arrives_byte_by_byte_is_held_in_few_pieces() -> None:
    body = IncomingBody(0, release=lambda _: None)
    for _ in range(100_000):
        body.feed(b"x")
    assert (len(body.held), body.held_bytes) == (13, 100_000)
