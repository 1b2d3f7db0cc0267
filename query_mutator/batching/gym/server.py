"""A server of puzzle gyms: any text environment over telnet, plain TCP and WebSocket on one port.

The protocol of the lines is in `session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from query_mutator.batching.gym.session import Game, Session, StepOutcome, TextEnv
from query_mutator.batching.streaming.connection import LineConnection, accept
from query_mutator.batching.streaming.gym_types import GymOutputMode, GymProtocolError
from query_mutator.errors import QueryMutatorError, UsageError

__all__ = ["Game", "GymServer", "GymnasiumTextEnv", "StepOutcome", "TextEnv"]

logger = logging.getLogger(__name__)

DETECT_TIMEOUT_S = 0.3  # a WebSocket client sends its request within this time


class GymnasiumTextEnv:
    """A gymnasium environment with discrete actions as a TextEnv: actions by name or number, `render()` as the text.

    `solved(info, total_reward)` returns whether an episode that ended is a success (default: a total above 0).
    """

    def __init__(
        self,
        env: Any,
        actions: Sequence[str],
        *,
        text: Callable[[Any, Mapping[str, Any]], str] | None = None,
        hint: Callable[[Any], str | None] | None = None,
        solved: Callable[[Mapping[str, Any], float], bool] = lambda info, total: total > 0,
    ) -> None:
        if len(actions) != env.action_space.n:
            raise UsageError(f"{len(actions)} action names for {env.action_space.n} actions; name each action once")
        self.env = env
        self.actions = list(actions)
        self._text = text or (lambda env, info: str(env.render()))
        self._hint = hint
        self._solved = solved
        self._total = 0.0

    def reset(self, *, seed: int, difficulty: str) -> str:
        """Start an episode; the environment has one difficulty."""
        self._total = 0.0
        _, info = self.env.reset(seed=seed)
        return self._text(self.env, info)

    def step(self, action: str) -> StepOutcome:
        """Take an action by its name or number."""
        index = self._index(action)
        if index is None:
            return StepOutcome(f"unknown action {action!r}; use one of {', '.join(self.actions)}", valid=False)
        _, reward, terminated, truncated, info = self.env.step(index)
        self._total += float(reward)
        over = bool(terminated or truncated)
        return StepOutcome(
            self._text(self.env, info),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=over and self._solved(info, self._total),
        )

    def _index(self, action: str) -> int | None:
        if action.isdecimal() and int(action) < len(self.actions):
            return int(action)
        names = [name.lower() for name in self.actions]
        return names.index(action.lower()) if action.lower() in names else None

    def hint(self) -> str | None:
        """Return the action that the given `hint` proposes."""
        return self._hint(self.env) if self._hint else None

    def help(self) -> str:
        """Return the actions by number and name."""
        return "\n".join(f"  {number}  {name}" for number, name in enumerate(self.actions))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class GymServer:
    """Serve games to many clients from a background thread; `port` 0 takes a free one.

    Environments run in a pool of `max_workers` threads, so one that waits for a model does not block the others.
    """

    def __init__(
        self, games: Sequence[Game], *, host: str = "127.0.0.1", port: int = 8023, seed: int = 42, max_workers: int = 8
    ) -> None:
        if not games:
            raise UsageError("a gym server without games; pass at least one")
        self.games = list(games)
        self.host = host
        self.port = port
        self.sessions_served = 0
        self._seed = seed
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="gym")
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="gym-server", daemon=True)

    def start(self) -> Self:
        """Start listening; raise UsageError if the address is not available."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise UsageError(
                f"cannot listen on {self.host}:{self.port}: {self._failure.strerror or self._failure}; use another port"
            )
        return self

    def wait(self) -> None:
        """Wait until the server is closed; a keyboard interrupt is raised here."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.2)

    def close(self) -> None:
        """Close all connections and stop; idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()  # the event loop refers to tasks only weakly

        def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # not passed as a coroutine: Python 3.11.7 then logs an error for each task that is cancelled
            task = asyncio.ensure_future(self._client(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(on_client, self.host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()  # asyncio.run then cancels the tasks of the clients

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = np.random.default_rng([self._seed, self.sessions_served])
        self.sessions_served += 1
        session = Session(self.games, rng)
        connection: LineConnection | None = None
        try:
            connection = await accept(reader, writer, timeout_s=DETECT_TIMEOUT_S)
            await self._converse(connection, session)
        except (GymProtocolError, OSError) as error:  # a GymConnectionError is an OSError
            logger.debug("client left: %s", error)
        finally:
            await asyncio.get_running_loop().run_in_executor(self._pool, session.close)
            if connection is not None:
                await connection.close()
            writer.close()

    async def _converse(self, connection: LineConnection, session: Session) -> None:
        await connection.send_lines(*session.greeting())
        while not session.ended:
            line = await connection.read_line()
            await connection.send_lines(*await self._answer(session, line))

    async def _answer(self, session: Session, line: str) -> list[str]:
        """Answer in a thread. An environment that fails ends its puzzle, not the connection."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, session.answer, line)
        except QueryMutatorError as error:
            logger.warning("the environment failed: %s", error)
            message = str(error)
        except Exception as error:
            logger.exception("the environment failed")
            message = f"{type(error).__name__}: {error}"
        await loop.run_in_executor(self._pool, session.close)
        if session.mode is GymOutputMode.JSON:
            return [json.dumps({"type": "error", "code": "ENVIRONMENT", "message": message})]
        return [f"Error: {message}"]
