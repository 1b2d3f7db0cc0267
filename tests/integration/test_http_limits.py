"""Limits of heads, bodies and time at the proxy, and clients that leave."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import requests

from query_mutator.apply.proxy.server import MAX_HEADERS, ClientLimits
from query_mutator.encoder import Encoder
from query_mutator.testing import start_server
from tests.conftest import Librarian, Upper
from tests.integration.proxied import proxy

BODY = json.dumps({"model": "upper", "prompt": "hi", "stream": False}).encode()
POST = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n"
TIMEOUT_S = 0.4
MAX_BODY_BYTES = 2**24


@contextmanager
def serving(encoder: Encoder, *, timeout_s: float = 60.0) -> Iterator[int]:
    """Yield the port of a proxy."""
    limits = ClientLimits(body_bytes=MAX_BODY_BYTES, timeout_s=timeout_s)
    with start_server([Upper(), Librarian(), Held()]) as server, proxy(server.url, encoder, limits=limits) as url:
        yield int(url.rsplit(":", 1)[1])


class Held(Upper):
    """Answers nothing until released."""

    name = "held"
    release, asked = threading.Event(), threading.Event()

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.asked.set()
        self.release.wait(20)
        return super().reply_many(prompts)


def raw(port: int, *pieces: bytes) -> bytes:
    """Send the pieces and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (POST + b"Content-Length: -1\r\n\r\n", b"400"),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", b"400"),
        (POST + b"Content-Length: 99999999999\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, b"431"),
        (b"GET /" + b"x" * 70_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * (MAX_HEADERS + 1) + b"\r\n", b"431"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: x\r\n" * (MAX_HEADERS + 1), b"431"),
    ],
)
def test_what_is_invalid_or_too_large_is_refused(hash_encoder: Encoder, request_bytes: bytes, status: bytes) -> None:
    with serving(hash_encoder) as port:
        assert raw(port, request_bytes).split(b" ", 2)[:2] in ([b"HTTP/1.1", status], [b"HTTP/1.0", status])


def test_a_body_without_a_length_is_bounded(hash_encoder: Encoder) -> None:
    chunks = [b"%x\r\n%b\r\n" % (2**20, b"a" * 2**20)] * (MAX_BODY_BYTES // 2**20 + 1)
    with serving(hash_encoder) as port:
        assert raw(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", *chunks).startswith(b"HTTP/1.1 413 ")


def test_half_a_head_and_half_a_body_end_in_time(hash_encoder: Encoder) -> None:
    unfinished = POST + b"Content-Length: 100\r\n\r\n{"
    with serving(hash_encoder, timeout_s=TIMEOUT_S) as port:
        for sent, reply in ((unfinished, b"HTTP/1.1 408 "), (unfinished[:20], b""), (b"", b"")):
            began = time.monotonic()
            assert raw(port, sent)[:13] == reply
            assert time.monotonic() - began < 10


def test_a_body_that_trickles_in_gets_no_more_time(hash_encoder: Encoder) -> None:
    with (
        serving(hash_encoder, timeout_s=TIMEOUT_S) as port,
        socket.create_connection(("127.0.0.1", port), timeout=0.05) as client,
    ):
        client.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        for _ in range(200):
            client.sendall(b"x")
            try:
                reply = client.recv(65536)
            except TimeoutError:
                continue
            break
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_many_half_bodies_leave_the_server_to_others(hash_encoder: Encoder) -> None:
    with serving(hash_encoder, timeout_s=TIMEOUT_S) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for client in clients:
            client.sendall(POST + b"Content-Length: 1000000\r\n\r\n" + b"a" * 1000)
        time.sleep(3 * TIMEOUT_S)
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        assert b'"response":"HI"' in raw(port, head + BODY)
        for client in clients:
            client.settimeout(5)
            assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
            client.close()


def test_requests_sent_at_once_are_answered_in_order(hash_encoder: Encoder) -> None:
    one = POST + b"%bContent-Length: %d\r\n\r\n%b"
    bodies = [BODY.replace(b"hi", b"n%d" % number) for number in range(40)]
    sent = b"".join(one % (b"", len(body), body) for body in bodies) + one % (b"Connection: close\r\n", len(BODY), BODY)
    with serving(hash_encoder) as port:
        for size in (len(sent), 1000, 61):
            replies = raw(port, *(sent[at : at + size] for at in range(0, len(sent), size)))
            places = [replies.find(b'"response":"N%d"' % number) for number in range(40)]
            assert -1 not in places
            assert places == sorted(places)


def test_a_client_that_expects_100_continue_gets_it(hash_encoder: Encoder) -> None:
    with (
        serving(hash_encoder) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as client,
    ):
        client.sendall(POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_an_old_client_gets_a_stream_without_chunks(hash_encoder: Encoder) -> None:
    body = BODY.replace(b"false", b"true")
    head = b"POST /api/generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(hash_encoder) as port:
        lines = raw(port, head + body).partition(b"\r\n\r\n")[2].splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["HI", ""]


def test_a_client_that_leaves_or_resets_frees_its_slot(hash_encoder: Encoder) -> None:
    body = BODY.replace(b"upper", b"held")
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    with serving(hash_encoder) as port:
        Held.release.clear()
        for linger in (None, struct.pack("ii", 1, 0)):
            Held.asked.clear()
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(head + body)
            if linger is None:
                assert Held.asked.wait(10)
            else:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.close()
        ends = time.monotonic() + 10
        while _in_flight(port):
            assert time.monotonic() < ends
            time.sleep(0.02)
        Held.release.set()


def _in_flight(port: int) -> bool:
    models = requests.get(f"http://127.0.0.1:{port}/qm/queue", timeout=5).json()["models"]
    return any(row["in_flight"] or row["waiting"] for row in models.values())
