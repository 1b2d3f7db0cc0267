"""A small server that answers byte for byte what a test scripts."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Any

from query_mutator.types import ErrorInfo

Step = bytes | str | threading.Event

RESET, STALL, DRIBBLE, CLOSE = "reset", "stall", "dribble", "close"


def http(body: bytes | str, *, status: str = "200 OK", headers: Sequence[str] = (), length: int | None = None) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class ScriptedServer:
    """Answers request i with script[i] (the last one from then on).

    A step is bytes that are sent as they are, one of the words above, or an event that is waited for.
    """

    def __init__(self, *script: Step | tuple[Step, ...], tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self._tls = tls
        self.requests: list[bytes] = []
        self.accepted = 0
        self.asked = threading.Semaphore(0)  # released once a request is there
        self.sent = threading.Semaphore(0)  # released once bytes are on their way
        self.gone = threading.Semaphore(0)  # released once a connection is closed on this side
        self._turn = itertools.count()
        self._closing = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.accepted += 1
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError), sock:
            self._answer(sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True))
        self.gone.release()

    def _answer(self, sock: socket.socket) -> None:
        self._open.append(sock)
        with sock, sock.makefile("rb") as stream:
            sock.settimeout(20)
            while (request := self._read(stream)) and not self._closing.is_set():
                self.requests.append(request)
                self.asked.release()
                entry = self.script[min(next(self._turn), len(self.script) - 1)]
                steps = entry if isinstance(entry, tuple) else (entry,)
                if not all(self._act(sock, step) for step in steps):
                    break

    @staticmethod
    def _read(stream: Any) -> bytes:
        head = b""
        while (line := stream.readline()) not in (b"\r\n", b""):
            head += line
        length = next(
            (int(row.split(b":")[1]) for row in head.split(b"\r\n") if row.lower().startswith(b"content-length")), 0
        )
        return head + (b"\r\n" + stream.read(length) if head else b"")

    def _act(self, sock: socket.socket, step: Step) -> bool:
        """Do one step of the script; False ends the connection."""
        if isinstance(step, threading.Event):
            return step.wait(20)
        if isinstance(step, bytes):
            try:
                sock.sendall(step)
                self.sent.release()
            except ConnectionError:  # the client has read enough
                return False
            return True
        if step == RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif step == STALL:
            self._closing.wait(20)
        elif step == DRIBBLE:
            try:
                while not self._closing.wait(0.01):
                    sock.sendall(b" ")
            except OSError:
                pass
        return False

    def close(self) -> None:
        self._closing.set()
        socket.create_connection(("127.0.0.1", self.port)).close()  # wakes the accepting thread
        self._listener.close()
        for sock in self._open:  # a client may keep its connection
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)


def chunks(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed


def failure(reply: Any) -> ErrorInfo:
    assert isinstance(reply, ErrorInfo), reply
    return reply
