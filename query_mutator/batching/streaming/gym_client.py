"""A client of the puzzle arcade's line protocol.

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
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from query_mutator.batching.streaming.connection import LineConnection, connect
from query_mutator.batching.streaming.gym_replies import Reply
from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymProtocolError,
    GymTransport,
    PuzzleDifficulty,
    PuzzleObservation,
    PuzzleResult,
    TelnetClientConfig,
)

__all__ = ["GymClient", "TelnetGymClient"]

logger = logging.getLogger(__name__)

PROMPT = "> "
MENU_LINE = re.compile(r"^\s*(\d+)\)\s+(.+?)\s+-\s")
UNKNOWN_IN_MENU = "Unknown command"


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


def _games(lines: Sequence[str]) -> dict[str, int]:
    matches = (MENU_LINE.match(line) for line in lines)
    return {_plain(match[2]): int(match[1]) for match in matches if match}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
