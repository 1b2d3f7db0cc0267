"""Ollama's JSON: read and check the fields of a request with its error texts, write replies, durations and options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any

from query_mutator.embedded.http import Connection, Request, Response
from query_mutator.files import count_values

__all__ = [
    "DEFAULT_KEEP_ALIVE_S", "FOREVER_S", "ApiError", "Exchange", "call_options", "dumps", "field", "json_response",
    "model_name", "parse_keep_alive", "read_body", "stamp", "stamp_in", "texts_of", "wrong_type",
]  # fmt: skip

DEFAULT_KEEP_ALIVE_S = 300.0
FOREVER_S = float("inf")
MAX_VALUES = 1_000_000  # of a request: each takes some 60 bytes when it is parsed
MAX_TEXTS = 8192  # of one request for embeddings: a vector takes more than a hundred times the memory of a short text

_COMPACT = json.JSONEncoder(separators=(",", ":"))
_GO_NAMES = {str: "string", bool: "bool", dict: "map[string]interface {}", list: "[]interface {}", int: "int"}
_JSON_NAMES = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
_INTEGER_OPTIONS = ("num_predict", "seed", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "top_k")
_FLOAT_OPTIONS = ("temperature", "top_p", "min_p", "repeat_penalty")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")
_LONGEST = timedelta(days=106_751)  # fits into 64 bits of nanoseconds; what Ollama reports for "forever"


class ApiError(Exception):
    """An error reply: HTTP `status` and the text for its body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Exchange:
    """A request, its connection, and the kind of fault its reply is to have."""

    request: Request
    connection: Connection
    fault: str | None = None

    @cached_property
    def payload(self) -> dict[str, Any]:
        """Return the JSON object in the body; raises ApiError 400."""
        return read_body(self.request.body)


# --- JSON ------------------------------------------------------------------------------------------------------------


def json_response(payload: Any, *, status: int = 200) -> Response:
    """Return `payload` as a JSON reply."""
    return Response(status, dumps(payload))


def dumps(payload: Any) -> bytes:
    """Return compact JSON in ASCII; all other characters, lone surrogates included, are escaped."""
    return _COMPACT.encode(payload).encode("ascii")


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; raises ApiError 400 with the error texts of Go's decoder."""
    if not body.strip():
        raise ApiError(400, "missing request body")
    if count_values(body) > MAX_VALUES:
        raise ApiError(413, f"the request has more than {MAX_VALUES:,} values")
    try:
        payload = _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except RecursionError:
        raise ApiError(400, "exceeded max depth") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ApiError(400, _go_message(error)) from None
    if not isinstance(payload, dict):
        raise ApiError(400, f"json: cannot unmarshal {_json_name(payload)} into Go value of type api.Request")
    return payload


def field(payload: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return the field `name`, or `default` if it is absent or null; raises ApiError 400 for another type."""
    value = payload.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong_type(name, value, _GO_NAMES[kind])
    return value


def wrong_type(name: str, value: Any, wanted: str) -> ApiError:
    """Return the error for a field of the wrong type."""
    return ApiError(400, f"json: cannot unmarshal {_json_name(value)} into Go struct field {name} of type {wanted}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity, which JSON does not have


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _go_message(error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return "invalid character in string literal"
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string"):
        return "unexpected EOF"
    return f"invalid character '{error.doc[error.pos]}' looking for beginning of value"


def _json_name(value: Any) -> str:
    return next((name for kind, name in _JSON_NAMES.items() if isinstance(value, kind)), "null")


# --- fields of a request ---------------------------------------------------------------------------------------------


def model_name(payload: Mapping[str, Any]) -> str:
    """Return the model of a request, from `model` or the older `name`; raises ApiError 400 without one."""
    name = field(payload, "model", str, "") or field(payload, "name", str, "")
    if not name:
        raise ApiError(400, "model is required")
    return str(name)


def texts_of(value: Any) -> list[str]:
    """Return the texts of an `input`: one text or a list; "" and null have none. Raises ApiError 400."""
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "invalid input type")
    if len(texts) > MAX_TEXTS:
        raise ApiError(400, f"{len(texts):,} texts in one request; send at most {MAX_TEXTS:,}")
    return texts


def call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `max_tokens` and `stop` of Ollama's `options`; raises ApiError 400 for an option of the wrong type.

    `seed` and `temperature` are accepted and change nothing: the embedded models are deterministic.
    """
    for name in _INTEGER_OPTIONS:
        if name in options and not _is_integer(options[name]):
            raise ApiError(400, f'option "{name}" must be of type integer')
    for name in _FLOAT_OPTIONS:
        if name in options and not _is_number(options[name]):
            raise ApiError(400, f'option "{name}" must be of type float32')
    stop = options.get("stop") or []
    if not isinstance(stop, list):
        raise ApiError(400, 'option "stop" must be of type array')
    if not all(isinstance(word, str) for word in stop):
        raise ApiError(400, 'option "stop" must be of an array of strings')
    limit = options.get("num_predict")
    return {"max_tokens": None if limit is None else int(limit), "stop": tuple(stop)}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_integer(value: Any) -> bool:
    return value is None or (_is_number(value) and abs(value) < 2**63 and float(value).is_integer())


@lru_cache(maxsize=64)
def parse_keep_alive(value: float | str) -> float:
    """Return the seconds of a number or a text such as "5m" or "1h30m"; below 0 the model stays loaded forever.

    Raises ValueError with Go's error text for anything else.
    """
    if not isinstance(value, str):
        return FOREVER_S if value < 0 else float(value)
    sign, digits = (-1, value[1:]) if value.startswith("-") else (1, value.removeprefix("+"))
    if digits == "0":
        return 0.0
    parts = _DURATION_PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        raise ValueError(f'time: invalid duration "{value}"')
    return FOREVER_S if sign < 0 else sum(float(number) * _UNITS_S[unit] for number, unit in parts)


# --- time stamps -----------------------------------------------------------------------------------------------------


def stamp(moment: datetime) -> str:
    """Return `moment` (in UTC) as RFC 3339 with a Z."""
    return moment.isoformat()[:26] + "Z" if moment.microsecond else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_in(delay_s: float) -> str:
    """Return the stamp `delay_s` seconds from now, at most some 292 years ahead."""
    delay = timedelta(seconds=delay_s) if delay_s < _LONGEST.total_seconds() else _LONGEST
    return stamp(datetime.now(UTC) + delay)
