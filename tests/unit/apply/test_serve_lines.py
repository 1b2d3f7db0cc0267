"""Lines of streams through the proxy: however they arrive, and under the client's model name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.apply.proxy.chat import MAX_PARSED_BYTES, MAX_PARSED_VALUES, is_small, read_lines, renamed


def test_a_request_of_many_bytes_or_values_is_not_parsed() -> None:
    assert is_small(b"{}" * 10)
    assert is_small(b'"' + b"x" * (MAX_PARSED_BYTES - 2) + b'"')
    assert not is_small(b"x" * (MAX_PARSED_BYTES + 1))
    assert not is_small(b"[]," * (MAX_PARSED_VALUES // 2 + 1))


def test_a_line_gets_the_clients_name_and_a_long_one_keeps_its_bytes() -> None:
    assert renamed(b'data: {"model":"m","n":1}\n', "m+qm") == b'data: {"model":"m+qm","n":1}\n'
    line = b'data: {"model":"m","embeddings":[' + b"[1.50,2e3]," * 20_000 + b"[0]]}\n"
    assert renamed(line, "m+qm") == line


async def lines_of(*chunks: bytes) -> list[list[bytes]]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [lines async for lines in read_lines(arriving())]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"a\nb", b"\n\n"]), max_size=30))
def test_lines_are_the_same_however_they_arrive(chunks: list[bytes]) -> None:
    *lines, last = [line for together in asyncio.run(lines_of(*chunks, b"end")) for line in together]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert b"".join([*lines, last]) == b"".join(chunks) + b"end"


def test_a_line_of_20_mb_is_read_in_small_pieces() -> None:
    lines = asyncio.run(lines_of(*[b"x" * 100] * 200_000, b"\n"))  # minutes, if each copied the line so far
    assert [len(line) for together in lines for line in together] == [20_000_001]
