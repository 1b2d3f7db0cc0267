"""`--dataset verifiers:PACKAGE`: the tasks of a taskset as questions, their rewards as the score."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is in an environment of its own: make install-peers")

from query_mutator.data import taskset
from query_mutator.data.taskset import NotScored, score_of, taskset_questions
from query_mutator.embedded.server import start_server
from query_mutator.errors import DatasetError
from query_mutator.session.dataset import read_dataset
from query_mutator.session.judging import make_reward
from query_mutator.settings.episode import TaskSettings
from tests.conftest import Librarian, Softener
from tests.qm_command import qm

SPEC = "verifiers:sums_taskset(num_tasks=30)"


class Adder(Librarian):
    """A target that adds what is asked in plain words, but complains about some numbers."""

    def reply(self, prompt: str) -> str:
        found = re.search(r"(\d+) plus (\d+)$", prompt.removesuffix("?").strip())
        if found and int(found[1]) % 4 == 3:
            return "This is nonsense."
        return str(int(found[1]) + int(found[2])) if found else "What?"


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Return the run folder of a plan for the taskset, and the flag of its server."""
    with start_server([Adder(), Softener()], num_parallel=8) as server:
        models = ["--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"]
        found = [*models, "--encoder", "hash", "--operators", "shorthand,courtesy", "--max-calls", "150"]
        assert qm("plan", *found, "--dataset", SPEC, "--save-dir", tmp_path / "runs", "--max-failure-rate", "0.9") == 0
        yield next((tmp_path / "runs").glob("*/summary.json")).parent, models[:2]


def test_prompts_are_questions_and_rewards_their_score() -> None:
    first = read_dataset(TaskSettings(dataset=SPEC)).questions[0]
    assert (first.id, first.text) == ("sums_taskset(num_tasks=30,size=1000)#0", "wat is 2 plus 5 pls")
    assert (first.accept, first.tags) == (("7",), ("verifiers", "sums_taskset"))
    assert make_reward(TaskSettings(dataset=SPEC)).weights == {"verifier": 1.0}
    replies = ("7", "It is 7.", "After some thought it seems to me that it is 7", "8", "x" * 50)
    assert [score_of(first, reply) for reply in replies] == [1, 1, 0.75, 0.25, 0]
    assert len(taskset_questions("verifiers:sums_taskset(size=2)")) == 2
    (polite,) = taskset_questions("verifiers:sums_taskset(size=1, system='Be brief.')")
    assert polite.text == "Be brief.\n\nwat is 2 plus 5 pls"


def test_what_gives_no_score_is_not_a_score_of_zero() -> None:
    first = taskset_questions(SPEC)[0]
    with pytest.raises(NotScored, match="this reward is broken"):
        score_of(first, "nonsense")
    with ThreadPoolExecutor(1) as thread, pytest.raises(NotScored, match="in the main thread only"):
        thread.submit(score_of, first, "7").result()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "taskset 'nowhere' not found"),
        ("json", "exports no Taskset subclass"),
        ("os.path", "not verifiers:PACKAGE"),
        ("sums_taskset(7)", "not verifiers:PACKAGE"),
        ("sums_taskset(size=0)", "size=0 must be a whole number from 1"),
        ("sums_taskset(num_task=3)", "num_task: Extra inputs are not permitted"),
        ("sums_taskset(num_tasks=0)", "has no tasks"),
        ("sums_taskset(unfit='setup')", "prepares a runtime: not a single turn"),
        ("sums_taskset(unfit='turns')", "has no prompt of one message: not a single turn"),
        ("query-rewriting", "has an environment of its own: not a single turn"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: str, said: str) -> None:
    with pytest.raises(DatasetError) as raised:
        taskset_questions(f"verifiers:{spec}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_plan_and_its_evaluation_are_scored_by_the_rewards(plan: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = plan
    search = json.loads((folder / "summary.json").read_text())["search"]
    assert (search["best"]["plan"], search["best"]["success"]) == ("shorthand > courtesy", 1)
    assert (search["original"]["success"], search["original"]["score"]) == (0, 0.25)
    assert qm("eval", "--checkpoint", folder, "--json", tmp_path / "eval.json") == 0
    report = json.loads((tmp_path / "eval.json").read_text())
    assert [report["methods"][name]["success"] for name in ("identity", "policy")] == [0, 1]
    assert {one["kind"] for one in report["unscored"]} == {"unscored"}


def test_a_policy_of_somebody_else_imports_no_package(
    plan: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, server = plan
    shutil.copytree(folder, tmp_path / "given")
    question = taskset_questions(SPEC)[0]
    monkeypatch.setenv("QUERY_MUTATOR_TRUSTED", str(tmp_path / "trusted.jsonl"))
    monkeypatch.setattr(taskset, "_opened", {})
    monkeypatch.delitem(sys.modules, "sums_taskset")
    capsys.readouterr()
    assert qm("eval", "--checkpoint", tmp_path / "given", *server) == 2
    assert SPEC in capsys.readouterr().err
    with pytest.raises(DatasetError, match="give --dataset verifiers:PACKAGE"):
        score_of(question, "7")
    assert "sums_taskset" not in sys.modules
