"""The second author's questions: in the nine tags, about objects that the first set is not about, and unchanged."""

from __future__ import annotations

import hashlib
from collections import Counter

from query_mutator.data import guard_questions, pynames, python_docs, second_hand_questions
from query_mutator.data.bundled import FOLDER
from query_mutator.data.split import target_key
from query_mutator.embedded.corpus import load_corpus

#: Of the file. Results on an edited set cannot be compared with those in docs/log.md.
SHA256 = "a17bfb385c334ee2466dd064a60dd20aa231f79c0419b88d75bc563e675377eb"


def test_the_file_is_the_one_that_was_committed_before_anything_was_measured() -> None:
    assert hashlib.sha256((FOLDER / "python_docs_2.jsonl").read_bytes()).hexdigest() == SHA256


def test_every_tag_of_the_first_set_has_at_least_fifteen_questions() -> None:
    counts = Counter(tag for question in second_hand_questions() for tag in question.tags)
    assert set(counts) == {tag for question in python_docs() for tag in question.tags}
    assert min(counts.values()) >= 15
    assert counts.total() == len(second_hand_questions()) == 200  # one tag each


def test_ids_differ_from_each_other_and_from_those_of_the_first_set() -> None:
    ids = [question.id for question in (*second_hand_questions(), *python_docs(), *guard_questions())]
    assert len(set(ids)) == len(ids)


def test_every_accepted_name_resolves_and_the_assistant_can_know_every_target() -> None:
    questions = second_hand_questions()
    assert not [name for question in questions for name in question.accept if pynames.resolve(name) is None]
    assert all(question.reference for question in questions)
    known = [entry.name for entry in load_corpus().entries]
    assert not [
        target_key(question)
        for question in questions
        if not any(pynames.same_object(target_key(question), name) for name in known)
    ]


def test_no_target_is_one_of_the_first_set_under_any_name_nor_asked_about_twice() -> None:
    targets = [target_key(question) for question in second_hand_questions()]
    first = {target_key(question) for question in python_docs()}
    assert not [name for name in targets if any(pynames.same_object(name, other) for other in first)]
    assert not [
        name for place, name in enumerate(targets) if any(pynames.same_object(name, t) for t in targets[:place])
    ]


def test_no_text_is_in_two_sets_or_twice_in_one() -> None:
    def words(text: str) -> str:
        return "".join(char for char in text.casefold() if char.isalnum())

    ours = [words(question.text) for question in second_hand_questions()]
    others = {words(question.text) for question in (*python_docs(), *guard_questions())}
    assert len(set(ours)) == len(ours)
    assert not others & set(ours)
