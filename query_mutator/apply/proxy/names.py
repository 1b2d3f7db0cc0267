"""The model's name in JSON that is too large to parse: found near its beginning or end, and replaced in its bytes.

The interpreter serves nobody else while it parses: 60 MB of `{},` take 17 s and 2 GB.
"""

from __future__ import annotations

import re
from collections import deque
from itertools import islice
from typing import NamedTuple

import orjson

from query_mutator.files import count_values

__all__ = ["MAX_PARSED_BYTES", "SOUGHT_BYTES", "ModelName", "find_model", "is_small"]

MAX_PARSED_BYTES = 1_000_000  # of a request; a larger one is forwarded as it is
MAX_PARSED_VALUES = 100_000
SOUGHT_BYTES = 64 * 1024  # at either end of what is not parsed
_MAX_FIELDS = 100  # that are called `model`, at any depth
_FIELD = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){1,500}")')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class ModelName(NamedTuple):
    """A model's name, and where its string stands in the beginning or the end of JSON."""

    text: str
    start: int
    end: int
    is_in_tail: bool


def is_small(content: bytes) -> bool:
    """Return whether a request is parsed."""
    return len(content) <= MAX_PARSED_BYTES and (
        len(content) <= MAX_PARSED_VALUES or count_values(content) <= MAX_PARSED_VALUES
    )


def find_model(head: bytes, tail: bytes) -> ModelName | None:
    """Return the field `model` of an object by its beginning and its end, None if it is in neither."""
    found, is_in_tail = _in_head(head), False
    if found is None:
        found, is_in_tail = _in_tail(tail), True
    if found is None:
        return None
    try:
        text = str(orjson.loads((tail if is_in_tail else head)[found]))
    except ValueError:
        return None
    return ModelName(text, found.start, found.stop, is_in_tail)


def _in_head(head: bytes) -> slice | None:
    depth = begin = 0
    for field in islice(_FIELD.finditer(head), _MAX_FIELDS):
        if _is_field(head, field.start()):
            depth, begin = depth + _rise(head[begin : field.start()]), field.start()
            if depth == 1:
                return slice(*field.span(1))
    return None


def _in_tail(tail: bytes) -> slice | None:
    depth, end = 0, len(tail)
    for field in reversed(deque(_FIELD.finditer(tail), maxlen=_MAX_FIELDS)):
        if _is_field(tail, field.start()):
            depth, end = depth - _rise(tail[field.end() : end]), field.end()
            if depth == 1:
                return slice(*field.span(1))
    return None


def _is_field(content: bytes, start: int) -> bool:
    """Return whether a quotation mark begins a string: within one, it would be escaped."""
    return start > 0 and content[start - 1] != ord("\\")


def _rise(part: bytes) -> int:
    """Return by how many levels JSON is deeper at the end of a part than at its beginning, both outside of strings."""
    bare = _STRING.sub(b"", part)
    return sum(map(bare.count, (b"{", b"["))) - sum(map(bare.count, (b"}", b"]")))
