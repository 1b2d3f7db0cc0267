"""Operators by name, their guards, and the cleaning of English questions."""

from __future__ import annotations

import json
import random
import sys

import pytest

from query_mutator import operators
from query_mutator.data import loaders, split_questions
from query_mutator.data.split import in_test
from query_mutator.encoder import resolve_encoder
from query_mutator.env.task import CallSettings, build_task
from query_mutator.errors import UsageError
from query_mutator.operators import GUARDS, LocalOperator, OperatorContext, PromptOperator, cleaning, rejecting_guard
from query_mutator.operators.typos import Speller, speller
from query_mutator.types import Question

SORT = "how do i sort a list of names in place"
KENYA = "What is the capital of Kenya?"
CONTEXT = OperatorContext(neighbor="How do I round 3.5 to an int?")
CLEANING = ("clean", "shorthand", "typos", "courtesy", "core", "tidy")
STAYS = {
    "German": "hallo, was ist bitte die Haupstadt von Frankreich und wie viele Menchen wohnen dort",
    "Spanish": "hola, cual es la captial de francia por favor",
    "French": "bonjour, quelle est la capitale de la france svp",
    "Chinese": "请问法国的首都是哪里？谢谢",
    "Russian": "привет, какая столица у Франции",
    "traceback": 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    pritn(x)\nNameError',
    "SQL": "select nme, adress from custmers where id = 3",
    "SQL in capitals": "SELECT nme FROM custmers",
    "code in a question": "why does `lsit` fail here\n\n    lsit = []\n",
    "a greeting": "hello",
    "a mark": "?",
    "nothing": "",
}
CONTEXTS = (
    "There are 3 apples in a basket. Tom eats one. How many apples are left?",
    "I have some eggs. My brother broke half of them. How many are left?",
    "My car does not start. What should I do?",
    "I am going to Japan next week. What currency do they use?",
    "The shirt costs 20 dollars. It is 30% off. What is the final price?",
    "I mix salt and water. Which of the two melts at zero degrees?",
    "We met a sage. Our sage always lies. Who is lying?",
    "In which month is Easter? Express your answer as a number.",
)


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


def test_an_operator_of_ones_own_is_a_prompt_with_the_question() -> None:
    own = PromptOperator.of("shorter", "Say it in fewer words.", "Shorten it: {question}")
    assert own.render("How?", context=OperatorContext()) == "Shorten it: How?\n"
    with pytest.raises(ValueError, match=r"operator .x.: its prompt must hold \{question\}"):
        PromptOperator.of("x", "Summary.", "no slot")


def rejected(operator: str, question: str, rewrite: str) -> str | None:
    return rejecting_guard(operators.get(operator), question, rewrite, context=CONTEXT)


@pytest.mark.parametrize(
    ("question", "rewrite", "guard"),
    [
        (SORT, "Sure! Use list.sort() for this.", "answer"),
        (SORT, "You can use the sort method.", "answer"),
        (SORT, "I'm sorry, but I can't help with that.", "answer"),
        (KENYA, "The capital of Kenya is Nairobi.", "answer"),
        (KENYA, "Nairobi is the capital of Kenya.", "answer"),
        (KENYA, 'The word "Nairobi" is the name of a city, which is the capital of Kenya.', "answer"),
        (KENYA, "The user wants to know a capital.", "answer"),
        (KENYA, "What is the capital of Kenya? <domain>general</domain>", "answer"),
        (KENYA, "The capital city of a country in Africa:", "answer"),
        (KENYA, "Nairobi.", "question"),
        (KENYA, "Kenya's capital city, Nairobi, with 4 million people", "question"),
        ("what is 17 times 7?", "what is 17 million 7?", "numbers"),
        ("what is 17 times 7?", "what is 17 times 8?", "numbers"),
        ("what is 17 times 7?", "What is 17 times 7, or 119?", "new_numbers"),
        ("how many of 1,000 are left", "How many of 100 are left?", "numbers"),
        ('why does "no such file" appear', "why does an error appear", "quotes"),
        ("what does os.path.join do", "what does the join function do", "code"),
        ("how do i sort a list in Python quickly", "how do i sort a list quickly", "names"),
        ("how do i sort a list of names with this", "¿Cómo ordeno una lista por los nombres?", "language"),
        ("how do i sort this list", "как отсортировать список", "question"),
        ("sort this list", "как отсортировать список", "language"),
        (SORT, "how to " + "sort " * 100, "length"),
    ],
)
def test_a_rewrite_that_is_none_is_rejected(question: str, rewrite: str, guard: str) -> None:
    assert rejected("spelling", question, rewrite) == guard


@pytest.mark.parametrize(
    ("operator", "question", "rewrite"),
    [
        ("neutral", "how do i nuke a folder lol", "how do I delete a directory and its contents"),
        ("grammar", "first 10 items of a list", "How do I take the first 10 items of a list?"),
        ("grammar", "can u delete a file w/ this", "Delete a file with this."),
        ("grammar", "what is 17 times 7", "What is seventeen 17 times seven?"),
        ("grammar", "how many of 1,000 are left", "How many of 1000 are left?"),
        ("slang", "bruh my ram goes brrr, can i stop it", "My memory is growing, can I stop it"),
        ("slang", "wheres the list", "Where is the list"),
        ("slang", "how 2 sort a list 4 a friend", "how to sort a list for a friend"),
        ("slang", "IDK how to join a gr8 list 2day", "I do not know how to join a great list today"),
        ("filler", "I need help. I have a list, how do I sort it?", "I have a list, how do I sort it?"),
        ("filler", "could you please explain to me what a lambda is", "Explain what a lambda is."),
        ("context", SORT, f"In Python's standard library: {SORT}"),
        ("spelling", "how do i sort a lsit in Pyhton", "how do i sort a list in Python"),
        ("spelling", "HOW DO I SORT A LIST", "how do I sort a list"),
        ("spelling", "list.how do i sort it", "List. How do I sort it?"),
        ("spelling", "wie sortiere ich eine lsite", "Wie sortiere ich eine Liste?"),
        ("imperative", SORT, "Sort a list of names in place."),
        ("keywords", SORT, "sort list names in place"),
        ("first_part", "What is 2 plus 2? And who is Ann in `x.py`?", "What is 2 plus 2?"),
        ("merge", "how do i round a float", "How do I round a float, say 3.5, to an int?"),
        ("expand", "how do i make it hex", "how do i make it hex (convert an int to base 16)"),
    ],
)
def test_what_an_operator_is_for_passes(operator: str, question: str, rewrite: str) -> None:
    assert rejected(operator, question, rewrite) is None


@pytest.mark.parametrize("name", operators.names())
def test_no_rewrite_of_a_model_may_answer(name: str) -> None:
    operator = operators.get(name)
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
    local = operators.local_rewrite(operators.get(name))
    assert local is not None
    return local(text, context=OperatorContext())


@pytest.mark.parametrize("text", STAYS.values(), ids=STAYS)
@pytest.mark.parametrize("name", CLEANING)
def test_other_languages_code_and_texts_without_a_question_stay(name: str, text: str) -> None:
    assert rewrite(name, text) == text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("how many tiems a day", "how many times a day"),
        ("waht is teh captial of Peru", "what is the capital of Peru"),
        ("Whcih contry has the longset coastline?", "Which country has the longest coastline?"),
        ("what's the differnce", "what's the difference"),
        ("a langauge of forty-two poeple (or mroe)", "a language of forty-two people (or more)"),
        ("alot of poeple ask whatis gravity", "a lot of people ask what is gravity"),
        ("wich planet is teh bigest", "which planet is the biggest"),
    ],
)
def test_misspelt_words_are_corrected(typed: str, meant: str) -> None:
    assert rewrite("typos", typed) == meant


@pytest.mark.parametrize(
    "text",
    [
        "Where did Kacper Brzezicki of the NAACP meet Ngozi in Ouagadougou?",
        "Ngozi met Zain there. Umer met Kalen, and can’t or can't say when.",
        "what does NaCl do in H2O, and Sb, Rn, Nb or nacl2",
        'is the word "wich lenght" in my_flie.txt, in a/pth or at https://exmaple.org/teh',
        "add 12 and 3.5 kg to the 2nd and 3rd, or 1e9",
        "is it the color or the colour of 10 centimeters, millimetres, kilometers",
        "how does async config parsing of a csv or json in python work",
        "she loves winemaking, reviles blogging no more, and idolizes her",
        "is the café in São Paulo or in Zürich",
    ],
)
def test_names_acronyms_symbols_code_numbers_and_quotes_are_not_corrected(text: str) -> None:
    assert rewrite("typos", text) == text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("yo wat r u doing lol", "what are you doing"),
        ("how 2 tie a tie", "how to tie a tie"),
        ("what does it stand 4", "what does it stand for"),
        ("whats bread n butter w/o salt", "what is bread and butter without salt"),
        ("what is 46 n 42", "what is 46 and 42"),
        ("convert 12 decades 2 years", "convert 12 decades to years"),
        ("add 5 to 2 and 4", "add 5 to 2 and 4"),
        ("which letter comes after u", "which letter comes after u"),
        ("how many r are in strawberry", "how many r are in strawberry"),
        ('what is the meaning of "lol" and of "u" in chat', 'what is the meaning of "lol" and of "u" in chat'),
        ("What is the symbol U or Rn?", "What is the symbol U or Rn?"),
    ],
)
def test_shorthand_is_spelled_out_where_it_is_no_letter_and_no_number(typed: str, meant: str) -> None:
    assert rewrite("shorthand", typed) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Hi there! How are you? What is rust? Thank you very much in advance.", "What is rust?"),
        ("Could you please tell me what the largest planet is?", "What is the largest planet?"),
        ("Do you know where Oslo is?", "Where is Oslo?"),
        ("hey, who wrote Hamlet please", "who wrote Hamlet"),
        ("I was wondering how many people live in Peru, thanks.", "How many people live in Peru?"),
        ("How do you say please in French?", "How do you say please in French?"),
        ("What is the opposite of please?", "What is the opposite of please?"),
        ("Who said thank you to Ann?", "Who said thank you to Ann?"),
        ("What is the opposite of thanks?", "What is the opposite of thanks?"),
        ("Right triangles have how many sides?", "Right triangles have how many sides?"),
        ("Hi-fi means what?", "Hi-fi means what?"),
        ("Hi! Sorry, what is the capital of peru? Bye.", "What is the capital of peru?"),
        ("Can you help me find lima? Is it far?", "Can you help me find lima? Is it far?"),
        ("Any answer must be short. How far is it?", "Any answer must be short. How far is it?"),
        ("List these:\n1. hello\n2. world", "List these:\n1. hello\n2. world"),
    ],
)
def test_courtesy_goes_and_questions_about_it_stay(typed: str, meant: str) -> None:
    assert rewrite("courtesy", typed) == meant


@pytest.mark.parametrize("text", CONTEXTS)
def test_what_a_question_needs_stays(text: str) -> None:
    assert rewrite("core", text) == rewrite("clean", text) == text


def test_back_story_goes_and_both_of_two_questions_stay() -> None:
    story = "My niece asked something today and nobody knew. {} I want to impress her."
    for question in (
        "Which planet has the most moons?",
        "What is molten lava? Where does lava come from?",
        "Name the largest moon.",
    ):
        assert rewrite("core", story.format(question)) == question


def test_the_sentence_gets_its_capital_and_its_mark() -> None:
    assert rewrite("tidy", "what  is rust??") == "What is rust?"
    assert rewrite("tidy", "on which continent is Peru") == "On which continent is Peru?"
    assert rewrite("tidy", "add 3 and 4") == "Add 3 and 4."
    assert rewrite("tidy", "iPhone or Android") == "iPhone or Android"


def test_clean_does_all_in_order() -> None:
    messy = "hi, pls can u tell me wat the captial of France is? thx in advance"
    assert rewrite("clean", messy) == "What is the capital of France?"
    assert rewrite("clean", "kill my neighbour") == "Kill my neighbour"


LOCAL = [name for name in operators.names() if operators.local_rewrite(operators.get(name)) is not None]
ODD = (
    "yo gimme the `os.path.join` thing for my_file.txt n stuff",
    "naïve café – “quotes”, <question>tags</question> and {braces}",
    "x" * 3000,
    *("?", "thanks", "pls", "lol", "hi!!", "so so so", "plz plz plz?!?", "sooooo gooood"),
)


@pytest.mark.parametrize("name", [name for name in operators.names() if name not in LOCAL])
def test_every_prompt_asks_for_the_rewritten_question_alone(name: str) -> None:
    prompt = operators.get(name).render("How do I join paths?", context=CONTEXT)
    assert "[operator" not in prompt
    assert "Reply with the rewritten question only." in prompt
    assert "<question>\nHow do I join paths?\n</question>" in prompt
    assert operators.get(name).summary.endswith(".")


@pytest.mark.parametrize("name", LOCAL)
def test_twice_is_once_and_something_is_left(name: str) -> None:
    known = split_questions(loaders.general()).train
    texts = [question.text for question in random.Random(0).sample(known, 150)]
    for text in [*texts, *CONTEXTS, *ODD]:
        once = rewrite(name, text)
        assert once == once.strip() != ""
        assert rewrite(name, once) == once


def words(text: str) -> list[str]:
    """Return the words of a text without case and the punctuation around them."""
    return [word for part in text.casefold().split() if (word := part.strip(".,;:!?…()"))]


def test_plain_questions_stay_and_most_misspelt_ones_are_restored() -> None:
    rows = map(json.loads, (loaders.FOLDER / "general.jsonl").read_text(encoding="utf-8").splitlines())
    known = [row for row in rows if not in_test(Question(id="", text=row["query"], about=row["about"]))]
    plain = [row["query"] for row in known if row["tags"][0] in ("plain", "two-part")][:150]
    assert [rewrite("clean", query) for query in plain] == plain
    misspelt = [row for row in known if row["tags"][0] == "misspelt"]
    assert sum(words(rewrite("clean", row["query"])) == words(row["clean"]) for row in misspelt) > 0.7 * len(misspelt)


def test_a_missing_library_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "symspellpy", None)
    with pytest.raises(UsageError, match="pip install"):
        Speller()


def test_cleaning_must_be_named() -> None:
    assert {operator.name for operator in operators.select("")}.isdisjoint(CLEANING)
    assert [operator.name for operator in operators.select("clean,typos")] == ["clean", "typos"]


def test_a_rewrite_that_never_settles_ends_with_the_text_as_it_came() -> None:
    swap = cleaning._of_english(lambda text: text[:-1] if text.endswith("!") else f"{text}!")
    assert swap("What is the capital of Peru?") == "What is the capital of Peru?"


def test_word_lists_are_loaded_with_a_task_and_not_between_calls() -> None:
    speller.cache_clear()
    cleaning.typos.cache_clear()
    build_task(
        [Question(id="1", text="how do i sort a list")],
        calls=CallSettings(target_model="target", mutator_model="mutator"),
        encoder=resolve_encoder("hash"),
        operators=operators.select("typos"),
        known_words=(),
    )
    assert speller.cache_info().currsize == 1
