"""The second author's general questions: their shares and answers, what the grader accepts, and who may open them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest

from query_mutator.data.loaders import GENERAL_2, general, general_bank, general_second_author, guard_questions
from query_mutator.data.split import target_key
from query_mutator.rewards.committed import FAMILY, commits_to
from query_mutator.types import Question
from tests.qm_command import qm

#: Of the file. Results on an edited set cannot be compared with those before.
SHA256 = "decc024cdb2e206c9da6d46fa65f43348ca95331a5aee290d15ec78e35bbddb9"
SHARES = {
    "plain": 0.5, "misspelt": 0.19, "slang": 0.28 / 3, "wordy": 0.28 / 3, "second-language": 0.09, "two-part": 0.1 / 3,
}  # fmt: skip
FEW_ANSWERS = ("animal_class", "planet", "weekday")  # families of at most a dozen answers
QUESTIONS = general_second_author()
ROWS = [json.loads(line) for line in GENERAL_2.read_text(encoding="utf8").splitlines()]
NAMES = json.loads(GENERAL_2.with_name("general_2_grader.json").read_text(encoding="utf8"))
PHRASINGS = ("{}", "The answer is {}.", "I think it is {}, and I am quite sure of it.")


def family_of(question: Question) -> str:
    return next(tag.removeprefix(FAMILY) for tag in question.tags if tag.startswith(FAMILY))


def accepts(answer: str, question: Question) -> bool:
    return commits_to(answer, question.accept, family=family_of(question), question=question.text)


def guesses(question: Question) -> list[str]:
    """Return the accepted answer behind others of its kind that the question does not name."""
    gold = question.accept[0]
    if all(text.isdecimal() for text in question.accept):
        return [str(int(gold) + step) for step in (3, 4, 0)]
    known = {text.casefold() for text in question.accept}
    others = [
        name
        for name in NAMES[family_of(question)]
        if name.casefold() not in question.text.casefold()
        and not any(name.casefold() in text or text in name.casefold() for text in known)
    ]
    return [*others[:2], gold]


def test_the_file_is_the_one_that_was_committed_before_anything_was_measured() -> None:
    assert hashlib.sha256(GENERAL_2.read_bytes()).hexdigest() == SHA256


def test_kinds_have_their_shares() -> None:
    kinds = Counter(question.tags[0] for question in QUESTIONS)
    assert set(kinds) == set(SHARES)
    assert len(QUESTIONS) == 300
    for kind, share in SHARES.items():
        assert kinds[kind] / len(QUESTIONS) == pytest.approx(share, abs=0.005)


def test_families_are_many_and_no_answer_is_right_often() -> None:
    families = Counter(map(family_of, QUESTIONS))
    assert len(families) >= 12
    assert max(families.values()) <= 0.12 * len(QUESTIONS)
    assert sum(families[name] for name in FEW_ANSWERS) <= 0.15 * len(QUESTIONS)
    answers = Counter(text.casefold() for question in QUESTIONS for text in set(question.accept))
    assert max(answers.values()) <= 0.05 * len(QUESTIONS)


def test_every_row_is_whole_and_about_something_else() -> None:
    assert all(set(row) == {"id", "query", "accept", "about", "tags", "clean"} for row in ROWS)
    for field in ("id", "query", "about"):
        assert len({row[field].casefold() for row in ROWS}) == len(ROWS)
    assert not {question.id for question in guard_questions()} & {row["id"] for row in ROWS}
    assert all((row["clean"] == row["query"]) == (row["tags"][0] == "plain") for row in ROWS)
    wordy = [len(row["query"].split()) for row in ROWS if row["tags"][0] == "wordy"]
    assert min(wordy) >= 35
    assert max(wordy) <= 70


def test_the_grader_knows_every_answer_under_families_of_its_own() -> None:
    first = json.loads(GENERAL_2.with_name("general_grader.json").read_text(encoding="utf8"))
    assert set(NAMES) == set(map(family_of, QUESTIONS))
    assert not set(NAMES) & set(first)
    assert not [(q.id, text) for q in QUESTIONS for text in q.accept if text not in NAMES[family_of(q)]]


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_accepted_answer_is_right(phrasing: str) -> None:
    wrong = [(q.id, text) for q in QUESTIONS for text in q.accept if not accepts(phrasing.format(text), q)]
    assert not wrong


def test_a_list_of_guesses_is_wrong() -> None:
    assert all(len(guesses(question)) == 3 for question in QUESTIONS)
    assert not [q.id for q in QUESTIONS if accepts(", ".join(guesses(q)), q)]
    assert not [q.id for q in QUESTIONS if accepts("It is {}, {} or {}.".format(*guesses(q)), q)]


def test_a_copy_of_the_question_is_wrong_and_no_question_holds_its_answer() -> None:
    for question, row in zip(QUESTIONS, ROWS, strict=True):
        for text in (question.text, f"You asked: {question.text}", row["clean"], question.text.upper()):
            assert not accepts(text, question), question.id
        for text in question.accept:
            assert not re.search(rf"(?<!\w){re.escape(text)}(?!\w)", question.text + row["clean"], re.IGNORECASE)


@pytest.mark.parametrize("dataset", ["general-2", str(GENERAL_2)])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_training_and_plans_refuse_the_set(dataset: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm(command, "--dataset", dataset, *["--dry-run"] * (command == "train")) == 2
    assert "only for evaluation, by `python -m benchmarks.second_author`" in capsys.readouterr().err


def test_no_entity_is_one_of_the_first_authors() -> None:
    first = {target_key(question).casefold() for question in [*general(), *general_bank()]}
    assert first.isdisjoint(target_key(question).casefold() for question in QUESTIONS)
