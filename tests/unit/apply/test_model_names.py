"""The model's name in JSON that is not parsed: the same as a parser finds, and its place."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.apply.proxy.names import (
    MAX_PARSED_BYTES,
    MAX_PARSED_VALUES,
    SOUGHT_BYTES,
    ModelName,
    find_model,
    is_small,
)
from query_mutator.apply.proxy.replies import LineReader, renamed

PICTURE = b'"' + b"iVBORw0KGgo" * 200_000 + b'"'
KEYS = st.sampled_from(["model", 'a"model', "\\", '"model":"x"', "messages", "{", "\\\\"])
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text('"\\{}[],:model ', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def string_of(found: ModelName, head: bytes, tail: bytes) -> bytes:
    """Return the string of a name."""
    return (tail if found.is_in_tail else head)[found.start : found.end]


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.integers(0, 40), st.booleans())
def test_the_name_is_the_one_of_the_outermost_object(body: dict[str, object], head: int, indents: bool) -> None:
    content = orjson.dumps(body, option=orjson.OPT_INDENT_2 if indents else 0)
    expected = body.get("model")
    known = expected if isinstance(expected, str) and expected else None
    assert getattr(find_model(content, b""), "text", None) == known
    assert getattr(find_model(b"", content), "text", None) == known
    found = find_model(content[:head], content[head:])
    assert found is None or found.text == known == orjson.loads(string_of(found, content[:head], content[head:]))


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "m+qm", "images": [' + PICTURE + b"]}",
        b'{"messages": [{"images": [' + PICTURE + b'], "model": "no"}], "model": "m+qm", "options": {"model": "no"}}',
        b'{"messages": [{"text": "\\"model\\": \\"no\\""}, ' + PICTURE + b'],\n "model" :\t"m+qm"\n}\n',
        b'{"model": "m\\u002bqm", "x": [' + b"{}," * 400_000 + b"{}]}",
        b'{"model":"m+qm"}',
    ],
)
def test_a_name_before_and_after_a_picture_is_found(content: bytes) -> None:
    head, tail = content[:SOUGHT_BYTES], content[-SOUGHT_BYTES:]
    found = find_model(head, tail)
    assert found is not None
    assert found.text == "m+qm" == orjson.loads(string_of(found, head, tail))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}," * 1_000_000,
        b'{"model":"a",' * 1_000_000,
        b'"model":' * 300_000,
        b'{"x":{"model":"a"},"y":' + PICTURE + b"}",
        b'{"a\\"model":"b"}',
        b'{"model":"\\ud800"}',
        b'{"model":["m"]}',
        b"\xff\xfe" * 1_000_000,
    ],
)
def test_what_has_no_name_has_none(content: bytes) -> None:
    found = find_model(content[:SOUGHT_BYTES], content[-SOUGHT_BYTES:])
    assert found is None or (content.startswith(b'{"model":"a",') and found.text == "a")


def test_a_request_of_many_bytes_or_values_is_not_parsed() -> None:
    assert is_small(b"{}" * 10)
    assert is_small(b'"' + b"x" * (MAX_PARSED_BYTES - 2) + b'"')
    assert not is_small(b"x" * (MAX_PARSED_BYTES + 1))
    assert not is_small(b"[]," * (MAX_PARSED_VALUES // 2 + 1))


def test_a_long_line_gets_the_clients_name_and_keeps_its_bytes() -> None:
    vectors = b"[1.50,2e3]," * 20_000
    line = b'data: {"model":"m","embeddings":[' + vectors + b"[0]]}\n"
    assert renamed(line, "m+qm") == line.replace(b'"m"', b'"m+qm"', 1)
    assert renamed(vectors, "m+qm") == vectors


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"a\nb", b"\n\n"]), max_size=30))
def test_lines_are_the_same_however_they_arrive(chunks: list[bytes]) -> None:
    reader = LineReader()
    lines = [line for chunk in chunks for line in reader.lines(chunk)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert b"".join([*lines, reader.rest()]) == b"".join(chunks)


def test_a_line_of_20_mb_is_read_in_small_pieces() -> None:
    reader, piece = LineReader(), b"x" * 100
    assert not any(reader.lines(piece) for _ in range(200_000))  # minutes, if each copied the line so far
    assert len(reader.lines(b"\n")[0]) == 20_000_001
