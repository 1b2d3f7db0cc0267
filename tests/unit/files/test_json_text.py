"""JSON as bytes: what comes back is what was written, also where the quick library refuses it."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_mutator.files import decode, encode

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=20,
)


@given(PLAIN)
def test_what_was_written_comes_back_and_json_reads_it_too(value: object) -> None:
    text = encode(value)
    assert b"\n" not in text
    assert decode(text) == json.loads(text) == value


@pytest.mark.parametrize("value", [{"half a sign": "\ud83d"}, {"tiny": sys.float_info.min / 4}])
def test_what_the_quick_library_refuses_is_written_all_the_same(value: object) -> None:
    assert decode(encode(value)) == value


def test_whole_number_beyond_64_bits_is_written_out_and_read_as_a_float() -> None:
    assert encode([10**30]) == b"[1" + b"0" * 30 + b"]"
    assert decode(encode([10**30])) == [1e30]


def test_numbers_that_are_not_finite_become_null() -> None:
    assert encode([math.nan, math.inf, 1.0]) == b"[null,null,1.0]"


def test_a_server_that_writes_nan_is_read() -> None:
    assert math.isnan(decode(b'{"x": NaN}')["x"])


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": 1} x', b"\xff", b"\xef\xbb\xbf{}"])
def test_anything_else_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)
