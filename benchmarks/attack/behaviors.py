"""What a hostile server does with a request: name -> function that yields the bytes it sends."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any

from benchmarks.attack.hostile import CHUNKED, Ask, Behavior, Close, Reset, chunks, head, http

DIGITS = "9" * 5000
PIECE = b" " * 65_536


def _json(ask: Ask, message: Any = None, **fields: Any) -> bytes:
    return ask.said(json.dumps(ask.payload(message, **fields)).encode())


def _replaced(ask: Ask, field: str, raw: str) -> bytes:
    return ask.said(json.dumps(ask.payload(**{field: "RAW"})).replace('"RAW"', raw).encode())


def _content(ask: Ask, raw: str) -> bytes:
    """Return a reply with JSON in place of its text."""
    if not ask.streamed:
        return http(json.dumps(ask.payload({"content": "RAW"})).replace('"RAW"', raw).encode())
    line = json.dumps({"message": {"content": "RAW"}, "choices": [{"delta": {"content": "RAW"}}]})
    prefix, end = (b"", b"\n") if ask.protocol == "ollama" else (b"data: ", b"\n\n")
    return chunks(prefix + line.replace('"RAW"', raw).encode() + end, *ask.lines())


def _saying(text: str) -> Behavior:
    def act(ask: Ask) -> Iterable[bytes]:
        ask.text = f"{ask.text} {text}"
        return [ask.honest()]

    return act


def _big(ask: Ask) -> Iterable[bytes]:
    ask.text = f"{ask.text} {'long ' * ask.rng.choice([10_000, 200_000, 1_000_000])}".strip()
    return [ask.honest()]


def _long_text(ask: Ask) -> Iterable[bytes]:
    """Answer with 15 MB, four bytes for each character once they are read: one of them is an emoji."""
    first, last = '{"done": true, "message": {"content": "\N{GRINNING FACE}'.encode(), b'"}}'
    yield head(f"Content-Length: {len(first) + len(last) + 15_000_000}") + first
    yield from ask.flood(b"y" * 60_000, 250)
    yield last


def _half_a_pair(ask: Ask) -> Iterable[bytes]:
    """Answer with half of a surrogate pair, which no file and no encoder takes."""
    reply = _content(ask, '"\\ud800"')
    ask.text = f"\ufffd{ask.text if ask.streamed else ''}"
    return [reply]


def _after(*steps: bytes | float | type[Exception]) -> Behavior:
    """Return a behavior that sends bytes, waits for seconds, or ends the connection."""

    def act(ask: Ask) -> Iterable[bytes]:
        for step in steps:
            if isinstance(step, bytes):
                yield step
            elif isinstance(step, float):
                ask.wait(step)
            else:
                raise step

    return act


def _split(ask: Ask, size: int, wait_s: float = 0.0) -> Iterable[bytes]:
    whole = ask.honest()
    for at in range(0, len(whole), size):
        yield whole[at : at + size]
        if wait_s:
            ask.wait(wait_s)


def _cut(ask: Ask, share: float, end: type[Exception]) -> Iterable[bytes]:
    whole = ask.honest()
    yield whole[: int(share * len(whole))]
    raise end


def _flooding(first: bytes, piece: bytes) -> Behavior:
    def act(ask: Ask) -> Iterable[bytes]:
        yield first
        yield from ask.flood(piece)

    return act


def _then(ask: Ask, end: type[Exception]) -> Iterable[bytes]:
    yield ask.honest()
    raise end


def _close_when_reused(ask: Ask) -> Iterable[bytes]:
    """Answer, then close when the next request arrives, as a server does that times out idle connections."""
    if ask.rng.random() < 0.5:
        raise Close
    yield ask.honest()


def _closed(body: bytes, *headers: str, version: str = "1.1") -> Behavior:
    return _after(head(*headers, version=version) + body, Close)


def _plain(ask: Ask) -> bytes:
    return json.dumps(ask.payload()).encode() if not ask.streamed else b"".join(ask.lines())


def _interrupted(ask: Ask) -> Iterable[bytes]:
    return [chunks(*ask.lines(done=False), *([b"data: [DONE]\n\n"] if ask.protocol == "openai" else []))]


def _nested(depth: int) -> Behavior:
    return lambda ask: [ask.said(b'{"a":' * depth + b"1" + b"}" * depth)]


def _lengths(value: str) -> Behavior:
    return lambda ask: [head(f"Content-Length: {value}") + _plain(ask)]


def _chunk_size(size: bytes) -> Behavior:
    return _after(CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n", 0.1, Close)


def _status(line: str, body: str = '{"error": "no"}', *headers: str) -> Behavior:
    return lambda ask: [http(body.encode(), status=line, headers=headers)]


#: Odd but right: the answer must arrive.
GOOD: dict[str, Behavior] = {
    "lf only": lambda ask: [head(f"content-LENGTH:{len(_plain(ask))}").replace(b"\r\n", b"\n") + _plain(ask)],
    "no length": lambda ask: _cut_after(head(), _plain(ask)),
    "http 1.0": lambda ask: _cut_after(head(version="1.0"), _plain(ask)),
    "http 1.0 kept": lambda ask: [
        head("Connection: keep-alive", f"Content-Length: {len(_plain(ask))}", version="1.0") + _plain(ask)
    ],
    "100 first": lambda ask: [head(status="100 Continue") + ask.honest()],
    "102 first": lambda ask: [head("X: 1", status="102 Processing"), ask.honest()],
    "chunk of a byte": lambda ask: [chunks(*(bytes([byte]) for byte in _plain(ask)))],
    "chunk extension": lambda ask: [chunks(_plain(ask), end=b"0;last=1\r\n\r\n")],
    "chunk trailer": lambda ask: [chunks(_plain(ask), end=b"0\r\nX: 1\r\nY: \r\n\r\n")],
    "byte by byte": lambda ask: _split(ask, 1),
    "in two": lambda ask: _split(ask, 90, 0.002),
    "closes after": lambda ask: _then(ask, Close),
    "extra newline": lambda ask: [ask.honest() + b"\r\n"],
    "asks to close": lambda ask: [ask.honest().replace(b"\r\n", b"\r\nConnection: close\r\n", 1), b""],
    "negative counts": lambda ask: (
        [_json(ask, prompt_eval_count=-5, total_duration=-1, usage=None)] if not ask.streamed else [ask.honest()]
    ),
    "null counts": lambda ask: (
        [_json(ask, eval_count=None, usage=None, timings=None)] if not ask.streamed else [ask.honest()]
    ),
    "escapes": _saying("\x1b[31mEVIL\x1b]0;title\x07"),
    "nul": _saying("a\0b"),
    "emoji": _saying("\N{GRINNING FACE}" * 50),
    "big": _big,
}


def _cut_after(first: bytes, body: bytes) -> Iterable[bytes]:
    yield first + body
    raise Close


PROTOCOL: dict[str, Behavior] = {
    "status digits": _after(f"HTTP/1.1 {DIGITS} OK\r\n\r\n".encode()),
    "status negative": _after(b"HTTP/1.1 -200 OK\r\n\r\n{}", Close),
    "status text": _after(b"HTTP/1.1 OK\r\n\r\n{}", Close),
    "status 0": _after(b"HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "version 9": _after(head(version="9.9") + b"{}", Close),
    "ssh": _after(b"SSH-2.0-OpenSSH_9.6\r\n", Close),
    "tls": _after(b"\x15\x03\x01\x00\x02\x02\x28", Close),
    "zeros": _after(b"\0" * 4096, Close),
    "length digits": _lengths(DIGITS),
    "length 10^12": _lengths("1000000000000"),
    "length 2^64": _lengths("18446744073709551616"),
    "length negative": _lengths("-5"),
    "length text": _lengths("many"),
    "length underscore": _lengths("1_0"),
    "length twice": _lengths("5\r\nContent-Length: 900"),
    "length list": _lengths("5, 5"),
    "length and chunked": _lengths("5\r\nTransfer-Encoding: chunked"),
    "length too long": lambda ask: [head(f"Content-Length: {len(_plain(ask)) + 99}") + _plain(ask)],
    "length too short": lambda ask: [head(f"Content-Length: {len(_plain(ask)) - 9}") + _plain(ask)],
    "many headers": _after(head(*["X: 1"] * 20_000) + b"{}", Close),
    "long header": _after(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000),
    "header of control": _after(b"HTTP/1.1 200 OK\r\nX: \x1b[31mEVIL\0\r\n\r\n{}", Close),
    "header folded": _after(b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n", Close),
    "header nameless": _after(b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n{}", Close),
    "100 flood": _flooding(b"", head(status="100 Continue") * 100),
    "101": _after(head("Upgrade: websocket", "Connection: upgrade", status="101 Switching") + b"{}", Close),
    "204": _after(head(status="204 None")),
    "204 with body": lambda ask: [head(status="204 None") + _plain(ask)],
    "304": _after(head("Content-Length: 10", status="304 Same")),
    "chunk digits": _chunk_size(DIGITS.encode()),
    "chunk 2^63": _chunk_size(b"7fffffffffffffff"),
    "chunk negative": _chunk_size(b"-1"),
    "chunk 0x2": _chunk_size(b"0x2"),
    "chunk underscore": _chunk_size(b"0_2"),
    "chunk empty": _chunk_size(b""),
    "chunk cut": lambda ask: _cut(ask, 0.8, Close),
    "chunked gzip": _after(head("Transfer-Encoding: gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n"),
    "gzip": lambda ask: [http(gzip.compress(_plain(ask)), headers=["Content-Encoding: gzip"])],
}
SIZES: dict[str, Behavior] = {
    "gb": _flooding(head("Content-Length: 1000000000"), PIECE),
    "15 MB": lambda ask: [head("Content-Length: 15000000"), *ask.flood(b"x" * 60_000, 250)],
    "15 MB of values": lambda ask: [
        head("Content-Length: 15000003"),
        b'{"a":[',
        *ask.flood(b"{}," * 20_000, 249),
        b"{}," * 19_998,
        b"1]}",
    ],
    "15 MB of text": _long_text,
    "endless": _flooding(head(), PIECE),
    "endless chunks": _flooding(CHUNKED, b"10000\r\n" + PIECE + b"\r\n"),
    "endless lines": _flooding(CHUNKED, b"3\r\n{}\n\r\n" * 1000),
    "endless blanks": _flooding(CHUNKED, b"2\r\n\n\n\r\n" * 1000),
    "endless error": _flooding(head(status="500 Broken"), PIECE),
    "endless header": _flooding(b"HTTP/1.1 200 OK\r\n", b"X: 1\r\n" * 1000),
    "endless status": _flooding(b"HTTP/1.1 200 ", b"x" * 1000),
    "big error": lambda ask: [http(json.dumps({"error": "why " * 1_000_000}).encode(), status="400 Bad")],
    "big error in 200": lambda ask: [ask.said(json.dumps({"error": "why " * 1_000_000}).encode())],
}
JSON: dict[str, Behavior] = {
    "nested list": lambda ask: [ask.said(b"[" * 200_000)],
    "nested dict": _nested(200_000),
    "nested 900": _nested(900),
    "400 digits": lambda ask: [_replaced(ask, "eval_count", "9" * 400).replace(b'"prompt_tokens": 10', b'"x": 0')],
    "5000 digits": lambda ask: [ask.said(b'{"a": ' + DIGITS.encode() + b"}")],
    "1e400": lambda ask: [_replaced(ask, "total_duration" if ask.protocol == "ollama" else "usage", "1e400")],
    "nan": lambda ask: [_replaced(ask, "eval_duration" if ask.protocol == "ollama" else "timings", "NaN")],
    "truncated": lambda ask: [ask.said(json.dumps(ask.payload()).encode()[:-9])],
    "two objects": lambda ask: [ask.said(json.dumps(ask.payload()).encode() * 2)],
    "list": lambda ask: [ask.said(b"[1]")],
    "null": lambda ask: [ask.said(b"null")],
    "nothing": lambda ask: [http(b"")],
    "blanks": lambda ask: [http(b" \n" * 500)],
    "html": lambda ask: [http(b"<html><h1>It works!</h1></html>")],
    "utf-16": lambda ask: [http(json.dumps(ask.payload()).encode("utf-16"))],
    "latin-1": lambda ask: [ask.said(b'{"message": {"content": "\xe9"}, "done": true}')],
    "half a pair": _half_a_pair,
}
CONTENT: dict[str, Behavior] = {
    "number": lambda ask: [_content(ask, "7")],
    "list of texts": lambda ask: [_content(ask, '["because"]')],
    "object": lambda ask: [_content(ask, '{"text": "because"}')],
    "true": lambda ask: [_content(ask, "true")],
    "message a list": lambda ask: [_json(ask, [1], choices=[[1]])],
    "message a text": lambda ask: [_json(ask, "because", choices="because")],
    "no choices": lambda ask: [_json(ask, {}, choices=[])],
    "not done": lambda ask: [
        _json(ask, done=False, choices=[{"message": {"content": "be"}, "finish_reason": "abort"}])
    ],
    "done a text": lambda ask: [
        _json(ask, done="yes", choices=[{"message": {"content": "be"}, "finish_reason": "abort"}])
    ],
    "only loaded": lambda ask: [_json(ask, {"content": ""}, done_reason="load")],
    "error in 200": lambda ask: [ask.said(b'{"error": {"message": ["no", {"way": 1}]}}')],
    "model an object": lambda ask: [_json(ask, model={"name": "m"})],
    "counts a text": lambda ask: [_json(ask, eval_count="many", usage={"prompt_tokens": "many"})],
}
STREAMS: dict[str, Behavior] = {
    "after its end": lambda ask: [chunks(*ask.lines(), *ask.lines())],
    "error midway": lambda ask: [
        chunks(*ask.lines(b'{"error": "out of slots"}', done=False), *(ask.lines() if ask.protocol == "ollama" else []))
    ],
    "no end": lambda ask: [chunks(*ask.lines(done=False))],
    "interrupted": _interrupted,
    "bad line": lambda ask: [chunks(*ask.lines(b"{oops", done=False))],
    "line of a MB": lambda ask: [chunks(b'{"message": {"content": "' + b"x" * 1_000_000)],
    "whole in place": lambda ask: [http(json.dumps(ask.payload()).encode()) if ask.protocol == "openai" else b"\0"],
}
TIMES: dict[str, Behavior] = {
    "stall": _after(60.0),
    "stall in head": _after(b"HTTP/1.1 200 OK\r\nContent-", 60.0),
    "stall in body": lambda ask: _after(ask.honest()[:-5], 60.0)(ask),
    "dribble": lambda ask: _split(ask, 1, 0.02),
    "dribble of headers": lambda ask: _after(b"HTTP/1.1 200 OK\r\n", *[b"X: 1\r\n", 0.05] * 400)(ask),
}
CONNECTIONS: dict[str, Behavior] = {
    "closes before": _after(Close),
    "resets before": _after(Reset),
    "resets within": lambda ask: _cut(ask, 0.5, Reset),
    "closes within": lambda ask: _cut(ask, 0.5, Close),
    "closes when reused": _close_when_reused,
    "stale reply": lambda ask: [ask.honest() + ask.previous],
    "stale half": lambda ask: [ask.honest() + ask.previous[: len(ask.previous) // 2]],
    "stale body": lambda ask: [ask.honest() + ask.previous.split(b"\r\n\r\n", 1)[-1]],
    "stale after an error": lambda ask: [http(b"{}", status="500 Broken") + ask.previous],
    "pipelined": lambda ask: [ask.honest() * 3],
    "garbage after": lambda ask: [ask.honest() + b"\xff" * 100],
}
STATUSES: dict[str, Behavior] = {
    "301": _status("301 Moved", "", "Location: http://\x7f/\x1b"),
    "400": _status("400 Bad"),
    "401": _status("401 No", '{"error": {"message": null}}'),
    "404": _status("404 Gone", '{"error": "model not found"}'),
    "429 nan": _status("429 Slow", "{}", "Retry-After: nan"),
    "429 year 99999": _status("429 Slow", "{}", "Retry-After: Fri, 31 Dec 99999 23:59:59 GMT"),
    "500 nested": _status("500 Broken", '{"error":' * 30_000),
    "503": _status("503 Busy", "[" * 900),
    "599": _status("599 What", "\x1b[31mEVIL"),
}
BAD: dict[str, Behavior] = {**PROTOCOL, **SIZES, **JSON, **CONTENT, **STREAMS, **TIMES, **CONNECTIONS, **STATUSES}
BEHAVIORS: dict[str, Behavior] = {**GOOD, **BAD}
LARGE = {"big", "15 MB of text"}  # once in a case: memory is bounded for one reply
UNCHECKED = {"15 MB of text"}  # the answer is what was sent, too long to keep here
