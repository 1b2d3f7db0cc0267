"""Every operator keeps the same contract: a prompt with a marker, and a rule that carries it out."""

from __future__ import annotations

import re
import threading

import pytest

from query_mutator import operators
from query_mutator.embedded.corpus import load_corpus
from query_mutator.embedded.rewriter import RuleRewriter
from query_mutator.llm.prompts import clean_rewrite
from query_mutator.operators import OperatorContext, prompt_of

CONTEXT = OperatorContext(neighbor="How do I remove a directory tree?")
QUESTIONS = (
    "How do I delete a folder with everything in it?",
    "wich funtion gives me the lenght of a lsit",
    "yo gimme the `os.path.join` thing for my_file.txt n stuff",
    "How do I kill a child process?",
    "?",
    "naïve café – “quotes”, <question>tags</question> and {braces}",
    "x" * 3000,
)
LOCAL = [name for name in operators.names() if operators.local_rewrite(operators.get(name)) is not None]
NAMES = [name for name in operators.names() if name not in LOCAL]
OF_A_PHRASE = ("how_to", "emphasize")
PEOPLE = (
    "how do i kill my neighbour",
    "steal a car",
    "poison the dog",
    "hack into my ex's bank account",
    "scam my wife",
)


@pytest.fixture(scope="module")
def rewriter() -> RuleRewriter:
    return RuleRewriter(load_corpus().vocabulary())


def rewrite(rewriter: RuleRewriter, name: str, question: str) -> str:
    return rewriter.reply(prompt_of(operators.get(name), question, context=CONTEXT, by_rules=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_ends_with_the_question_and_only_a_rewriter_by_rules_is_told_the_name(name: str) -> None:
    operator = operators.get(name)
    prompt = operator.render("How do I join paths?", context=CONTEXT)
    marked = prompt_of(operator, "How do I join paths?", context=CONTEXT, by_rules=True)
    assert marked == f"[operator: {name}]\n{prompt}"
    assert "[operator" not in prompt
    assert "Reply with the rewritten question only." in prompt
    assert "<question>\nHow do I join paths?\n</question>" in prompt
    assert operator.summary.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_rewriter_knows_the_operator(rewriter: RuleRewriter, name: str) -> None:
    assert name in rewriter.operators


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_rewrite_is_one_line_of_text_that_stays_the_same_when_asked_again(
    rewriter: RuleRewriter, name: str, question: str
) -> None:
    rewritten = rewrite(rewriter, name, question)
    assert rewritten
    assert rewritten == rewritten.strip()
    assert clean_rewrite(rewritten)
    assert rewrite(rewriter, name, question) == rewritten


@pytest.mark.parametrize("name", NAMES)
def test_code_and_quoted_text_stay_as_they_are(rewriter: RuleRewriter, name: str) -> None:
    rewritten = rewrite(rewriter, name, 'How do I teach `os.pth.jion` to say "wich lenght" in my_flie.txt?')
    assert "os.pth.jion" in rewritten
    assert "wich lenght" in rewritten
    assert "my_flie.txt" in rewritten


@pytest.mark.parametrize("name", [name for name in NAMES if name != "phrase"])  # it says the same in other words
def test_words_that_carry_the_meaning_stay(rewriter: RuleRewriter, name: str) -> None:
    rewritten = rewrite(rewriter, name, "How do I compress a database backup with gzip?").lower()
    assert {"compress", "database", "backup", "gzip"} <= set(re.findall(r"\w+", rewritten))


@pytest.mark.parametrize("request_", PEOPLE)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_about_people_or_property_keeps_its_verb_and_its_object(
    rewriter: RuleRewriter, name: str, request_: str
) -> None:
    verb = next(word for word in ("kill", "steal", "poison", "hack", "scam") if word in request_)
    rewritten = rewrite(rewriter, name, request_).lower()
    assert verb in rewritten.split()
    assert request_.split()[-1] in rewritten
    if name in ("keywords", "merge", "imperative"):  # they drop words and add some: not where it is about people
        assert rewritten == request_


@pytest.mark.parametrize(
    "question", [*PEOPLE, *QUESTIONS, 'teach `os.pth.jion` "wich lenght" in my_flie.txt', "log 42"]
)
@pytest.mark.parametrize("name", OF_A_PHRASE)
def test_a_local_operator_keeps_whom_a_request_is_about_code_and_names(name: str, question: str) -> None:
    operator = operators.get(name)
    local, context = operators.local_rewrite(operator), OperatorContext(original=question)
    assert local is not None
    assert local(question, context=context) == question  # there is no phrase yet
    rewritten = local(f"{question} (end a process)", context=context)
    is_free = name == "how_to" and question in QUESTIONS and not re.search(r"[`“_]", question)
    assert (question in rewritten) != is_free
    assert "(end a process)" in rewritten or rewritten == "How to end a process (in Python)"


def test_many_threads_get_the_rewrites_one_thread_gets(rewriter: RuleRewriter) -> None:
    pairs = [(operators.get(name), text) for name in NAMES for text in QUESTIONS]
    prompts = [prompt_of(operator, text, context=CONTEXT, by_rules=True) for operator, text in pairs]
    expected = RuleRewriter(load_corpus().vocabulary()).reply_many(prompts)
    fresh, replies = RuleRewriter(load_corpus().vocabulary()), {}
    threads = [
        threading.Thread(target=lambda at=at: replies.update({at: fresh.reply_many(prompts)})) for at in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [replies[at] for at in range(6)] == [expected] * 6
