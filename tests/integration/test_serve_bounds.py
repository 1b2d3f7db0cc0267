"""What a client of the proxy may take from the others: half bodies, large bodies, long streams and replies."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import requests

from query_mutator.apply.proxy.server import ClientLimits
from query_mutator.encoder import Encoder
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, answer, chat, proxy
from tests.scripted_server import ScriptedServer, http

PICTURE = "iVBORw0KGgo=" * 200_000
HALF = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def tokens(*texts: str) -> bytes:
    """Return pieces of a chunked stream of Ollama's API, a line for each text."""
    lines = (json.dumps({"model": "m", "message": {"content": text}, "done": False}).encode() + b"\n" for text in texts)
    return b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines)


@contextmanager
def halves(url: str, path: bytes, *, count: int) -> Iterator[None]:
    """Hold connections that have sent half a body."""
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    clients = [socket.create_connection(address) for _ in range(count)]
    try:
        for client in clients:
            client.sendall(HALF % path)
        yield
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("path", [b"/api/chat", b"/api/blobs/sha256:0", b"/elsewhere"])
def test_half_bodies_take_nobodys_place(tiny_server: StubServer, hash_encoder: Encoder, path: bytes) -> None:
    limits = ClientLimits(requests=3)
    with proxy(tiny_server.url, hash_encoder, limits=limits) as url, halves(url, path, count=6):
        for _ in range(3):
            assert requests.get(f"{url}/healthz", timeout=20).status_code == 200
            assert chat(url, SORT, model=MODEL).status_code == 200


def test_health_is_answered_where_calls_are_refused(hash_encoder: Encoder) -> None:
    more = threading.Event()
    with (
        closing(ScriptedServer((more, http("{}")))) as upstream,
        proxy(upstream.url, hash_encoder, limits=ClientLimits(requests=1)) as url,
    ):
        asking = threading.Thread(target=lambda: requests.get(f"{url}/api/version", timeout=20))
        asking.start()
        while requests.get(f"{url}/qm/queue", timeout=20).json()["requests"] == 0:
            pass
        assert requests.get(f"{url}/api/version", timeout=20).status_code == 503
        assert requests.get(f"{url}/healthz", timeout=20).status_code == 200
        more.set()
        asking.join()


# --- large requests ---------------------------------------------------------------------------------------------------


def test_a_picture_for_a_virtual_model_passes_under_the_upstreams_name(hash_encoder: Encoder) -> None:
    turns = [{"role": "user", "content": "what is this", "images": [PICTURE]}]
    line = b'{"model":"m","message":{"content":"A cat."},"done":true}'
    with closing(ScriptedServer(http(line))) as upstream, proxy(upstream.url, hash_encoder) as url:
        got = requests.post(f"{url}/api/chat", json={"model": "m+qm", "messages": turns}, timeout=20)
    assert json.loads(upstream.requests[0].partition(b"\r\n\r\n")[2]) == {"model": "m", "messages": turns}
    assert got.headers["x-qm-decision"] == "passed; images"
    assert got.json() == {"model": "m+qm", "message": {"content": "A cat."}, "done": True}


@pytest.mark.parametrize("fields", [("model", "options"), ("options", "model")])
def test_a_larger_request_is_forwarded_as_it_is(hash_encoder: Encoder, fields: tuple[str, str]) -> None:
    body: dict[str, Any] = {"model": "m", "options": {"note": PICTURE * 4}}
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        sent = json.dumps({name: body[name] for name in fields})
        assert requests.post(f"{url}/api/chat", data=sent, timeout=20).status_code == 200
    assert [request.partition(b"\r\n\r\n")[2].decode() for request in upstream.requests] == [sent]


def test_many_values_are_not_parsed(hash_encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from query_mutator.apply.proxy import chat as read

    def refuse(content: bytes) -> None:
        raise AssertionError(f"{len(content)} bytes were parsed")

    monkeypatch.setattr(read, "parsed", refuse)
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for body in (b"[" + b"{}," * 200_000 + b"{}]", b'{"model":"m","a":[' + b"[]," * 2_000_000 + b"1]}"):
            assert requests.post(f"{url}/api/chat", data=body, timeout=20).status_code == 200
            assert upstream.requests[-1].partition(b"\r\n\r\n")[2] == body
        assert requests.post(f"{url}/qm/rewrite", data=body, timeout=20).status_code == 400


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gate", "full"])
def test_a_reply_of_a_virtual_model_is_bounded(hash_encoder: Encoder, mode: Any) -> None:
    reply = http(json.dumps({"model": "m", "message": {"content": "x" * 50_000}, "done": True}))
    server = ScriptedServer(reply)
    with closing(server) as upstream, proxy(upstream.url, hash_encoder, mode=mode, max_reply_bytes=40_000) as url:
        refused = chat(url, SORT, model="m+qm")
        assert refused.status_code == 502
        assert "more than 0.04 MB; --max-reply-mb allows larger ones" in refused.json()["error"]
        assert chat(url, SORT, model="m").status_code == 200


def test_a_stream_of_a_virtual_model_is_cut_beyond_the_bound(hash_encoder: Encoder) -> None:
    more = threading.Event()
    step = (STREAM + tokens("Use `sorted`. "), more, tokens(*["x" * 1_000] * 200) + b"0\r\n\r\n")
    with closing(ScriptedServer(step)) as upstream, proxy(upstream.url, hash_encoder, max_reply_bytes=100_000) as url:
        body = {"model": "m+qm", "messages": [{"role": "user", "content": SORT}]}
        with requests.post(f"{url}/api/chat", json=body, stream=True, timeout=20) as reply:
            more.set()
            with pytest.raises(requests.exceptions.ChunkedEncodingError):
                list(reply.iter_lines())
        assert len(chat(url, SORT, model="m", stream=True).content.splitlines()) == 201


def test_too_many_values_in_a_reply_are_502(hash_encoder: Encoder) -> None:
    reply = http(b'{"model":"m","a":[' + b"{}," * 600_000 + b"{}]}")
    with closing(ScriptedServer(reply)) as upstream, proxy(upstream.url, hash_encoder) as url:
        assert "values" in chat(url, SORT, model="m+qm").json()["error"]


@pytest.mark.parametrize("beginning", ["word " * 60, "好的。", "Use `sorted`. "])
def test_a_stream_goes_on_once_its_verdict_is_certain(hash_encoder: Encoder, beginning: str) -> None:
    more = threading.Event()
    step = (STREAM + tokens(*beginning), more, tokens("end") + b"0\r\n\r\n")
    with closing(ScriptedServer(step)) as upstream, proxy(upstream.url, hash_encoder) as url:
        body = {"model": "m+qm", "messages": [{"role": "user", "content": SORT}]}
        with requests.post(f"{url}/api/chat", json=body, stream=True, timeout=10) as reply:
            lines = reply.iter_lines()
            assert reply.headers["x-qm-decision"] == "kept"
            assert json.loads(next(lines)) == {
                "model": "m+qm", "message": {"content": beginning[0]}, "done": False,
            }  # fmt: skip
            more.set()
            assert json.loads([*lines][-1])["message"]["content"] == "end"


def test_a_refusal_without_a_sentence_end_is_rewritten(hash_encoder: Encoder) -> None:
    class Rambling(Librarian):
        def reply(self, prompt: str) -> str:
            return super().reply(prompt).removesuffix(".") + " and so on" * 100

    with start_server([Rambling(), Softener()]) as server, proxy(server.url, hash_encoder) as url:
        assert answer(chat(url, KILL)).startswith("`os.kill` is what you want")
        assert chat(url, KILL, stream=True).headers["x-qm-decision"] == "rewritten"
        assert chat(url, SORT, stream=True).headers["x-qm-decision"] == "kept"
