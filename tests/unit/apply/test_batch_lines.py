"""Lines of OpenAI's batch format, as servers of both APIs take them."""

from __future__ import annotations

from query_mutator.apply.batch_files import parse_line


def test_one_stop_is_sent_as_a_list() -> None:
    line = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}], "stop": "END", "top_p": 0.5}}'
    assert parse_line(1, line).options == {"stop": ["END"], "top_p": 0.5}
