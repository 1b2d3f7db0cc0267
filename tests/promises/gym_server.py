"""A puzzle arcade for tests of its clients: climbs over telnet, plain TCP and WebSocket on one port.

menu    NAME|NUMBER [easy|medium|hard] [SEED], mode NAME, quit
puzzle  show, hint, stats, reset, mode NAME, menu - anything else is an action
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

RULER = "=" * 50
GAMES = ("Climb", "Star Climb")
MODES = ("normal", "agent", "json")
DIFFICULTIES = ("easy", "medium", "hard")
DETECT_TIMEOUT_S = 0.3  # a WebSocket client sends its request within this time


@dataclass(kw_only=True)
class Climb:
    """Walk from 0 to the top in steps of one; hard climbs are higher, `fall` breaks the puzzle."""

    game: str
    difficulty: str
    seed: int
    place: int = 0
    moves: int = 0
    invalid_moves: int = 0
    is_complete: bool = False

    @property
    def top(self) -> int:
        return 2 + self.seed % 2 + 2 * DIFFICULTIES.index(self.difficulty)

    @property
    def is_lost(self) -> bool:
        return self.place < -2

    @property
    def text(self) -> str:
        return f"at {self.place} of {self.top}\nnext: {{up}} or down"

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}


class Session:
    """One client: its output mode and the puzzle it plays."""

    def __init__(self) -> None:
        self.mode = "normal"
        self.climb: Climb | None = None
        self.ended = False

    def greeting(self) -> list[str]:
        return [RULER, "Puzzles", RULER, *(f"  {at}) {game} - go up" for at, game in enumerate(GAMES, start=1)), RULER]

    def answer(self, line: str) -> list[str]:
        """Return the lines that answer a line."""
        verb, *rest = line.strip().lower().split() or [""]
        if verb == "quit":
            self.ended = True
            return ["Goodbye!"]
        if verb == "mode":
            return self._set_mode(*rest)
        if self.climb is None:
            return self._in_menu(verb, rest)
        if verb == "menu":
            self.climb = None
            return self.greeting()
        return self._in_puzzle(self.climb, verb)

    def _said(self, value: Mapping[str, Any], *lines: str) -> list[str]:
        return [json.dumps(value)] if self.mode == "json" else [*lines]

    def _set_mode(self, name: str) -> list[str]:
        if name not in MODES:
            reply = {"type": "error", "code": "INVALID_MODE", "mode": name}
            return self._said(reply, f"Invalid mode '{name}'. Choose: {', '.join(MODES)}")
        self.mode = name
        return self._said({"type": "mode", "success": True, "mode": name}, f"Output mode set to: {name}")

    def _in_menu(self, verb: str, rest: list[str]) -> list[str]:
        names = [game.lower().replace(" ", "_") for game in GAMES]
        place = int(verb) - 1 if verb.isdecimal() else names.index(verb) if verb in names else -1
        if not 0 <= place < len(GAMES):
            return ["Unknown command. Type 'help' to see available options."]
        difficulty, seed = [*rest, "easy", "0"][0], [*rest, *["0"] * 2][1]
        self.climb = Climb(game=GAMES[place], difficulty=difficulty, seed=int(seed))
        return self._shown(self.climb)

    def _in_puzzle(self, climb: Climb, verb: str) -> list[str]:
        if verb == "hint":
            return self._said(
                {"type": "hint", "success": True, "action": "up", "message": "Try `up`"}, "Hint: Try `up`"
            )
        if verb == "stats":
            return self._said({"type": "stats", **asdict(climb)}, *map(str, asdict(climb).items()))
        if verb == "reset":
            climb.place = climb.moves = climb.invalid_moves = 0
            climb.is_complete = False
        return self._shown(climb) if verb in ("show", "reset") else self._act(climb, verb)

    def _act(self, climb: Climb, action: str) -> list[str]:
        if action == "fall":
            self.climb = None
            return self._said({"type": "error", "code": "ENVIRONMENT", "message": "fell off"}, "Error: fell off")
        is_valid = action in ("up", "down") and not (climb.is_complete or climb.is_lost)
        climb.moves += is_valid
        climb.invalid_moves += not is_valid
        if is_valid:
            climb.place += 1 if action == "up" else -1
            climb.is_complete = climb.place == climb.top
        ends = {"terminated": climb.is_complete, "truncated": climb.is_lost}
        result = {"type": "result", "success": is_valid, "code": "OK" if is_valid else "INVALID", **ends}
        result |= {"message": "" if is_valid else f"no way {action!r}", "state": climb.state()}
        reward = float(is_valid and climb.is_complete)
        said = self._said({**result, "reward": reward}, f"Reward: {reward:g}" if is_valid else "Invalid: no way")
        if not is_valid:
            return said
        said += self._shown(climb)
        if climb.is_complete or climb.is_lost:
            message = "CONGRATULATIONS! YOU SOLVED IT!" if climb.is_complete else "GAME OVER!"
            said += self._said({"type": "complete", "success": climb.is_complete}, message)
        return said

    def _shown(self, climb: Climb) -> list[str]:
        grid = climb.text.splitlines()
        lines = [RULER, *grid, f"Moves: {climb.moves} | Seed: {climb.seed}", RULER]
        if self.mode == "agent":
            about = [f"GAME: {climb.game}", f"DIFFICULTY: {climb.difficulty}", f"MOVES: {climb.moves}"]
            lines = ["---GAME-START---", *about, "---GRID-START---", *grid, "---GRID-END---", "---GAME-END---"]
        return self._said({"type": "observation", **climb.state()}, *lines)


class Accepting(ServerProtocol):
    """The server's side of a WebSocket, which accepts the client's request."""

    def events_received(self) -> list[Any]:
        found = super().events_received()
        for event in found:
            if isinstance(event, Request):
                self.send_response(self.accept(event))
        return found


class Peer:
    """A client's connection: WebSocket messages when it begins with an HTTP request, else lines, with telnet or not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._web = Accepting() if first == b"G" else None
        self._text = b""
        self._take(first)

    def _take(self, data: bytes) -> None:
        if self._web is None:
            self._text += data
            return
        self._web.receive_data(data)
        self._text += b"".join(
            event.data
            for event in self._web.events_received()
            if isinstance(event, Frame) and event.opcode is Opcode.TEXT
        )
        self._writer.writelines(self._web.data_to_send())

    async def _receive(self) -> None:
        data = await self._reader.read(65_536)
        if not data:
            raise ConnectionResetError
        self._take(data)

    async def read_line(self) -> str:
        """Return the next line without the telnet commands before it."""
        while b"\n" not in self._text:
            await self._receive()
        line, _, self._text = self._text.partition(b"\n")
        return re.sub(rb"\xff[\xfb-\xfe].", b"", line).decode()

    async def send_lines(self, *lines: str) -> None:
        """Send lines, each a message of its own over WebSocket."""
        while self._web is not None and self._web.state is State.CONNECTING:
            await self._receive()
        for line in lines:
            if self._web is None:
                self._writer.write(f"{line}\r\n".encode())
            else:
                self._web.send_text(f"{line}\n".encode())
                self._writer.writelines(self._web.data_to_send())
        await self._writer.drain()


class GymServer:
    """Serves climbs from a thread while it is entered."""

    def __init__(self) -> None:
        self.port = 0
        self.sessions_served = 0

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()  # asyncio.run then cancels the tasks of the clients

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions_served += 1
        session, first = Session(), b""
        with contextlib.suppress(OSError, InvalidState, asyncio.CancelledError):  # the client left, or the test
            with contextlib.suppress(TimeoutError):
                first = await asyncio.wait_for(reader.read(1), DETECT_TIMEOUT_S)
            peer = Peer(reader, writer, first)
            await peer.send_lines(*session.greeting())
            while not session.ended:
                await peer.send_lines(*session.answer(await peer.read_line()))
        writer.close()


@contextmanager
def start_gym() -> Iterator[GymServer]:
    """Serve climbs on a free port."""
    server, started, loops = GymServer(), threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def run() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await server.serve(started, stop)

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
