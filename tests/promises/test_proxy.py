"""`qm serve`: what a client or an upstream may take of it, and which names and keys it knows."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.promises.helpers import QM, ModelServer, ask, contents, model_server, one_line_error, run
from tests.promises.proxied import MODEL, REFUSED, VIRTUAL, Proxy, serving

POST = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def proxy(plan: Path, upstream: ModelServer) -> Iterator[Proxy]:
    """A proxy with small bounds, which the tests of this file share."""
    with serving(plan, upstream, plan.parents[1], "--max-body-mb", "2", "--max-reply-mb", "0.1") as started:
        yield started


@pytest.fixture(autouse=True)
def instant(upstream: ModelServer) -> None:
    """Forget what the test before set and counted."""
    upstream.set(latency_ms=0)
    upstream.reset()


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        (b"GET /" + b"x" * 1_000_000, (400, 414, 431)),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 1_000_000, (400, 431)),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 200_000, (400, 431)),
    ],
    ids=["target", "header", "headers"],
)
def test_a_head_is_bounded(head: bytes, statuses: tuple[int, ...], proxy: Proxy) -> None:
    """The proxy refuses a head of a megabyte, closes the connection, and answers others."""
    replies = [proxy.raw(head, b"\r\n\r\n")[:13], proxy.raw(head)[:13]]
    for reply in filter(None, replies):  # where the proxy closes with bytes unread, TCP may drop its reply
        assert int(reply.split()[1]) in statuses
    assert proxy.chat("which river is it")[2]["message"]["content"] == "It is Nile."


def test_a_body_is_bounded(proxy: Proxy) -> None:
    """A request longer than --max-body-mb is status 413, announced or in chunks, and is not kept in memory."""
    before, chunk = proxy.memory_mb(), b"%x\r\n%b\r\n" % (2**20, b"a" * 2**20)
    assert b" 413 " in proxy.raw(POST + b"Content-Length: 3000000\r\n\r\n")[:13]
    reply = proxy.raw(POST + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 100)
    assert not reply or b" 413 " in reply[:13]
    assert proxy.memory_mb() < before + 30


def test_a_reply_is_bounded(proxy: Proxy) -> None:
    """A reply to a virtual model longer than --max-reply-mb is status 502 or a cut stream; a plain one passes whole."""
    status, _, said = proxy.chat("go", model="endless:latest+qm", options={"num_predict": 10_000})
    assert (status, "--max-reply-mb" in said["error"]) == (502, True)
    reply = proxy.chat("go", model="endless:latest", options={"num_predict": 10_000})[2]
    assert len(reply["message"]["content"].split()) == 10_000
    body = {"model": "endless:latest+qm", "messages": [{"role": "user", "content": "go"}]}
    content = json.dumps({**body, "options": {"num_predict": 2_000}}).encode()
    stream = proxy.raw(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    assert len(stream) < 200_000
    assert b'"done": true' not in stream.replace(b'"done":true', b'"done": true')


def test_slow_clients_take_nobodys_place(plan: Path, upstream: ModelServer, tmp_path: Path) -> None:
    """Clients that send half a head or half a body, or read nothing, neither delay others nor count as requests."""
    upstream.set(latency_ms=0)
    with serving(plan, upstream, tmp_path, "--max-requests", "8") as proxy, contextlib.ExitStack() as open_sockets:
        for sent in (POST, POST + b"Content-Length: 100\r\n\r\n{"):
            for _ in range(40):
                client = open_sockets.enter_context(socket.create_connection(("127.0.0.1", proxy.port)))
                client.sendall(sent)
        before = proxy.memory_mb()
        body = json.dumps({"model": "endless", "prompt": "go", "options": {"num_predict": 10_000}}).encode()
        for _ in range(6):
            client = open_sockets.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", proxy.port))
            client.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
            client.sendall(body)
        began = time.monotonic()
        for _ in range(5):
            assert proxy.chat("which river is it")[2]["message"]["content"] == "It is Nile."
        assert time.monotonic() - began < 5
        time.sleep(2)
        assert proxy.memory_mb() < before + 25  # six streams of 11 MB each that nobody reads


def test_a_client_that_leaves_cuts_its_call(proxy: Proxy, upstream: ModelServer) -> None:
    """When a client leaves, the proxy cuts its call, plain or virtual, so that the server's slot is free."""
    upstream.set(latency_ms=20_000)
    for model in (MODEL, VIRTUAL):
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "which river is it"}]}).encode()
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for_in_flight(upstream, 1)
        wait_for_in_flight(upstream, 0)
    assert upstream.stats()["cancelled"] == 2


def wait_for_in_flight(server: ModelServer, number: int) -> None:
    """Wait until so many calls are in flight."""
    until = time.monotonic() + 60
    while server.stats()["in_flight"] != number:
        assert time.monotonic() < until, server.stats()
        time.sleep(0.02)


def test_healthz_answers_within_a_second_whatever_others_ask(plan: Path, upstream: ModelServer, tmp_path: Path) -> None:
    """/healthz is answered within a second while others wait for slow calls, for rewrites, and send large bodies."""
    upstream.set(latency_ms=300)
    pieces = [{"role": "user", "content": "word " * 20, "note": []}] * 60_000
    with serving(plan, upstream, tmp_path, "--mode", "full") as proxy:
        ends = time.monotonic() + 4
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                while time.monotonic() < ends:
                    if number < 16:
                        assert proxy.chat(f"plz which river is it {number}", model=VIRTUAL)[0] == 200
                    elif number < 32:
                        assert proxy.chat("which river is it")[0] == 200
                    else:
                        assert proxy.chat("which river is it", more=pieces)[0] == 200
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(34)]
        for thread in threads:
            thread.start()
        times = []
        while time.monotonic() < ends:
            times.append(proxy.health_s())
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
    assert len(times) > 15
    assert sorted(times)[-2] < 1  # one of them may have met a pause of this machine
    assert upstream.stats()["max_in_service"] > 16


# --- keys and names --------------------------------------------------------------------------------------------------


def test_a_key_is_required_where_one_is_set(plan: Path, upstream: ModelServer, tmp_path: Path) -> None:
    """With --api-key every route needs the key, which the upstream never sees; another --host needs a key to be set."""
    line = one_line_error(
        run([*QM, "serve", plan, "--ollama-url", upstream.url, "--host", "0.0.0.0", "--port", "0"], cwd=tmp_path)
    )
    assert "--api-key" in line
    with (
        model_server(api_key="") as keeper,
        serving(plan, keeper, tmp_path, "--api-key", "sk-of-the-proxy") as proxy,
    ):
        keeper.reset()
        for method, path in (
            ("GET", "/api/tags"),
            ("GET", "/metrics"),
            ("POST", "/qm/rewrite"),
            ("DELETE", "/api/delete"),
        ):
            body = None if method == "GET" else {"model": MODEL}
            for headers in ({}, {"Authorization": "Bearer sk-of-the-prox"}):
                assert proxy.send(method, path, body, headers)[0] == 401
        assert keeper.stats()["routes"] == {}
        for model in (MODEL, VIRTUAL):
            assert proxy.chat("which river is it", model=model)[0] == 401
            assert proxy.chat("which river is it", model=model, key="sk-of-the-proxy")[0] == 200
        assert keeper.keys == []


def test_every_model_is_there_twice(proxy: Proxy, upstream: ModelServer) -> None:
    """A plain name gets the upstream's own reply; NAME+qm an answer to a rewrite, with headers that say so."""
    direct = ask(f"{upstream.url}/api/chat", {"model": MODEL, "stream": False, "messages": messages(REFUSED)})
    status, headers, said = proxy.chat(REFUSED)
    timed = {key for key in direct if "duration" in key or key == "created_at"}
    assert (status, {**said, **dict.fromkeys(timed)}) == (200, {**direct, **dict.fromkeys(timed)})
    assert "x-qm-decision" not in headers
    status, headers, said = proxy.chat(REFUSED, model=VIRTUAL)
    assert (status, said["model"], said["message"]["content"]) == (200, VIRTUAL, "It is Nile.")
    assert (headers["x-qm-decision"], int(headers["x-qm-calls"])) == ("rewritten", 2)
    assert proxy.chat("which river is it", model=VIRTUAL)[1]["x-qm-decision"] == "kept"
    skipped = {"X-QM-Skip": "1"}
    body = {"model": VIRTUAL, "stream": False, "messages": messages(REFUSED)}
    assert proxy.send("POST", "/api/chat", body, skipped)[1]["x-qm-decision"] == "passed; asked"
    names = {model["name"] for model in proxy.send("GET", "/api/tags")[2]["models"]}
    assert {MODEL, VIRTUAL, "echo:latest", "echo:latest+qm"} <= names
    rewritten = proxy.send("POST", "/qm/rewrite", {"model": VIRTUAL, "messages": messages(REFUSED)})
    assert rewritten[0] == 200


def messages(text: str) -> list[dict[str, str]]:
    """Return the messages of a question."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/api/delete", {"model": VIRTUAL}),
        ("DELETE", "/api//delete", {"name": VIRTUAL}),
        ("DELETE", "/api/delete", {"name": VIRTUAL}),
        ("DELETE", "/api/delete", {"model": VIRTUAL, "more": "x" * 1_500_000}),
        ("POST", "/api/pull", {"model": VIRTUAL}),
        ("POST", "/api/push", {"model": VIRTUAL}),
        ("POST", "/v1/unload", {"model": VIRTUAL}),
        ("POST", "/api/copy", {"source": VIRTUAL, "destination": "mine"}),
        ("POST", "/api/copy", {"source": MODEL, "destination": VIRTUAL}),
        ("POST", "/api/create", {"model": "mine", "from": VIRTUAL}),
        ("POST", "/api/create", {"model": VIRTUAL, "from": MODEL}),
    ],
)
def test_a_virtual_name_changes_no_model(
    method: str, path: str, body: Any, proxy: Proxy, upstream: ModelServer
) -> None:
    """A request that would change a model and names NAME+qm is status 400 and does not reach the upstream."""
    assert proxy.send(method, path, body)[0] == 400
    assert upstream.stats()["routes"] == {}


def test_a_web_page_of_another_site_asks_nothing(proxy: Proxy, upstream: ModelServer) -> None:
    """A page of another site is refused, by its Origin, and by the Host that DNS rebinding gives it."""
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert (
            proxy.send("POST", "/api/chat", {"model": MODEL, "messages": messages("which river is it")}, headers)[0]
            == 403
        )
    assert upstream.stats()["routes"] == {}
    page = {"Origin": "http://localhost:3000"}
    body = {"model": MODEL, "stream": False, "messages": messages("which river is it")}
    assert proxy.send("POST", "/api/chat", body, page)[0] == 200


def test_no_prompt_is_on_disk_or_in_the_log(plan: Path, upstream: ModelServer, tmp_path: Path) -> None:
    """The proxy writes no prompt and no answer to disk or to its output, answered, rewritten or failed."""
    with serving(plan, upstream, tmp_path, "--mode", "full", env={"TMPDIR": str(tmp_path)}) as proxy:
        for model in (MODEL, VIRTUAL, "no-such-model+qm"):
            proxy.chat(f"{REFUSED} zanzibar", model=model)
            proxy.chat("zanzibar which river is it", model=model)
        said = proxy.command.stdout + proxy.command.stderr
    assert "listening on" in said
    assert "zanzibar" not in said
    folders = {**contents(tmp_path), **contents(plan.parents[1])}
    assert not [name for name, content in folders.items() if b"zanzibar" in content]
