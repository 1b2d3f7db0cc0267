"""A client of line-speaking puzzle gyms: the puzzle arcade's protocol, which `gym_server` speaks as well.

    menu    GAME DIFFICULTY [SEED]                            starts a puzzle
    puzzle  show, hint, stats, reset, check, mode NAME, menu  and whatever the puzzle takes, such as `place 1 5 7`

Replies have no end mark and any number of lines, some of them plain text even in JSON mode. So after each command the
client sends one that no server knows, `mode fence17`: the complaint about it names the fence, and all that came
before it is the reply. No reply is guessed from silence, and a reply that is late cannot be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError

from query_mutator.batching.records import Record
from query_mutator.batching.streaming.connection import LineConnection, connect
from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymOutputMode,
    GymProtocolError,
    GymTransport,
    PuzzleCompletion,
    PuzzleDifficulty,
    PuzzleObservation,
    PuzzleResult,
)

logger = logging.getLogger(__name__)

PROMPT = "> "
ENVIRONMENT = "ENVIRONMENT"  # the code of a puzzle that broke down
MENU_LINE = re.compile(r"^\s*(\d+)\)\s+(.+?)\s+-\s")
UNKNOWN_IN_MENU = "Unknown command"
SOLVED = re.compile(r"CONGRATULATIONS|^COMPLETE\b")
LOST = re.compile(r"^GAME ?OVER", re.IGNORECASE)
NOT_STARTED = re.compile(r"Unknown command|Invalid (start|game|difficulty)", re.IGNORECASE)
FAILED = re.compile(r"^Error: (.+)")
REFUSED = re.compile(r"unknown command|invalid|error|usage:", re.IGNORECASE)
R = TypeVar("R", PuzzleObservation, PuzzleCompletion)

RULER = re.compile(r"^[=-]{5,}$")


class Reply(NamedTuple):
    """What came back for one command: lines of text, and the JSON objects among them."""

    lines: tuple[str, ...]
    objects: tuple[dict[str, Any], ...]

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the last object of a type, or None."""
        return next((one for one in reversed(self.objects) if one.get("type") == kind), None)

    @property
    def text(self) -> str:
        """Return the lines without blank ones and rulers at both ends."""
        lines = list(self.lines)
        for end in (0, -1):
            while lines and (not lines[end].strip() or RULER.match(lines[end].strip())):
                lines.pop(end)
        return "\n".join(lines)


class GymClient:
    """One connection to a gym, used by one task; a reply that does not come in time ends the connection."""

    def __init__(self, config: GymConfig | None = None) -> None:
        self.config = config or GymConfig()
        self.games: dict[str, int] = {}  # what the menu offers: names to numbers
        self._connection: LineConnection | None = None
        self._fences = itertools.count(1)
        self._echoes: deque[str] = deque()  # lines sent, which a telnet server sends back
        self._playing = False

    # --- connection ------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Say whether there is a connection."""
        return self._connection is not None

    async def connect(self) -> None:
        """Connect and read the menu; GymConnectionError when nothing answers. `GymEpisodeStream` tries again."""
        if self._connection is not None:
            return
        self._connection = await connect(self.config)
        self._echoes.clear()
        self._playing = False
        try:
            async with asyncio.timeout(self.config.connect_timeout):
                first = await self._connection.read_line()  # servers listen only once they have greeted
                greeting = await self._until_fence(menu=True)
        except TimeoutError as error:
            await self.disconnect()
            raise GymConnectionError(f"{self.config.address} sent no greeting") from error
        except BaseException:
            await self.disconnect()
            raise
        self.games = _games((first, *greeting.lines))

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
        """Start a puzzle (leaving another one) and return what it shows; an unknown game is a GymProtocolError."""
        await self.connect()
        if self._playing:
            await self.quit_puzzle()
        mode = self.config.output_mode
        start = f"{self._number_of(game)} {difficulty}{'' if seed is None else f' {seed}'}"
        reply = await self.command(start, f"mode {mode}", menu=True)
        confirmed = reply.last("mode") is not None or any(f"mode set to: {mode}" in line for line in reply.lines)
        refusal = _failure(reply) or next((line for line in reply.lines if NOT_STARTED.match(line)), None)
        if refusal or not confirmed:
            await self.disconnect()
            raise GymProtocolError(f"{self.config.address} did not start {game!r}: {refusal or reply.text[-200:]}")
        self._playing = True
        return await self.show_state()

    def _number_of(self, game: str) -> str:
        """Return a game's number in the menu, found by its name or how that begins; without a menu, the name."""
        wanted = _plain(game)
        if not self.games:
            return game
        for matches in (str.__eq__, str.startswith):
            for name, number in self.games.items():
                if matches(name, wanted) or matches(name.replace("_", ""), wanted.replace("_", "")):
                    return str(number)
        raise GymProtocolError(f"{self.config.address} has no {game!r}; it offers {', '.join(self.games)}")

    async def show_state(self) -> PuzzleObservation:
        """Return the state of the puzzle."""
        reply = await self.command("show")
        return self._observation(reply) or PuzzleObservation(text=reply.text)

    async def send_action(self, action: str) -> PuzzleResult:
        """Carry out a command of the puzzle and return what became of it."""
        return self._result(await self.command(action))

    async def get_hint(self) -> PuzzleResult:
        """Return a hint: `success` False when there is none, `info["action"]` where the server names the action."""
        reply = await self.command("hint")
        given = reply.last("hint")
        if given is not None:
            return PuzzleResult(
                success=True, code="HINT", message=str(given.get("message", "")), info={"action": given.get("action")}
            )
        for line in reply.lines:
            label, colon, text = line.partition(":")
            if colon and label.strip().lower() == "hint":
                return PuzzleResult(success=True, code="HINT", message=text.strip())
        refused = reply.last("result") or {}
        return PuzzleResult(success=False, code="NO_HINT", message=refused.get("message") or reply.text)

    async def get_stats(self) -> dict[str, Any]:
        """Return the server's account of this puzzle; in text modes under the key `text`."""
        reply = await self.command("stats")
        return reply.last("stats") or {"text": reply.text}

    async def reset_puzzle(self) -> PuzzleObservation:
        """Put the puzzle back to its beginning and return what it shows."""
        return self._observation(await self.command("reset")) or await self.show_state()

    async def quit_puzzle(self) -> None:
        """Leave the puzzle for the menu."""
        await self.command("menu", menu=True)
        self._playing = False

    # --- the wire --------------------------------------------------------------------------------------------------

    async def command(self, *lines: str, menu: bool = False) -> Reply:
        """Send lines and return everything the server says to them; `menu` when it may be in the menu afterwards."""
        text = " / ".join(lines)
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError(f"a command is one line: {text!r}")
        if self._connection is None:
            raise GymConnectionError(f"not connected to {self.config.address}")
        try:
            async with asyncio.timeout(self.config.read_timeout):
                return await self._until_fence(*lines, menu=menu)
        except TimeoutError as error:
            await self.disconnect()
            raise GymConnectionError(
                f"{self.config.address} did not answer {text!r} within {self.config.read_timeout:g} s"
            ) from error
        except BaseException:  # cancelled halfway too: what is still to come belongs to nobody
            await self.disconnect()
            raise

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
                return _reply(found)
            found.append(line)

    def _without_echo(self, line: str) -> str | None:
        """Return a line without prompt, or None when it is one that was sent, coming back."""
        text = line
        while text.startswith(PROMPT):
            text = text[len(PROMPT) :]
        if text in self._echoes:
            while self._echoes.popleft() != text:
                pass
            return None
        return text

    # --- reading replies -------------------------------------------------------------------------------------------

    def _observation(self, reply: Reply) -> PuzzleObservation | None:
        """Return the state in a reply, or None when it shows none."""
        given = reply.last("observation")
        if given is not None:
            return _record(PuzzleObservation, {**given, "text": _text_of(given)})
        if self.config.output_mode is GymOutputMode.AGENT and any("GRID-START" in line for line in reply.lines):
            return PuzzleObservation(text=_agent_block(reply.lines), is_complete=_solved(reply))
        return None

    def _result(self, reply: Reply) -> PuzzleResult:
        failure = _failure(reply)
        if failure is not None:
            return PuzzleResult(success=False, code=ENVIRONMENT, message=failure, done=True)
        given, complete = reply.last("result") or {}, reply.last("complete")
        solved = (complete is not None and _record(PuzzleCompletion, complete).success) or _solved(reply)
        lost = any(LOST.match(line.strip()) for line in reply.lines)
        over = solved or lost or bool(given.get("terminated") or given.get("truncated"))
        success = given.get("success")
        if success is None and REFUSED.search(reply.text.partition("\n")[0]):
            success = False
        return PuzzleResult(
            success=success,
            code=given.get("code"),
            message=given.get("message") or reply.text,
            reward=float(given.get("reward", 1.0 if solved else 0.0)),
            done=over,
            solved=solved,
            truncated=bool(given.get("truncated")),
            state=self._observation(reply),
            info=complete or {},
        )


class TelnetClientConfig(Record):
    """Where a telnet gym is, and how patient its client is."""

    host: str = "localhost"
    port: int = Field(default=8023, ge=1, le=65535)
    connect_timeout: float = Field(default=10.0, gt=0)
    read_timeout: float = Field(default=30.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    retry_delay: float = Field(default=1.0, ge=0)


class TelnetGymClient(GymClient):
    """A `GymClient` over telnet in JSON mode that tries to connect up to `max_retries` more times."""

    def __init__(self, config: TelnetClientConfig | None = None) -> None:
        self.telnet_config = config or TelnetClientConfig()
        super().__init__(GymConfig(transport=GymTransport.TELNET, **self.telnet_config.model_dump()))

    async def connect(self) -> None:
        """Connect and read the menu, waiting `retry_delay` seconds between tries."""
        for attempt in range(self.telnet_config.max_retries + 1):
            try:
                await super().connect()
                return
            except GymConnectionError as error:
                if attempt == self.telnet_config.max_retries:
                    raise
                logger.info("%s; trying again", error)
                await asyncio.sleep(self.telnet_config.retry_delay)


def _reply(lines: Sequence[str]) -> Reply:
    """Sort lines into text and JSON objects; a line that only looks like JSON is text."""
    texts, objects = [], []
    for line in lines:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                texts.append(line)
                continue
            if isinstance(found, dict):
                objects.append(found)
                continue
        texts.append(line)
    return Reply(tuple(texts), tuple(objects))


def _games(lines: Sequence[str]) -> dict[str, int]:
    matches = (MENU_LINE.match(line) for line in lines)
    return {_plain(match[2]): int(match[1]) for match in matches if match}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _text_of(state: dict[str, Any]) -> str:
    """Return what a reader is shown of a JSON state."""
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


def _solved(reply: Reply) -> bool:
    return any(SOLVED.search(line) for line in reply.lines)


def _failure(reply: Reply) -> str | None:
    """Return what the server says when the puzzle itself broke down."""
    error = reply.last("error")
    if error is not None and error.get("code") == ENVIRONMENT:
        return str(error.get("message"))
    found = (FAILED.match(line) for line in reply.lines)
    return next((match[1] for match in found if match), None)


def _record(kind: type[R], fields: dict[str, Any]) -> R:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise GymProtocolError(f"a gym's {fields.get('type')} cannot be read: {error.errors()[0]['msg']}") from error
