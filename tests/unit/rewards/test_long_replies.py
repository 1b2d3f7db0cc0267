"""Long and nasty replies: every reader sees their last 20,000 characters, so that no pattern stalls a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from query_mutator import forms
from query_mutator.confidence import Attempt, rule_vote
from query_mutator.confidence.features import feature_row
from query_mutator.operators.base import clean_rewrite
from query_mutator.operators.guards import GUARDS, failed_guard
from query_mutator.rewards import Evidence, Judge, Unscored, WeightedReward, is_not_sure, is_refusal
from query_mutator.rewards.committed import FAMILY, SYMBOLS
from query_mutator.rewards.matching import decided, final_number
from query_mutator.rewards.parts import PARTS
from query_mutator.types import READ_CHARS, Completion, Question, read_part

FEW = "How many apples are 2 and 3?"
KINDS = ("number", "last_number", "choice", "yes_no", "words")
PIECES = (
    " ", "\n", " \n", "\t", "\u00a0", "(", "[{", ")", '"', "`", "*", "“", "1", "1.", "1,234,", "1 ", "1/", "1+", "=",
    "\n=", "\n- ", "A", "A ", "A, ", "a", "_a", "a.", "a(", "is ", "answer ", "answer:\n", "the answer is ", "####",
    "\\frac{", "\\boxed{", "<think>", "</think>", ".", "?", "é", '{"a":', "sorry ", "1% of ", "A or ", "I'm ",
)  # fmt: skip


def nasty() -> Iterator[str]:
    """Yield repeated pieces, alone and between words."""
    for piece in PIECES:
        yield (piece * 30_000)[:30_000]
        yield f"x {(piece * 1_000_000)[:1_000_000]} 7"


QUESTIONS: Mapping[str, Question] = {
    "number": Question(id="a", text=FEW, accept=("5",), tags=("numeric",)),
    "name": Question(id="b", text="Which function sorts a list?", accept=("sorted",), reference="sorted sorts a list"),
    "text": Question(id="c", text="Who wrote it?", accept=("Ada Lovelace",), tags=("text",)),
    "symbol": Question(id="d", text="Which symbol has gold?", accept=("Au",), tags=(FAMILY + SYMBOLS[0],)),
    "family": Question(id="e", text="Which language is it?", accept=("Danish",), tags=(FAMILY + "language",)),
}
ROW = np.ones(1, dtype=np.float32)


def graded(part: str, question: Question, answer: str) -> None:
    evidence = Evidence(
        question=question, rewrite=question.text, answer=answer,
        question_vector=ROW, rewrite_vector=ROW, answer_vector=ROW, reference_vector=ROW, judge=Judge(model="m"),
    )  # fmt: skip
    try:
        scoring: Any = PARTS.get(part)(evidence)
        if part == "judge" and not isinstance(scoring, float):
            next(scoring)
            scoring.send(Completion(text=answer))
    except (Unscored, StopIteration):
        pass


def readers() -> Iterator[tuple[str, Callable[[str], object]]]:
    """Yield everything that reads a reply, by name."""
    for part in PARTS.names():
        for name, question in QUESTIONS.items():
            yield f"{part} of a {name}", lambda text, part=part, question=question: graded(part, question, text)
    for form in forms.names():
        yield form, forms.get(form).answer_in
    for form in ("schema", "logprobs", "words"):
        yield f"judge by {form}", lambda text, form=form: Judge(model="m", form=form).verdict(Completion(text=text))
    for kind in KINDS:
        yield f"vote by {kind}", lambda text, kind=kind: rule_vote("How?", [Attempt(text=text)], kind=kind)
        yield f"features of {kind}", lambda text, kind=kind: feature_row(FEW, Attempt(text=text), kind=kind)
    yield "refusals", lambda text: (is_refusal(text), is_not_sure(text))
    yield "rewrites", lambda text: clean_rewrite(text)
    yield "guards", lambda text: failed_guard(GUARDS, "Please sort 2 Foos", clean_rewrite(text))


READERS = dict(readers())


@pytest.mark.timeout(40)  # a second or two; minutes to days where a pattern reads all of it
@pytest.mark.parametrize("name", READERS)
def test_a_nasty_reply_is_read_at_once(name: str) -> None:
    for text in nasty():
        READERS[name](text)


def test_all_readers_see_the_same_part_of_a_reply() -> None:
    long = "I'm sorry, but I can't help with that. The answer is 4. " + "x" * READ_CHARS + "The answer is 5."
    seen = long[-READ_CHARS:]
    assert read_part(long) == read_part(read_part(long)) == seen
    assert Attempt(text=long).text == seen
    assert forms.get("as_is").answer_in(long) == seen
    assert clean_rewrite(long) == seen
    assert not is_refusal(long)
    reward = WeightedReward({"numeric": 1.0})
    for gold, score in (("5", 1.0), ("4", 0.0)):
        question = Question(id="a", text="How many?", accept=(gold,), tags=("numeric",))
        evidence = Evidence(
            question=question,
            rewrite="How many?",
            answer=long,
            question_vector=ROW,
            rewrite_vector=ROW,
            answer_vector=ROW,
        )
        assert evidence.answer == seen
        assert reward(evidence).score == score
    assert Completion(text=long).text == long  # what files and clients get


def test_the_first_number_after_the_mark_counts_however_much_follows() -> None:
    found = final_number("The answer is 42. " + "and so on " * 3000 + "7")
    assert found is not None
    assert found.value == 42


@pytest.mark.timeout(20)  # each blank line once, where every one was read with all after it: minutes
def test_blank_lines_are_read_once() -> None:
    text = "\n" * 200_000 + "42"
    assert decided(text) == text
    assert decided("\n\n Answer: 42\n7") == "42"
