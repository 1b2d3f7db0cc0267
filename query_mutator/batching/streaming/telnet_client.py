"""A client of the puzzle arcade's line protocol, over telnet, plain TCP or WebSocket.

    menu    GAME DIFFICULTY [SEED]                            starts a puzzle
    puzzle  show, hint, stats, reset, check, mode NAME, menu  and the puzzle's actions, such as `place 1 5 7`

Replies have no end mark and any number of lines, some of them plain text even in JSON mode. So after each command the
client sends one that no server knows, `mode fence17`: the error message names the fence, and everything before it is
the reply. Silence is never taken for an end, and a late reply is never taken for the next command's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidHandshake, InvalidMessage

from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer
from query_mutator.batching.records import Record
from query_mutator.batching.streaming.gym_types import (
    DifficultyProfile,
    GymConfig,
    GymConnectionError,
    GymProtocolError,
    GymTransport,
    PuzzleCompletion,
    PuzzleDifficulty,
    PuzzleObservation,
    PuzzleResult,
    TelnetClientConfig,
)

logger = logging.getLogger(__name__)

# --- connections -----------------------------------------------------------------------------------------------------

CHUNK_BYTES = 65_536
MAX_LINE_BYTES = 1 << 20
MAX_COMMAND_BYTES = 4096
CLOSE_TIMEOUT_S = 1.0

IAC, DONT, DO, WONT, WILL = 255, 254, 253, 252, 251
ECHO, SUPPRESS_GO_AHEAD = 1, 3
WANTED = {WILL: (ECHO, SUPPRESS_GO_AHEAD), DO: (SUPPRESS_GO_AHEAD,)}  # options agreed to; all others are refused
ANSWERS = {WILL: (DO, DONT), DO: (WILL, WONT)}
# IAC IAC (the byte 255), a negotiation, a subnegotiation, or a command of one byte
COMMAND = re.compile(rb"\xff(?:\xff|([\xfb-\xfe])(.)|\xfa(?:[^\xff]|\xff[^\xf0])*\xff\xf0|[^\xfa-\xff])", re.DOTALL)


class TelnetFilter:
    """Remove telnet commands (RFC 854) from received bytes, wherever these are cut, and answer each offer once."""

    def __init__(self) -> None:
        self.request = bytes([IAC, DO, SUPPRESS_GO_AHEAD])  # sent first: servers know a telnet client by its first byte
        self._answered = {(WILL, SUPPRESS_GO_AHEAD)}
        self._rest = b""  # an incomplete command

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the text in `data`, without zero bytes, and the answer to the commands in it."""
        data, self._rest = self._rest + data, b""
        text, answer, place = bytearray(), bytearray(), 0
        while (start := data.find(IAC, place)) >= 0:
            text += data[place:start]
            match = COMMAND.match(data, start)
            if match is None:
                self._rest, data = data[start:], data[:start]
                if len(self._rest) > MAX_COMMAND_BYTES:
                    raise GymProtocolError("a telnet subnegotiation does not end; is this a telnet server?")
                place = start
                break
            place = match.end()
            if match[0] == bytes([IAC, IAC]):
                text.append(IAC)
            elif match[1]:
                answer += self._answer(match[1][0], match[2][0])
        return bytes(text + data[place:]).replace(b"\0", b""), bytes(answer)

    def _answer(self, verb: int, option: int) -> bytes:
        if verb not in ANSWERS or (verb, option) in self._answered:
            return b""
        self._answered.add((verb, option))
        agree, refuse = ANSWERS[verb]
        return bytes([IAC, agree if option in WANTED[verb] else refuse, option])


class LineConnection:
    """Send and receive lines. `read_line` raises GymConnectionError at the end of the connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lines: deque[str] = deque()
        self._rest = b""  # the incomplete last line

    async def _receive(self) -> bytes:
        """Return the next bytes of text, b"" at the end of the connection."""
        raise NotImplementedError

    async def read_line(self) -> str:
        """Return the next line without its end."""
        while not self._lines:
            *whole, self._rest = (self._rest + await self._receive()).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                raise GymProtocolError(f"{self.name} sent a line of more than {MAX_LINE_BYTES} bytes")
            self._lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in whole)
        return self._lines.popleft()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ConnectionClosedError as error:
            if error.sent is not None and error.rcvd is None:  # this side closed, because of what the server sent
                raise GymProtocolError(f"{self.name} does not speak WebSocket properly: {error.sent.reason}") from error
            raise GymConnectionError(f"{self.name}: the connection was closed") from error
        except (ConnectionClosed, EOFError) as error:
            raise GymConnectionError(f"{self.name}: the connection was closed") from error
        except OSError as error:
            raise GymConnectionError(f"{self.name}: the connection broke: {error}") from error


class SocketConnection(LineConnection):
    """Lines that end in CR LF over TCP, with telnet commands removed and answered if there is a filter."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, telnet: TelnetFilter | None
    ) -> None:
        super().__init__(name)
        self._reader, self._writer, self._telnet = reader, writer, telnet
        if telnet is not None:
            writer.write(telnet.request)

    async def send_lines(self, *lines: str) -> None:
        """Send lines in one write; UTF-8 has no byte 255, so telnet needs no escape."""
        with self._errors():
            self._writer.write("".join(f"{line}\r\n" for line in lines).encode())
            await self._writer.drain()

    async def _receive(self) -> bytes:
        with self._errors():
            data = await self._reader.read(CHUNK_BYTES)
            if not data:
                raise EOFError
            if self._telnet is None:
                return data
            text, answer = self._telnet.feed(data)
            self._writer.write(answer)
            return text

    async def close(self) -> None:
        """Close; idempotent."""
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT_S)


class WebSocketConnection(LineConnection):
    """Lines over a WebSocket: a message is one line or several, and may contain telnet commands."""

    def __init__(self, name: str, socket: ClientConnection) -> None:
        super().__init__(name)
        self._socket = socket
        self._telnet = TelnetFilter()

    async def send_lines(self, *lines: str) -> None:
        """Send each line as a text message."""
        with self._errors():
            for line in lines:
                await self._socket.send(f"{line}\n")

    async def _receive(self) -> bytes:
        with self._errors():
            message, answer = self._telnet.feed(await self._socket.recv(decode=False))
            if answer:
                await self._socket.send(answer)
        return message if message.endswith(b"\n") else message + b"\n"

    async def close(self) -> None:
        """Close; idempotent."""
        await self._socket.close()


async def connect(config: GymConfig) -> SocketConnection | WebSocketConnection:
    """Open the connection that `config` describes; raise GymConnectionError when nothing answers in time."""
    try:
        async with asyncio.timeout(config.connect_timeout):
            if config.transport is GymTransport.WEBSOCKET:
                host = f"[{config.host}]" if ":" in config.host else config.host
                socket = await connect_websocket(
                    f"ws://{host}:{config.port}{config.path}",
                    compression=None,
                    proxy=None,
                    open_timeout=None,
                    close_timeout=CLOSE_TIMEOUT_S,
                    max_size=MAX_LINE_BYTES,
                )
                return WebSocketConnection(config.address, socket)
            reader, writer = await asyncio.open_connection(config.host, config.port)
            telnet = TelnetFilter() if config.transport is GymTransport.TELNET else None
            return SocketConnection(config.address, reader, writer, telnet)
    except TimeoutError as error:
        raise GymConnectionError(f"{config.address} did not answer within {config.connect_timeout:g} s") from error
    except InvalidHandshake as error:
        if isinstance(error.__cause__, EOFError) or isinstance(error, InvalidMessage):
            raise GymConnectionError(f"{config.address}: the connection was closed") from error
        raise GymProtocolError(f"{config.address} does not speak WebSocket properly: {error}") from error
    except OSError as error:
        raise GymConnectionError(f"nothing answers at {config.address}: {error}") from error


# --- replies ---------------------------------------------------------------------------------------------------------

ENVIRONMENT = "ENVIRONMENT"  # the error code of a puzzle that failed
RULER = re.compile(r"^[=-]{5,}$")
SOLVED = re.compile(r"CONGRATULATIONS|^COMPLETE\b")
LOST = re.compile(r"^GAME ?OVER", re.IGNORECASE)
NOT_STARTED = re.compile(r"Unknown command|Invalid (start|game|difficulty)", re.IGNORECASE)
FAILED = re.compile(r"^Error: (.+)")
REFUSED = re.compile(r"unknown command|invalid|error|usage:", re.IGNORECASE)
HINT = re.compile(r"^\s*hint\s*:\s*(.*?)\s*$", re.IGNORECASE)
R = TypeVar("R", PuzzleObservation, PuzzleCompletion)


class Reply(NamedTuple):
    """The reply to one command: its lines of text, and its lines that are JSON objects."""

    lines: tuple[str, ...]
    objects: tuple[dict[str, Any], ...]

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Self:
        """Sort lines into text and JSON objects; invalid JSON is text."""
        texts, objects = [], []
        for line in lines:
            found = None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
            if isinstance(found, dict):
                objects.append(found)
            else:
                texts.append(line)
        return cls(tuple(texts), tuple(objects))

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the last object of a type, or None."""
        return next((one for one in reversed(self.objects) if one.get("type") == kind), None)

    @property
    def text(self) -> str:
        """Return the lines, without blank lines and rulers at both ends."""
        lines = list(self.lines)
        for end in (0, -1):
            while lines and (not lines[end].strip() or RULER.match(lines[end].strip())):
                lines.pop(end)
        return "\n".join(lines)

    @property
    def failure(self) -> str | None:
        """Return the error message of a puzzle that failed on the server, if it did."""
        error = self.last("error")
        if error is not None and error.get("code") == ENVIRONMENT:
            return str(error.get("message"))
        found = (FAILED.match(line) for line in self.lines)
        return next((match[1] for match in found if match), None)

    @property
    def refusal(self) -> str | None:
        """Return why a puzzle was not started, if the server says so."""
        return self.failure or next((line for line in self.lines if NOT_STARTED.match(line)), None)

    @property
    def _solved(self) -> bool:
        return any(SOLVED.search(line) for line in self.lines)

    def observation(self) -> PuzzleObservation | None:
        """Return the state of the puzzle, or None if the reply does not show it."""
        given = self.last("observation")
        if given is not None:
            return _record(PuzzleObservation, {**given, "text": _text_of(given)})
        if any("GRID-START" in line for line in self.lines):  # output mode agent
            return PuzzleObservation(text=_agent_block(self.lines), is_complete=self._solved)
        return None

    def result(self) -> PuzzleResult:
        """Return the result of an action."""
        failure = self.failure
        if failure is not None:
            return PuzzleResult(success=False, code=ENVIRONMENT, message=failure, done=True)
        given, complete = self.last("result") or {}, self.last("complete")
        solved = (complete is not None and _record(PuzzleCompletion, complete).success) or self._solved
        lost = any(LOST.match(line.strip()) for line in self.lines)
        success = given.get("success")
        if success is None and REFUSED.search(self.text.partition("\n")[0]):
            success = False
        return PuzzleResult(
            success=success,
            code=given.get("code"),
            message=given.get("message") or self.text,
            reward=float(given.get("reward", 1.0 if solved else 0.0)),
            done=solved or lost or bool(given.get("terminated") or given.get("truncated")),
            solved=solved,
            truncated=bool(given.get("truncated")),
            state=self.observation(),
            info=complete or {},
        )

    def hint(self) -> PuzzleResult:
        """Return the hint, as `GymClient.get_hint` does."""
        given = self.last("hint")
        if given is not None:
            message, action = str(given.get("message", "")), given.get("action")
            return PuzzleResult(success=True, code="HINT", message=message, info={"action": action})
        for match in filter(None, map(HINT.match, self.lines)):
            return PuzzleResult(success=True, code="HINT", message=match[1])
        refused = self.last("result") or {}
        return PuzzleResult(success=False, code="NO_HINT", message=refused.get("message") or self.text)


def _text_of(state: dict[str, Any]) -> str:
    """Return a JSON state as text for a reader."""
    shown = state.get("text") or state.get("grid_display")
    if isinstance(shown, str) and shown.strip():
        return f"{state.get('game', 'Puzzle')} ({state.get('difficulty', '?')})\n{shown.rstrip()}"
    return json.dumps({name: value for name, value in state.items() if name != "type"}, sort_keys=True)


def _agent_block(lines: Sequence[str]) -> str:
    """Return the last block between GAME-START and GAME-END."""
    starts = [place for place, line in enumerate(lines) if "GAME-START" in line]
    first = starts[-1] + 1 if starts else 0
    ends = [place for place, line in enumerate(lines) if "GAME-END" in line and place > first]
    return "\n".join(lines[first : ends[0] if ends else len(lines)])


def _record(kind: type[R], fields: dict[str, Any]) -> R:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise GymProtocolError(f"the gym sent an invalid {fields.get('type')}: {error.errors()[0]['msg']}") from error


# Translate a hint in words ("Try placing 5 at row 3, column 4") into a command (`place 3 4 5`).
ROW_COLUMN = r"row (?P<r>\d+), column (?P<c>\d+)"
CELL = r"\((?P<r>\d+),\s*(?P<c>\d+)\)"

# The first match wins; braces are filled from its groups.
PATTERNS = [
    (re.compile(pattern, re.IGNORECASE), command)
    for pattern, command in (
        (rf"placing (?P<v>-?\d+) at {ROW_COLUMN}", "place {r} {c} {v}"),
        (rf"placing a (?:queen|star|tent) at {ROW_COLUMN}", "place {r} {c} 1"),
        (rf"remove the (?:queen|star|tent) at {ROW_COLUMN}", "place {r} {c} 0"),
        (rf"marking {ROW_COLUMN} as filled", "place {r} {c} 1"),
        (rf"marking {ROW_COLUMN} as empty", "place {r} {c} 0"),
        (rf"pressing the light at {ROW_COLUMN}", "press {r} {c}"),
        (rf"(?:un)?shading cell at {ROW_COLUMN}", "shade {r} {c}"),
        (rf"revealing cell {CELL}", "reveal {r} {c}"),
        (rf"flagging cell {CELL}", "flag {r} {c}"),
        (rf"marking {CELL} as (?P<v>\w+)", "mark {r} {c} {v}"),
        (rf"setting (?P<v>[hv])\w* edge at {CELL} to line", "set {v} {r} {c} 1"),
        (
            rf"placing (?P<v>\d+) bridge\(s\) between {CELL} and \((?P<r2>\d+),\s*(?P<c2>\d+)\)",
            "bridge {r} {c} {r2} {c2} {v}",
        ),
        (r"secret code is:? (?P<v>\d+(?:\s+\d+)*)", "guess {v}"),
        (r"coloring node (?P<r>\d+) with .*\(color (?P<v>\d+)\)", "place {r} {v}"),
        (r"assigning (?P<r>[A-Za-z]) = (?P<v>\d+)", "assign {r} {v}"),
        (r"moving vehicle (?P<r>\w+) (?P<v>\w+)", "move {r} {v}"),
        (r"\bdeselecting item (?P<v>\d+)", "deselect {v}"),
        (r"\bselecting item (?P<v>\d+)", "select {v}"),
        (r"\bmove (?P<v>up|down|left|right)\b", "move {v}"),
        (r"`(?P<v>[^`]+)`", "{v}"),
    )
]


def action_of_hint(hint: str) -> str | None:
    """Return the command of a hint, or None if no pattern matches."""
    for pattern, command in PATTERNS:
        match = pattern.search(hint)
        if match:
            return command.format(**match.groupdict()).lower()
    return None


# --- the client ------------------------------------------------------------------------------------------------------

PROMPT = "> "
MENU_LINE = re.compile(r"^\s*(\d+)\)\s+(.+?)\s+-\s")
UNKNOWN_IN_MENU = "Unknown command"


class GymClient:
    """One connection to a gym, for one task at a time; a late reply ends the connection."""

    def __init__(self, config: GymConfig | None = None) -> None:
        self.config = config or GymConfig()
        self.games: dict[str, int] = {}  # the menu: names to numbers
        self._connection: SocketConnection | WebSocketConnection | None = None
        self._fences = itertools.count(1)
        self._echoes: deque[str] = deque()  # lines sent, which a telnet server may echo
        self._playing = False

    # --- connection ------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection."""
        return self._connection is not None

    async def connect(self) -> None:
        """Connect and read the menu; raise GymConnectionError if nothing answers. `GymEpisodeStream` retries."""
        if self._connection is not None:
            return
        self._connection = await connect(self.config)
        self._echoes.clear()
        self._playing = False
        async with self._deadline(self.config.connect_timeout, "sent no greeting"):
            first = await self._connection.read_line()  # servers listen only after their greeting
            greeting = await self._until_fence(menu=True)
        self.games = _games((first, *greeting.lines))

    @contextlib.asynccontextmanager
    async def _deadline(self, seconds: float, failure: str) -> AsyncIterator[None]:
        """Disconnect when the block fails, is cancelled or takes longer: a reply may still arrive."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            await self.disconnect()
            raise GymConnectionError(f"{self.config.address} {failure} within {seconds:g} s") from error
        except BaseException:
            await self.disconnect()
            raise

    async def disconnect(self) -> None:
        """Close the connection; idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

    # --- puzzles ---------------------------------------------------------------------------------------------------

    async def start_puzzle(
        self, game: str, difficulty: str = PuzzleDifficulty.EASY, seed: int | None = None
    ) -> PuzzleObservation:
        """Leave the current puzzle, start another and return its state; raise GymProtocolError for an unknown game."""
        await self.connect()
        if self._playing:
            await self.quit_puzzle()
        mode = self.config.output_mode
        start = f"{self._number_of(game)} {difficulty}{'' if seed is None else f' {seed}'}"
        reply = await self.command(start, f"mode {mode}", menu=True)
        confirmed = reply.last("mode") is not None or any(f"mode set to: {mode}" in line for line in reply.lines)
        if reply.refusal or not confirmed:
            await self.disconnect()
            raise GymProtocolError(
                f"{self.config.address} did not start {game!r}: {reply.refusal or reply.text[-200:]}"
            )
        self._playing = True
        return await self.show_state()

    def _number_of(self, game: str) -> str:
        """Return a game's number in the menu, by its name or a prefix of it; without a menu, the name."""
        wanted = _plain(game)
        if not self.games:
            return game
        for matches in (str.__eq__, str.startswith):
            for name, number in self.games.items():
                if matches(name, wanted) or matches(name.replace("_", ""), wanted.replace("_", "")):
                    return str(number)
        raise GymProtocolError(f"{self.config.address} does not offer {game!r}; use one of {', '.join(self.games)}")

    async def show_state(self) -> PuzzleObservation:
        """Return the state of the puzzle."""
        reply = await self.command("show")
        return reply.observation() or PuzzleObservation(text=reply.text)

    async def send_action(self, action: str) -> PuzzleResult:
        """Send an action and return its result."""
        return (await self.command(action)).result()

    async def get_hint(self) -> PuzzleResult:
        """Return a hint; `success` is False if there is none, `info["action"]` is the action if the server names it."""
        return (await self.command("hint")).hint()

    async def get_stats(self) -> dict[str, Any]:
        """Return the server's counts for this puzzle; in text modes under the key `text`."""
        reply = await self.command("stats")
        return reply.last("stats") or {"text": reply.text}

    async def reset_puzzle(self) -> PuzzleObservation:
        """Restart the puzzle and return its state."""
        return (await self.command("reset")).observation() or await self.show_state()

    async def quit_puzzle(self) -> None:
        """Return to the menu."""
        await self.command("menu", menu=True)
        self._playing = False

    # --- the wire --------------------------------------------------------------------------------------------------

    async def command(self, *lines: str, menu: bool = False) -> Reply:
        """Send lines and return the reply to them; set `menu` if the server may be in the menu afterwards."""
        text = " / ".join(lines)
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError(f"{text!r} has several lines; send one line per command")
        if self._connection is None:
            raise GymConnectionError(f"not connected to {self.config.address}")
        async with self._deadline(self.config.read_timeout, f"did not answer {text!r}"):
            return await self._until_fence(*lines, menu=menu)

    async def _until_fence(self, *commands: str, menu: bool) -> Reply:
        assert self._connection is not None
        fence = f"fence{next(self._fences)}"
        lines = [*commands, f"mode {fence}"]
        self._echoes.extend(lines)
        await self._connection.send_lines(*lines)
        found: list[str] = []
        while True:
            line = self._without_echo(await self._connection.read_line())
            if line is None:
                continue
            if fence in line or (menu and line.startswith(UNKNOWN_IN_MENU)):  # the menu does not name what it refuses
                return Reply.parse(found)
            found.append(line)

    def _without_echo(self, line: str) -> str | None:
        """Return a line without its prompt, or None if it is the echo of a line that was sent."""
        text = line
        while text.startswith(PROMPT):
            text = text[len(PROMPT) :]
        if text in self._echoes:
            while self._echoes.popleft() != text:
                pass
            return None
        return text


class TelnetGymClient(GymClient):
    """A `GymClient` over telnet in JSON mode that connects again up to `max_retries` times."""

    def __init__(self, config: TelnetClientConfig | None = None) -> None:
        super().__init__(GymConfig(transport=GymTransport.TELNET, **(config or TelnetClientConfig()).model_dump()))

    async def connect(self) -> None:
        """Connect and read the menu; wait `retry_delay` seconds between attempts."""
        for attempt in range(self.config.max_retries + 1):
            try:
                await super().connect()
                return
            except GymConnectionError as error:
                if attempt == self.config.max_retries:
                    raise
                logger.info("%s; connecting again", error)
                await asyncio.sleep(self.config.retry_delay)


def _games(lines: Sequence[str]) -> dict[str, int]:
    matches = (MENU_LINE.match(line) for line in lines)
    return {_plain(match[2]): int(match[1]) for match in matches if match}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


class PuzzleEpisode(Record):
    """A puzzle from its first grid to its last, with the moves between; 0 in a grid is an empty cell."""

    game: str
    difficulty: str
    seed: int
    initial_grid: list[list[int]] | None = None
    final_grid: list[list[int]] | None = None
    moves: tuple[str, ...] = ()
    success: bool
    total_moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    optimal_steps: int | None = None
    difficulty_profile: DifficultyProfile | None = None

    def to_training_text(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask: the puzzle without a loss, then the moves and the result with one."""
        prompt = f"Solve this {self.game} puzzle ({self.difficulty}).\n{_grid_text(self.initial_grid)}\n"
        ending = "solved" if self.success else "not solved"
        row = RowTokenizer(tokenizer).pair(prompt, "\n".join([*self.moves, ending]))
        return row.input_ids.tolist(), row.loss_mask.tolist()


def _grid_text(grid: Sequence[Sequence[int]] | None) -> str:
    return "\n".join(" ".join(str(cell) if cell else "." for cell in row) for row in grid or ())
