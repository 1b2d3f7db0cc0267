"""What the proxy sends to the upstream and what it makes of the replies, byte for byte."""

from __future__ import annotations

import gc
import gzip
from contextlib import closing
from typing import Any

import pytest
import requests

from query_mutator.apply.proxy.app import ProxyServer, run_frozen
from query_mutator.apply.proxy.server import listen
from query_mutator.encoder import Encoder
from tests.integration.proxied import proxy
from tests.scripted_server import CLOSE, RESET, ScriptedServer, http


def test_the_request_line_and_large_bodies_arrive_as_they_were_sent(hash_encoder: Encoder) -> None:
    body = bytes(range(256)) * 4_000
    with closing(ScriptedServer(http(""))) as upstream, proxy(upstream.url, hash_encoder) as url:
        session = requests.Session()
        sent = requests.Request("POST", url, data=body, headers={"X-Long": "x" * 20_000}).prepare()
        sent.url = f"{url}/api/a%2Fb/%7Ec?d=%20e&f=g+h"
        assert session.send(sent, timeout=20).status_code == 200
    head, _, received = upstream.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /api/a%2Fb/%7Ec?d=%20e&f=g+h HTTP/1.1\r\n")
    assert b"x" * 20_000 in head
    assert received == body


def test_replies_come_as_they_are(hash_encoder: Encoder) -> None:
    packed = gzip.compress(b"packed")
    replies = [
        http(packed, headers=["Content-Encoding: gzip", "X-Long: " + "y" * 20_000]),
        http("", status="302 Found", headers=["Location: /elsewhere"]),
        http("odd", status="299 Odd", headers=["X-Twice: 1", "X-Twice: 2"]),
    ]
    with closing(ScriptedServer(*replies)) as upstream, proxy(upstream.url, hash_encoder) as url:
        with requests.get(f"{url}/packed", stream=True, timeout=20) as reply:
            assert reply.raw.read(decode_content=False) == packed
            assert reply.headers["X-Long"] == "y" * 20_000
        moved = requests.get(f"{url}/moved", allow_redirects=False, timeout=20)
        assert (moved.status_code, moved.headers["Location"]) == (302, "/elsewhere")
        odd = requests.get(f"{url}/odd", timeout=20)
        assert (odd.status_code, odd.text, odd.headers["X-Twice"]) == (299, "odd", "1, 2")
    assert len(upstream.requests) == 3


@pytest.mark.parametrize("closed", [CLOSE, RESET])
def test_a_kept_connection_that_is_closed_costs_no_client_its_reply(closed: str, hash_encoder: Encoder) -> None:
    body = {"model": "other", "messages": [{"role": "user", "content": "q"}], "stream": False}
    with (
        closing(ScriptedServer(http("{}"), closed, http('{"n": 2}'), closed, closed)) as upstream,
        proxy(upstream.url, hash_encoder) as url,
    ):
        replies = [requests.post(f"{url}/api/chat", json=body, timeout=20) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 502]  # the third: a new connection is closed too
    assert replies[1].json() == {"n": 2}
    assert len(upstream.requests) == 5


def test_cookies_of_one_client_are_not_sent_for_another(hash_encoder: Encoder) -> None:
    with (
        closing(ScriptedServer(http("", headers=["Set-Cookie: who=first"]), http(""))) as upstream,
        proxy(upstream.url, hash_encoder) as url,
    ):
        assert requests.get(f"{url}/a", timeout=20).cookies["who"] == "first"
        requests.get(f"{url}/b", timeout=20)
        requests.get(f"{url}/c", headers={"Cookie": "who=third"}, timeout=20)
    second, third = (request.lower() for request in upstream.requests[1:])
    assert b"cookie" not in second
    assert b"cookie: who=third" in third


@pytest.mark.parametrize(
    "answer",
    [
        *(RESET, CLOSE, b"this is not HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
        b"HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_a_reply_that_is_not_http_is_status_502(hash_encoder: Encoder, answer: bytes | str) -> None:
    with closing(ScriptedServer(answer, http("fine"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        reply = requests.post(f"{url}/api/chat", json={"model": "m"}, timeout=20)
        assert (reply.status_code, upstream.url in reply.text) == (502, True)
        assert requests.post(f"{url}/api/chat", json={"model": "m"}, timeout=20).text == "fine"


def test_a_body_that_ends_early_leaves_the_client_with_an_incomplete_reply(hash_encoder: Encoder) -> None:
    broken = (http("begun", length=50), CLOSE)
    chunked = (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n", CLOSE)
    with closing(ScriptedServer(broken, chunked)) as upstream, proxy(upstream.url, hash_encoder) as url:
        for _ in range(2):
            with pytest.raises(requests.RequestException):
                _ = requests.get(f"{url}/broken", timeout=20).content


def test_what_is_loaded_is_left_out_of_garbage_collections_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(ProxyServer, "run", lambda _: frozen.append(gc.get_freeze_count()))
    app: Any = None
    before = gc.get_freeze_count()
    with listen("127.0.0.1", 0) as listening:
        run_frozen(ProxyServer(app, listening))
    assert frozen[0] > before + 1_000
    assert gc.get_freeze_count() == 0
