"""Codecs between bytes and lines of text, without a socket: plain TCP, telnet and WebSocket."""

from __future__ import annotations

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, State

from query_mutator.batching.streaming.telnet import TelnetCodec

__all__ = ["WebSocketWire", "Wire"]


class Wire:
    """Lines that end in CR LF; with a `telnet` codec its commands are removed and answered."""

    def __init__(self, telnet: TelnetCodec | None = None) -> None:
        self.telnet = telnet

    @property
    def opening(self) -> bool:
        """Return whether the handshake is still incomplete."""
        return False

    @property
    def closed(self) -> bool:
        """Return whether either side has ended the conversation."""
        return False

    @property
    def failure(self) -> Exception | None:
        """Return how the peer broke the protocol, if it did."""
        return None

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the text in `data` (b"" at the end of the stream) and the bytes to send in answer."""
        return self.telnet.feed(data) if self.telnet else (data, b"")

    def encode(self, line: str) -> bytes:
        """Return the bytes of one line; UTF-8 has no byte 255, so telnet needs no escape."""
        return f"{line}\r\n".encode()

    def goodbye(self) -> bytes:
        """Return the last bytes to send."""
        return b""


class WebSocketWire(Wire):
    """Lines over a WebSocket protocol of the `websockets` library, including its handshake.

    A text message is one line or several; binary messages are parts of a byte stream, which may contain telnet.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self._binary = TelnetCodec()
        self._opcode = Opcode.TEXT  # of the message being received
        self._message = bytearray()

    @property
    def opening(self) -> bool:
        """Return whether the handshake is still incomplete."""
        return self.protocol.state is State.CONNECTING and self.protocol.handshake_exc is None

    @property
    def closed(self) -> bool:
        """Return whether either side has sent a close frame."""
        return self.protocol.state in (State.CLOSING, State.CLOSED)

    @property
    def failure(self) -> Exception | None:
        """Return the error of the handshake or of a frame; None when the peer merely disconnected."""
        error = self.protocol.handshake_exc or self.protocol.parser_exc
        return None if error is None or isinstance(error.__cause__ or error, EOFError) else error

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the completed messages as text, and handshake, pongs, telnet answers or a close frame to send."""
        if data:
            self.protocol.receive_data(data)
        else:
            self.protocol.receive_eof()
        text = bytearray()
        for event in self.protocol.events_received():
            if isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                text += self._on_frame(event)
        return bytes(text), self._take()

    def _on_frame(self, frame: Frame) -> bytes:
        """Return the text of a message when this frame completes it."""
        if frame.opcode is not Opcode.CONT:
            self._opcode = frame.opcode
        self._message += frame.data
        if not frame.fin:
            return b""
        message, self._message = bytes(self._message), bytearray()
        if self._opcode is Opcode.TEXT:
            return self._checked(message)
        text, answer = self._binary.feed(message)
        if answer and not self.closed:
            self.protocol.send_binary(answer)
        return text

    def _checked(self, message: bytes) -> bytes:
        """Return a text message with a line end; fail the connection when it is not UTF-8 (RFC 6455, section 8.1)."""
        try:
            message.decode()
        except UnicodeDecodeError as error:
            self.protocol.fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
            self.protocol.parser_exc = error
        return message if message.endswith(b"\n") else message + b"\n"

    def _take(self) -> bytes:
        return b"".join(self.protocol.data_to_send())

    def encode(self, line: str) -> bytes:
        """Return the line as a text message."""
        self.protocol.send_text(f"{line}\n".encode())
        return self._take()

    def goodbye(self) -> bytes:
        """Return a close frame, unless one was sent."""
        if self.protocol.state is State.OPEN:
            self.protocol.send_close(CloseCode.NORMAL_CLOSURE)
        return self._take()
