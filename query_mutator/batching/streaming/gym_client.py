"""A client of the puzzle arcade's line protocol, which `query_mutator.gym` serves too.

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
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import ValidationError

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
    TelnetClientConfig,
)

__all__ = ["ENVIRONMENT", "GymClient", "Reply", "TelnetGymClient"]

logger = logging.getLogger(__name__)

PROMPT = "> "
ENVIRONMENT = "ENVIRONMENT"  # the error code of a puzzle that failed
MENU_LINE = re.compile(r"^\s*(\d+)\)\s+(.+?)\s+-\s")
UNKNOWN_IN_MENU = "Unknown command"
SOLVED = re.compile(r"CONGRATULATIONS|^COMPLETE\b")
LOST = re.compile(r"^GAME ?OVER", re.IGNORECASE)
NOT_STARTED = re.compile(r"Unknown command|Invalid (start|game|difficulty)", re.IGNORECASE)
FAILED = re.compile(r"^Error: (.+)")
REFUSED = re.compile(r"unknown command|invalid|error|usage:", re.IGNORECASE)
RULER = re.compile(r"^[=-]{5,}$")
R = TypeVar("R", PuzzleObservation, PuzzleCompletion)


class Reply(NamedTuple):
    """The reply to one command: its lines of text, and its lines that are JSON objects."""

    lines: tuple[str, ...]
    objects: tuple[dict[str, Any], ...]

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


class GymClient:
    """One connection to a gym, for one task at a time; a late reply ends the connection."""

    def __init__(self, config: GymConfig | None = None) -> None:
        self.config = config or GymConfig()
        self.games: dict[str, int] = {}  # the menu: names to numbers
        self._connection: LineConnection | None = None
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
        refusal = _failure(reply) or next((line for line in reply.lines if NOT_STARTED.match(line)), None)
        if refusal or not confirmed:
            await self.disconnect()
            raise GymProtocolError(f"{self.config.address} did not start {game!r}: {refusal or reply.text[-200:]}")
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
        return self._observation(reply) or PuzzleObservation(text=reply.text)

    async def send_action(self, action: str) -> PuzzleResult:
        """Send an action and return its result."""
        return self._result(await self.command(action))

    async def get_hint(self) -> PuzzleResult:
        """Return a hint; `success` is False if there is none, `info["action"]` is the action if the server names it."""
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
        """Return the server's counts for this puzzle; in text modes under the key `text`."""
        reply = await self.command("stats")
        return reply.last("stats") or {"text": reply.text}

    async def reset_puzzle(self) -> PuzzleObservation:
        """Restart the puzzle and return its state."""
        return self._observation(await self.command("reset")) or await self.show_state()

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
                return _reply(found)
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

    # --- reading replies -------------------------------------------------------------------------------------------

    def _observation(self, reply: Reply) -> PuzzleObservation | None:
        """Return the state in a reply, or None if there is none."""
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


class TelnetGymClient(GymClient):
    """A `GymClient` over telnet in JSON mode that connects again up to `max_retries` times."""

    def __init__(self, config: TelnetClientConfig | None = None) -> None:
        self.telnet_config = config or TelnetClientConfig()
        super().__init__(GymConfig(transport=GymTransport.TELNET, **self.telnet_config.model_dump()))

    async def connect(self) -> None:
        """Connect and read the menu; wait `retry_delay` seconds between attempts."""
        for attempt in range(self.telnet_config.max_retries + 1):
            try:
                await super().connect()
                return
            except GymConnectionError as error:
                if attempt == self.telnet_config.max_retries:
                    raise
                logger.info("%s; connecting again", error)
                await asyncio.sleep(self.telnet_config.retry_delay)


def _reply(lines: Sequence[str]) -> Reply:
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
    return Reply(tuple(texts), tuple(objects))


def _games(lines: Sequence[str]) -> dict[str, int]:
    matches = (MENU_LINE.match(line) for line in lines)
    return {_plain(match[2]): int(match[1]) for match in matches if match}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


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


def _solved(reply: Reply) -> bool:
    return any(SOLVED.search(line) for line in reply.lines)


def _failure(reply: Reply) -> str | None:
    """Return the error message of a puzzle that failed on the server, if it did."""
    error = reply.last("error")
    if error is not None and error.get("code") == ENVIRONMENT:
        return str(error.get("message"))
    found = (FAILED.match(line) for line in reply.lines)
    return next((match[1] for match in found if match), None)


def _record(kind: type[R], fields: dict[str, Any]) -> R:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise GymProtocolError(f"the gym sent an invalid {fields.get('type')}: {error.errors()[0]['msg']}") from error
