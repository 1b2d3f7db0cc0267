"""What a program gets for a question."""

from __future__ import annotations

from query_mutator.apply.rewriter import Rewrite, Step


def test_changes_are_the_first_steps_with_a_new_wording() -> None:
    texts = {"spelling": "b", "ask": "b", "undo": "a", "filler": "c", "neutral": "b"}
    steps = tuple(Step(operator=name, text=text, answer=None) for name, text in texts.items())
    found = Rewrite(question="a", text="b", answer="yes", steps=steps, calls=4, seconds=0.0)
    assert [(step.operator, step.text) for step in found.changes] == [("spelling", "b"), ("filler", "c")]
