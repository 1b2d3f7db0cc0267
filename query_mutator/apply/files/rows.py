"""The rows of the output, in the format of their line, and those of lines without an answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from query_mutator.apply.files.lines import Ask
from query_mutator.types import Completion, ErrorInfo

__all__ = ["answer_row", "bad_line_row", "error_row"]


def answer_row(ask: Ask, completion: Completion, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of an answered line; `more` says how its prompt was rewritten."""
    reason = "length" if completion.hit_limit else "stop"
    tokens = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    if not ask.is_openai:
        about = {"model": completion.model, "finish_reason": reason, **tokens}
        return {"id": ask.id, "answer": completion.text, **about, **(more or {})}
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    body = {
        "id": f"chatcmpl-{ask.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completion.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {**tokens, "total_tokens": sum(tokens.values())},
    }
    response = {"status_code": 200, "request_id": f"req_{ask.number}", "body": body}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": response, "error": None}
    return {**row, **({"query_mutator": dict(more)} if more is not None else {})}


def error_row(ask: Ask, error: ErrorInfo) -> dict[str, Any]:
    """Return the row of a line whose call failed for good."""
    said = {"code": error.kind, "message": error.message}
    if not ask.is_openai:
        return {"line": ask.number, "id": ask.id, "error": said}
    row = {"id": f"batch_req_{ask.number}", "custom_id": ask.id, "response": None, "error": said}
    return {"line": ask.number, **row}


def bad_line_row(number: int, reason: str) -> dict[str, Any]:
    """Return the row of a line that cannot be asked."""
    return {"line": number, "id": None, "error": {"code": "invalid_line", "message": reason}}
