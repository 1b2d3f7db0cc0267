"""What the proxy makes of clients and upstreams that it does not know: names, methods, headers, shapes."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import requests

from query_mutator.encoder import Encoder
from tests.integration.proxied import MODEL, SORT, VIRTUAL, chat, proxy
from tests.scripted_server import ScriptedServer, chunks, http

TURNS = [{"role": "user", "content": SORT}]


def raw(url: str, request: bytes) -> bytes:
    """Send bytes and return all that comes back until the proxy closes."""
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), 20) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: 127.0.0.1", "Connection: close", *headers, "", ""]).encode()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 2])
def test_names_that_clients_choose_are_cut_and_do_not_stay(hash_encoder: Encoder, slots: int) -> None:
    release, name = threading.Event(), "x" * 100_000
    with (
        closing(ScriptedServer((release, http("{}")))) as upstream,
        proxy(upstream.url, hash_encoder, slots=slots) as url,
    ):
        asking = threading.Thread(target=chat, args=(url, SORT), kwargs={"model": name})
        asking.start()
        assert upstream.asked.acquire(timeout=20)
        metrics = requests.get(f"{url}/metrics", timeout=20).text
        assert f'qm_in_flight{{model="{name[:300]}"}} 1\n' in metrics
        assert len(metrics) < 20_000
        counts = requests.get(f"{url}/qm/queue", timeout=20).json()["models"]
        assert counts == {name[:300]: {"in_flight": 1, "waiting": 0}}
        release.set()
        asking.join(20)
        assert requests.get(f"{url}/qm/queue", timeout=20).json()["models"] == {}
        assert 'model="' not in requests.get(f"{url}/metrics", timeout=20).text


# --- methods and headers ----------------------------------------------------------------------------------------------


def test_only_a_preflight_passes_without_the_key(hash_encoder: Encoder) -> None:
    preflight = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    with (
        closing(ScriptedServer(http("from the upstream"))) as upstream,
        proxy(upstream.url, hash_encoder, api_key="secret") as url,
    ):
        assert requests.options(f"{url}/api/tags", timeout=20).status_code == 401
        assert requests.options(f"{url}/api/tags", headers=preflight, timeout=20).status_code == 204
        assert raw(url, head("OPTIONS * HTTP/1.1")).startswith(b"HTTP/1.1 401 ")
        assert upstream.requests == []
        key = {"Authorization": "Bearer secret"}
        assert requests.options(f"{url}/api/tags", headers=key, timeout=20).text == "from the upstream"
        assert raw(url, head("OPTIONS * HTTP/1.1", "Authorization: Bearer secret")).startswith(b"HTTP/1.1 204 ")
        assert b" 400 " in raw(url, head("GET * HTTP/1.1", "Authorization: Bearer secret"))[:16]
    assert len(upstream.requests) == 1


def test_the_upstream_sees_no_header_for_the_proxy(hash_encoder: Encoder) -> None:
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for model in (MODEL, VIRTUAL):
            body = {"model": model, "messages": TURNS, "stream": False}
            headers = {"X-QM-Skip": "1", "X-QM-Body": "1", "X-Mine": "kept"}
            assert requests.post(f"{url}/api/chat", json=body, headers=headers, timeout=20).status_code == 200
    sent = [request.partition(b"\r\n\r\n")[0].lower() for request in upstream.requests]
    assert [b"x-mine: kept" in each for each in sent] == [True, True]
    assert [b"x-qm-" in each for each in sent] == [False, False]


@pytest.mark.parametrize("model", [MODEL, VIRTUAL])
def test_a_client_that_expects_100_continue_gets_it_from_the_proxy(hash_encoder: Encoder, model: str) -> None:
    body = json.dumps({"model": model, "messages": TURNS, "stream": False}).encode()
    asked = head("POST /api/chat HTTP/1.1", "Expect: 100-continue", f"Content-Length: {len(body)}")
    with (
        closing(ScriptedServer(http('{"message": {"content": "sorted"}}'))) as upstream,
        proxy(upstream.url, hash_encoder) as url,
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), 20) as client,
    ):
        client.sendall(asked)
        assert client.recv(100).startswith(b"HTTP/1.1 100 Continue")
        client.sendall(body)
        assert b"sorted" in b"".join(iter(lambda: client.recv(65536), b""))
    assert b"expect:" not in upstream.requests[0].lower()


@pytest.mark.parametrize("model", [MODEL, VIRTUAL])
def test_a_client_of_http_1_0_gets_no_chunks(hash_encoder: Encoder, model: str) -> None:
    line = b'{"model": "librarian:latest", "message": {"content": "sorted"}, "done": true}\n'
    body = json.dumps({"model": model, "messages": TURNS}).encode()
    with closing(ScriptedServer(chunks(line, b""))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for connection in ("Connection: close", "Connection: keep-alive"):
            lines = ["POST /api/chat HTTP/1.0", "Host: 127.0.0.1", connection, f"Content-Length: {len(body)}", "", ""]
            reply, _, content = raw(url, "\r\n".join(lines).encode() + body).partition(b"\r\n\r\n")
            assert b"chunked" not in reply.lower()
            assert json.loads(content)["model"] == model


# --- shapes -----------------------------------------------------------------------------------------------------------

WRONG = {
    "/api/chat": ['{"message": "text"}', '{"message": [1]}', "[]", "5", '"x"'],
    "/v1/chat/completions": [
        '{"choices": 5}',
        '{"choices": [5]}',
        '{"choices": [{"message": "x"}]}',
        '{"choices": {}, ',
    ],
}


@pytest.mark.parametrize(("path", "shapes"), WRONG.items())
def test_a_reply_of_another_shape_is_status_502(hash_encoder: Encoder, path: str, shapes: list[str]) -> None:
    with closing(ScriptedServer(*map(http, shapes))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for _ in shapes:
            body = {"model": VIRTUAL, "messages": TURNS, "stream": False}
            reply = requests.post(url + path, json=body, timeout=20)
            assert (reply.status_code, "upstream" in reply.text) == (502, True)


def test_a_list_of_another_shape_is_no_error_of_the_proxy(hash_encoder: Encoder) -> None:
    shapes = ['{"models": 5}', '{"models": {"a": 1}}', '{"models": [5, {"name": 5}]}', "5"]
    with closing(ScriptedServer(*map(http, shapes))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for _ in shapes:
            assert requests.get(f"{url}/api/tags", timeout=20).status_code == 200


@pytest.mark.parametrize("odd", [r'"\ud83d plz"', "1e999", "NaN"])
def test_what_only_lenient_parsers_read_is_left_to_the_upstream(hash_encoder: Encoder, odd: str) -> None:
    content = f'{{"model": "{VIRTUAL}", "odd": {odd}, "messages": [{{"role": "user", "content": "x"}}]}}'
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        assert requests.post(f"{url}/api/chat", data=content, timeout=20).status_code == 200
    assert [request.partition(b"\r\n\r\n")[2].decode() for request in upstream.requests] == [content]
