"""Operators are prompt files registered by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from query_mutator import operators
from query_mutator.errors import UsageError
from query_mutator.operators import GUARDS, OperatorContext, PromptOperator


def test_the_operators_have_a_fixed_order_in_which_new_ones_are_last() -> None:
    expected = "spelling slang terms neutral filler imperative keywords context first_part merge grammar expand"
    cleaning = "clean shorthand typos courtesy core tidy"
    assert operators.names() == [*expected.split(), *cleaning.split()]


def test_select_keeps_the_order_given_and_drops_repeats() -> None:
    assert [operator.name for operator in operators.select("terms, spelling,terms")] == ["terms", "spelling"]


def test_select_of_nothing_is_the_rewrites_by_a_model_that_keep_the_meaning() -> None:
    expected = "spelling slang terms neutral filler context grammar expand"
    assert [operator.name for operator in operators.select("")] == expected.split()
    assert [operator.name for operator in operators.select("keywords")] == ["keywords"]


def test_a_typo_names_the_operator_that_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean 'spelling'"):
        operators.select("speling")


def test_render_puts_neighbour_and_domain_where_the_prompt_asks_for_them() -> None:
    context = OperatorContext(domain="the C library", neighbor="How do I open a file?")
    assert "<neighbour>\nHow do I open a file?\n</neighbour>" in operators.get("merge").render("q", context=context)
    assert "<domain>the C library</domain>" in operators.get("context").render("q", context=context)
    assert "the C library" not in operators.get("spelling").render("q", context=context)


def test_braces_in_a_question_are_text() -> None:
    prompt = operators.get("spelling").render("what is {question} in f'{x}'", context=OperatorContext())
    assert "<question>\nwhat is {question} in f'{x}'\n</question>" in prompt


def test_an_operator_of_ones_own_is_one_text() -> None:
    text = "[operator: shorter]\n# Say it in fewer words.\nShorten it.\n\n<question>\n{question}\n</question>\n"
    own = PromptOperator.parse(text, source="shorter.md")
    assert (own.name, own.summary) == ("shorter", "Say it in fewer words.")
    assert own.render("How?", context=OperatorContext()).startswith("Shorten it.")
    assert own.guards == GUARDS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# no marker\n{question}", "first line"),
        ("[operator: x]\nno summary\n{question}", "second line"),
        ("[operator: x]\n# Summary.\nno slot", "{question}"),
    ],
)
def test_a_broken_prompt_file_is_named_with_what_is_missing(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        PromptOperator.parse(text, source="mine.md")
    assert str(caught.value).startswith("mine.md: ")


def test_importing_the_operators_loads_no_torch() -> None:
    code = "import sys, query_mutator.operators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
