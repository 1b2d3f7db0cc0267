"""The rewriting proxy before strangers: damaged heads, bodies and streams over raw sockets.

A case is wrong when a reply is not HTTP or the proxy's own status 500, when a right reply does not arrive, when a reply
to a virtual model is longer than it may be, or when another client is not answered afterwards.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attack.behaviors import BEHAVIORS, GOOD, LARGE, TIMES
from benchmarks.attack.harness import Outcome
from benchmarks.attack.hostile import MODEL, HostileServer, answer_to
from query_mutator.encoder import resolve_encoder
from query_mutator.llm.reply import MAX_REPLY_BYTES
from tests.integration.proxied import proxy

PATIENCE_S = 0.4  # for a reply that may never come, and on a connection that stays open
SLOW_S = 20.0  # for one that is to come: a busy machine is no failure
MAX_READ_BYTES = 64_000_000
PATHS = ("/api/chat", "/api/generate", "/v1/chat/completions", "/api/show", "/api/embed", "/v1/responses", "/api/tags",
         "/v1/models", "/v1/models/m", "/qm/rewrite", "/qm/queue", "/metrics", "/healthz", "/", "/api/blobs/sha256:0",
         "/nowhere", "*", "", "http://elsewhere/api/tags", "/%ff%00", "/api/chat?x=" + "y" * 200)  # fmt: skip
METHODS = ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "get", "BREW", "")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) [^\r\n]*\r\n")


class _Errors(logging.Handler):
    """Keeps what is logged as an error: a handler that failed, a callback that raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A proxy in front of a server that misbehaves as it is told."""

    port: int
    upstream: HostileServer
    errors: _Errors


_OPEN = ExitStack()  # while the process lives


@functools.cache
def _target() -> _Target:
    upstream = HostileServer(lambda ask: [ask.honest()], rng=random.Random(0))
    url = _OPEN.enter_context(proxy(upstream.url, resolve_encoder("hash"), mode="gate"))
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    return _Target(port=int(url.rsplit(":", 1)[1]), upstream=upstream, errors=errors)


def attack(rng: random.Random, folder: Path) -> Outcome:
    """Run one case: a damaged head, a damaged body, or an upstream that misbehaves."""
    target = _target()
    target.errors.lines.clear()
    target.upstream.behavior = lambda ask: [ask.honest()]
    case, wrong = rng.choices([_head, _body, _stream], weights=[2, 2, 3])[0](rng, target)
    if target.errors.lines:
        return Outcome(case=case, verdict="traceback", detail="\n".join(target.errors.lines)[-4000:])
    if not wrong and b'"status":"ok"' not in _ask(
        target, _head_of("GET", "/healthz", "Connection: close"), timeout_s=SLOW_S
    ):
        wrong = "another client is not answered afterwards"
    return Outcome(case=case, verdict="wrong" if wrong else "ok", detail=wrong)


# --- heads ------------------------------------------------------------------------------------------------------------


def _head(rng: random.Random, target: _Target) -> tuple[str, str]:
    lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/{rng.choice(['1.1', '1.1', '1.0', '2.0', '0.9', 'x'])}"]
    lines += ["Host: localhost", *(rng.choice(HEADERS)(rng) for _ in range(rng.randrange(5)))]
    end = rng.choice(["\r\n", "\r\n", "\r\n", "\n", "\r"])
    sent = _flipped(rng, (end.join(lines) + 2 * end).encode("latin-1"))
    if rng.random() < 0.3:
        sent += rng.choice(
            [b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"-1\r\n", b"f" * 20 + b"\r\n", sent * 20, rng.randbytes(99)]
        )
    return _told("head", sent), _judged(_ask(target, _flood(rng) if rng.random() < 0.2 else sent, rng=rng))


LENGTHS = ("0", "2", "5", "-1", "1_0", "9" * 30, "2, 2", "0x2", "", "\xb2")
HEADERS: Sequence[Callable[[random.Random], str]] = (
    lambda rng: f"Content-Length: {rng.choice(LENGTHS)}",
    lambda rng: f"Transfer-Encoding: {rng.choice(['chunked', 'gzip', 'chunked, chunked', 'identity', 'x' * 99])}",
    lambda rng: f"Expect: {rng.choice(['100-continue', 'tea'])}",
    lambda rng: f"Connection: {rng.choice(['close', 'keep-alive', 'upgrade', 'content-length', 'host'])}",
    lambda rng: f"Upgrade: {rng.choice(['websocket', 'h2c'])}",
    lambda rng: f"Origin: {rng.choice(['http://localhost', 'http://evil', 'null', ''])}",
    lambda rng: f"X-QM-{rng.choice(['Skip', 'Body', 'Decision'])}: 1",
    lambda rng: f"Host: {rng.choice(['evil.example', '[::1', '', 'localhost:99999999999'])}",
    lambda rng: f"X: {'x' * rng.choice([1, 8_000, 70_000])}",
    lambda rng: "\r\n".join(["Y: 1"] * rng.choice([2, 90, 200])),
    lambda rng: rng.choice([" folded", "nothing", ":", "X : 1", "\0: 1", "é: é", "Authorization: Bearer \xff"]),
)


CHUNKED_HEAD = b"POST /api/chat HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def _flood(rng: random.Random) -> bytes:
    """Return a head that does not end."""
    first = b"GET /healthz HTTP/1.1\r\n"
    return rng.choice([
        first + b"X: " + b"x" * 3_000_000, b"GET /" + b"x" * 3_000_000, first + b"X: 1\r\n" * 300_000,
        first + b"X" * 500_000, b"\r\n" * 500_000, (first + b"\r\n") * 2_000,
        CHUNKED_HEAD + b"2;" + b"x" * 500_000, CHUNKED_HEAD + b"1\r\n{\r\n" * 50_000,
    ])  # fmt: skip


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body(rng: random.Random, target: _Target) -> tuple[str, str]:
    path = rng.choice(PATHS[:10])
    model = rng.choice(
        [MODEL, MODEL + "+qm", "m+qm", "+qm", "", "m" * 300, "m\n+qm", None, 1, [MODEL], {"model": MODEL}]
    )
    body: dict[str, Any] = {
        "model": model,
        "messages": _turns(rng),
        "prompt": rng.choice(["how do i sort", "", None, 7]),
    }
    for _ in range(rng.randrange(4)):
        body[rng.choice(FIELDS)] = rng.choice([None, True, -1, 1e308, "", "x", [], {}, [[]], {"": {}}, ["x"] * 50])
    if rng.random() < 0.3:
        body = dict(sorted(body.items(), key=lambda _: rng.random()))
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    raw = rng.choice(DAMAGE)(rng, raw)
    if rng.random() < 0.3:
        size = rng.choice([1, 1_000, 1 << 16])
        pieces = [raw[at : at + size] for at in range(0, min(len(raw), 2000 * size), size)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        sent = _head_of("POST", path, "Transfer-Encoding: chunked") + framed
    else:
        length = len(raw) + rng.choice([0, 0, 0, 0, 0, -1, 9])
        sent = _head_of(rng.choice(["POST", "POST", "POST", "DELETE"]), path, f"Content-Length: {length}") + raw
    return _told(f"body of {len(raw):,} bytes", sent), _judged(_ask(target, sent, rng=rng))


FIELDS = (
    "stream", "tools", "options", "format", "metadata", "stream_options", "n", "name", "source", "input", "images",
    "messages", "prompt", "model", "suffix", "keep_alive", "response_format", "think", "raw",
)  # fmt: skip


def _turns(rng: random.Random) -> Any:
    content = rng.choice([
        "how do i sort a list", "plz kill it", "\ud800", "\0", " " * 5_000, "word " * 500, "word, " * 200_000, 5, None,
        [{"type": "text", "text": "how do i sort"}], [{"type": "text"}], [[]], {"text": 1}, "i" * 2_000_000,
    ])  # fmt: skip
    turn = {"role": rng.choice(["user", "user", "assistant", "", None, 3]), "content": content}
    return rng.choice([[turn], [turn], [turn] * 3, [], turn, "hello", [None], [[]], [turn, None], [{}], 0])


DAMAGE: Sequence[Callable[[random.Random, bytes], bytes]] = (
    *[lambda rng, raw: raw] * 4,
    lambda rng, raw: raw[: rng.randrange(len(raw))],
    lambda rng, raw: _flipped(rng, raw),
    lambda rng, raw: raw + raw,
    lambda rng, raw: b"\xef\xbb\xbf" + raw,
    lambda rng, raw: raw.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, raw: raw.replace(b"null", rng.choice([b"NaN", b"1e999", b"9" * 5_000, b"-0"])),
    lambda rng, raw: b'{"a":' * rng.choice([900, 2_000, 300_000]) + raw,
    lambda rng, raw: raw[:-1] + b',"x":[' + rng.choice([b"{},", b"1,", b'"",', b"[],"]) * 700_000 + b"1]}",
    lambda rng, raw: b"[" + b"{}," * rng.choice([10_000, 1_000_000]) + b"{}]",
    lambda rng, raw: b'{"x":"' + b"A" * 3_000_000 + b'",' + raw[1:],
    lambda rng, raw: b" " * 2_000_000 + raw,
    lambda rng, raw: rng.randbytes(rng.choice([0, 9, 70_000])),
)


# --- streams ----------------------------------------------------------------------------------------------------------


def _stream(rng: random.Random, target: _Target) -> tuple[str, str]:
    name = rng.choice([*BEHAVIORS, *STREAMS])
    target.upstream.behavior = BEHAVIORS.get(name) or STREAMS[name]
    path, is_virtual, streamed = rng.choice(PATHS[0:3:2]), rng.random() < 0.8, rng.random() < 0.6
    question = f"how do i sort list number {rng.randrange(10**9)}"
    body = {
        "model": MODEL + is_virtual * "+qm",
        "stream": streamed,
        "messages": [{"role": "user", "content": question}],
    }
    raw = json.dumps(body).encode()
    sent = _head_of("POST", path, f"Content-Length: {len(raw)}", "Connection: close") + raw
    is_good = name in GOOD and name not in LARGE
    got = _ask(target, sent, timeout_s=PATIENCE_S if name in TIMES else SLOW_S)
    case = f"{name}: {path}, {'virtual' if is_virtual else 'plain'}, {'streamed' if streamed else 'whole'}"
    wrong = _judged(got)
    if not wrong and is_virtual and len(got) > 1.2 * MAX_REPLY_BYTES:
        wrong = f"a reply of {len(got):,} bytes"
    if not wrong and is_good and answer_to(question)[-16:-1] not in _text(got):
        wrong = f"a right reply does not arrive: {got[-500:]!r}"
    return case, wrong


def _lines(*lines: bytes, count: int) -> Any:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    framed = b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines)
    return lambda ask: [head, *ask.flood(framed, count), b"0\r\n\r\n"]


STREAMS = {
    "8,000 tokens without a sentence end": _lines(b'{"model":"m","message":{"content":"word "}}\n', count=8_000),
    "8,000 tokens of thinking": _lines(b'{"model":"m","message":{"content":"","thinking":"x"}}\n', count=8_000),
    "a line of 30 MB": _lines(b"x" * 60_000, count=500),
    "lines of a MB": _lines(b'{"model":"m","x":"' + b"x" * 1_000_000 + b'"}\n', count=14),
    "a line of many values": _lines(b"{}," * 20_000, count=200),
    "a million blank lines": _lines(b"\n" * 1_000, count=1_000),
    "100,000 names": _lines(b'{"model":"m"}\n' * 1_000, count=100),
}


# --- asking -----------------------------------------------------------------------------------------------------------


def _head_of(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def _ask(target: _Target, sent: bytes, *, rng: random.Random | None = None, timeout_s: float = PATIENCE_S) -> bytes:
    """Send bytes, with `rng` in pieces and then the end of the connection, and return what comes back."""
    got = bytearray()
    with socket.create_connection(("127.0.0.1", target.port), timeout=timeout_s) as client:
        try:
            cut = rng.randrange(len(sent) + 1) if rng is not None and rng.random() < 0.5 else len(sent)
            for piece in (sent[:cut], sent[cut:]):
                client.sendall(piece)
            if rng is not None and rng.random() < 0.3:
                client.shutdown(socket.SHUT_WR)
            while len(got) < MAX_READ_BYTES and (piece := client.recv(1 << 20)):
                got += piece
        except OSError:  # a time-out, or the proxy has closed
            pass
    return bytes(got)


def _judged(got: bytes) -> str:
    """Return what is wrong with a reply, "" for nothing; none at all is right: the connection is closed."""
    found = _STATUS.match(got)
    if got and found is None:
        return f"not HTTP: {got[:200]!r}"
    return f"the proxy failed: {got[:500]!r}" if b"\r\n\r\ninternal server error" in got[:5_000] else ""


def _text(got: bytes) -> str:
    """Return the texts in a reply, streamed or not."""
    return "".join(re.findall(r'"content": ?"((?:[^"\\]|\\.)*)"', got.decode("utf-8", "replace")))


def _flipped(rng: random.Random, raw: bytes) -> bytes:
    flipped = bytearray(raw)
    for _ in range(rng.choice([0, 0, 1, 3])):
        if flipped:
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _told(what: str, sent: bytes) -> str:
    return f"{what}: {sent[:300]!r}"
