"""What went wrong with one call, as an `ErrorInfo`: from an exception of the connection, or from a reply's status."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from query_mutator.errors import TOO_MANY_FILES, disk_advice
from query_mutator.files import decode
from query_mutator.llm.reply import BadReply, NoReply, Reply
from query_mutator.types import ErrorInfo

__all__ = ["error_from_exception", "error_from_status", "malformed", "parsed"]

T = TypeVar("T")

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


def error_from_exception(error: Exception, *, url: str, timeout_s: float) -> ErrorInfo:
    """Return why a call without a complete reply failed; `error` is an OSError or a BadReply."""
    if isinstance(error, TimeoutError):
        return ErrorInfo(kind="timeout", message=f"no complete reply from {url} within {timeout_s:g} s")
    if isinstance(error, BadReply):
        return ErrorInfo(kind="malformed", message=f"{url} {error}")
    if isinstance(error, NoReply) and error.errno is None:  # closed, not reset
        return ErrorInfo(kind="connect", message=f"{url} closed the connection without a reply")
    if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:  # the server is not away
        return ErrorInfo(kind="server", message=f"cannot reach {url}: {disk_advice(error)}")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
    return ErrorInfo(kind="connect", message=f"cannot reach {url}: {reason}")


def error_from_status(reply: Reply, body: bytes) -> ErrorInfo:
    """Return why a reply with a status other than 2xx is a failure."""
    status, headers = reply.status, reply.headers
    text = _server_text(status, body)
    kind, message = _kind_of_status(status, text), _start(text)
    if kind == "memory":
        message += "; use a smaller model, or fewer slots (OLLAMA_NUM_PARALLEL)"
    if status in range(300, 400):
        message = f"redirected to {headers.get('location')}: use that as the server's address"
    return ErrorInfo(kind=kind, message=message, status=status, retry_after_s=_retry_after_s(headers))


def parsed(read: Callable[[], T], *, what: str) -> T | ErrorInfo:
    """Return what `read` makes of a reply, or a "malformed" error for whatever it raises, a RecursionError included.

    All replies are read through here: what is wrong with one is the server's fault, and costs one call.
    """
    try:
        return read()
    except Exception as error:
        return ErrorInfo(kind="malformed", message=f"{what}: {_start(repr(error))}")


def malformed(status: int, body: bytes) -> ErrorInfo:
    """Return the error for a 2xx reply whose body is not one JSON object."""
    start = _start(body[:1000].decode("utf-8", "replace"))[:80]
    return ErrorInfo(kind="malformed", message=f"the reply is not a JSON object: {start!r}", status=status)


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
    text = parsed(lambda: _error_text(decode(body)), what="the error is not JSON")
    if isinstance(text, ErrorInfo):
        text = body.decode("utf-8", "replace")
    return " ".join(text[:_READ_CHARS].split()) or f"status {status} without a message"


def _error_text(said: Any) -> str:
    said = said.get("error", said) if isinstance(said, dict) else said
    return str(said.get("message", said) if isinstance(said, dict) else said)


def _start(text: str) -> str:
    """Return the beginning of a text on one line, short enough for advice to follow it in a message."""
    return " ".join(text[:_SERVER_CHARS].split())


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after")
    if value is None:
        return None
    for read in (float, _seconds_until):
        with contextlib.suppress(Exception):  # a year 99999 and similar raise more than ValueError
            seconds = read(value)
            return max(0.0, seconds) if math.isfinite(seconds) else None
    return None


def _seconds_until(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() - time.time()
