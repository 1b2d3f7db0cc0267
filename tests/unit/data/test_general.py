"""The bundled sets: what their parts share, in which shares kinds and families come, answers, and who may open them."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from query_mutator.data.loaders import FOLDER, GENERAL_2, general, general_bank, guard_questions, load_questions
from query_mutator.data.split import in_test, split_questions, target_key
from query_mutator.rewards.committed import FAMILY, commits_to
from query_mutator.types import Question
from tests.qm_command import qm

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from general.noise import misspell
from general.wordings import PLAIN, SECOND_LANGUAGE, SLANG, TWO_PART, WORDY

#: Of the file. Results on an edited set cannot be compared with those before.
SHA256 = "decc024cdb2e206c9da6d46fa65f43348ca95331a5aee290d15ec78e35bbddb9"
SHARES = {
    "plain": 0.5, "misspelt": 0.19, "slang": 0.28 / 3, "wordy": 0.28 / 3, "second-language": 0.09, "two-part": 0.1 / 3,
}  # fmt: skip
FEW_ANSWERS = ("animal_class", "planet", "weekday")  # families of at most a dozen answers
QUESTIONS = load_questions(GENERAL_2)
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


CLOSED = ("continent", "difference")  # at most twelve answers


def family(question: Question) -> str:
    return next(tag.removeprefix("family:") for tag in question.tags if tag.startswith("family:"))


def test_sizes() -> None:
    questions = general()
    assert len(questions) >= 1500
    assert len(split_questions(questions).test) >= 600
    assert len(general_bank()) >= 200
    assert len({family(question) for question in questions}) >= 10


def test_other_common_names_are_accepted_after_the_first() -> None:
    accepted = {question.accept for question in (*general(), *general_bank())}
    assert {("Bangla", "Bengali"), ("Chinese", "Mandarin"), ("aluminum", "aluminium")} <= accepted


def test_half_are_plain_and_the_others_in_fixed_shares() -> None:
    kinds = Counter(question.tags[0] for question in general())
    shares = {kind: count / kinds.total() for kind, count in kinds.items()}
    assert shares == pytest.approx(
        {"plain": 0.475, "misspelt": 0.19, "slang": 0.095, "wordy": 0.095, "second-language": 0.095, "two-part": 0.05},
        abs=0.03,
    )


def test_what_a_question_is_about_is_in_one_part() -> None:
    parts = defaultdict(set)
    for question in general():
        parts[question.about].add("test" if in_test(question) else "train")
    for question in general_bank():
        parts[question.about].add("bank")
    assert all(len(found) == 1 for found in parts.values())


def test_held_out_questions_have_wordings_of_their_own() -> None:
    assert all(len(wordings) >= 8 for wordings in PLAIN.values())
    for wordings in (*PLAIN.values(), *SECOND_LANGUAGE.values(), SLANG, WORDY, *TWO_PART.values()):
        half = len(wordings) // 2
        assert not set(wordings[:half]) & set(wordings[half:])
    for question in general():
        if question.tags[0] == "wordy":
            beginnings = [wordy.partition("{")[0] for wordy in WORDY]
            place = next(place for place, begin in enumerate(beginnings) if question.text.startswith(begin))
            assert (place >= len(WORDY) // 2) == in_test(question)


def test_no_constant_answer_pays() -> None:
    by_family = defaultdict(list)
    for question in general():
        by_family[family(question)].append(question.accept[0])
    count = sum(map(len, by_family.values()))
    assert sum(len(by_family[name]) for name in CLOSED) <= 0.15 * count
    for name, answers in by_family.items():
        assert name in CLOSED or len(set(answers)) > 12
        assert Counter(answers).most_common(1)[0][1] <= 0.4 * len(answers)


def test_the_clean_text_of_a_question_is_in_its_file_only() -> None:
    rows = [json.loads(line) for line in (FOLDER / "general.jsonl").read_text().splitlines()]
    assert {row["id"]: row["query"] for row in rows} == {question.id: question.text for question in general()}
    assert all(row["clean"] == row["query"] for row in rows if row["tags"][0] == "plain")


@pytest.mark.parametrize("text", ["Cary: which US state is that in?", "Which state is the city of Cary in?"])
def test_a_short_name_is_never_misspelt(text: str) -> None:
    spoiled = [misspell(text, ["Cary"], random.Random(seed)) for seed in range(100)]
    assert all("cary" in wrong.lower() for wrong in spoiled)
    assert text not in spoiled
