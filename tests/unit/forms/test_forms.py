"""Forms of the request: their messages, what they read in a reply, and how they are selected."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from query_mutator import forms
from query_mutator.errors import UsageError
from query_mutator.forms import FORMS, Example, Form, FormContext, Framed, last_answer
from query_mutator.types import AS_IS

CONTEXT = FormContext(
    domain="geography",
    original="wat is the capital of Peru",
    examples=(
        Example("What is the capital of Chad?", "N'Djamena"),
        Example("What is the capital of Chile?", "Santiago"),
    ),
)


def turns(framed: Framed) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in framed.messages]


@pytest.mark.parametrize("name", FORMS.names())
def test_every_form_keeps_the_question_and_its_braces(name: str) -> None:
    kinds = json.loads((Path(__file__).parents[2] / "promises" / "untouched.json").read_text("utf-8"))
    for text in ("What is {question}?", "x" * 5000, *itertools.chain(*kinds.values())):
        framed = FORMS.get(name).frame(text, context=CONTEXT)
        assert text in framed.messages[-1].content
        assert framed.messages[-1].role == "user"
    assert FORMS.get(name).read("Lima.") == "Lima."


def test_as_is_is_the_question_alone() -> None:
    framed = FORMS.get(AS_IS).frame("hi", context=FormContext())
    assert turns(framed) == [("user", "hi")]
    assert framed.text == "hi"


def test_examples_are_turns_or_one_text_the_nearest_last() -> None:
    asked = turns(FORMS.get("examples").frame("What is the capital of Peru?", context=CONTEXT))
    assert [role for role, _ in asked] == ["user", "assistant", "user", "assistant", "user"]
    assert asked[-2:] == [("assistant", "Santiago"), ("user", "What is the capital of Peru?")]
    framed = FORMS.get("examples_text").frame("What is the capital of Peru?", context=CONTEXT)
    assert framed.messages[0].content.endswith(
        "Question: What is the capital of Chile?\nAnswer: Santiago\n\nQuestion: What is the capital of Peru?\nAnswer:"
    )
    assert framed.options == {"stop": ["\nQuestion:"]}
    assert framed.text is None  # the stop is part of the request


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("17 + 4 is 21.\n\nAnswer: 21", "21"),
        ("Answer: 20\nNo, I forgot one.\n**Answer:** 21.", "21."),
        ("It is Lima.", "It is Lima."),
        ("First this.\nThen that.\n\n", "Then that."),
        ("", ""),
    ],
)
def test_steps_are_read_at_their_last_answer(reply: str, answer: str) -> None:
    assert last_answer(reply) == answer


def test_selection_names_the_nearest_form() -> None:
    assert forms.select("") == ()
    assert [form.name for form in forms.select("expert, question_answer,expert")] == ["expert", "question_answer"]
    again = [(form.name, form.sample, form.model) for form in forms.select("", ("a", "b"), samples=2)]
    assert again == [("a", 0, "a"), ("b", 0, "b"), ("a#2", 1, "a"), ("b#2", 1, "b")]
    assert [form.name for form in forms.select("expert#3,expert", samples=1)] == ["expert#3", "expert"]
    assert [form.name for form in forms.select("", samples=2)] == ["as_is", "as_is#2"]
    everything = [form.name for form in forms.select("all")]
    assert AS_IS not in everything
    assert {AS_IS, *everything} == set(FORMS.names())
    with pytest.raises(UsageError, match="did you mean 'expert'"):
        forms.select("expret")


def test_a_form_of_ones_own_is_a_text_or_a_function() -> None:
    pirate = Form.of("pirate", "As a pirate.", "Arr! {question}", system="You are a pirate.")
    assert turns(pirate.frame("who?", context=CONTEXT)) == [("system", "You are a pirate."), ("user", "Arr! who?")]
    loud = Form(name="loud", summary="Loud.", function=lambda text, context: text.upper())
    assert loud.frame("who?", context=CONTEXT).text == "WHO?"
    with pytest.raises(ValueError, match=r"\{question\}"):
        Form.of("mute", "Silent.", "Arr!")
