"""Reading request bodies as Ollama does, with its error texts: JSON in, checked fields out, else an ApiError."""

from __future__ import annotations

import json
from typing import Any

from query_mutator.embedded.http import Response

_COMPACT = json.JSONEncoder(separators=(",", ":"))
_GO_NAMES = {str: "string", bool: "bool", dict: "map[string]interface {}", list: "[]interface {}", int: "int"}


class ApiError(Exception):
    """An error reply: HTTP `status` and the text that goes into its body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_response(payload: Any, *, status: int = 200) -> Response:
    """Return `payload` as a JSON reply."""
    return Response(status, dumps(payload))


def maybe_cut(response: Response, fault: str | None) -> Response:
    """Return the reply, or for the fault "cut" its first half."""
    return response._replace(body=response.body[: len(response.body) // 2]) if fault == "cut" else response


def dumps(payload: Any) -> bytes:
    """Return compact JSON in ASCII; other signs, a lone surrogate too, are written as escapes."""
    return _COMPACT.encode(payload).encode("ascii")


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; raises ApiError 400 in the words of Go's decoder."""
    if not body.strip():
        raise ApiError(400, "missing request body")
    try:
        payload = json.loads(body)
    except RecursionError:
        raise ApiError(400, "exceeded max depth") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ApiError(400, _go_message(body, error)) from None
    if not isinstance(payload, dict):
        raise ApiError(400, f"json: cannot unmarshal {_json_name(payload)} into Go value of type api.Request")
    return payload


def field(payload: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return the field `name`, or `default` when it is absent or null; raises ApiError 400 for another type."""
    value = payload.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong_type(name, value, _GO_NAMES[kind])
    return value


def wrong_type(name: str, value: Any, wanted: str) -> ApiError:
    """Return the error for a field of the wrong type."""
    return ApiError(400, f"json: cannot unmarshal {_json_name(value)} into Go struct field {name} of type {wanted}")


def model_name(payload: dict[str, Any]) -> str:
    """Return the model a request names, by `model` or the older `name`; raises ApiError 400 without one."""
    name = field(payload, "model", str, "") or field(payload, "name", str, "")
    if not name:
        raise ApiError(400, "model is required")
    return str(name)


def _go_message(body: bytes, error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return "invalid character in string literal"
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string"):
        return "unexpected EOF"
    return f"invalid character '{error.doc[error.pos]}' looking for beginning of value"


def _json_name(value: Any) -> str:
    kinds = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")
