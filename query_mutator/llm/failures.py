"""What went wrong with one call, as an `ErrorInfo`: from an exception of the connection, or from a reply's status."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from query_mutator.llm.reply import BadReply, NoReply, Reply
from query_mutator.types import ErrorInfo

__all__ = ["error_from_exception", "error_from_status", "malformed"]

_MESSAGE_CHARS = 300
# Ollama answers 500 for these; a retry cannot help, a smaller model or fewer slots can.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|cudaMalloc failed|(requires|needs) more (system |gpu )?memory|(insufficient|not enough) memory",
    re.IGNORECASE,
)
# Ollama; llama-server; OpenAI, vLLM and llama_cpp.server; SGLang and vLLM for prompts that exceed it alone.
_TOO_LONG = re.compile(
    r"exceeds? (the |maximum )?(available )?context|maximum context length|context_length_exceeded"
    r"|longer than the (maximum )?model('s)? (context )?length",
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
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
    return ErrorInfo(kind="connect", message=f"cannot reach {url}: {_one_line(reason)}")


def error_from_status(reply: Reply, body: bytes) -> ErrorInfo:
    """Return why a reply with a status other than 2xx is a failure."""
    status, headers = reply.status, reply.headers
    message = _server_message(status, body)
    kind = _kind_of_status(status, message)
    if kind == "memory":
        message += "; use a smaller model, or fewer slots (OLLAMA_NUM_PARALLEL)"
    if status in range(300, 400):
        message = f"redirected to {headers.get('location')}: use that as the server's address"
    return ErrorInfo(kind=kind, message=message, status=status, retry_after_s=_retry_after_s(headers))


def malformed(status: int, body: bytes) -> ErrorInfo:
    """Return the error for a 2xx reply whose body is not one JSON object."""
    start = _one_line(body.decode("utf-8", "replace"))[:80]
    return ErrorInfo(kind="malformed", message=f"the reply is not a JSON object: {start!r}", status=status)


def _kind_of_status(status: int, message: str) -> str:
    if status in (429, 503):
        return "busy"
    if _TOO_LONG.search(message):
        return "prompt_too_long"
    if status >= 500:
        return "memory" if _OUT_OF_MEMORY.search(message) else "server"
    return "model_missing" if status == 404 and _NO_SUCH_MODEL.search(message) else "request"


def _server_message(status: int, body: bytes) -> str:
    """Return the server's message: `error` as text (Ollama) or as an object (OpenAI), else the body or the status."""
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        said: Any = json.loads(text)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
    return _one_line(text) or f"status {status} without a message"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS]


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after")
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
