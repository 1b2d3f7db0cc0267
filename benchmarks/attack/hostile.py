"""A model server that misbehaves: it answers honestly, or as one of BEHAVIORS does (benchmarks/attack/behaviors.py).

Speaks Ollama's and OpenAI's routes, streamed and not, one thread per connection. An honest answer names its prompt, so
that an answer to another request is recognized.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Behavior = Callable[["Ask"], Iterable[bytes]]

MODEL = "m:latest"
CHAT = {"/api/chat": "ollama", "/v1/chat/completions": "openai"}


class Close(Exception):
    """End the connection here."""


class Reset(Exception):
    """Reset the connection here."""


def answer_to(prompt: str) -> str:
    """Return the answer that belongs to a prompt alone."""
    return f"`sorted` is what you want, says {hashlib.sha256(prompt.encode()).hexdigest()[:16]}."


def http(body: bytes, *, status: str = "200 OK", headers: Sequence[str] = (), length: int | None = None) -> bytes:
    """Return a whole reply."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def head(*headers: str, status: str = "200 OK", version: str = "1.1") -> bytes:
    """Return the head of a reply."""
    return "\r\n".join([f"HTTP/{version} {status}", *headers, "", ""]).encode()


CHUNKED = head("Transfer-Encoding: chunked")


def chunks(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a chunked reply."""
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + end


@dataclass
class Ask:
    """One chat request, and what an honest server would say."""

    protocol: str
    streamed: bool
    prompt: str
    closing: threading.Event
    rng: random.Random
    previous: bytes = http(b"{}")  # the reply to an earlier request
    text: str = ""  # what the reply means to say
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = answer_to(self.prompt)

    def payload(self, message: Any = None, **fields: Any) -> dict[str, Any]:
        """Return the object of a whole reply."""
        message = {"role": "assistant", "content": self.text} if message is None else message
        if self.protocol == "ollama":
            times = {"total_duration": 5_000_000, "prompt_eval_duration": 1_000_000, "eval_duration": 2_000_000}
            counts = {"prompt_eval_count": 10, "eval_count": 5}
            return {
                "model": MODEL,
                "message": message,
                "done": True,
                "done_reason": "stop",
                **times,
                **counts,
                **fields,
            }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"model": MODEL, "choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}, **fields}

    def lines(self, last: bytes | None = None, *, done: bool = True) -> list[bytes]:
        """Return the lines of a streamed reply; `last` stands for the line that ends it."""
        pieces = [self.text[:7], self.text[7:9], self.text[9:]]
        if self.protocol == "ollama":
            rows: list[Any] = [{"model": MODEL, "message": {"content": piece}, "done": False} for piece in pieces]
            rows += [self.payload({"content": ""})] if done and last is None else []
            return [json.dumps(row).encode() + b"\n" for row in rows] + ([last + b"\n"] if last is not None else [])
        rows = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        rows += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}] if done and last is None else []
        ends = [last] if last is not None else []
        ends += [b"[DONE]"] if done else []
        return [b"data: " + line + b"\n\n" for line in [*(json.dumps(row).encode() for row in rows), *ends]]

    def honest(self) -> bytes:
        """Return the whole reply of an honest server."""
        return chunks(*self.lines()) if self.streamed else http(json.dumps(self.payload()).encode())

    def said(self, raw: bytes) -> bytes:
        """Return a reply whose JSON, or whose last line, is `raw`."""
        return chunks(*self.lines(raw)) if self.streamed else http(raw)

    def wait(self, seconds: float) -> None:
        """Wait, or end the connection because the case is over."""
        if self.closing.wait(seconds):
            raise Close

    def flood(self, piece: bytes, count: int = 1 << 40) -> Iterable[bytes]:
        """Yield a piece again and again until the client leaves."""
        for _ in range(count):
            if self.closing.is_set():
                raise Close
            yield piece


class HostileServer:
    """Misbehaves in `share` of the chat requests; with `probes` also in the questions about itself."""

    def __init__(
        self,
        behavior: Behavior,
        *,
        rng: random.Random,
        share: float = 1.0,
        probes: bool = False,
        limit: int = 1 << 30,
    ) -> None:
        self.behavior, self.share, self.probes = behavior, share, probes
        self._left = limit  # of the times that it misbehaves
        self.meant: dict[str, str] = {}  # prompt -> what the last reply to it meant to say
        self._rng = rng
        self._lock = threading.Lock()
        self._previous = http(b"{}")
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as stream:
            sock.settimeout(20)
            try:
                while not self._closing.is_set() and (request := _read(stream)):
                    for piece in self._reply(*request):
                        sock.sendall(piece)
            except Reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except (OSError, Close, ValueError):
                pass
        with self._lock:
            self._sockets.discard(sock)

    def _reply(self, path: str, body: Mapping[str, Any]) -> Iterable[bytes]:
        with self._lock:
            rng = random.Random(self._rng.random())
        if path not in CHAT:
            ask = Ask("ollama", False, path, self._closing, rng)
            return self.behavior(ask) if self.probes and rng.random() < self.share else [_about(path)]
        ask = Ask(CHAT[path], body.get("stream") is True, _last_content(body), self._closing, rng)
        ask.previous, self._previous = self._previous, ask.honest()
        pieces: Iterable[bytes] = [ask.honest()]
        if rng.random() < self.share and self._left > 0:
            self._left -= 1
            pieces = self.behavior(ask)
        with self._lock:
            self.meant[ask.prompt] = ask.text
        return pieces


def _read(stream: Any) -> tuple[str, Mapping[str, Any]] | None:
    start = stream.readline()
    length = 0
    while (line := stream.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    body = stream.read(length)
    words = start.split()
    return (words[1].decode(), _object(body)) if len(words) > 1 else None


def _object(body: bytes) -> Mapping[str, Any]:
    """Return the object in a body, an empty one for anything else: a proxy forwards what its clients send."""
    try:
        found = json.loads(body if len(body) < 5_000_000 else b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_content(body: Mapping[str, Any]) -> str:
    """Return the last turn's content; a client may send anything."""
    turns = body.get("messages")
    last = turns[-1] if isinstance(turns, list) and turns else None
    return str(last.get("content")) if isinstance(last, dict) else ""


def _about(path: str) -> bytes:
    """Return an honest reply about the server or its models."""
    known: dict[str, Any] = {
        "/api/version": {"version": "0.24.0"},
        "/api/tags": {"models": [{"name": MODEL, "model": MODEL, "digest": "d" * 64}]},
        "/api/ps": {"models": []},
        "/api/show": {"model_info": {"llama.context_length": 100_000}, "capabilities": ["completion"]},
        "/v1/models": {"data": [{"id": MODEL}]},
    }
    return http(json.dumps(known[path]).encode()) if path in known else http(b"{}", status="404 Not Found")
