"""The model server behind the proxy: requests go there, and replies come back, byte for byte and as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import orjson

__all__ = ["Upstream", "UpstreamError", "UpstreamGone", "end_to_end"]

Header = tuple[bytes, bytes]
#: Headers of one connection (RFC 9110, 7.6.1), which a proxy does not forward.
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
_JSON_HEADERS = {"content-type": "application/json"}


class UpstreamGone(Exception):
    """The upstream could not be reached, or closed the connection before its reply was complete."""


class UpstreamError(Exception):
    """The upstream answered a call of the proxy with an error, which the client gets as it is."""

    def __init__(self, status: int, headers: list[Header], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


class Upstream:
    """One model server. `token` is the key it expects, if the client sends none of its own."""

    def __init__(self, url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._own = {name.lower(): value for name, value in (headers or {}).items()}
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            timeout=httpx2.Timeout(timeout_s, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=200, keepalive_expiry=30.0),
            trust_env=False,  # a proxy of the environment is for the internet, not for this server
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Iterable[Header], content: AsyncIterator[bytes] | bytes | None
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request as it is and yield the reply before its body; leaving cuts what has not arrived.

        UpstreamGone if there is no reply.
        """
        sent = [*end_to_end(headers, without=(b"host",)), *self._missing(headers)]
        path, _, query = target.partition(b"?")
        url = self._client.base_url.copy_with(
            raw_path=self._client.base_url.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        )
        request = httpx2.Request(
            method, url, headers=sent, content=content, extensions={"timeout": self._client.timeout.as_dict()}
        )
        try:
            response = await self._client.send(request, stream=True)
        except (httpx2.HTTPError, OSError) as error:
            raise UpstreamGone(f"{self.url}: {_named(error)}") from error
        try:
            yield response
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise UpstreamGone(f"{self.url}: {_named(error)}") from error
        finally:
            await response.aclose()

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any], headers: Iterable[Header]
    ) -> AsyncIterator[httpx2.Response]:
        """Send a JSON body with a client's headers and yield the reply; UpstreamError for an error."""
        kept = end_to_end(headers, without=(b"host", b"content-length", b"content-type", b"accept-encoding"))
        ours = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        async with self.send("POST", path.encode(), [*kept, *ours], orjson.dumps(body)) as response:
            if response.status_code != 200:
                raise UpstreamError(response.status_code, end_to_end(response.headers.raw), await response.aread())
            yield response

    async def post_json(self, path: str, body: Mapping[str, Any], headers: Iterable[Header]) -> dict[str, Any]:
        """Return the whole JSON reply; UpstreamGone if it is not a JSON object."""
        async with self.post(path, body, headers) as response:
            data = await response.aread()
        try:
            reply = orjson.loads(data)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise UpstreamGone(f"{self.url}{path}: the reply is not a JSON object")
        return reply

    def _missing(self, headers: Iterable[Header]) -> list[Header]:
        given = {name.lower() for name, _ in headers}
        return [(name.encode(), value.encode()) for name, value in self._own.items() if name.encode() not in given]


def end_to_end(headers: Iterable[Header], *, without: Iterable[bytes] = ()) -> list[Header]:
    """Return the headers that a proxy forwards, in their order and spelling."""
    headers = list(headers)
    named = {
        part.strip().lower() for name, value in headers if name.lower() == b"connection" for part in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named | set(without)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _named(error: BaseException) -> str:
    return str(error) or type(error).__name__
