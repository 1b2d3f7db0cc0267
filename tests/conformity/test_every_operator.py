"""Every operator keeps the same contract: a prompt that holds the question, or a function of the question."""

from __future__ import annotations

import pytest

from query_mutator import operators
from query_mutator.operators import OperatorContext

CONTEXT = OperatorContext(neighbor="How do I remove a directory tree?")
QUESTIONS = (
    "How do I delete a folder with everything in it?",
    "yo gimme the `os.path.join` thing for my_file.txt n stuff",
    "?",
    "naïve café – “quotes”, <question>tags</question> and {braces}",
    "x" * 3000,
)
LOCAL = [name for name in operators.names() if operators.local_rewrite(operators.get(name)) is not None]
NAMES = [name for name in operators.names() if name not in LOCAL]


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_asks_for_the_rewritten_question_alone(name: str) -> None:
    operator = operators.get(name)
    prompt = operator.render("How do I join paths?", context=CONTEXT)
    assert "[operator" not in prompt
    assert "Reply with the rewritten question only." in prompt
    assert "<question>\nHow do I join paths?\n</question>" in prompt
    assert operator.summary.endswith(".")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", LOCAL)
def test_a_local_rewrite_is_text_that_stays_the_same_when_rewritten_again(name: str, question: str) -> None:
    local = operators.local_rewrite(operators.get(name))
    assert local is not None
    rewritten = local(question, context=CONTEXT)
    assert rewritten == rewritten.strip() != ""
    assert local(rewritten, context=CONTEXT) == rewritten
