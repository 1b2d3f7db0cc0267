"""The transport against a server that answers byte for byte what a test scripts, whatever its JSON holds."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from query_mutator.errors import BackendError, ModelMissingError
from query_mutator.llm.http_server import HttpServer
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.transport import Transport
from query_mutator.types import MAX_ERROR_CHARS, ChatRequest, Completion, ErrorInfo
from tests.scripted_server import CLOSE, DRIBBLE, RESET, STALL, ScriptedServer, chunks, failure, http

OUT_OF_MEMORY = '{"error": "model requires more system memory (5.6 GiB) than is available (3.2 GiB)"}'
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DIGITS = b"9" * 5000


def test_a_reply_is_its_json_object_and_the_request_carries_ours(serve: Any) -> None:
    server, transport = serve(http('{"text": "naïve"}'), headers={"Authorization": "Bearer x"})
    assert transport.post("/api/chat", {"question": "why?"}) == transport.get("/") == {"text": "naïve"}
    assert all(b"\r\nAuthorization: Bearer x\r\n" in request for request in server.requests)
    head, body = server.requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /api/chat HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}".encode() in head
    assert json.loads(body) == {"question": "why?"}


@pytest.mark.parametrize(
    ("answer", "kind", "status", "said"),
    [
        (http('{"error": "server busy"}', status="503 Service Unavailable"), "busy", 503, "server busy"),
        (http('{"error": {"message": "slow down"}}', status="429 Too Many Requests"), "busy", 429, "slow down"),
        (http('{"error": "it broke"}', status="500 Internal Server Error"), "server", 500, "it broke"),
        (http("<h1>Bad\nGateway</h1>", status="502 Bad Gateway"), "server", 502, "<h1>Bad Gateway</h1>"),
        (http(OUT_OF_MEMORY, status="500 Internal Server Error"), "memory", 500, "use a smaller model"),
        (http('{"error": "CUDA error: out of memory"}', status="500 x"), "memory", 500, "out of memory"),
        (http('{"error": "model \'qwen\' not found"}', status="404 Not Found"), "model_missing", 404, "qwen"),
        (http("404 page not found", status="404 Not Found"), "request", 404, "page not found"),
        (http('{"error": "invalid options"}', status="400 Bad Request"), "request", 400, "invalid options"),
        (http("", status="401 Unauthorized"), "request", 401, "status 401"),
        (http("", status="301 Moved", headers=["Location: https://a/"]), "request", 301, "redirected to https://a/"),
        (http('{"a": 1'), "malformed", 200, "not a JSON object"),
        (http('["a", "list"]'), "malformed", 200, "not a JSON object"),
        (http('{"a": 1}\n{"a": 2}'), "malformed", 200, "not a JSON object"),
        (http(b'{"a": "\xff"}'), "malformed", 200, "not a JSON object"),
        ((http('{"a": 1}', length=900), CLOSE), "malformed", None, "truncated"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", CLOSE), "malformed", None, "truncated"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n", CLOSE), "malformed", None, "did not answer in HTTP"),
        ((CLOSE,), "connect", None, "without response"),
        ((RESET,), "connect", None, "cannot reach"),
    ],
)
def test_every_failure_has_its_kind(serve: Any, answer: Any, kind: str, status: int | None, said: str) -> None:
    error = failure(serve(answer)[1].post("/api/chat", {}))
    assert (error.kind, error.status) == (kind, status)
    assert said in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("-3", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), ("nan", None),
     ("9" * 5000, None), ("Fri, 31 Dec 99999 23:59:59 GMT", None), ("\u2603", None)],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_as_a_date(serve: Any, value: str, seconds: float | None) -> None:
    reply = http("{}", status="503 Busy", headers=[f"Retry-After: {value}"])
    assert failure(serve(reply)[1].get("/")).retry_after_s == seconds


def test_https_to_a_server_that_speaks_http_is_a_connect_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        call = pool.submit(Transport(f"https://127.0.0.1:{listener.getsockname()[1]}").get, "/")
        sock, _ = listener.accept()
        sock.sendall(http("plain text", status="400 Bad Request"))
        error = failure(call.result(10))
        sock.close()
    assert error.kind == "connect"


ONE, TWO = http('{"a": 1}'), http('{"a": 2}')


@pytest.mark.parametrize(
    ("answers", "replies", "accepted", "asked"),
    [
        ([ONE, http('{"error": "x"}', status="400 Bad"), TWO], [1, "request", 2], 1, 3),
        ([(http('{"a": 1}', headers=["Connection: close"]), STALL), TWO], [1, 2], 2, 2),
        ([ONE, (CLOSE,), TWO], [1, 2], 2, 3),
        ([ONE, (RESET,), TWO], [1, 2], 2, 3),
        ([ONE, (CLOSE,), (CLOSE,), TWO], [1, "connect"], 2, 3),
        ([ONE, (b"HTTP/1.1 200", CLOSE), TWO], [1, "malformed"], 1, 2),
    ],
    ids=["kept", "asks to close", "closed", "reset", "a new one closed too", "closed within a reply"],
)
def test_a_connection_is_kept_or_replaced_and_no_call_answered_in_part_is_made_again(
    serve: Any, answers: list[Any], replies: list[Any], accepted: int, asked: int
) -> None:
    server, transport = serve(*answers)
    found = [transport.get("/") for _ in replies]
    assert [reply["a"] if isinstance(reply, dict) else failure(reply).kind for reply in found] == replies
    assert (server.accepted, len(server.requests)) == (accepted, asked)


def test_a_connection_the_server_closed_meanwhile_is_replaced(serve: Any) -> None:
    server, transport = serve((http('{"a": 1}'), CLOSE), http('{"a": 2}'))
    assert transport.get("/") == {"a": 1}
    assert server.gone.acquire(timeout=10)
    assert transport.get("/") == {"a": 2}
    assert server.accepted == 2


def test_a_call_may_bring_its_own_deadline(serve: Any) -> None:
    _, transport = serve((STALL,))
    error = failure(transport.get("/", timeout_s=0.2))
    assert (error.kind, error.message[-12:]) == ("timeout", "within 0.2 s")


def test_close_ends_calls_that_stall(serve: Any) -> None:
    server, transport = serve((b"HTTP/1.1 200 OK\r\n", STALL), timeout_s=300.0)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(transport.get, "/") for _ in range(3)]
        for _ in calls:
            assert server.asked.acquire(timeout=10)
        transport.close()
        assert [failure(call.result(10)).kind for call in calls] == ["cancelled"] * 3
    assert failure(transport.get("/")).kind == "cancelled"
    transport.close()


def test_close_ends_a_tls_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        transport = Transport(f"https://127.0.0.1:{listener.getsockname()[1]}", timeout_s=300.0)
        call = pool.submit(transport.get, "/")
        sock, _ = listener.accept()
        assert sock.recv(1)
        transport.close()
        assert failure(call.result(20)).kind == "cancelled"
        sock.close()


@pytest.mark.parametrize("trusted", ["file", "folder", "nothing"])
def test_https_trusts_the_authorities_of_the_environment(
    trusted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def openssl(command: str) -> str:
        return subprocess.run(
            ["openssl", *command.split()], cwd=tmp_path, capture_output=True, check=True
        ).stdout.decode()

    curve = "ec -pkeyopt ec_paramgen_curve:prime256v1"  # a key of RSA takes seconds
    openssl(
        f"req -x509 -newkey {curve} -nodes -keyout key -out own.pem -subj /CN=own -addext subjectAltName=IP:127.0.0.1"
    )
    (tmp_path / f"{openssl('x509 -hash -noout -in own.pem').strip()}.0").write_bytes(
        (tmp_path / "own.pem").read_bytes()
    )
    if trusted != "nothing":
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "own.pem" if trusted == "file" else tmp_path))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key")
    with closing(ScriptedServer(http('{"a": 1}'), tls=context)) as server:
        transport = Transport(f"https://127.0.0.1:{server.port}", timeout_s=10.0)
        for _ in range(2):
            reply = transport.get("/")
            assert failure(reply).kind == "connect" if trusted == "nothing" else reply == {"a": 1}
        assert server.accepted == (2 if trusted == "nothing" else 1)
    assert failure(transport.get("/")).kind == "connect"
    transport.close()


def test_threads_have_connections_of_their_own_and_the_pool_keeps_its_size(serve: Any) -> None:
    server, transport = serve(http("{}"), pool_size=2)
    together = threading.Barrier(5)

    def call() -> None:
        together.wait(10)
        for _ in range(20):
            assert transport.get("/") == {}

    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(call) for _ in range(5)]:
            done.result()
    assert len(server.requests) == 100
    assert all(server.gone.acquire(timeout=10) for _ in range(server.accepted - 2))


def test_another_host_is_reached_through_the_proxy_of_the_environment(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, direct = serve(http('{"map_needs": "proxy"}'))
    monkeypatch.setenv("http_proxy", f"http://me:p%40ss@127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    transport = Transport("http://models.test:8080/ollama", timeout_s=10.0)
    assert transport.get("/api/tags") == {"map_needs": "proxy"}
    assert proxy.requests[0].startswith(b"GET http://models.test:8080/ollama/api/tags HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==" in proxy.requests[0]
    transport.close()

    loopback = Transport(direct.url)
    loopback.get("/api/tags")
    assert proxy.requests[1].startswith(b"GET /api/tags HTTP/1.1\r\n")
    loopback.close()


def test_https_through_a_proxy_asks_for_a_tunnel(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, _ = serve(http("", status="403 Forbidden"))
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    error = failure(Transport("https://models.test").get("/api/tags"))
    assert error.kind == "connect"
    assert "403" in error.message
    assert proxy.requests[0].startswith(b"CONNECT models.test:443 HTTP/1.")


@pytest.mark.parametrize(
    "extra",
    [http('{"a": "stale"}'), http('{"a": "stale"}')[:20], b'{"a": "stale"}', b"H"],
    ids=["a reply", "half a reply", "a body", "a byte"],
)
@pytest.mark.parametrize("first", [http('{"a": 1}'), chunks(b'{"a": 1}') + b"0\r\n\r\n", b"HTTP/1.1 204 None\r\n\r\n"])
def test_bytes_after_a_reply_never_answer_the_next_request(serve: Any, first: bytes, extra: bytes) -> None:
    _, transport = serve(first + extra, http('{"a": 2}'))
    transport.get("/")
    assert transport.get("/") == {"a": 2}


def test_bytes_that_arrive_between_two_requests_answer_neither(serve: Any) -> None:
    is_read = threading.Event()
    server, transport = serve((http('{"a": 1}'), is_read, http('{"a": "stale"}')), http('{"a": 2}'))
    assert transport.get("/") == {"a": 1}
    is_read.set()
    assert all(server.sent.acquire(timeout=20) for _ in range(2))
    assert transport.get("/") == {"a": 2}
    assert server.accepted == 2


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 99999999999999999999\r\n\r\n",
        OK + b"Content-Length: 999999999999\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nplain",
        CHUNKED + b"\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 " + DIGITS + b" OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"X: 1\r\n" * 20_000,
        OK + b"X" * 100_000,
    ],
    ids=lambda answer: f"{answer[:40]!r} {len(answer)}",
)
def test_a_reply_that_breaks_the_protocol_is_malformed_at_once(serve: Any, answer: bytes) -> None:
    _, transport = serve((answer, STALL))
    error = failure(transport.get("/"))
    assert error.kind == "malformed"
    assert len(error.message) <= 300


@pytest.mark.parametrize(
    "answer",
    [
        (OK + b"Content-Length: -5\r\n\r\n", STALL),
        (CHUNKED + DIGITS + b"\r\n", STALL),
        (CHUNKED + b"-1\r\n", STALL),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, STALL),
        (OK + b"Content-Length: 1000000\r\n\r\n", DRIBBLE),  # however often a byte comes
        (OK + b"Server:", DRIBBLE),
    ],
    ids=lambda answer: f"{answer[0][:40]!r} {len(answer[0])} {answer[1]}",
)
def test_a_reply_whose_end_does_not_come_ends_at_the_deadline(serve: Any, answer: tuple[bytes, str]) -> None:
    assert failure(serve(answer, timeout_s=0.3)[1].get("/")).kind == "timeout"


@pytest.mark.parametrize("interim", [b"102 Processing\r\n\r\n", b"103 Early Hints\r\nLink: </a>\r\n\r\n"])
def test_interim_replies_are_passed_over(serve: Any, interim: bytes) -> None:
    assert serve(b"HTTP/1.1 " + interim + http(b'{"a": 1}'))[1].get("/") == {"a": 1}


def test_a_compressed_reply_is_read_and_bounded_by_what_it_becomes(serve: Any) -> None:
    head = ["Content-Encoding: gzip"]
    bomb = gzip.compress(b'{"a": "' + b" " * 50_000_000 + b'"}')
    server, transport = serve(http(gzip.compress(b'{"a": 1}'), headers=head), http(bomb, headers=head))
    assert transport.get("/") == {"a": 1}
    assert b"gzip" in server.requests[0]
    tracemalloc.start()
    assert "16 MB; --max-reply-mb" in failure(transport.get("/")).message
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a": ' + DIGITS + b"}", b'{"a": "' + b"x" * 9])
def test_json_that_cannot_be_read_is_malformed(serve: Any, body: bytes) -> None:
    assert failure(serve(http(body))[1].get("/")).kind == "malformed"


@pytest.mark.parametrize(
    "head", [b"Content-Length: 900000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\ndbba0\r\n", b"\r\n"]
)
def test_a_reply_is_read_up_to_the_cap(serve: Any, head: bytes) -> None:
    endless = (OK + head + b" " * 900_000, STALL)
    error = failure(serve(endless, max_reply_bytes=100_000)[1].get("/"))
    assert error.kind == "malformed"
    assert "0.1 MB; --max-reply-mb" in error.message


def test_an_endless_error_page_is_read_to_its_beginning(serve: Any) -> None:
    page = (b"HTTP/1.1 500 Broken\r\n\r\n" + b"it broke " * 20_000, STALL)
    error = failure(serve(page)[1].get("/"))
    assert (error.kind, error.status) == ("server", 500)


ASK = ChatRequest.user("why?", model="m")
Connect = Callable[..., tuple[ScriptedServer, Any]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Start a scripted server and a backend for it."""
    opened: list[Any] = []

    def start(kind: type[HttpServer], *script: Any) -> tuple[ScriptedServer, HttpServer]:
        server = ScriptedServer(*script)
        backend = kind(server.url, timeout_s=10.0)
        opened.extend([backend, server])
        return server, backend

    yield start
    for thing in opened:
        thing.close()


def ollama(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "message": {"content": "because"}, "done": True, "done_reason": "stop", **fields}


def openai(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"message": {"content": "because"}, "finish_reason": "stop"}], **fields}


def says(content: object) -> list[dict[str, Any]]:
    return [{"message": {"content": content}, "finish_reason": "stop"}]


HUGE = int("9" * 400)
DEEP = '{"a": ' * 900 + "1" + "}" * 900

MALFORMED = [
    (OllamaBackend, json.dumps(ollama(message="because"))),
    (OllamaBackend, json.dumps(ollama(message={"content": {"text": "because"}}))),
    (OllamaBackend, json.dumps(ollama(eval_count=HUGE))),
    (OllamaBackend, json.dumps(ollama(eval_count=1e300))),
    (OllamaBackend, json.dumps(ollama(total_duration=2)).replace(": 2", ": 1e400")),
    (OllamaBackend, json.dumps(ollama(total_duration=float("nan")))),
    (OpenAIBackend, "{}"),
    (OpenAIBackend, json.dumps(openai(choices=[]))),
    (OpenAIBackend, json.dumps(openai(choices=[{}]))),
    (OpenAIBackend, json.dumps(openai(choices=says(["because"])))),
    (OpenAIBackend, json.dumps(openai(usage={"prompt_tokens": HUGE}))),
    (OpenAIBackend, json.dumps(openai(usage=7))),
    (OpenAIBackend, json.dumps(openai(timings={"prompt_ms": "soon"}))),
    (OpenAIBackend, json.dumps(openai(model={"name": "m"}))),
    (OpenAIBackend, "[" * 200_000),
    (OllamaBackend, '{"a": [' + "[]," * 2_100_000 + "1]}"),
]


@pytest.mark.parametrize(("kind", "body"), MALFORMED, ids=range(len(MALFORMED)))
def test_fields_of_another_type_are_malformed(connect: Connect, kind: type[HttpServer], body: str) -> None:
    _, backend = connect(kind, http(body))
    completion = backend.complete(ASK)
    assert completion.error is not None
    assert (completion.error.kind, completion.text) == ("malformed", "")
    assert len(completion.error.message) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (OllamaBackend, '{"message": {"content": "a\\ud800b"}, "done": true}', "a\N{REPLACEMENT CHARACTER}b"),
        (OpenAIBackend, '{"choices": [{"message": {"content": "\\udfff"}, "finish_reason": "stop"}]}', "\ufffd"),
        (OllamaBackend, json.dumps(ollama(eval_count=-5, total_duration=None)), "because"),
        (OpenAIBackend, json.dumps(openai(usage=None, timings=None)), "because"),
    ],
)
def test_what_can_be_read_is_an_answer(connect: Connect, kind: type[HttpServer], body: str, text: str) -> None:
    _, backend = connect(kind, http(body))
    completion = backend.complete(ASK)
    assert (completion.error, completion.text, completion.completion_tokens) == (None, text, 0)
    completion.text.encode()


def test_every_error_is_one_short_line_from_its_birth() -> None:
    error = ErrorInfo(kind="server", message="no\nway " * 1000 + "\ud800")
    assert (len(error.message), error.message[:7], error.message[-1]) == (MAX_ERROR_CHARS, "no way ", "…")
    assert Completion.from_ollama({"error": "x" * 5000}).error == ErrorInfo(kind="server", message="x" * 5000)


@pytest.mark.parametrize("body", ["[" * 200_000, '{"models": 7, "data": 7}', "[]", "", "x"])
@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_an_unreadable_list_of_models_is_a_backend_error(connect: Connect, kind: type[HttpServer], body: str) -> None:
    _, backend = connect(kind, http(body))
    with pytest.raises(BackendError, match="check that it is the address"):
        backend.models()


@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
def test_a_list_of_models_is_read_as_far_as_it_holds_names(connect: Connect, kind: type[HttpServer]) -> None:
    rows = [7, {}, {"name": None, "id": None}, {"name": {}, "id": []}, {"name": "x" * 400, "id": "x" * 400}]
    rows += [{"name": f"m{number}", "id": f"m{number}"} for number in range(9000)]
    _, backend = connect(kind, http(json.dumps({"models": rows, "data": rows})))
    assert backend.models()[:2] == ("m0", "m1")
    with pytest.raises(ModelMissingError, match="8,980 more") as raised:
        backend.require_model("m9999")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("path_reply", ["7", "[]", '{"model_info": 7, "capabilities": 7, "parameters": 7}', DEEP])
def test_what_is_said_about_a_model_may_be_anything(connect: Connect, path_reply: str) -> None:
    _, backend = connect(OllamaBackend, http(path_reply))
    assert backend.model_info("m") == {}
