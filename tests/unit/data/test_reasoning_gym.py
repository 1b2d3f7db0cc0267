"""`--dataset reasoning-gym:NAME`: the tasks of the package itself as questions, and what is said about a wrong spec."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from query_mutator.data import split_questions, validation_split
from query_mutator.data.reasoning_gym import entry_of, tasks_of, verified_questions
from query_mutator.errors import DatasetError, UsageError
from query_mutator.rewards import DEFAULT_WEIGHTS
from query_mutator.session.dataset import read_dataset
from query_mutator.session.judging import make_reward
from query_mutator.settings.episode import TaskSettings
from tests.qm_command import qm

ROOT = Path(__file__).resolve().parents[3]
SPEC = "reasoning-gym:chain_sum(size=60),letter_counting(size=5, seed=3, max_words=6)"


@pytest.fixture(autouse=True)
def package() -> None:
    pytest.importorskip("reasoning_gym")


def test_entries_are_questions_with_task_kind_and_an_id_that_generates_them_again() -> None:
    questions = read_dataset(TaskSettings(dataset=SPEC)).questions
    assert len(questions) == 65
    first, last = questions[0], questions[-1]
    assert (first.id, first.tags) == ("chain_sum(seed=0,size=60)#0", ("reasoning-gym", "chain_sum", "arithmetic"))
    assert (last.id, last.tags[1:]) == (
        "letter_counting(max_words=6,seed=3,size=5)#4",
        ("letter_counting", "algorithmic"),
    )
    assert entry_of(last).fields["question"].strip() == last.text
    assert last.accept == (entry_of(last).answer,)
    assert questions == verified_questions(SPEC)


def test_a_split_is_by_entry_and_a_larger_set_moves_none() -> None:
    few, more = (verified_questions(f"reasoning-gym:chain_sum(size={size})") for size in (40, 80))
    split = split_questions(few)
    fold = validation_split(split.train, 0)
    assert min(len(fold.train), len(fold.validation), len(split.test)) > 0
    held_out = {question.text for question in split_questions(more).test}
    assert {question.text for question in split.test} == held_out & {question.text for question in few}
    assert held_out.isdisjoint(question.text for question in split_questions(more).train)


def test_entries_are_the_same_in_another_process() -> None:
    code = f"from query_mutator.data.reasoning_gym import *; print([one.text for one in verified_questions({SPEC!r})])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str([question.text for question in verified_questions(SPEC)])


def test_defaults_of_size_and_seed() -> None:
    assert tasks_of("reasoning-gym:gcd, lcm") == ["gcd(seed=0,size=100)", "lcm(seed=0,size=100)"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("basic_arithmetik", "did you mean 'basic_arithmetic'?"),
        ("composite", "unknown task of reasoning-gym 'composite'"),
        ("gcd(siez=3)", "unknown option of gcd 'siez' (did you mean 'size'?)"),
        ("gcd(size=0)", "size=0 must be a whole number from 1"),
        ("gcd(seed=None)", "seed=None must be a whole number from 0"),
        ("gcd(size=2.5)", "size=2.5 must be"),
        ("gcd(min_numbers=0)", "gcd(min_numbers=0,seed=0,size=100): not possible"),
        ("gcd(min_numbers=f())", "f() is not a value of min_numbers"),
        ("gcd(7)", "gcd(7) is not a task"),
        ("gcd(**{'size': 3})", "unknown option of gcd"),
        ("", "not reasoning-gym:NAME,NAME(size=50, seed=1)"),
        ("gcd(size=3", "not reasoning-gym:NAME,NAME(size=50, seed=1)"),
        ("gcd,gcd", "gcd(seed=0,size=100) occurs twice; give one another seed"),
        ("ransom_note", "ransom_note: its entries differ from one process to the next"),
        ("game_of_life_halting(size=4)", "its scorer gives full marks to wrong answers"),
        ("puzzle24(size=4)", "its scorer gives full marks to wrong answers"),
        ("coin_flip(size=4)", "its scorer gives full marks to wrong answers"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        verified_questions(f"reasoning-gym:{spec}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_task_ends_a_command_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("train", "--dataset", "reasoning-gym:basic_arithmetik", "--dry-run") == 2
    said = capsys.readouterr().err.strip()
    assert "did you mean 'basic_arithmetic'?" in said
    assert len(said.splitlines()) == 1
    assert qm("train", "--dataset", "reasoning-gym:gcd", "--question-column", "q", "--dry-run") == 2


def test_without_the_package_a_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert qm("train", "--dataset", "reasoning-gym:gcd", "--dry-run") == 2
    said = capsys.readouterr().err.strip()
    assert "pip install 'query-mutator[reasoning-gym]'" in said
    assert len(said.splitlines()) == 1


def test_the_package_is_imported_only_when_it_is_asked_for() -> None:
    code = "import sys, train_query_mutator, query_mutator.rewards; print('reasoning_gym' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"


def test_such_a_set_is_rewarded_by_the_scorer_of_its_tasks() -> None:
    assert make_reward(TaskSettings(dataset=SPEC)).weights == {"verifier": 1.0}
    assert make_reward(TaskSettings(dataset=SPEC, reward="right")).weights == {"right": 1.0}
    assert make_reward(TaskSettings(dataset="questions.jsonl")).weights == DEFAULT_WEIGHTS


def test_a_question_of_another_version_is_not_scored_by_this_one() -> None:
    question = verified_questions("reasoning-gym:gcd(size=1)")[0]
    with pytest.raises(DatasetError, match="is another one in the reasoning-gym that is installed"):
        entry_of(replace(question, text="another text"))
    with pytest.raises(DatasetError, match="not an entry"):
        entry_of(replace(question, id="q1"))
