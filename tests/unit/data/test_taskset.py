"""`--dataset verifiers:PACKAGE` without the package, and who may name one; tests/peers has the package itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from query_mutator.data.taskset import score_of, taskset_questions
from query_mutator.errors import DatasetError, UnnamedError
from query_mutator.session.dataset import read_dataset
from query_mutator.session.judging import make_reward
from query_mutator.session.trust import check_reach, remember
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import Question
from tests.qm_command import qm

SPEC = "verifiers:some-package(size=50)"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "not verifiers:PACKAGE"),
        ("os.path", "not verifiers:PACKAGE"),
        ("../package", "not verifiers:PACKAGE"),
        ("a b", "not verifiers:PACKAGE"),
        ("package(7)", "not verifiers:PACKAGE"),
        ("package(size=f())", "not verifiers:PACKAGE"),
        ("package(**{'size': 3})", "not verifiers:PACKAGE"),
        ("package(size=3", "not verifiers:PACKAGE"),
        ("package(size=0)", "size=0 must be a whole number from 1"),
        ("package(size=True)", "size=True must be a whole number from 1"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: str, said: str) -> None:
    with pytest.raises(DatasetError) as raised:
        taskset_questions(f"verifiers:{spec}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_package_a_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    assert qm("train", "--dataset", SPEC, "--dry-run") == 2
    said = capsys.readouterr().err.strip()
    assert "pip install 'query-mutator[verifiers]'" in said
    assert len(said.splitlines()) == 1


def test_only_the_user_names_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(tmp_path / "trusted.jsonl"))
    with pytest.raises(UnnamedError, match="some-package"):
        check_reach({"dataset": SPEC}, source="policy.qm")
    check_reach({"dataset": SPEC}, source="policy.qm", named={"dataset": SPEC})
    remember({"dataset": SPEC})
    check_reach({"dataset": SPEC}, source="policy.qm")


def test_a_question_alone_imports_nothing() -> None:
    question = Question(id="json(size=50)#0", text="2 + 2?", tags=("verifiers", "json"))
    with pytest.raises(DatasetError, match="give --dataset verifiers:PACKAGE"):
        score_of(question, "4")


def test_such_a_set_is_rewarded_by_its_tasks_and_has_its_own_columns() -> None:
    assert make_reward(TaskSettings(dataset=SPEC)).weights == {"verifier": 1.0}
    with pytest.raises(ValueError, match="question-column is for a file"):
        read_dataset(TaskSettings(dataset=SPEC, question_column="q"))
