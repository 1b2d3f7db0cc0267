"""JSON over pooled connections to one server; a failed call returns an ErrorInfo in place of an object."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.client import IncompleteRead
from typing import TYPE_CHECKING, TypeVar

from query_mutator.errors import HIDDEN, TOO_MANY_FILES, disk_advice
from query_mutator.files import count_values, decode, decode_object, encode
from query_mutator.llm.client import CANCELLATION, Call, Cancellation, server_url
from query_mutator.settings import Calls
from query_mutator.types import ErrorInfo, Json

if TYPE_CHECKING:  # slow to import
    from urllib3 import BaseHTTPResponse

T = TypeVar("T")

MAX_REPLY_BYTES = round(Calls.max_reply_mb * 1e6)
_ERROR_BYTES = 65_536  # read of a reply whose status is an error: it may never end
_PIECE_BYTES = 65_536

_SERVER_CHARS = 220  # of a server's message, so that ours fits into an ErrorInfo's too
_READ_CHARS = 4000  # of an error page, to find its kind
# Ollama answers 500 for these; a retry cannot help, a smaller model or fewer slots can.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|cudaMalloc failed|(requires|needs) more (system |gpu )?memory|(insufficient|not enough) memory",
    re.IGNORECASE,
)
# Ollama; llama-server; OpenAI, vLLM and llama_cpp.server; SGLang and vLLM for prompts that exceed it alone.
_TOO_LONG = re.compile(
    r"exceeds? (the |maximum )?(available )?context|maximum context length|context_length_exceeded"
    r"|longer than the (maximum )?model('s)? (context )?length|input \(\d+ tokens\) is too large to process",
    re.IGNORECASE,
)
_NO_SUCH_MODEL = re.compile(r"model\b.*\bnot found|no such model|does not exist", re.IGNORECASE)

_CANCELLED = ErrorInfo(kind="cancelled", message="the call was cancelled from this side")
_CARRIES_SECRET = re.compile("auth|key|token|secret|password|cookie", re.IGNORECASE)  # in a header's name
_SECRET_CHARS = 8  # fewer are a scheme, as Bearer, or a word of the language
_MAX_VALUES = 2_000_000  # in JSON of more bytes than this: 4,000 embeddings of 512 numbers


class BadReply(ValueError):
    """A reply that cannot be read; the message continues a sentence about the server."""


def error_from_exception(error: BaseException, *, url: str, timeout_s: float) -> ErrorInfo:
    """Return why a call without a complete reply failed."""
    while _is_of_requests(error):  # what is beneath the errors of requests and urllib3
        inner = next((arg for arg in error.args if isinstance(arg, Exception)), error.__cause__ or error.__context__)
        if inner is None:
            break
        error = inner
    if isinstance(error, TimeoutError):
        return ErrorInfo(kind="timeout", message=f"no complete reply from {url} within {timeout_s:g} s")
    if isinstance(error, BadReply):
        return ErrorInfo(kind="malformed", message=f"{url} {error}")
    if isinstance(error, IncompleteRead):
        return ErrorInfo(kind="malformed", message=f"{url} sent a truncated reply")
    if not isinstance(error, OSError) or _is_of_requests(error):
        return ErrorInfo(kind="malformed", message=f"{url} did not answer in HTTP: {_start(str(error) or repr(error))}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return ErrorInfo(kind="connect", message=f"{url}: {error.verify_message}; trust it by REQUESTS_CA_BUNDLE=FILE")
    if error.errno in TOO_MANY_FILES:  # the server is not away
        return ErrorInfo(kind="server", message=f"cannot reach {url}: {disk_advice(error)}")
    return ErrorInfo(kind="connect", message=f"cannot reach {url}: {error.strerror or str(error) or repr(error)}")


def _is_of_requests(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in ("requests", "urllib3")


def error_from_status(reply: BaseHTTPResponse, body: bytes) -> ErrorInfo:
    """Return why a reply with a status other than 2xx is a failure."""
    status, headers = reply.status, reply.headers
    text = _server_text(status, body)
    kind, message = _kind_of_status(status, text), _start(text)
    if kind == "memory":
        message += "; use a smaller model, or fewer slots (OLLAMA_NUM_PARALLEL)"
    if status in range(300, 400):
        message = f"redirected to {headers.get('Location')}: use that as the server's address"
    return ErrorInfo(kind=kind, message=message, status=status, retry_after_s=_retry_after_s(headers))


def parsed(read: Callable[[], T], *, what: str) -> T | ErrorInfo:
    """Return what `read` makes of a reply, or a "malformed" error for whatever it raises, a RecursionError included.

    All replies are read through here: what is wrong with one is the server's fault, and costs one call.
    """
    try:
        return read()
    except Exception as error:
        return ErrorInfo(kind="malformed", message=f"{what}: {_start(repr(error))}")


def _kind_of_status(status: int, message: str) -> str:
    if status in (429, 503):
        return "busy"
    if _TOO_LONG.search(message):
        return "prompt_too_long"
    if status >= 500:
        return "memory" if _OUT_OF_MEMORY.search(message) else "server"
    return "model_missing" if status == 404 and _NO_SUCH_MODEL.search(message) else "request"


def _server_text(status: int, body: bytes) -> str:
    """Return the server's message: `error` as text (Ollama) or as an object (OpenAI), else the body or the status."""
    try:
        said = decode(body)
    except ValueError:
        said = body.decode("utf-8", "replace")
    for key in ("error", "message"):
        said = said.get(key, said) if isinstance(said, dict) else said
    text = str(said)
    return " ".join(text[:_READ_CHARS].split()) or f"status {status} without a message"


def _start(text: str) -> str:
    """Return the beginning of a text on one line, short enough for advice to follow it in a message."""
    return " ".join(text[:_SERVER_CHARS].split())


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date; None for anything else."""
    from urllib3 import Retry

    value = headers.get("Retry-After")
    found = parsed(lambda: float(Retry().parse_retry_after(value or "")), what="Retry-After")
    return None if isinstance(found, ErrorInfo) else found


class Transport:
    """Calls to one server over at most `pool_size` kept connections of `requests`; safe from many threads.

    `timeout_s` bounds a call from connecting to the last byte, `max_reply_bytes` the length of a reply. Threads beyond
    `pool_size` get connections that are not kept. All requests carry `headers`.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = Calls.batch_size,
        timeout_s: float = Calls.timeout_s,
        headers: Mapping[str, str] | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        self.url = server_url(url)
        self.pool_size = pool_size
        self.timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._max_reply_bytes = max_reply_bytes
        self._cancellation = Cancellation()  # of all calls
        self._open()
        self._secrets = _secrets({**self._headers, **self._session.proxy_headers})

    def _open(self) -> None:
        from query_mutator.llm.connection import Session  # requests takes a tenth of a second to import

        self._session = Session(self.url, pool_size=self.pool_size, headers=self._headers)
        self._owner = os.getpid()

    def get(self, path: str, *, timeout_s: float | None = None) -> Json | ErrorInfo:
        """Return the JSON object at `path`, or why there is none."""
        return self._call("GET", path, None, {}, timeout_s)

    def post(
        self, path: str, payload: Json, *, timeout_s: float | None = None, retry_count: int = 0
    ) -> Json | ErrorInfo:
        """Return the JSON object that answers `payload`, or why there is none.

        `retry_count` says how often the same call failed before, in the header that OpenAI's client sends.
        """
        headers = {"Content-Type": "application/json", "X-Stainless-Retry-Count": str(retry_count)}
        return self._call("POST", path, encode(payload), headers, timeout_s)

    def without_secrets(self, text: bytes) -> bytes:
        """Return `text` without what authorizes our requests: some servers repeat what they were sent."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN.encode())
        return text

    def close(self) -> None:
        """Cancel calls in flight (error kind "cancelled") and close all connections; idempotent."""
        self._cancellation.cancel()
        self._session.close()

    def _call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float | None
    ) -> Json | ErrorInfo:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self._owner != os.getpid():  # after a fork; the kept connections are those of the parent
            self._open()
        with Call(timeout_s, self._cancellation, CANCELLATION.get()) as call:
            try:
                with contextlib.closing(self._session.ask(method, self.url + path, body, headers)) as reply:
                    result = self._read(reply)
            except Exception as error:  # whatever a reply makes `requests` and what it stands on raise
                result = error_from_exception(error, url=self._session.named, timeout_s=timeout_s)
        return _CANCELLED if call.is_cut and isinstance(result, ErrorInfo) else result

    def _read(self, reply: BaseHTTPResponse) -> Json | ErrorInfo:
        """Return the object in a reply, or the error; BadReply when it is too large, as announced or decompressed."""
        is_ok = reply.status in range(200, 300)
        received = bytearray()
        while is_ok or len(received) < _ERROR_BYTES:
            if len(received) + (reply.length_remaining or 0) > self._max_reply_bytes:
                limit_mb = self._max_reply_bytes / 1e6
                raise BadReply(f"sent a reply of more than {limit_mb:g} MB; --max-reply-mb allows larger ones")
            piece = reply.read1(_PIECE_BYTES, decode_content=True)
            if not piece:
                break
            received += piece
        body = self.without_secrets(bytes(received))
        if not is_ok:
            error = error_from_status(reply, body)
            return replace(error, message=self.without_secrets(error.message.encode()).decode())  # of a header
        payload = parsed(lambda: json_object(body), what="JSON")
        if not isinstance(payload, ErrorInfo):
            return payload
        start = _start(body[:1000].decode("utf-8", "replace"))[:80]
        return replace(payload, message=f"the reply is not a JSON object: {start!r}", status=reply.status)


def _secrets(headers: Mapping[str, str]) -> set[bytes]:
    """Return the words of the headers that carry credentials, in the spellings a server may repeat them in."""
    words = [word for name, value in headers.items() if _CARRIES_SECRET.search(name) for word in value.split()]
    long = [word for word in words if len(word) >= _SECRET_CHARS]
    return {form.encode() for word in long for form in (word, json.dumps(word)[1:-1], word.replace("/", r"\/"))}


def json_object(text: bytes) -> Json:
    """Return the object that a text in JSON holds; ValueError for anything else.

    A short text of many small values takes up to thirty times its length as objects, so their number is bounded.
    """
    if len(text) > _MAX_VALUES and count_values(text) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES:,} values")
    return decode_object(text)
