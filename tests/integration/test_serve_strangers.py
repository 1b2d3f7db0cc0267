"""Clients of the proxy and of the test server: those that people use, and any that send what they like."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import requests
from langchain_ollama import ChatOllama

from query_mutator.apply.proxy.server import ClientLimits
from query_mutator.encoder import Encoder
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener, Upper
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, chat, proxy
from tests.scripted_server import ScriptedServer, chunks, http

TURNS = [{"role": "user", "content": SORT}]
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
PICTURE = "iVBORw0KGgo=" * 200_000
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"model": "upper", "prompt": "hi", "stream": False}).encode()
POST = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n"
TIMEOUT_S = 0.4
MAX_BODY_BYTES = 2**24


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: 127.0.0.1", "Connection: close", *headers, "", ""]).encode()


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_that_clients_choose_are_cut_and_do_not_stay(hash_encoder: Encoder) -> None:
    release, name = threading.Event(), "x" * 100_000
    with (
        closing(ScriptedServer((release, http("{}")))) as upstream,
        proxy(upstream.url, hash_encoder) as url,
    ):
        asking = threading.Thread(target=chat, args=(url, SORT), kwargs={"model": name})
        asking.start()
        assert upstream.asked.acquire(timeout=20)
        metrics = requests.get(f"{url}/metrics", timeout=20).text
        assert f'qm_in_flight{{model="{name[:300]}"}} 1\n' in metrics
        assert len(metrics) < 20_000
        release.set()
        asking.join(20)
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
        assert upstream.requests == []
        key = {"Authorization": "Bearer secret"}
        assert requests.options(f"{url}/api/tags", headers=key, timeout=20).text == "from the upstream"
    assert len(upstream.requests) == 1


def test_the_upstream_sees_no_header_for_the_proxy(hash_encoder: Encoder) -> None:
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for model in (MODEL, VIRTUAL):
            body = {"model": model, "messages": TURNS, "stream": False}
            headers = {"X-QM-Skip": "1", "X-Mine": "kept"}
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
            reply, _, content = sent_raw(urlsplit(url).port or 0, "\r\n".join(lines).encode() + body).partition(
                b"\r\n\r\n"
            )
            assert b"chunked" not in reply.lower()
            assert json.loads(content)["model"] == model


@pytest.mark.parametrize(("path", "shapes"), WRONG.items())
def test_a_reply_of_another_shape_is_status_502(hash_encoder: Encoder, path: str, shapes: list[str]) -> None:
    with closing(ScriptedServer(*map(http, shapes))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for _ in shapes:
            body = {"model": VIRTUAL, "messages": TURNS, "stream": False}
            reply = requests.post(url + path, json=body, timeout=20)
            assert (reply.status_code, "upstream" in reply.text) == (502, True)


@pytest.mark.parametrize("odd", [r'"\ud83d plz"', "1e999", "NaN"])
def test_what_only_lenient_parsers_read_is_left_to_the_upstream(hash_encoder: Encoder, odd: str) -> None:
    content = f'{{"model": "{VIRTUAL}", "odd": {odd}, "messages": [{{"role": "user", "content": "x"}}]}}'
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        assert requests.post(f"{url}/api/chat", data=content, timeout=20).status_code == 200
    assert [request.partition(b"\r\n\r\n")[2].decode() for request in upstream.requests] == [content]


def tokens(*texts: str) -> bytes:
    """Return pieces of a chunked stream of Ollama's API, a line for each text."""
    lines = (json.dumps({"model": "m", "message": {"content": text}, "done": False}).encode() + b"\n" for text in texts)
    return b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines)


def test_health_is_answered_where_calls_are_refused(hash_encoder: Encoder) -> None:
    more = threading.Event()
    with (
        closing(ScriptedServer((more, http("{}")))) as upstream,
        proxy(upstream.url, hash_encoder, limits=ClientLimits(requests=1)) as url,
    ):
        asking = threading.Thread(target=lambda: requests.get(f"{url}/api/version", timeout=20))
        asking.start()
        assert upstream.asked.acquire(timeout=20)
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


def test_many_values_are_not_parsed(hash_encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from query_mutator.apply.proxy import app

    def refuse(content: bytes) -> None:
        raise AssertionError(f"{len(content)} bytes were parsed")

    monkeypatch.setattr(app, "parsed", refuse)
    with closing(ScriptedServer(http("{}"))) as upstream, proxy(upstream.url, hash_encoder) as url:
        for body in (b"[" + b"{}," * 200_000 + b"{}]", b'{"model":"m","a":[' + b"[]," * 2_000_000 + b"1]}"):
            assert requests.post(f"{url}/api/chat", data=body, timeout=20).status_code == 200
            assert upstream.requests[-1].partition(b"\r\n\r\n")[2] == body
        assert requests.post(f"{url}/qm/rewrite", data=body, timeout=20).status_code == 400


# --- replies ----------------------------------------------------------------------------------------------------------


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


@contextmanager
def serving(encoder: Encoder, *, timeout_s: float = 60.0) -> Iterator[int]:
    """Yield the port of a proxy."""
    limits = ClientLimits(body_bytes=MAX_BODY_BYTES, timeout_s=timeout_s)
    with start_server([Upper(), Librarian()]) as server, proxy(server.url, encoder, limits=limits) as url:
        yield int(url.rsplit(":", 1)[1])


def sent_raw(port: int, *pieces: bytes) -> bytes:
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
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: x\r\n" * 200, b"400"),
    ],
)
def test_what_is_invalid_or_too_large_is_refused(hash_encoder: Encoder, request_bytes: bytes, status: bytes) -> None:
    with serving(hash_encoder) as port:
        assert sent_raw(port, request_bytes).split(b" ", 2)[:2] in ([b"HTTP/1.1", status], [b"HTTP/1.0", status])


def test_half_a_head_and_half_a_body_end_in_time(hash_encoder: Encoder) -> None:
    unfinished = POST + b"Content-Length: 100\r\n\r\n{"
    with serving(hash_encoder, timeout_s=TIMEOUT_S) as port:
        for sent, reply in ((unfinished, b"HTTP/1.1 408 "), (unfinished[:20], b""), (b"", b"")):
            began = time.monotonic()
            assert sent_raw(port, sent)[:13] == reply
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


def test_requests_sent_at_once_are_answered_in_order(hash_encoder: Encoder) -> None:
    one = POST + b"%bContent-Length: %d\r\n\r\n%b"
    bodies = [BODY.replace(b"hi", b"n%d" % number) for number in range(40)]
    sent = b"".join(one % (b"", len(body), body) for body in bodies) + one % (b"Connection: close\r\n", len(BODY), BODY)
    with serving(hash_encoder) as port:
        for size in (len(sent), 1000, 61):
            replies = sent_raw(port, *(sent[at : at + size] for at in range(0, len(sent), size)))
            places = [replies.find(b'"response":"N%d"' % number) for number in range(40)]
            assert -1 not in places
            assert places == sorted(places)


STOPPED = "`os.kill` is what you want."
TIMES = ("created_at", "created", "id", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_LITELLM = """
import json, sys
import litellm
messages = [{"role": "user", "content": %r}]
def asked(provider, url, model):
    base = url + "/v1" if provider == "openai" else url
    settings = dict(model=provider + "/" + model, messages=messages, api_base=base, api_key="x")
    whole = litellm.completion(**settings)
    parts = litellm.completion(stream=True, **settings)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    headers = (whole._hidden_params or {}).get("additional_headers") or {}
    decision = [value for name, value in headers.items() if name.endswith("x-qm-decision")]
    return [whole.choices[0].message.content, text, whole.usage.completion_tokens, decision]
print(json.dumps([asked(*one) for one in json.loads(sys.argv[1])]))
"""


def untimed(found: Any) -> Any:
    """Return a record without what depends on the clock."""
    if isinstance(found, dict):
        return {name: untimed(value) for name, value in found.items() if name not in TIMES}
    return [untimed(one) for one in found] if isinstance(found, list) else found


def test_langchain_ollama_gets_equal_objects_and_the_rewritten_answer(gate: str, tiny_server: StubServer) -> None:
    def asked(url: str) -> list[Any]:
        model = ChatOllama(model=MODEL, base_url=url)
        whole, parts = model.invoke(KILL), list(model.stream(KILL))
        return [(one.content, untimed(one.response_metadata), one.usage_metadata) for one in (whole, *parts)]

    assert asked(gate) == asked(tiny_server.url)
    seen: list[httpx.Response] = []
    virtual = ChatOllama(model=VIRTUAL, base_url=gate, client_kwargs={"event_hooks": {"response": [seen.append]}})
    assert virtual.invoke(KILL).content == STOPPED
    assert "".join(str(part.content) for part in virtual.stream(KILL)) == STOPPED
    assert [reply.headers["x-qm-decision"] for reply in seen] == ["rewritten", "rewritten"]


@pytest.mark.slow
def test_litellm_gets_the_same_and_the_rewritten_answer(gate: str, tiny_server: StubServer) -> None:
    places = ((gate, MODEL), (tiny_server.url, MODEL), (gate, VIRTUAL))
    calls = [(provider, *place) for provider in ("openai", "ollama_chat") for place in places]
    command = [sys.executable, "-c", _LITELLM % KILL, json.dumps(calls)]
    settings = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, timeout=120, env=settings)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for through_gate, direct, rewritten in (found[:3], found[3:]):
        assert through_gate == direct
        assert rewritten[0] == rewritten[1] == STOPPED
    assert found[2][3] == ["rewritten"]  # the other provider of LiteLLM drops headers
