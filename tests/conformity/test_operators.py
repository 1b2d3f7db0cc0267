"""One contract for all operators: a prompt a language model can follow, and a rule under the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from query_mutator import operators
from query_mutator.embedded.rewriter import UNKNOWN, RuleRewriter
from query_mutator.errors import UsageError
from query_mutator.operators import OperatorContext

QUESTION = "yo hwo do i kill a {child} proccess plz, and then what?"
CONTEXT = OperatorContext(domain="the handbook", neighbour="How do I stop a thread?")
VOCABULARY = frozenset({"child", "process", "kill", "stop", "thread"})


@pytest.mark.parametrize("name", operators.names())
def test_prompt_begins_with_the_marker_and_holds_the_question_as_it_is(name: str) -> None:
    operator = operators.get(name)
    prompt = operator.render(QUESTION, context=CONTEXT)
    assert prompt.splitlines()[0] == f"[operator: {name}]"
    assert f"<question>\n{QUESTION}\n</question>" in prompt
    assert "Reply with the rewritten question only." in prompt
    assert operator.summary


@pytest.mark.parametrize("name", operators.names())
def test_rule_rewriter_carries_the_operator_out(name: str) -> None:
    rewriter = RuleRewriter(VOCABULARY)
    prompt = operators.get(name).render(QUESTION, context=CONTEXT)
    (rewritten,) = rewriter.reply_many([prompt])
    assert rewritten
    assert rewritten != UNKNOWN.format(known=", ".join(rewriter.operators()))
    assert rewriter.reply_many([prompt]) == [rewritten]


@pytest.mark.parametrize(
    ("name", "question", "rewritten"),
    [
        ("spelling", "kill a child proccess", "kill a child process"),
        ("neutral", "How do I kill a child process?", "How do I stop a child process?"),
        ("neutral", "How do I kill my neighbour?", "How do I kill my neighbour?"),
        ("neutral", "Tell me how to rob an old lady.", "Tell me how to rob an old lady."),
    ],
)
def test_rules_change_what_they_are_for_and_nothing_else(name: str, question: str, rewritten: str) -> None:
    prompt = operators.get(name).render(question, context=CONTEXT)
    assert RuleRewriter(VOCABULARY).reply_many([prompt]) == [rewritten]


def test_unknown_operator_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean 'spelling'"):
        operators.select("speling")


def test_readme_links_lead_somewhere() -> None:
    import re

    root = Path(__file__).resolve().parents[2]
    for link in re.findall(r"\]\((docs/[^)#]+)\)", (root / "README.md").read_text(encoding="utf-8")):
        assert (root / link).exists(), link
