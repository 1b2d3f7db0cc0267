"""Structured replies: the answer in the first string field of a JSON schema, the other fields as small as allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 16  # a schema may refer to itself


def in_format(text: str, format: str | Mapping[str, Any]) -> str:
    """Return `text` as JSON: under "response" for "json", in the schema's first string field for a schema."""
    if isinstance(format, str):
        return json.dumps({"response": text}, ensure_ascii=False)
    return json.dumps(_Filler(text, root=format).fill(format), ensure_ascii=False)


class _Filler:
    """Builds one value for a schema and places the text in it once."""

    def __init__(self, text: str, *, root: Mapping[str, Any]) -> None:
        self._text: str | None = text
        self._root = root

    def fill(self, schema: Any, depth: int = 0) -> Any:
        """Return the smallest value that fits `schema`, with the text in the first free string met."""
        schema = self._resolve(schema)
        if depth > _MAX_DEPTH:
            return None
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._choose(schema["enum"])
        kind = _kind(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return schema.get("minimum", 0)
        return {"boolean": False, "null": None}[kind] if kind in ("boolean", "null") else self._take()

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        # A string of this object comes before one deeper down, wherever it stands.
        order = sorted(properties, key=lambda name: not self._is_free_string(properties[name]))
        values = {name: self.fill(properties[name], depth + 1) for name in order}
        filled = {name: values[name] for name in properties}
        for name in schema.get("required") or ():
            if name not in filled:
                filled[name] = self._take()
        return filled or {"response": self._take()}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        wanted = schema.get("minItems")
        count = max(wanted if isinstance(wanted, int) else 0, 1 if self._text is not None else 0)
        return [self.fill(schema.get("items"), depth + 1) for _ in range(count)]

    def _is_free_string(self, schema: Any) -> bool:
        schema = self._resolve(schema)
        return _kind(schema) == "string" and "enum" not in schema and "const" not in schema

    def _choose(self, allowed: list[Any]) -> Any:
        return self._take() if self._text is not None and self._text in allowed else allowed[0]

    def _take(self) -> str:
        text, self._text = self._text, None
        return text or ""

    def _resolve(self, schema: Any) -> Mapping[str, Any]:
        """Follow `$ref` into `$defs` and take the first branch of `anyOf` that is not null, as pydantic writes them."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            target = self._lookup(schema["$ref"]) if isinstance(schema.get("$ref"), str) else _branch(schema)
            if target is None:
                return schema
            schema = target
        return {}

    def _lookup(self, reference: str) -> Any:
        target: Any = self._root
        for key in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        return target


def _branch(schema: Mapping[str, Any]) -> Any:
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    return next((each for each in branches if isinstance(each, dict) and each.get("type") != "null"), None)


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)
