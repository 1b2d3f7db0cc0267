"""The model servers behind the proxy: requests go there, and replies come back, byte for byte and as they arrive.

A request goes to the first address whose server lists its model; what belongs to no model goes to the first address.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientResponse
from aiohttp.http import HttpProcessingError
from yarl import URL

from query_mutator.files import count_values
from query_mutator.llm.connection import tls_context
from query_mutator.llm.ollama import with_tag
from query_mutator.llm.reply import MAX_REPLY_BYTES
from query_mutator.types import MAX_NAME_CHARS

__all__ = [
    "MAX_REPLY_VALUES", "Address", "Header", "Upstream", "UpstreamError", "UpstreamGone", "end_to_end",
]  # fmt: skip

Header = tuple[bytes, bytes]
#: Headers of one connection (RFC 9110, 7.6.1), which a proxy does not forward.
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
_OWN_PREFIX = b"x-qm-"  # of headers between a client and the proxy
_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError)
MODELS_PATH = b"/v1/models"  # which Ollama has too
FRESH_S = 5.0  # for which a list of models is believed
LIST_S = 1.0  # for which counts by model wait for a list
KEEP_ALIVE_S = 4.0  # llama.cpp says Keep-Alive: timeout=5, and closes then
MAX_REPLY_VALUES = 1_000_000  # parsed in a tenth of a second, in which no other client is served
_MAX_HEADER_BYTES = 64 * 1024
_PIECE_BYTES = 256 * 1024  # of a body; a larger one is sent in pieces, so that other requests are served in between


class UpstreamGone(Exception):
    """The upstream could not be reached, or its reply is not a complete one of a chat."""


class UpstreamError(Exception):
    """The upstream answered a call of the proxy with an error, which the client gets as it is."""

    def __init__(self, status: int, headers: list[Header], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a model server is; `headers`, as its key, are sent where the client has none of these names.

    If the server is this process's own (`is_own`), they replace those of the client.
    """

    url: str  # without /v1
    headers: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False

    def sent(self, headers: Iterable[Header]) -> list[tuple[str, str]]:
        """Return a client's headers as this server gets them."""
        own = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        replaced = [name for name, _ in own] if self.is_own else []
        kept = end_to_end(headers, without=(b"host", b"expect", *replaced))
        kept = [pair for pair in kept if not pair[0].lower().startswith(_OWN_PREFIX)]
        given = {name.lower() for name, _ in kept}
        kept += [pair for pair in own if pair[0] not in given]
        return [(name.decode("latin-1"), _text(value)) for name, value in kept]


class Upstream:
    """One or several model servers with different models. `max_reply_bytes` bounds replies that the proxy reads."""

    def __init__(
        self, addresses: Sequence[Address], *, timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._addresses = tuple(addresses)
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes
        self._session: aiohttp.ClientSession | None = None
        self._homes: dict[str, Address] = {}  # of models, by their names with a tag
        self._away: tuple[str, ...] = ()  # addresses that gave no list
        self._listed_at = -FRESH_S

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session, which needs a running event loop to be made; a proxy of the environment is not used."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls_context()),
                timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=self._timeout_s),
                trace_configs=[_watching()],
                cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                auto_decompress=False,
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def send(
        self,
        method: str,
        target: bytes,
        headers: Iterable[Header],
        content: AsyncIterator[bytes] | bytes | None,
        *,
        model: str | None = None,
    ) -> AsyncIterator[ClientResponse]:
        """Send a request as it is and yield the reply before its body; leaving cuts what has not arrived.

        UpstreamGone if there is no reply, or if it ends before it is complete.
        """
        address = await self._home(model)
        async with self._asked(address, method, target, headers, content) as reply:
            yield reply

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any], headers: Iterable[Header]
    ) -> AsyncIterator[ClientResponse]:
        """Send a JSON body with a client's headers and yield the reply; UpstreamError for an error."""
        kept = end_to_end(headers, without=(b"host", b"content-length", b"content-type", b"accept-encoding"))
        sent = [*kept, (b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        async with self.send("POST", path.encode(), sent, orjson.dumps(body), model=body.get("model")) as reply:
            if reply.status != 200:
                raise UpstreamError(reply.status, end_to_end(reply.raw_headers), await self.read(reply))
            yield reply

    async def post_json(self, path: str, body: Mapping[str, Any], headers: Iterable[Header]) -> dict[str, Any]:
        """Return the whole JSON reply; UpstreamGone if it is not a JSON object."""
        async with self.post(path, body, headers) as reply:
            return await self.read_object(reply)

    @asynccontextmanager
    async def _asked(
        self,
        address: Address,
        method: str,
        target: bytes,
        headers: Iterable[Header],
        content: AsyncIterator[bytes] | bytes | None,
    ) -> AsyncIterator[ClientResponse]:
        sent = address.sent(headers)
        if isinstance(content, bytes) and len(content) > _PIECE_BYTES:
            sent.append(("Content-Length", str(len(content))))
            content = _pieces(content)
        try:
            reply = await self._reply(method, address.url + target.decode("latin-1"), sent, content)
            try:
                if reply.status < 200:  # no server may send it, and no client would take it
                    raise UpstreamGone(f"{address.url}: answered with the status {reply.status}")
                yield reply
            finally:
                reply.close()
        except _ERRORS as error:
            raise UpstreamGone(f"{address.url}: {str(error) or type(error).__name__}") from error

    async def _reply(
        self, method: str, url: str, headers: list[tuple[str, str]], content: AsyncIterator[bytes] | bytes | None
    ) -> ClientResponse:
        """Return the reply; where the server has just closed a kept connection, ask again, as aiohttp does for GET."""
        connection: dict[str, bool] = {}
        while True:
            try:
                return await self._opened().request(
                    method,
                    URL(url, encoded=True),
                    headers=headers,
                    data=content,
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.pop("is_kept", False) or not isinstance(content, bytes | None):
                    raise

    # --- bodies of replies ------------------------------------------------------------------------------------------

    async def pieces(self, reply: ClientResponse, *, bounded: bool = True) -> AsyncIterator[bytes]:
        """Yield a body as it arrives; UpstreamGone if one that is bounded is longer than --max-reply-mb allows."""
        left_bytes = self._max_reply_bytes if bounded else sys.maxsize
        async for piece in reply.content.iter_any():
            left_bytes -= len(piece)
            if left_bytes < 0:
                limit_mb = self._max_reply_bytes / 1e6
                raise UpstreamGone(
                    f"{reply.url}: sent a reply of more than {limit_mb:g} MB; --max-reply-mb allows larger ones"
                )
            yield piece

    async def read(self, reply: ClientResponse) -> bytes:
        """Return a whole body; UpstreamGone as above."""
        return b"".join([piece async for piece in self.pieces(reply)])

    async def read_object(self, reply: ClientResponse) -> dict[str, Any]:
        """Return the JSON object of a whole reply; UpstreamGone for anything else."""
        content = await self.read(reply)
        if count_values(content) > MAX_REPLY_VALUES:
            raise UpstreamGone(f"{reply.url}: the reply has more than {MAX_REPLY_VALUES:,} values")
        try:
            found = orjson.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UpstreamGone(f"{reply.url}: the reply is not a JSON object")
        return found

    # --- which server has which model -------------------------------------------------------------------------------

    async def lists(self, target: bytes, headers: Sequence[Header]) -> list[tuple[ClientResponse, bytes]]:
        """Return the replies of all servers that can be reached to a request for a list; UpstreamGone if none can."""
        found = await asyncio.gather(*(self._list(address, target, headers) for address in self._addresses))
        replies = [reply for reply in found if not isinstance(reply, UpstreamGone)]
        if not replies:
            raise UpstreamGone("; ".join(map(str, found)))
        return replies

    async def listed(self) -> frozenset[str]:
        """Return the names, with their tags, that the servers list; what is known already if that takes long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIST_S):
                await self._refresh()
        return frozenset(self._homes)

    async def _home(self, model: object) -> Address:
        """Return the address of the server that has a model; the first one, which then says so, if none has it."""
        if len(self._addresses) == 1 or not isinstance(model, str):
            return self._addresses[0]
        name = with_tag(model)
        if name not in self._homes:
            await self._refresh()
        if name not in self._homes and self._away:
            raise UpstreamGone(
                f"{', '.join(self._away)} cannot be reached, and no other server has {model[:MAX_NAME_CHARS]!r}"
            )
        return self._homes.get(name, self._addresses[0])

    async def _refresh(self) -> None:
        """Ask for the lists of models unless they are fresh; a server that gives none keeps the models it had."""
        if time.monotonic() - self._listed_at < FRESH_S:
            return
        found = await asyncio.gather(*(self._list(address, MODELS_PATH, []) for address in self._addresses))
        self._listed_at = time.monotonic()
        pairs = tuple(zip(self._addresses, found, strict=True))
        self._away = tuple(address.url for address, reply in pairs if isinstance(reply, UpstreamGone))
        homes = {name: home for name, home in self._homes.items() if home.url in self._away}
        for address, reply in pairs:
            for name in () if isinstance(reply, UpstreamGone) else _names(reply[1]):
                homes.setdefault(name, address)
        self._homes = homes

    async def _list(
        self, address: Address, target: bytes, headers: Sequence[Header]
    ) -> tuple[ClientResponse, bytes] | UpstreamGone:
        try:
            async with self._asked(address, "GET", target, headers, None) as reply:
                return reply, await self.read(reply)
        except UpstreamGone as gone:
            return gone


def end_to_end(headers: Iterable[Header], *, without: Iterable[bytes] = ()) -> list[Header]:
    """Return the headers that a proxy forwards, in their order and spelling."""
    headers = list(headers)
    named = {
        part.strip().lower() for name, value in headers if name.lower() == b"connection" for part in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named | set(without)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _names(content: bytes) -> frozenset[str]:
    try:
        rows = orjson.loads(content)["data"]
        return frozenset(with_tag(str(row["id"])) for row in rows or ())
    except (ValueError, KeyError, TypeError):
        return frozenset()


def _watching() -> aiohttp.TraceConfig:
    """Return what notes in a request's context that its connection was kept from an earlier one."""

    async def kept(
        _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
    ) -> None:
        context.trace_request_ctx["is_kept"] = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(kept)
    return config


def _text(value: bytes) -> str:
    """Return a header's value such that it is sent as the same bytes: as UTF-8, and Latin-1 is not valid UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
