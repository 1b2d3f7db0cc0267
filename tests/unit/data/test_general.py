"""The bundled set `general`: what its parts may share, and in which shares its kinds and families come."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from query_mutator.data.loaders import FOLDER, general, general_bank
from query_mutator.data.split import in_test, split_questions
from query_mutator.types import Question

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from general.noise import misspell
from general.wordings import PLAIN, SECOND_LANGUAGE, SLANG, TWO_PART, WORDY

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
