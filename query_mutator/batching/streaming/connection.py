"""Line connections over plain TCP, telnet or WebSocket, which `connect` opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymProtocolError,
    GymTransport,
)
from query_mutator.batching.streaming.telnet import SUPPRESS_GO_AHEAD, TelnetCodec
from query_mutator.batching.streaming.wires import WebSocketWire, Wire

__all__ = ["LineConnection", "connect"]

CHUNK_BYTES = 65_536
MAX_LINE_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0


class LineConnection:
    """Send and receive lines. `read_line` raises GymConnectionError at the end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire, *, name: str) -> None:
        self.name = name
        self.closed = False
        self._reader = reader
        self._writer = writer
        self._wire = wire
        self._lines: deque[str] = deque()
        self._rest = bytearray()  # the incomplete last line

    async def send_lines(self, *lines: str) -> None:
        """Send lines in one write."""
        if self._wire.closed:
            raise GymConnectionError(f"{self.name}: the connection was closed")
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
            await self.receive()
        return self._lines.popleft()

    async def handshake(self) -> None:
        """Receive until the handshake of the protocol is complete."""
        while self._wire.opening:
            await self.receive()

    async def receive(self) -> None:
        """Wait for bytes and process them."""
        try:
            data = await self._reader.read(CHUNK_BYTES)
        except OSError as error:
            raise GymConnectionError(f"{self.name}: the connection broke: {error}") from error
        self.feed(data)
        if not data:
            raise GymConnectionError(f"{self.name}: the connection was closed")

    def feed(self, data: bytes) -> None:
        """Process received bytes and send what they call for: negotiation, pongs, a close frame."""
        text, answer = self._wire.decode(data)
        if answer:
            self._writer.write(answer)
        if self._wire.failure is not None:
            raise GymProtocolError(f"{self.name} does not speak WebSocket properly: {self._wire.failure}")
        *whole, self._rest = (self._rest + text).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise GymProtocolError(f"{self.name} sent a line of more than {MAX_LINE_BYTES} bytes")
        self._lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in whole)

    async def close(self) -> None:
        """Send the protocol's last bytes and close; idempotent."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.write(self._wire.goodbye())
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT_S)


async def connect(config: GymConfig) -> LineConnection:
    """Open the connection that `config` describes; raise GymConnectionError when nothing answers in time."""
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
    except GymConnectionError:
        raise
    except OSError as error:
        raise GymConnectionError(f"nothing answers at {config.address}: {error}") from error


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: GymConfig) -> LineConnection:
    wire = Wire()
    if config.transport is GymTransport.TELNET:
        telnet = TelnetCodec()
        wire = Wire(telnet)
        # sent first: servers recognize a telnet client by its first byte
        writer.write(telnet.ask(SUPPRESS_GO_AHEAD))
    elif config.transport is GymTransport.WEBSOCKET:
        host = f"[{config.host}]" if ":" in config.host else config.host
        protocol = ClientProtocol(parse_uri(f"ws://{host}:{config.port}{config.path}"), max_size=MAX_LINE_BYTES)
        protocol.send_request(protocol.connect())
        writer.writelines(protocol.data_to_send())
        wire = WebSocketWire(protocol)
    await writer.drain()
    connection = LineConnection(reader, writer, wire, name=config.address)
    await connection.handshake()
    return connection
