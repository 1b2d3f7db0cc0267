"""Who may call the embedded server, and what a client that misbehaves cannot do to it, over real sockets."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator

import pytest
from raw_http import until

from query_mutator.embedded.access import Access, is_local
from query_mutator.embedded.http import MAX_HEAD_BYTES
from query_mutator.embedded.server import EmbeddedServer, start_server
from tests.conftest import Upper

BODY = json.dumps({"model": "upper", "prompt": "hi", "stream": False}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with start_server([Upper()], origins=("https://trusted.example",)) as running:
        yield running


def raw(server: EmbeddedServer, *pieces: bytes) -> bytes:
    """Send the pieces and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def ask(
    server: EmbeddedServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of one reply; `_` in a header's name stands for `-`."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body)}", *lines])
    first, *rest = raw(server, head.encode() + b"\r\n\r\n" + body).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split()[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}


# --- hosts and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/tags", "/v1/models", "/debug/stats", "/nothing"])
def test_a_name_that_is_not_this_machine_gets_nothing_from_a_loopback_server(server: EmbeddedServer, path: str) -> None:
    assert ask(server, "GET", path, Host="rebound.example:80")[0] == 403
    assert ask(server, "GET", path, Host=f"localhost:{server.port}")[0] in (200, 404)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *[(host, True) for host in ("", "localhost", "LOCALHOST.:1", "127.0.0.1:80", "[::1]:80", "192.168.1.2")],
        *[(host, True) for host in (socket.gethostname(), "box.local:11434", "host.docker.internal", "a.localhost")],
        *[(host, False) for host in ("evil.example", "8.8.8.8", "localhost.evil.example", "127.0.0.1.nip.io", "a, b")],
    ],
)  # fmt: skip
def test_names_and_addresses_of_this_machine_and_its_network(host: str, allowed: bool) -> None:
    assert is_local(host) is allowed


def test_a_server_bound_to_another_address_takes_any_host() -> None:
    headers = {"host": "models.example"}
    assert Access(bound=["127.0.0.1", "::1"]).refusal(headers) is not None
    assert Access(bound=["0.0.0.0"]).refusal(headers) is None


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *[(origin, True) for origin in ("http://localhost", "https://localhost:3000", "http://127.0.0.1:8080")],
        *[(origin, True) for origin in ("app://obsidian.md", "vscode-webview://x", "https://trusted.example")],
        *[(origin, False) for origin in ("https://evil.example", "null", "http://localhost.evil.example", "")],
    ],
)
def test_pages_of_this_machine_and_of_named_origins_may_call(
    server: EmbeddedServer, origin: str, allowed: bool
) -> None:
    for method, path, body in (("POST", "/api/generate", BODY), ("DELETE", "/debug/stats", b"")):
        status, headers = ask(server, method, path, body, Host="localhost", Origin=origin)
        assert (status == 200) is allowed
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_a_streamed_reply_can_be_read_by_an_allowed_page(server: EmbeddedServer) -> None:
    body = json.dumps({"model": "upper", "prompt": "hi"}).encode()
    status, headers = ask(server, "POST", "/api/generate", body, Host="localhost", Origin="http://localhost:5173")
    assert (status, headers["access-control-allow-origin"]) == (200, "http://localhost:5173")


def test_a_preflight_says_what_an_allowed_page_may_send(server: EmbeddedServer) -> None:
    wish = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type,authorization"}
    status, headers = ask(server, "OPTIONS", "/api/chat", Host="localhost", Origin="http://localhost:3000", **wish)
    assert status == 204
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "content-type,authorization"
    assert "content-length" not in headers
    assert ask(server, "OPTIONS", "/api/chat", Host="localhost", Origin="https://evil.example", **wish)[0] == 403


# --- clients that misbehave ------------------------------------------------------------------------------------------


def test_a_client_that_speaks_tls_is_answered_at_once(server: EmbeddedServer) -> None:
    context = ssl.create_default_context()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client, pytest.raises(ssl.SSLError):
        context.wrap_socket(client, server_hostname="localhost")


def test_an_old_client_that_asks_for_it_keeps_its_connection(server: EmbeddedServer) -> None:
    head = b"POST /api/generate HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n%b"
    kept, last = (head % (line, len(BODY), BODY) for line in (b"Connection: Keep-Alive\r\n", b""))
    replies = raw(server, kept, kept, last).split(b"HTTP/1.1 200 OK\r\n")
    assert [b"connection: keep-alive" in reply.lower() for reply in replies[1:]] == [True, True, False]


def test_requests_sent_while_one_is_in_progress_wait_without_being_held_in_memory(server: EmbeddedServer) -> None:
    one = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%b"
    many = one % (b"", len(BODY), BODY) * (MAX_HEAD_BYTES // len(BODY))
    replies = raw(server, many + one % (b"Connection: close\r\n", len(BODY), BODY))
    assert replies.count(b'"response":"HI"') == many.count(BODY) + 1


def test_a_request_that_stops_in_the_middle_ends_and_a_connection_without_one_too() -> None:
    with start_server([Upper()], request_timeout_s=0.05) as server:
        unfinished = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        assert raw(server, unfinished).startswith(b"HTTP/1.1 408 ")
        assert raw(server, unfinished[:20]).startswith(b"HTTP/1.1 408 ")
        assert raw(server) == b""
        until(lambda: server.open_connections == 0)


def test_a_call_may_take_longer_than_a_request_to_arrive() -> None:
    with start_server([Upper()], request_timeout_s=0.05, latency_ms=1000) as server:
        request = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        assert b'"response":"HI"' in raw(server, request % (len(BODY), BODY))


def test_a_refused_client_reads_why_although_it_still_sends(server: EmbeddedServer) -> None:
    head = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    assert raw(server, head, b"a" * 2_000_000).startswith(b"HTTP/1.1 413 ")
