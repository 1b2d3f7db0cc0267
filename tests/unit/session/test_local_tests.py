"""Local tests of operators say False exactly where the embedded rewriter would return the text unchanged."""

from __future__ import annotations

import random

import pytest

from query_mutator import operators
from query_mutator.data import python_docs, split_questions
from query_mutator.embedded.corpus import load_corpus
from query_mutator.embedded.rewriter import RuleRewriter
from query_mutator.llm.prompts import clean_rewrite
from query_mutator.operators import Operator, OperatorContext, prompt_of, would_change
from query_mutator.session.local_tests import RULES, TESTED_TEXTS, with_local_tests

CONTEXT = OperatorContext(neighbor="How do I remove a directory tree?")
VOCABULARY = load_corpus().vocabulary()


@pytest.fixture(scope="module")
def rewriter() -> RuleRewriter:
    return RuleRewriter(VOCABULARY)


def rewrite(rewriter: RuleRewriter, operator: Operator, text: str) -> str:
    local = operators.local_rewrite(operator)
    if local is not None:
        return local(text, context=CONTEXT)
    return clean_rewrite(rewriter.reply(prompt_of(operator, text, context=CONTEXT, by_rules=True))) or text


@pytest.fixture(scope="module")
def texts(rewriter: RuleRewriter) -> list[str]:
    """Training questions as they are, and rewritten once and twice by every operator that it has rules for."""
    rng = random.Random(0)
    known = [operators.get(name) for name in operators.names()]
    found = rng.sample([question.text for question in split_questions(python_docs()).train], 60)
    once = {rewrite(rewriter, operator, text) for text in found for operator in known}
    twice = {rewrite(rewriter, operator, text) for text in rng.sample(sorted(once), 40) for operator in known}
    return [*found, *rng.sample(sorted(once), 120), *rng.sample(sorted(twice), 120)]


@pytest.mark.parametrize("name", [*RULES, "how_to", "emphasize"])
def test_false_exactly_where_the_rewriter_changes_nothing(rewriter: RuleRewriter, texts: list[str], name: str) -> None:
    [operator] = with_local_tests([operators.get(name)], vocabulary=VOCABULARY, by_rules=True)
    says = {text: would_change(operator, text, context=CONTEXT) for text in texts}
    assert says == {text: rewrite(rewriter, operator, text) != text for text in texts}
    assert {True, False} == set(says.values())


def test_the_texts_that_are_remembered_are_bounded() -> None:
    [operator] = with_local_tests([operators.get("first_part")], vocabulary=VOCABULARY, by_rules=True)
    for number in range(TESTED_TEXTS + 10):
        would_change(operator, f"question {number}?", context=CONTEXT)
    assert operator.test.cache_info().currsize == TESTED_TEXTS  # type: ignore[attr-defined]


def test_for_a_language_model_only_facts_about_a_text_are_tested() -> None:
    tested = with_local_tests(operators.select(""), vocabulary=VOCABULARY, by_rules=False)
    assert [one.name for one in tested if getattr(one, "test", None)] == ["spelling", "slang"]
    spelling, slang = tested[:2]
    assert not would_change(spelling, "how do i join a list", context=CONTEXT)
    assert would_change(spelling, "how do i jion a list", context=CONTEXT)
    assert would_change(slang, "gimme the list", context=CONTEXT)
    assert not would_change(slang, "give me the list", context=CONTEXT)
