"""Operators by name, their guards, and the sentences that no code may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from query_mutator import data, operators
from query_mutator.errors import UsageError
from query_mutator.operators import GUARDS, OPERATORS, LocalOperator, OperatorContext, PromptOperator, rejecting_guard
from query_mutator.operators.guards import failed_guard

SORT = "how do i sort a list of names in place"
KENYA = "What is the capital of Kenya?"
CONTEXT = OperatorContext(domain="Python's standard library", neighbor="How do I round 3.5 to an int?")
LOCAL = [name for name in OPERATORS.names() if operators.local_rewrite(OPERATORS.get(name)) is not None]
REWRITES: Mapping[str, list[list[str]]] = json.loads(Path(__file__).with_name("rewrites.json").read_text("utf-8"))
UNTOUCHED: Mapping[str, list[str]] = json.loads(
    (Path(__file__).parents[2] / "promises" / "untouched.json").read_text("utf-8")
)


def test_the_operators_have_a_fixed_order_in_which_new_ones_are_last() -> None:
    expected = "spelling slang terms neutral filler imperative keywords context first_part merge grammar expand"
    assert OPERATORS.names() == [*expected.split(), "clean"]


def test_select_keeps_the_order_given_and_drops_repeats() -> None:
    by_model = "spelling slang terms neutral filler context grammar expand"  # those that keep the meaning
    for spec, names in (("clean, spelling,clean", "clean spelling"), ("", by_model), ("keywords", "keywords")):
        assert [operator.name for operator in operators.select(spec)] == names.split()


def test_a_typo_names_the_operator_that_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean 'spelling'"):
        operators.select("speling")


def test_render_puts_neighbour_and_domain_where_the_prompt_asks_for_them() -> None:
    context = OperatorContext(domain="the C library", neighbor="How do I open a file?")
    assert "<neighbour>\nHow do I open a file?\n</neighbour>" in OPERATORS.get("merge").render("q", context=context)
    assert "<domain>the C library</domain>" in OPERATORS.get("context").render("q", context=context)
    assert "the C library" not in OPERATORS.get("spelling").render("q", context=context)


def test_braces_in_a_question_are_text() -> None:
    prompt = OPERATORS.get("spelling").render("what is {question} in f'{x}'", context=OperatorContext())
    assert "<question>\nwhat is {question} in f'{x}'\n</question>" in prompt


def test_an_operator_of_ones_own_is_a_prompt_with_the_question() -> None:
    own = PromptOperator.of("shorter", "Say it in fewer words.", "Shorten it: {question}")
    assert own.render("How?", context=OperatorContext()) == "Shorten it: How?\n"
    with pytest.raises(ValueError, match=r"operator .x.: its prompt must hold \{question\}"):
        PromptOperator.of("x", "Summary.", "no slot")


def rejected(operator: str, question: str, rewrite: str) -> str | None:
    return rejecting_guard(OPERATORS.get(operator), question, rewrite, context=CONTEXT)


@pytest.mark.parametrize(("question", "rewrite", "guard"), REWRITES["rejected"])
def test_a_rewrite_that_is_none_is_rejected(question: str, rewrite: str, guard: str) -> None:
    assert rejected("spelling", question, rewrite) == guard


@pytest.mark.parametrize(("operator", "question", "rewrite"), REWRITES["kept"])
def test_what_an_operator_is_for_passes(operator: str, question: str, rewrite: str) -> None:
    assert rejected(operator, question, rewrite) is None


@pytest.mark.parametrize("half", ["open", "frozen"])
def test_guards_reject_rewrites_that_change_the_meaning_and_no_others(half: str) -> None:
    lines = Path(__file__).with_name(f"{half}_rewrites.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    changed = [not row["keeps"] for row in rows]
    found = [failed_guard(GUARDS, row["original"], row["rewrite"]) is not None for row in rows]
    hits = sum(map(min, changed, found))
    assert hits / sum(found) >= 0.95
    assert hits / sum(changed) >= 0.95


@pytest.mark.parametrize("name", OPERATORS.names())
def test_no_rewrite_of_a_model_may_answer(name: str) -> None:
    operator = OPERATORS.get(name)
    expected = None if operators.local_rewrite(operator) else "answer"
    assert rejecting_guard(operator, KENYA, "The capital of Kenya is Nairobi.", context=CONTEXT) == expected


def test_an_operator_of_ones_own_has_all_guards_or_those_that_it_declares() -> None:
    class Bare:
        name, summary = "bare", "Shorten it."

        def render(self, question: str, *, context: OperatorContext) -> str:
            return question

    whole = PromptOperator.of("short", "Shorten it.", "Shorten {question}")
    some = PromptOperator.of("short", "Shorten it.", "Shorten {question}", guards=["answer"])
    assert (whole.guards, some.guards) == (GUARDS, ("answer",))
    local = LocalOperator(name="say", summary="Say a word.", function=lambda *_: "tuple")
    for operator, expected in ((Bare(), "question"), (whole, "question"), (some, None), (local, None)):
        assert rejecting_guard(operator, SORT, "tuple", context=CONTEXT) == expected
    guarded = LocalOperator(name="say", summary="Say a word.", function=lambda *_: "tuple", guards=("question",))
    assert rejecting_guard(guarded, SORT, "tuple", context=CONTEXT) == "question"


def test_an_unknown_guard_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown guard 'anwser'.*did you mean 'answer'"):
        PromptOperator.of("short", "Shorten it.", "Shorten {question}", guards=["anwser"])


def rewrite(name: str, text: str) -> str:
    local = operators.local_rewrite(OPERATORS.get(name))
    assert local is not None
    return local(text, context=OperatorContext())


@pytest.mark.parametrize("kind", UNTOUCHED)
@pytest.mark.parametrize("name", LOCAL)
def test_no_code_changes_or_drops_a_word_of_a_question(name: str, kind: str) -> None:
    assert [rewrite(name, text) for text in UNTOUCHED[kind]] == UNTOUCHED[kind]


@pytest.mark.parametrize(("typed", "left"), REWRITES["cleaned"])
def test_greetings_and_thanks_leave_whole(typed: str, left: str) -> None:
    assert rewrite("clean", typed) == rewrite("clean", left) == left


@pytest.mark.parametrize("run", ["\n", " ", "\n ", "Hi. ", "Thanks. ", "thanks\n", ". ", "1. ", "a"])
def test_a_long_text_is_read_at_once(run: str) -> None:
    assert rewrite("clean", f"Why? {run * 20_000}x") in f"Why? {run * 20_000}x"
    assert rewrite("clean", f"{run * 20_000}Who is it?").endswith("Who is it?")


def test_whatever_leaves_is_before_or_after_the_question() -> None:
    for question in data.general():
        left = rewrite("clean", question.text)
        assert left in question.text
        assert rewrite("clean", left) == left != ""


@pytest.mark.parametrize("name", [name for name in OPERATORS.names() if name not in LOCAL])
def test_every_prompt_asks_for_the_rewritten_question_alone(name: str) -> None:
    prompt = OPERATORS.get(name).render("How do I join paths?", context=CONTEXT)
    assert "[operator" not in prompt
    assert "Reply with the rewritten question only." in prompt
    assert "<question>\nHow do I join paths?\n</question>" in prompt
    assert OPERATORS.get(name).summary.endswith(".")


def test_spelling_is_not_asked_where_every_word_is_known() -> None:
    tests = [operators.would_change(OPERATORS.get("spelling"), text, context=CONTEXT) for text in (KENYA, "wich one")]
    assert tests == [False, True]
    words = operators.english_words()
    assert {"the", "remove", "folder"} <= words
    assert len(words) > 20_000
    assert all(word.isalpha() and word == word.lower() for word in words)
