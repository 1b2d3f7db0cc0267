"""Shaped replies: tokens, stop texts, limits, JSON schemas as pydantic and people write them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from query_mutator.embedded.models import PromptError
from query_mutator.embedded.shaping import in_format, shape, tokens_of

STRING = {"type": "string"}
KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "items", "anyOf", "allOf", "enum", "const", "$ref", "$defs", "required", "minItems"),
        *("maxItems", "prefixItems", "minimum", "maximum", "exclusiveMinimum", "additionalProperties", "a"),
    ]
)
JSON_LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["object", "array", "string", "number", "null", "odd", "#/$defs/a"])
)


class Scores(BaseModel):
    scores: dict[str, float]
    note: str


class Tree(BaseModel):
    left: Tree | None = None
    right: Tree | None = None
    third: Tree | None = None
    name: str


@settings(deadline=None)
@given(st.text())
def test_tokens_joined_are_the_text(text: str) -> None:
    assert "".join(tokens_of(text)) == text


def test_words_and_signs_are_tokens_and_long_words_are_several() -> None:
    assert tokens_of("Use os.kill(pid), unconditionally.") == (
        *("Use", " os", ".", "kill", "(", "pid", ")", ",", " uncondit", "ionally", "."),
    )


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason"),
    [
        ((), None, "a b c d", "stop"),
        ((), 4, "a b c d", "stop"),
        ((), 3, "a b c", "length"),
        ((), 0, "a b c d", "stop"),
        (("", " d", " c"), None, "a b", "stop"),
        ((" c",), 1, "a", "length"),
    ],
)
def test_stop_texts_and_limits(stop: tuple[str, ...], max_tokens: int | None, text: str, reason: str) -> None:
    tokens, done_reason = shape("a b c d", format=None, stop=stop, max_tokens=max_tokens)
    assert ("".join(tokens), done_reason) == (text, reason)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"n": {"type": "integer"}, "t": STRING}}, {"n": 0, "t": "hi"}),
        ({"properties": {"t": STRING, "u": STRING}}, {"t": "hi", "u": ""}),
        ({"properties": {"meta": {"properties": {"id": STRING}}, "t": STRING}}, {"meta": {"id": ""}, "t": "hi"}),
        ({"properties": {"meta": {"properties": {"id": STRING}}}}, {"meta": {"id": "hi"}}),
        ({"properties": {"all": {"type": "array", "items": STRING, "minItems": 2}}}, {"all": ["hi", ""]}),
        ({"properties": {"t": {"anyOf": [{"type": "null"}, STRING]}}}, {"t": "hi"}),
        ({"properties": {"t": {"type": ["null", "string"]}}}, {"t": "hi"}),
        (
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"properties": {"t": STRING}}}},
            {"a": {"t": "hi"}},
        ),
        ({"properties": {"k": {"enum": ["x", "y"]}, "c": {"const": 4}, "t": STRING}}, {"k": "x", "c": 4, "t": "hi"}),
        ({"properties": {"k": {"enum": ["x", "hi"]}}}, {"k": "hi"}),
        ({"properties": {"n": {"type": "number", "minimum": 3}, "z": {"type": "null"}}}, {"n": 3, "z": None}),
        ({"type": "object", "required": ["t"]}, {"t": "hi"}),
        ({"type": "object"}, {"response": "hi"}),
        (STRING, "hi"),
        ({"type": "array", "items": STRING}, ["hi"]),
        ({}, "hi"),
    ],
)
def test_the_answer_goes_into_the_first_string_field(schema: dict[str, Any], value: Any) -> None:
    assert json.loads(in_format("hi", schema)) == value


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (dict[str, float], {}),
        (dict[str, str], {"response": "hi"}),
        (dict[str, list[str]], {"response": ["hi"]}),
        (list[float], []),
        (tuple[int, str], [0, "hi"]),
        (dict[str, dict[str, int]], {}),
        (Annotated[dict[str, float], Field(min_length=2)], {"key0": 0, "key1": 0}),
        (Annotated[float, Field(gt=0, lt=1)], 0.5),
        (Annotated[int, Field(le=-3)], -3),
        (Scores, {"scores": {}, "note": "hi"}),
        (Tree, {"name": "hi", "left": None, "right": None, "third": None}),
    ],
)
def test_replies_are_what_pydantic_asked_for(wanted: Any, value: Any) -> None:
    adapter = TypeAdapter(wanted)
    found = in_format("hi", adapter.json_schema())
    adapter.validate_json(found)
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": STRING, "minItems": 1_000_000_000},
        {"type": "object", "minProperties": 1_000_000_000},
        {"type": "array", "items": {"const": "a" * 10_000}, "minItems": 1_000},
        {"type": "array", "items": {"enum": ["a"] * 10_000}, "minItems": 1_000},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "minItems": 10, "items": {"$ref": "#/$defs/A"}}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {name: {"$ref": "#/$defs/A"} for name in "abcdefgh"}}}},
    ],
)
def test_a_schema_whose_document_is_huge_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="100,000 values"):
        in_format("hi", schema)


@settings(deadline=None)
@given(st.recursive(JSON_LEAF, lambda inner: st.lists(inner) | st.dictionaries(KEYWORDS, inner), max_leaves=20))
def test_any_json_object_as_a_schema_gives_json_or_an_error(schema: Any) -> None:
    if isinstance(schema, dict):
        json.loads(in_format("hi", schema))


def test_a_schema_that_refers_to_itself_ends() -> None:
    tree = {
        "$ref": "#/$defs/T",
        "$defs": {"T": {"properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}},
    }
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    json.loads(in_format("hi", tree))
    json.loads(in_format("hi", loop))
