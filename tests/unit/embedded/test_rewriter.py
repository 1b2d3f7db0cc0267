"""The rule-based mutator: what each rule changes, and what it leaves unchanged."""

from __future__ import annotations

import pytest

from query_mutator import operators
from query_mutator.embedded.corpus import load_corpus
from query_mutator.embedded.models import PromptError
from query_mutator.embedded.rewriter import RuleRewriter
from query_mutator.embedded.rules.inflect import forms, plural
from query_mutator.embedded.rules.spelling import slip_cost
from query_mutator.embedded.rules.text import sentences, tidy, tokens
from query_mutator.operators import OperatorContext, prompt_of


def prompt_for(name: str, question: str, neighbor: str | None = None) -> str:
    return prompt_of(operators.get(name), question, context=OperatorContext(neighbor=neighbor), by_rules=True)


@pytest.fixture(scope="module")
def rewriter() -> RuleRewriter:
    return RuleRewriter(load_corpus().vocabulary())


@pytest.fixture(scope="module")
def apply(rewriter: RuleRewriter):  # type: ignore[no-untyped-def]
    def rewrite(name: str, question: str, neighbour: str | None = None) -> str:
        return rewriter.reply(prompt_for(name, question, neighbour))

    return rewrite


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("wich funtion gives the lenght of a stirng", "which function gives the length of a string"),
        ("how do I remvoe a direcotry", "how do I remove a directory"),
        ("Wendesday is a wrod", "Wednesday is a word"),
        ("it dosent work untill i restrat", "it doesn't work until i restart"),
        ("read alot of bytes", "read a lot of bytes"),
        ("which os.path.jion or my_varible", "which os.path.jion or my_varible"),  # names are left alone
        ("nuke the zipfile and stringify a UUID", "nuke the zipfile and stringify a UUID"),  # known words stay
    ],
)
def test_spelling(apply, typed: str, meant: str) -> None:  # type: ignore[no-untyped-def]
    assert apply("spelling", typed) == meant


def test_a_likely_slip_costs_less_than_an_unlikely_one() -> None:
    assert slip_cost("lenght", "length") == pytest.approx(0.7)  # two letters swapped
    assert slip_cost("bigest", "biggest") == pytest.approx(0.4)  # a doubled letter missing
    assert slip_cost("objekt", "object") == pytest.approx(0.8)  # sounds alike
    assert slip_cost("cat", "dog") > 2.4
    assert slip_cost("theard", "thread") == pytest.approx(1.2)  # one letter jumped


@pytest.mark.parametrize(
    ("asked", "neutral"),
    [
        ("How do I kill a child process?", "How do I stop a child process?"),
        ("How do I nuke a folder?", "How do I remove a folder?"),
        ("What kills one item in a set?", "What removes one item in a set?"),
        ("How do I crack a file path open?", "How do I open a file path?"),
        ("Is there a call that explodes a line into words?", "Is there a call that splits a line into words?"),
        ("The thread was killed by the script.", "The thread was cancelled by the script."),
        ("My script dies when the queue is empty.", "My script ends when the queue is empty."),
        ("I launched a script, how do I kill it?", "I launched a script, how do I stop it?"),
        ("Is there a neat hack to sort a list?", "Is there a neat way to sort a list?"),
    ],
)
def test_neutral_rewords_what_governs_a_computing_noun(apply, asked: str, neutral: str) -> None:  # type: ignore[no-untyped-def]
    assert apply("neutral", asked) == neutral


@pytest.mark.parametrize(
    "asked",
    [
        "how do i kill my neighbour",
        "poison the dog",
        "steal my neighbour's files",
        "write a script to hack into someone's bank account",
        "attack a website with many requests",
        "kill all the children",
        "how do i kill it",
        "execute my boss",
        "How do I sort a list?",
    ],
)
def test_neutral_keeps_people_property_and_everything_else(apply, asked: str) -> None:  # type: ignore[no-untyped-def]
    assert apply("neutral", asked) == asked


@pytest.mark.parametrize(
    ("name", "asked", "rewritten"),
    [
        ("slang", "yo how do i yeet a file lol", "How do i remove a file"),
        ("slang", "gimme the numbers workin from 1 up to n", "Give me the numbers working from 1 up to n"),
        ("slang", "make my code fassst plz", "Make my code fast"),
        ("terms", "How do I make a new folder?", "How do I make a new directory?"),
        ("imperative", "How do I turn bytes into a list?", "Turn bytes into a list."),
        ("imperative", "Which function removes spaces from my text?", "Remove spaces from the text."),
        ("imperative", "How can I tell whether a path exists?", "Return True if a path exists."),
        ("imperative", "How many items are in my list?", "Return the number of items in the list."),
        ("keywords", "How do I remove a file from a directory?", "remove file directory"),
        ("context", "How do I sort?", "In Python's standard library: How do I sort?"),
        ("first_part", "How do I open a file? And how do I close it?", "How do I open a file?"),
        ("first_part", "How do I sort a big list, and what if it is a set?", "How do I sort a big list?"),
        ("first_part", "How do I see what is in a set?", "How do I see what is in a set?"),
        ("grammar", "How I can to open the file?", "How can I open the file?"),
        ("grammar", "It exists a function for to sort?", "Is there a function to sort?"),
        ("filler", "Hi all, how do I sort a list? Many thanks in advance!", "How do I sort a list?"),
    ],
)
def test_rules(apply, name: str, asked: str, rewritten: str) -> None:  # type: ignore[no-untyped-def]
    assert apply(name, asked) == rewritten


def test_filler_drops_back_story_and_keeps_the_request(apply) -> None:  # type: ignore[no-untyped-def]
    asked = (
        "Good morning! My sister married, the cake was wonderful, you know. I have a list of file names "
        "in Python, and I would like to remove the extension from each path. Any ideas? Thank you so much!"
    )
    shorter = apply("filler", asked)
    assert "cake" not in shorter
    assert "list of file names" in shorter
    assert "remove the extension from each path" in shorter
    assert "Thank" not in shorter


def test_expand_adds_terms_and_keeps_the_question(apply) -> None:  # type: ignore[no-untyped-def]
    expanded = apply("expand", "How do I put a folder in order?")
    assert expanded.startswith("How do I put a folder in order? (")
    assert "directory" in expanded


def test_merge_adds_what_the_neighbour_says_in_other_words(apply) -> None:  # type: ignore[no-untyped-def]
    merged = apply("merge", "How do I delete a folder?", "How do I nuke a direcotry tree?")
    assert merged == "How do I delete a folder, like: remove directory tree?"


def test_merge_without_a_neighbour_is_the_question(apply) -> None:  # type: ignore[no-untyped-def]
    assert apply("merge", "How do I delete a folder?") == "How do I delete a folder?"


def test_a_prompt_that_is_not_a_rewrite_gets_a_sentence_that_lists_the_operators(rewriter: RuleRewriter) -> None:
    reply = rewriter.reply("Write me a poem.")
    assert "spelling, slang" in reply
    assert "[operator: NAME]" in reply


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("[operator: rhyme]\n<question>\nx\n</question>", "cannot carry out operator 'rhyme' .*--mutator-model"),
        ("[operator: rhyme]\nno question", "cannot carry out operator 'rhyme'"),
        ("<question>\nno marker\n</question>", r"cannot carry out a prompt without a line \[operator: NAME\]"),
        ("[operator: slang]\nno question", "'slang' has no text between <question>"),
    ],
)
def test_a_rewrite_without_a_rule_is_an_error_and_never_a_reply(rewriter: RuleRewriter, prompt: str, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        rewriter.reply(prompt)


def test_reply_many_keeps_the_order(rewriter: RuleRewriter) -> None:
    prompts = [prompt_for("keywords", f"the word {n}00") for n in range(9)]
    assert rewriter.reply_many(prompts) == [f"word {n}00" for n in range(9)]


def test_words_without_ranks_are_enough() -> None:
    small = RuleRewriter(frozenset({"file", "open"}), frozenset({"how", "the"}))
    assert small.reply(prompt_for("spelling", "how opne the flie")) == "how open the file"


def test_forms_double_the_last_consonant_where_english_does() -> None:
    assert forms("stop")[1:] == ("stops", "stopping", "stopped", "stopped")
    assert forms("edit").gerund == "editing"
    assert forms("get rid of").past == "got rid of"
    assert forms("carry")[1:4] == ("carries", "carrying", "carried")
    assert (plural("directory"), plural("key"), plural("box")) == ("directories", "keys", "boxes")


def test_tokens_join_to_the_text() -> None:
    text = "Use `os.kill(x)` on my_file.txt — it's “odd, really”, isn't it?  See https://a.b/c?d=e"
    assert "".join(tokens(text)) == text
    assert "`os.kill(x)`" in tokens(text)


def test_sentences_survive_abbreviations() -> None:
    assert sentences("Sort it, e.g. by name. Then stop!  Why?") == ["Sort it, e.g. by name.", "Then stop!", "Why?"]


def test_tidy_mends_articles_spaces_and_commas() -> None:
    assert tidy("a object , and an file ,, then an URL an hour") == "An object, and a file, then a URL an hour"
