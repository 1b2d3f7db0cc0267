"""Reading HTTP requests: however the bytes are cut, the same requests come out."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.embedded.http import HttpError, Request, take_request

PLAIN = b"GET /v1/models/a%20b?x=1 HTTP/1.1\r\nHost: here\r\nX-Odd:  yes \r\n\r\n"
SIZED = b"POST /api/chat HTTP/1.1\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello\r\n\r\nab"
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;note=x\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n"
OLD = b"GET / HTTP/1.0\r\n\r\n"


def take_all(*pieces: bytes) -> list[Request]:
    buffer, taken = bytearray(), []
    for piece in pieces:
        buffer += piece
        while (request := take_request(buffer)) is not None:
            taken.append(request)
    assert not buffer
    return taken


def test_requests_are_read_with_path_headers_and_body() -> None:
    plain, sized, chunked, old = take_all(PLAIN + SIZED + CHUNKED + OLD)
    assert (plain.method, plain.path, plain.headers) == ("GET", "/v1/models/a b", {"host": "here", "x-odd": "yes"})
    assert (sized.body, chunked.body, plain.body) == (b"hello\r\n\r\nab", b"hello0123456789", b"")
    assert [each.keep_alive for each in (plain, sized, chunked, old)] == [True, False, True, False]
    assert [each.chunked_reply for each in (plain, old)] == [True, False]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(PLAIN + SIZED + CHUNKED + OLD)), max_size=8))
def test_the_cuts_between_pieces_do_not_matter(cuts: list[int]) -> None:
    whole = PLAIN + SIZED + CHUNKED + OLD
    edges = [0, *sorted(cuts), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(edges)]
    assert take_all(*pieces) == take_all(whole)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_an_error_or_not_yet_complete(data: bytes) -> None:
    with contextlib.suppress(HttpError):
        request = take_request(bytearray(data + b"\r\n\r\n"))
        assert request is None or request.method


@pytest.mark.parametrize("length", [b"x", b"-1", b"1_0", "٣".encode()])
def test_a_content_length_is_digits(length: bytes) -> None:
    with pytest.raises(HttpError, match="content length"):
        take_request(bytearray(b"POST / HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n"))
