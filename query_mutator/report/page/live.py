"""The page during a run: an HTTP server on the loopback address sends what is new in the files, by server-sent events.

    run folder -> Reader.poll, once a second while a page is open -> Feed -> one stream per open page

The feed holds every message once, compressed. A page is a position in it, so one that reads slowly holds only the
buffer of its connection and delays nobody. Nothing is written, and the trainer is not involved.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from query_mutator.cli.console import note
from query_mutator.embedded.access import Access
from query_mutator.embedded.http import TEXT_TYPE, Clients, Connection, Request, Response, why_not_listening
from query_mutator.errors import QueryMutatorError, UsageError
from query_mutator.files import encode
from query_mutator.report.page.messages import Message, section
from query_mutator.report.page.pairs import pairs_of
from query_mutator.report.page.questions import Evaluation

__all__ = ["Feed", "LivePage", "Reader", "serve_live"]

HOST = "127.0.0.1"
POLL_S = 1.0
BEAT_S = 15.0  # after which a silent stream sends a comment, so that a vanished page is noticed
RETRY_MS = 1000  # after which a page connects again
REQUEST_S = 30.0
MAX_PAGES = 64
EVENTS = "/events"  # or /events/ID, which continues behind that event
CONFIG = "config.json"  # the first file of a run folder
STATUS = "live"  # the section that says what is waited for
RESTART = b"event: restart\ndata:\n\n"
CAUGHT_UP = b"event: caught-up\ndata:\n\n"
#: No other site may embed the page or read the stream; what the page may load is in the page.
HEADERS = (
    "Content-Security-Policy: frame-ancestors 'none'\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    "Cache-Control: no-store\r\n"
)


class Reader(Protocol):
    """Reads one run folder."""

    @property
    def name(self) -> str:
        """Return the name of the run."""

    @property
    def evaluation(self) -> Evaluation:
        """Return the rows of its evaluation."""

    def poll(self) -> Iterable[Message]:
        """Return messages with some of what is new since the last call; none if nothing is left."""


OpenReader = Callable[[Path, int], Reader]  # of a folder, with the number of the run on the page


class Packed(NamedTuple):
    """A message as it is sent: base64 of gzip of its JSON, and which messages it belongs to or replaces."""

    key: tuple[object, ...]
    replaces: bool
    data: bytes


def pack(message: Message) -> Packed:
    """Return a message compressed; a section, a reset and a new table of texts replace those of their key."""
    is_section = message["kind"] == "section"
    replaces = is_section or bool(message.get("reset")) or message.get("start") == 0
    key = (message["kind"], message["run"], message.get("name") if is_section else None)
    return Packed(key, replaces, base64.b64encode(gzip.compress(encode(message), 6, mtime=0)))


class Feed:
    """The messages so far; an event's id is the feed's name and the position behind the event."""

    def __init__(self) -> None:
        self._is_read = False  # all that was there when it began
        self._name = secrets.token_hex(4)
        self._messages: list[bytes | None] = []  # None where a later one replaces it
        self._current: dict[tuple[object, ...], list[int]] = {}
        self._changed = asyncio.Event()
        self._has_ended = False

    def add(self, packed: Packed) -> None:
        """Append a message; those it replaces are not sent any more."""
        positions = self._current.setdefault(packed.key, [])
        if packed.replaces:
            for position in positions:
                self._messages[position] = None
            positions.clear()
        positions.append(len(self._messages))
        self._messages.append(packed.data)
        self._notify()

    def mark_read(self) -> None:
        """Let pages know, once they have got it, that they have all that was there when the feed began."""
        if not self._is_read:
            self._is_read = True
            self._notify()

    def end(self) -> None:
        """Let all streams end; the pages start again with another feed."""
        self._has_ended = True
        self._notify()

    def position_of(self, last_event_id: str) -> int | None:
        """Return where a page continues, or None for an id that is not of this feed."""
        if not last_event_id:
            return 0
        name, _, position = last_event_id.partition("-")
        if name != self._name or not position.isdecimal() or int(position) > len(self._messages):
            return None
        return int(position)

    async def events(self, position: int) -> AsyncIterator[bytes]:
        """Yield the events from a position on, one when there are no more, and a comment after BEAT_S without any.

        Stop when the feed ends.
        """
        has_caught_up = False
        while not self._has_ended:
            changed = self._changed
            while position < len(self._messages) and not self._has_ended:
                message, position = self._messages[position], position + 1
                if message is not None:
                    yield b"id: %b-%d\ndata: %b\n\n" % (self._name.encode(), position, message)
            if self._is_read and not has_caught_up:
                has_caught_up = True
                yield CAUGHT_UP
            try:
                async with asyncio.timeout(BEAT_S):  # `wait_for` can swallow the cancellation when a page leaves
                    await changed.wait()
            except TimeoutError:
                yield b":\n\n"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class WatchedRun:
    """A run folder that may not exist yet, and its reader; `runs/latest` may become another folder.

    `status` says in words what is waited for, or what is wrong.
    """

    def __init__(self, number: int, folder: Path, open_reader: OpenReader) -> None:
        self.reader: Reader | None = None
        self.status = ""
        self._number, self._folder, self._open_reader = number, folder, open_reader
        self._target = folder.resolve()

    @property
    def has_moved(self) -> bool:
        """Return whether the folder is now a link to another run than the one that is read."""
        target = self._folder.resolve()
        return self.reader is not None and target != self._target and (target / CONFIG).is_file()

    def poll(self) -> list[Packed]:
        """Return some of what is new; nothing if nothing is left."""
        if self.reader is None:
            self._target = self._folder.resolve()
            if not (self._target / CONFIG).is_file():
                self.status = f"waiting for {self._folder}: there is no {CONFIG} yet"
                return []
        try:
            self.reader = self.reader or self._open_reader(self._target, self._number)
            packed = [pack(message) for message in self.reader.poll()]
        except (OSError, QueryMutatorError) as error:
            self.status = f"{self._folder}: {error}"
            return []
        self.status = ""
        return packed


class LivePage:
    """The handler of requests: `/` is the page, `/events` the stream of what is new."""

    def __init__(self, folders: Sequence[Path], *, page: bytes, open_reader: OpenReader) -> None:
        self.pages: set[Connection] = set()
        self._folders, self._page, self._open_reader = folders, page, open_reader
        self._access = Access(bound=[HOST], origins=())
        self._feed, self._runs, self._status = self._start()

    async def __call__(self, request: Request, connection: Connection) -> Response | None:
        """Return the reply to `request`, or None for a stream."""
        connection.reply_headers = HEADERS
        if self._access.refusal(request.headers) is not None:
            return _text(403, "only pages that this server sent, at a name of this machine, may call it")
        if request.method not in ("GET", "HEAD"):
            connection.reply_headers += "Allow: GET, HEAD\r\n"
            return _text(405, f"{request.method} is not allowed; the page is read-only")
        if request.path == "/":
            return Response(200, self._page, "text/html; charset=utf-8")
        if request.path == EVENTS or request.path.startswith(f"{EVENTS}/"):
            return await self._stream(request, connection)
        return _text(404, "not found; the page is at /")

    async def poll(self) -> None:
        """Read what is new in a thread and add it to the feed."""
        if any(run.has_moved for run in self._runs):
            self._feed.end()
            self._feed, self._runs, self._status = self._start()
        has_questions = False
        for run in self._runs:
            while packed := await asyncio.to_thread(run.poll):
                for each in packed:
                    self._feed.add(each)
                    has_questions |= each.key[0] == "questions"
        readers = [run.reader for run in self._runs if run.reader is not None]
        if has_questions and len(readers) > 1:
            self._feed.add(pack(pairs_of([(reader.name, reader.evaluation) for reader in readers])))
        self._end_poll("; ".join(filter(None, (run.status for run in self._runs))))

    def _end_poll(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self._feed.add(pack(section(-1, STATUS, {"status": status})))
            if status:
                note(status)
        self._feed.mark_read()

    def _start(self) -> tuple[Feed, list[WatchedRun], str]:
        runs = [WatchedRun(number, folder, self._open_reader) for number, folder in enumerate(self._folders)]
        return Feed(), runs, ""

    async def _stream(self, request: Request, connection: Connection) -> Response | None:
        content_type = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":
            return Response(200, b"", content_type)
        if len(self.pages) >= MAX_PAGES:
            return _text(503, f"{MAX_PAGES} pages are open; close some")
        self.pages.add(connection)
        try:
            stream = connection.stream(request, content_type)
            stream.write(b"retry: %d\n\n" % RETRY_MS)
            feed = self._feed
            # The header is newer: a browser that connects again by itself keeps the path.
            last = request.headers.get("last-event-id") or request.path.removeprefix(EVENTS).lstrip("/")
            position = feed.position_of(last)
            if position is not None:
                async for event in feed.events(position):
                    stream.write(event)
                    await connection.drain()
            stream.write(RESTART)
            stream.close()
        finally:
            self.pages.discard(connection)
        return None


async def serve_live(live: LivePage, *, port: int, on_listening: Callable[[str], object]) -> None:
    """Serve until cancelled; `on_listening` is called with the address. Raises UsageError for a port in use."""
    clients = Clients(handler=live, request_timeout_s=REQUEST_S)
    try:
        listener = await asyncio.get_running_loop().create_server(clients.connect, HOST, port)
    except (OSError, OverflowError) as error:
        raise UsageError(why_not_listening(HOST, port, error)) from error
    async with listener:
        clients.keep_sweeping()
        on_listening(f"http://{HOST}:{listener.sockets[0].getsockname()[1]}/")
        await live.poll()
        while True:
            await asyncio.sleep(POLL_S)
            if live.pages:
                await live.poll()


def _text(status: int, message: str) -> Response:
    return Response(status, f"{message}\n".encode(), TEXT_TYPE)
