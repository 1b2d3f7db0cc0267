"""The question inside a model's reply."""

from __future__ import annotations

import pytest

from query_mutator.operators.base import DEFAULT_REFUSAL, clean_rewrite
from query_mutator.rewards.matching import is_refusal

QUESTION = "How do I copy a file?"


@pytest.mark.parametrize(
    "reply",
    [
        QUESTION,
        f"  {QUESTION}\n",
        f'"{QUESTION}"',
        f"'{QUESTION}'",
        f"“{QUESTION}”",
        f"`{QUESTION}`",
        f"**{QUESTION}**",
        f'"**{QUESTION}**"',
        f"```\n{QUESTION}\n```",
        f"```text\n{QUESTION}\n```",
        f"```{QUESTION}```",
        f"<question>\n{QUESTION}\n</question>",
        f"Rewritten question: {QUESTION}",
        f'Rewritten Question:\n"{QUESTION}"',
        f"**Rewritten question:** {QUESTION}",
        f"**Rewritten question**: {QUESTION}",
        f"Question: {QUESTION}",
        f"Rephrased: {QUESTION}",
        f"Corrected query (shorter): {QUESTION}",
        f"Sure, here is the rewritten question:\n\n{QUESTION}",
        f"Here's the question rephrased in plain English: {QUESTION}",
        f"Sure! {QUESTION}",
        f"Sure! Rewritten: {QUESTION}",
        f"{QUESTION}\n\nI replaced the slang and kept the meaning.",
        f"<think>The user wants\n\na question.</think>\n\n{QUESTION}",
        f"the user wants a question</think>{QUESTION}",
        f"<thinking>hm</thinking>{QUESTION}",
        "How do I\ncopy a file?",
    ],
)
def test_what_a_model_adds_around_the_question_is_stripped(reply: str) -> None:
    assert clean_rewrite(reply) == QUESTION


@pytest.mark.parametrize(
    "question",
    [
        "In Python 3: how do I copy a file?",
        "Here is my code: f(x). Why does it fail?",
        "The output of my script is: 3. How do I round it?",
        '"rb" or "wb"?',
        "`os.path` or `pathlib`?",
        "'r' mode, what's it do? I mean 'r'",
        "What does `__init__` do?",
        "Sure, but how do I copy a file?",
        "What's a dict: a table?",
        "2 * 3 or 2 ** 3?",
        "don't",
    ],
)
def test_a_question_that_only_looks_like_it_is_left_alone(question: str) -> None:
    assert clean_rewrite(question) == question


@pytest.mark.parametrize("reply", ["", "  ", "<think>never ends", '""', "```\n```", "Rewritten question:"])
def test_a_reply_without_a_question_is_empty(reply: str) -> None:
    assert clean_rewrite(reply) == ""


def test_the_stand_in_for_a_failed_answer_counts_as_a_refusal() -> None:
    assert is_refusal(DEFAULT_REFUSAL)
