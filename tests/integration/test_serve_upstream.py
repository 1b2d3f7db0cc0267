"""What the proxy sends to one or several upstreams, what it makes of the replies, and its process."""

from __future__ import annotations

import gzip
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import ollama
import openai
import pytest
import requests

from query_mutator.encoder import Encoder
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, MODEL, SORT, VIRTUAL, answer, chat, proxy
from tests.qm_command import serving
from tests.scripted_server import CLOSE, RESET, ScriptedServer, http

OTHER = "other:latest"


def test_the_request_line_and_large_bodies_arrive_as_they_were_sent(hash_encoder: Encoder) -> None:
    body = bytes(range(256)) * 4_000
    with closing(ScriptedServer(http(""))) as upstream, proxy(upstream.url, hash_encoder) as url:
        session = requests.Session()
        sent = requests.Request("POST", url, data=body, headers={"X-Long": "x" * 8_000}).prepare()
        sent.url = f"{url}/api/a%2Fb/%7Ec?d=%20e&f=g+h"
        assert session.send(sent, timeout=20).status_code == 200
    head, _, received = upstream.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /api/a%2Fb/%7Ec?d=%20e&f=g+h HTTP/1.1\r\n")
    assert b"x" * 8_000 in head
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


class Other(Librarian):
    name = "other"

    def reply(self, prompt: str) -> str:
        return f"The other server says {super().reply(prompt)}"


@pytest.fixture
def first() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=4) as server:
        yield server


@pytest.fixture
def second() -> Iterator[StubServer]:
    with start_server([Other(), Softener()], num_parallel=4) as server:
        yield server


@pytest.fixture
def both(first: StubServer, second: StubServer, hash_encoder: Encoder) -> Iterator[str]:
    with proxy(first.url, hash_encoder, others=[second.url]) as url:
        yield url


def names(url: str) -> list[str]:
    return [row["name"] for row in requests.get(f"{url}/api/tags", timeout=10).json()["models"]]


def test_the_lists_are_those_of_both(both: str) -> None:
    listed = [model.model for model in ollama.Client(host=both).list().models]
    assert {MODEL, VIRTUAL, OTHER, f"{OTHER}+qm"} <= set(listed)
    assert len(listed) == len(set(listed))  # the softener is on both
    ids = [model.id for model in openai.OpenAI(base_url=f"{both}/v1", api_key="x").models.list()]
    assert {MODEL, VIRTUAL, OTHER, f"{OTHER}+qm"} <= set(ids)
    for model in (MODEL, OTHER):
        chat(both, SORT, model=model)
    assert {MODEL, OTHER} <= {model.model for model in ollama.Client(host=both).ps().models}


def test_a_call_goes_to_the_server_that_has_its_model(both: str, first: StubServer, second: StubServer) -> None:
    assert answer(chat(both, SORT, model=MODEL)) == "`sorted` is what you want."
    assert answer(chat(both, SORT, model="other")) == "The other server says `sorted` is what you want."
    kept, rewritten = chat(both, SORT, model=f"{OTHER}+qm"), chat(both, KILL)
    assert answer(kept).startswith("The other server says")
    assert kept.json()["model"] == f"{OTHER}+qm"
    assert answer(rewritten) == "`os.kill` is what you want."
    for model in (MODEL, OTHER, f"{OTHER}+qm"):
        shown = requests.post(f"{both}/api/show", json={"model": model}, timeout=10)
        assert shown.status_code == 200
        assert openai.OpenAI(base_url=f"{both}/v1", api_key="x").models.retrieve(model).id == model
    assert first.stats()["calls_by_model"].get("other", 0) == 0
    assert second.stats()["calls_by_model"].get("librarian", 0) == 0


def test_a_server_that_is_down_is_named_where_nobody_else_has_its_model(
    first: StubServer, second: StubServer, hash_encoder: Encoder
) -> None:
    with proxy(second.url, hash_encoder, others=[first.url]) as url:
        assert answer(chat(url, SORT, model=OTHER))
        second.close()
        for model in (OTHER, f"{OTHER}+qm"):
            gone = chat(url, SORT, model=model)
            assert gone.status_code == 502
            assert second.url in gone.json()["error"]
            assert first.url not in gone.json()["error"]
        assert chat(url, SORT, model=MODEL).status_code == 200
        assert MODEL in names(url)
        assert OTHER not in names(url)
        assert second.url in requests.get(f"{url}/api/version", timeout=10).json()["error"]  # of no model: the first
        first.close()
        gone = requests.get(f"{url}/api/tags", timeout=10)
        assert gone.status_code == 502
        assert first.url in gone.json()["error"]
        assert second.url in gone.json()["error"]


class Slow(Librarian):
    name = "slow"

    def reply(self, prompt: str) -> str:
        time.sleep(1.0)
        return super().reply(prompt)


def test_sigterm_lets_an_open_stream_end(plan: Path, tmp_path: Path) -> None:
    models = [Librarian(), Softener(), Slow()]
    with start_server(models) as server, serving(plan, tmp_path, "--ollama-url", server.url) as (process, url):
        body = {"model": "slow:latest", "messages": [{"role": "user", "content": SORT}]}
        with requests.post(f"{url}/api/chat", json=body, stream=True, timeout=20) as reply:
            process.send_signal(signal.SIGTERM)
            lines = list(reply.iter_lines())
        assert b'"done":true' in lines[-1].replace(b" ", b"")
        assert process.wait(20) == 128 + signal.SIGTERM  # as a shell reports it
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/healthz", timeout=5)
