"""Lines over a socket, whatever carries them: plain TCP, telnet or WebSocket; the client's and the server's side."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Protocol

from query_mutator.batching.streaming import websocket
from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymProtocolError,
    GymTransport,
)
from query_mutator.batching.streaming.telnet import SUPPRESS_GO_AHEAD, TelnetCodec

CHUNK_BYTES = 65_536
MAX_LINE_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0


class Wire(Protocol):
    """What turns bytes into text and back; `closed` once the other side has said goodbye."""

    closed: bool

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the text in `data`, and what has to be sent back for it."""
        ...

    def encode(self, line: str) -> bytes:
        """Return a line as it goes out."""
        ...

    def goodbye(self) -> bytes:
        """Return what is sent last."""
        ...


class PlainWire:
    """Bytes as they are, lines ended by CR LF."""

    closed = False

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return `data`, and no answer."""
        return data, b""

    def encode(self, line: str) -> bytes:
        """Return the line with its end."""
        return f"{line}\r\n".encode()

    def goodbye(self) -> bytes:
        """Return nothing."""
        return b""


class TelnetWire(PlainWire):
    """Telnet commands are taken out and answered; a server that hears none sends none, so it serves plain TCP too."""

    def __init__(self) -> None:
        self.codec = TelnetCodec()

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the text without commands, and the answer to them."""
        return self.codec.feed(data)

    def encode(self, line: str) -> bytes:
        """Return the line with its end, bytes 255 doubled."""
        return self.codec.escape(super().encode(line))


class WebSocketWire:
    """A text message is a line of its own; binary messages are pieces of a stream, which may speak telnet."""

    def __init__(self, *, client: bool) -> None:
        self.codec = websocket.WebSocketCodec(client=client)
        self.telnet = TelnetCodec()
        self.closed = False

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the messages as text, and pongs and telnet answers; a broken frame closes with its code."""
        text, answers = bytearray(), bytearray()
        for message in self.codec.feed(data):
            if message.opcode == websocket.CLOSE:
                self.closed = True
            elif message.opcode == websocket.TEXT:
                text += message.payload if message.payload.endswith(b"\n") else message.payload + b"\n"
            else:
                piece, answer = self.telnet.feed(message.payload)
                text += piece
                if answer:
                    answers += self.codec.frame(websocket.BINARY, answer)
        return bytes(text), self.codec.take_answers() + bytes(answers)

    def encode(self, line: str) -> bytes:
        """Return the line as a text message."""
        return self.codec.text(f"{line}\n")

    def goodbye(self) -> bytes:
        """Return a close frame."""
        return self.codec.close()


class LineConnection:
    """One connection; `read_line` raises GymConnectionError when it has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire, *, name: str) -> None:
        self.name = name
        self.closed = False
        self._reader = reader
        self._writer = writer
        self._wire = wire
        self._lines: deque[str] = deque()
        self._rest = bytearray()  # of a line that is not complete

    async def send_lines(self, *lines: str) -> None:
        """Send lines in one go."""
        try:
            self._writer.write(b"".join(self._wire.encode(line) for line in lines))
            await self._writer.drain()
        except OSError as error:
            raise GymConnectionError(f"{self.name}: the connection broke: {error}") from error

    async def read_line(self) -> str:
        """Return the next line without its end."""
        while not self._lines:
            if self._wire.closed:
                raise GymConnectionError(f"{self.name}: the connection was closed")
            try:
                data = await self._reader.read(CHUNK_BYTES)
            except OSError as error:
                raise GymConnectionError(f"{self.name}: the connection broke: {error}") from error
            if not data:
                raise GymConnectionError(f"{self.name}: the connection was closed")
            await self.feed(data)
        return self._lines.popleft()

    async def feed(self, data: bytes) -> None:
        """Take in bytes, answering what has to be answered."""
        try:
            text, answer = self._wire.decode(data)
        except websocket.WebSocketError as error:
            assert isinstance(self._wire, WebSocketWire)
            self._writer.write(self._wire.codec.close(error.code))
            raise
        if answer:
            self._writer.write(answer)
        self._rest += text
        *whole, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise GymProtocolError(f"{self.name}: a line of more than {MAX_LINE_BYTES} bytes")
        self._lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in whole)

    async def close(self) -> None:
        """Say goodbye and close; idempotent."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.write(self._wire.goodbye())
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT_S)


async def connect(config: GymConfig) -> LineConnection:
    """Open a connection as `config` says; nothing there within `connect_timeout` is a GymConnectionError."""
    try:
        async with asyncio.timeout(config.connect_timeout):
            reader, writer = await asyncio.open_connection(config.host, config.port)
            try:
                return await _greet(reader, writer, config)
            except BaseException:
                writer.close()
                raise
    except TimeoutError as error:
        raise GymConnectionError(f"{config.address} did not answer within {config.connect_timeout:g} s") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise GymConnectionError(f"nothing answers at {config.address}: {error}") from error


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: GymConfig) -> LineConnection:
    wire: Wire = PlainWire()
    if config.transport is GymTransport.TELNET:
        wire = TelnetWire()
        # said first, because servers tell a telnet client by its first byte
        writer.write(wire.codec.ask(SUPPRESS_GO_AHEAD))
    elif config.transport is GymTransport.WEBSOCKET:
        key = websocket.new_key()
        writer.write(websocket.request(config.host, config.port, config.path, key))
        websocket.check_response(await reader.readuntil(b"\r\n\r\n"), key)
        wire = WebSocketWire(client=True)
    await writer.drain()
    return LineConnection(reader, writer, wire, name=config.address)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, patience_s: float
) -> LineConnection | None:
    """Take a client in: WebSocket when it begins with a request, else telnet, which plain TCP is too.

    A client that says nothing within `patience_s` waits to be greeted: it speaks telnet or plain TCP. None when it
    asked for something else over HTTP, which has been answered.
    """
    name = str(writer.get_extra_info("peername"))
    first = b""
    with contextlib.suppress(TimeoutError):
        first = await asyncio.wait_for(reader.read(1), patience_s)
    if first == b"G":
        first += await _until_known(reader)
    if first != b"GET ":
        connection = LineConnection(reader, writer, TelnetWire(), name=name)
        if first:
            await connection.feed(first)
        return connection
    head = first + await reader.readuntil(b"\r\n\r\n")
    answer, agreed = websocket.response(head)
    writer.write(answer)
    return LineConnection(reader, writer, WebSocketWire(client=False), name=name) if agreed else None


async def _until_known(reader: asyncio.StreamReader) -> bytes:
    """Read on after a `G` until it is clear whether this is `GET `; a line that only begins so is left whole."""
    more = b""
    while b"ET ".startswith(more) and len(more) < 3:
        byte = await reader.read(1)
        if not byte:
            break
        more += byte
    return more
