"""WebSocket (RFC 6455) without a socket: handshake and frames of both sides, bytes in and bytes out."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from query_mutator.batching.streaming.gym_types import GymProtocolError

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL_CLOSURE, PROTOCOL_ERROR, BAD_DATA, TOO_BIG = 1000, 1002, 1007, 1009
MAX_MESSAGE_BYTES = 1 << 20
MAX_CONTROL_BYTES = 125
MAX_HEAD_BYTES = 16_384


class WebSocketError(GymProtocolError):
    """The other side broke the protocol; `code` is the status a close frame says it with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"WebSocket: {reason}")
        self.code = code


class Message(NamedTuple):
    """A whole message: TEXT or BINARY with its payload, or CLOSE."""

    opcode: int
    payload: bytes


# --- handshake -------------------------------------------------------------------------------------------------------


def new_key() -> str:
    """Return a fresh key for a request."""
    return base64.b64encode(os.urandom(16)).decode()


def accept_of(key: str) -> str:
    """Return what a server answers to a key (section 4.2.2)."""
    return base64.b64encode(hashlib.sha1(key.encode() + GUID).digest()).decode()


def request(host: str, port: int, path: str, key: str) -> bytes:
    """Return the client's opening request."""
    name = f"[{host}]" if ":" in host else host
    lines = [f"GET {path} HTTP/1.1", f"Host: {name}:{port}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
    return "\r\n".join(lines).encode()


def check_response(head: bytes, key: str) -> None:
    """Check the server's answer to `request`; anything but an upgrade is a GymProtocolError that says what it was."""
    status, headers = _parse_head(head)
    if status.split(" ")[1:2] != ["101"]:
        raise GymProtocolError(f"the server does not speak WebSocket at this path: {status}")
    if headers.get("upgrade", "").lower() != "websocket" or "upgrade" not in headers.get("connection", "").lower():
        raise GymProtocolError("the server's WebSocket answer lacks the upgrade")
    if headers.get("sec-websocket-accept") != accept_of(key):
        raise GymProtocolError("the server's WebSocket answer is to another request")


def response(head: bytes) -> tuple[bytes, bool]:
    """Return a server's answer to an opening request, and whether the connection is a WebSocket now."""
    try:
        _, headers = _parse_head(head)
    except GymProtocolError:
        return _refusal("400 Bad Request"), False
    if headers.get("upgrade", "").lower() != "websocket" or "upgrade" not in headers.get("connection", "").lower():
        return _refusal("426 Upgrade Required", "Upgrade: websocket", "Connection: Upgrade"), False
    if headers.get("sec-websocket-version") != "13":
        return _refusal("426 Upgrade Required", "Sec-WebSocket-Version: 13"), False
    if not _is_key(headers.get("sec-websocket-key", "")):
        return _refusal("400 Bad Request"), False
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Accept: {accept_of(headers['sec-websocket-key'])}", "", ""]
    return "\r\n".join(lines).encode(), True


def _refusal(status: str, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, "Content-Length: 0", "Connection: close", "", ""]
    return "\r\n".join(lines).encode()


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def _parse_head(head: bytes) -> tuple[str, Mapping[str, str]]:
    """Return the first line and the headers, by lower-case name."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or any(letter.isspace() for letter in name):
            raise GymProtocolError(f"no HTTP header: {line[:80]!r}")
        known = headers.get(name.lower())
        headers[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
    if len(first.split(" ", 2)) < 2:
        raise GymProtocolError(f"no HTTP: {first[:80]!r}")
    return first, headers


# --- frames ----------------------------------------------------------------------------------------------------------


def _masked(payload: bytes, key: bytes) -> bytes:
    size = len(payload)
    stream = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")


class WebSocketCodec:
    """Frames of one side of a connection; answers to pings and to a close collect in `take_answers`."""

    def __init__(
        self,
        *,
        client: bool,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        new_mask: Callable[[], bytes] = lambda: os.urandom(4),
    ) -> None:
        self.client = client
        self.close_sent = False
        self.close_code: int | None = None  # what the other side closed with
        self._new_mask = new_mask
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._answers = bytearray()
        self._fragments: bytearray | None = None  # of a message that is not complete
        self._opcode = TEXT

    # sending

    def frame(self, opcode: int, payload: bytes, *, final: bool = True) -> bytes:
        """Return one frame, masked when this is the client's side (section 5.3)."""
        size, mask_bit = len(payload), 0x80 if self.client else 0
        head = bytes([(0x80 if final else 0) | opcode])
        if size <= MAX_CONTROL_BYTES:
            head += bytes([mask_bit | size])
        elif size < 1 << 16:
            head += bytes([mask_bit | 126]) + struct.pack("!H", size)
        else:
            head += bytes([mask_bit | 127]) + struct.pack("!Q", size)
        if not self.client:
            return head + payload
        key = self._new_mask()
        return head + key + _masked(payload, key)

    def text(self, message: str) -> bytes:
        """Return a text message as one frame."""
        return self.frame(TEXT, message.encode())

    def close(self, code: int = NORMAL_CLOSURE, reason: str = "") -> bytes:
        """Return a close frame, once; later calls return nothing."""
        if self.close_sent:
            return b""
        self.close_sent = True
        return self.frame(CLOSE, struct.pack("!H", code) + reason.encode()[: MAX_CONTROL_BYTES - 2])

    def take_answers(self) -> bytes:
        """Return what has to be sent for what was received: pongs, the echo of a close."""
        answers, self._answers = bytes(self._answers), bytearray()
        return answers

    # receiving

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages completed by `data`; a broken frame is a WebSocketError."""
        self._buffer += data
        messages = []
        while (frame := self._next_frame()) is not None:
            message = self._on_frame(*frame)
            if message is not None:
                messages.append(message)
        return messages

    def _next_frame(self) -> tuple[bool, int, bytes] | None:
        """Take one whole frame from the buffer: final, opcode, payload."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1] & 0x7F
        self._check_head(final, opcode, size, masked=bool(buffer[1] & 0x80))
        at = 2
        if size >= 126:
            wide = 2 if size == 126 else 8
            if len(buffer) < at + wide:
                return None
            size = int.from_bytes(buffer[at : at + wide], "big")
            at += wide
        if size + len(self._fragments or b"") > self._max_message_bytes:
            raise WebSocketError(TOO_BIG, f"a message of more than {self._max_message_bytes} bytes")
        key_size = 0 if self.client else 4
        if len(buffer) < at + key_size + size:
            return None
        key, payload = bytes(buffer[at : at + key_size]), bytes(buffer[at + key_size : at + key_size + size])
        del buffer[: at + key_size + size]
        return final, opcode, _masked(payload, key) if key else payload

    def _check_head(self, final: bool, opcode: int, size: int, *, masked: bool) -> None:
        if self._buffer[0] & 0x70:
            raise WebSocketError(PROTOCOL_ERROR, "a reserved bit is set")
        if opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise WebSocketError(PROTOCOL_ERROR, f"opcode {opcode}")
        if opcode >= CLOSE and (size > MAX_CONTROL_BYTES or not final):
            raise WebSocketError(PROTOCOL_ERROR, "a control frame that is long or in parts")
        if masked == self.client:
            raise WebSocketError(PROTOCOL_ERROR, "a server's frame is masked" if masked else "a client's is not")

    def _on_frame(self, final: bool, opcode: int, payload: bytes) -> Message | None:
        if opcode == PING:
            self._answers += self.frame(PONG, payload)
            return None
        if opcode == PONG:
            return None
        if opcode == CLOSE:
            return self._on_close(payload)
        if (opcode == CONTINUATION) != (self._fragments is not None):
            raise WebSocketError(PROTOCOL_ERROR, "a message in parts is out of order")
        if opcode != CONTINUATION:
            self._opcode, self._fragments = opcode, bytearray()
        assert self._fragments is not None
        self._fragments += payload
        if not final:
            return None
        whole, self._fragments = bytes(self._fragments), None
        if self._opcode == TEXT:
            _check_utf8(whole)
        return Message(self._opcode, whole)

    def _on_close(self, payload: bytes) -> Message:
        if len(payload) == 1:
            raise WebSocketError(PROTOCOL_ERROR, "a close frame of one byte")
        self.close_code = int.from_bytes(payload[:2], "big") if payload else 1005
        _check_utf8(payload[2:])
        self._answers += self.close(self.close_code if payload else NORMAL_CLOSURE)
        return Message(CLOSE, payload)


def _check_utf8(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise WebSocketError(BAD_DATA, "text that is not UTF-8") from error
