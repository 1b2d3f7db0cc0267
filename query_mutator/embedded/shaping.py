"""From a model's text to the reply that was requested: `format`, then `stop`, then `num_predict`.

For a JSON schema the answer goes into the first string field and the other fields are as small as the schema allows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from query_mutator.embedded.models import PromptError

__all__ = ["in_format", "shape", "tokens_of"]

# A token is a word of up to eight letters or one other character, with the whitespace before it.
_TOKEN = re.compile(r"\s*\w{1,8}|\s*[^\w\s]|\s+")
_MAX_DEPTH = 16  # a schema may refer to itself
MAX_COST = 100_000  # values of a schema's smallest document plus characters of its names and constants
_SMALLEST = {"boolean": False, "null": None}


@lru_cache(maxsize=1024)
def tokens_of(text: str) -> tuple[str, ...]:
    """Return the tokens of `text`; joined they are the text."""
    return tuple(_TOKEN.findall(text))


def shape(
    text: str, *, format: str | Mapping[str, Any] | None, stop: Sequence[str], max_tokens: int | None
) -> tuple[Sequence[str], str]:
    """Return the tokens of the reply and its `done_reason` ("stop" or "length").

    As in a language model the format is written first, ends at a stop text, and is truncated to `max_tokens` (None or
    below 1 is no limit), if necessary in the middle of its JSON. Raises PromptError for a
    schema whose document is too large.
    """
    if format:
        text = in_format(text, format)
    cuts = [at for word in stop if word and (at := text.find(word)) >= 0]
    tokens = tokens_of(text[: min(cuts)] if cuts else text)
    if max_tokens is not None and 0 < max_tokens < len(tokens):
        return tokens[:max_tokens], "length"
    return tokens, "stop"


def in_format(text: str, format: str | Mapping[str, Any]) -> str:
    """Return `text` as JSON: under "response" for "json", in the schema's first string field for a schema."""
    value = {"response": text} if isinstance(format, str) else _SchemaFiller(text, root=format).fill(format)
    return json.dumps(value, ensure_ascii=False)


class _SchemaFiller:
    """Builds the smallest value for a schema and places the text in it once."""

    def __init__(self, text: str, *, root: Mapping[str, Any]) -> None:
        self._text: str | None = text
        self._root = root
        self._left = MAX_COST

    def fill(self, schema: Any, depth: int = 0) -> Any:
        """Return the smallest value that fits `schema`, with the text in the first free string."""
        self._spend(1)
        schema = self._resolve(schema)
        if depth > _MAX_DEPTH:
            return None
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            self._spend(len(schema["enum"]))
            fits = self._text is not None and self._text in schema["enum"]
            return self._take() if fits else self._constant(schema["enum"][0])
        kind = _kind(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return _number(schema, step=1 if kind == "integer" else 0.5)
        return _SMALLEST[kind] if kind in _SMALLEST else self._take()

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise PromptError(f"invalid format: the smallest document of this schema exceeds {MAX_COST:,} values")

    def _constant(self, value: Any) -> Any:
        self._spend(len(json.dumps(value)))
        return value

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        wanted = schema.get("minItems")
        count = max(wanted if isinstance(wanted, int) else 0, len(first))
        self._spend(count)  # before the first of them is made
        if count == 0 and schema.get("maxItems") != 0:
            return self._place_of_text(schema.get("items"), depth)
        others = count - len(first)
        return [self.fill(each, depth + 1) for each in [*first, *[schema.get("items")] * others]]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        self._spend(len(properties) + sum(map(len, properties)))
        # A string of this object is preferred to one in an object inside it.
        order = sorted(properties, key=lambda name: not self._is_free_string(properties[name]))
        values = {name: self.fill(properties[name], depth + 1) for name in order}
        filled = {name: values[name] for name in properties}
        others = schema.get("additionalProperties", {})
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in filled:
                filled[name] = self.fill(others, depth + 1)
        if not filled and others is not False:
            filled |= dict(zip(["response"], self._place_of_text(others, depth), strict=False))
        wanted = schema.get("minProperties")
        missing = max(0, wanted - len(filled)) if isinstance(wanted, int) else 0
        self._spend(missing)
        return filled | {f"key{number}": self.fill(others, depth + 1) for number in range(missing)}

    def _place_of_text(self, schema: Any, depth: int) -> list[Any]:
        """Return a value for `schema` if the text has its place in it, so that it is worth adding one."""
        if self._text is None:
            return []
        value = self.fill(schema, depth + 1)
        return [value] if self._text is None else []

    def _is_free_string(self, schema: Any) -> bool:
        schema = self._resolve(schema)
        return _kind(schema) == "string" and "enum" not in schema and "const" not in schema

    def _take(self) -> str:
        text, self._text = self._text, None
        return text or ""

    def _resolve(self, schema: Any) -> Mapping[str, Any]:
        """Follow `$ref` into `$defs`, and the first branch of `anyOf` that is not null, as pydantic writes them.

        When the text has its place, null is the smallest value.
        """
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            target = self._lookup(schema["$ref"]) if isinstance(schema.get("$ref"), str) else self._branch(schema)
            if target is None:
                return schema
            schema = target
        return {}

    def _lookup(self, reference: str) -> Any:
        self._spend(len(reference))
        target: Any = self._root
        for key in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        return target

    def _branch(self, schema: Mapping[str, Any]) -> Any:
        branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
        branches = [each for each in branches if isinstance(each, dict)] if isinstance(branches, list) else []
        self._spend(len(branches))
        prefers_null = self._text is None
        return next(iter(sorted(branches, key=lambda branch: (branch.get("type") == "null") != prefers_null)), None)


def _number(schema: Mapping[str, Any], *, step: float) -> float:
    """Return a number within the limits of `schema`: 0 if it fits, else the limit."""
    limits = {name: value for name, value in schema.items() if isinstance(value, (int, float))}
    low = limits.get("minimum", limits.get("exclusiveMinimum", -math.inf) + step)
    high = limits.get("maximum", limits.get("exclusiveMaximum", math.inf) - step)
    return min(max(low, 0), high)


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)
