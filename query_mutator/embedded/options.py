"""Ollama's `options`: those that shape one reply, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from query_mutator.embedded.wire import ApiError

_WHOLE = ("num_predict", "seed", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "top_k")
_REAL = ("temperature", "top_p", "min_p", "repeat_penalty")


def call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `max_tokens` and `stop` of a call; raises ApiError 400 for an option of the wrong type.

    `seed` and `temperature` are accepted and change nothing: the embedded models always give the same reply.
    """
    for name in _WHOLE:
        if name in options and not _is_whole(options[name]):
            raise ApiError(400, f'option "{name}" must be of type integer')
    for name in _REAL:
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


def _is_whole(value: Any) -> bool:
    return value is None or (_is_number(value) and float(value).is_integer())
