"""Lines of OpenAI's batch format, and the steps of a rewrite."""

from __future__ import annotations

from query_mutator.apply.batch_files import parse_line
from query_mutator.apply.rewriter import Rewrite, Step


def test_one_stop_is_sent_as_a_list() -> None:
    line = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}], "stop": "END", "top_p": 0.5}}'
    assert parse_line(1, line).options == {"stop": ["END"], "top_p": 0.5}


def test_changes_are_the_first_steps_with_a_new_wording() -> None:
    texts = {"spelling": "b", "ask": "b", "undo": "a", "filler": "c", "neutral": "b"}
    steps = tuple(Step(operator=name, text=text, answer=None) for name, text in texts.items())
    found = Rewrite(question="a", text="b", answer="yes", steps=steps, calls=4, seconds=0.0)
    assert [(step.operator, step.text) for step in found.changes] == [("spelling", "b"), ("filler", "c")]
