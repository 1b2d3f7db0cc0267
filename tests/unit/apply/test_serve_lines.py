"""Lines of streams through the proxy: however they arrive, and under the client's model name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.apply.proxy.replies import LineReader, renamed
from query_mutator.apply.proxy.requests import MAX_PARSED_BYTES, MAX_PARSED_VALUES, is_small, names_virtual


def test_a_request_of_many_bytes_or_values_is_not_parsed() -> None:
    assert is_small(b"{}" * 10)
    assert is_small(b'"' + b"x" * (MAX_PARSED_BYTES - 2) + b'"')
    assert not is_small(b"x" * (MAX_PARSED_BYTES + 1))
    assert not is_small(b"[]," * (MAX_PARSED_VALUES // 2 + 1))


def test_a_virtual_name_is_seen_at_either_end_of_what_is_not_parsed() -> None:
    note = b'"note":"' + b"x" * 1_000_000 + b'"'
    assert names_virtual(b'{"model":"m+qm",' + note + b"}")
    assert names_virtual(b"{" + note + b',"model" : "m+qm"}')
    assert not names_virtual(b'{"model":"m",' + note + b',"says":"m+qm"}')
    assert not names_virtual(b'{"model":' * 300_000)


def test_a_line_gets_the_clients_name_and_a_long_one_keeps_its_bytes() -> None:
    assert renamed(b'data: {"model":"m","n":1}\n', "m+qm") == b'data: {"model":"m+qm","n":1}\n'
    line = b'data: {"model":"m","embeddings":[' + b"[1.50,2e3]," * 20_000 + b"[0]]}\n"
    assert renamed(line, "m+qm") == line


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
