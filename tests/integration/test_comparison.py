"""The final comparison: one pool of calls, shared and charged; its rows, its bound, its interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.second_author import main as second_author
from query_mutator.cli.console import exit_code
from query_mutator.data import GENERAL_2
from query_mutator.env.task import Task
from query_mutator.evaluation.comparison import Comparison, Evaluator, Found, Job, best_of, chain_of, standard_methods
from query_mutator.files import file_sha256, read_json_lines
from query_mutator.forms import FORMS
from query_mutator.llm.cache import Cache
from query_mutator.llm.client import Client
from query_mutator.operators import LocalOperator
from query_mutator.session.play import script
from query_mutator.testing import StubServer, start_server
from tests.conftest import QUESTIONS, Librarian, Softener
from tests.fake_client import FakeClient
from tests.integration.conftest import write_dataset
from tests.qm_command import qm
from train_query_mutator import main as train_main

ROOT = Path(__file__).resolve().parents[2]
MakeTask = Callable[..., Task]


@pytest.fixture
def recording(tiny_client: Client) -> FakeClient:
    return FakeClient(tiny_client.complete)


@pytest.fixture
def evaluator(recording: FakeClient) -> Evaluator:
    return Evaluator(client=Cache(recording), batch_size=2)


def test_equal_calls_are_made_once_and_charged_to_each_method(
    evaluator: Evaluator, recording: FakeClient, tiny_task: MakeTask
) -> None:
    task, found = tiny_task(skip_unchanged=False), Found()
    methods = [
        chain_of("once", task, ["filler", "submit"]),
        chain_of("twice", task, ["ask", "filler", "ask", "submit"]),
    ]
    jobs = [Job(name=method.name, task=method.rules(task), player=method.player) for method in methods]
    evaluator.run_all(jobs, found, title="")
    assert set(Counter((one.model, one.messages[-1].content) for one in recording.requests).values()) == {1}
    assert [outcome.calls for outcome in found["once"].values()] == [2] * 5
    changed = [len(outcome.asked) == 2 for outcome in found["twice"].values()]
    assert [outcome.calls for outcome in found["twice"].values()] == [2 + was for was in changed]
    assert all(outcome.tokens and outcome.seconds > 0 for outcome in found["twice"].values())


def contest(evaluator: Evaluator, task: Task, policy: list[str]) -> Comparison:
    """Return a contest whose policy takes the same actions for every question."""
    methods = standard_methods(task, script([task.actions.index(name) for name in policy]), seed=0)
    return Comparison(evaluator, methods, test=task, guard=task.on(QUESTIONS[1:2]), ranking=task)


@pytest.mark.parametrize(
    ("policy", "k"), [(["submit"], 1), (["filler", "submit"], 2), (["filler", "neutral", "spelling", "submit"], 4)]
)
def test_k_is_the_smallest_whose_calls_are_at_least_the_policys(
    policy: list[str], k: int, evaluator: Evaluator, tiny_task: MakeTask
) -> None:
    ran = contest(evaluator, tiny_task(skip_unchanged=False), policy)
    ran.run()
    outcomes = ran.results().outcomes
    assert list(outcomes) == ["identity", "random", "best_single", "best_of_k", "policy"]
    spent = {name: sum(outcome.calls for outcome in found) for name, found in outcomes.items()}
    assert ran.k == k
    assert spent["identity"] == 5
    assert spent["best_single"] == 10
    assert spent["best_of_k"] >= spent["policy"] or k == 4
    fewer = best_of(k - 1, ran.ranking, tiny_task(skip_unchanged=False)) if k > 1 else None
    if fewer is not None:
        task = fewer.rules(tiny_task(skip_unchanged=False))
        assert sum(outcome.calls for outcome in evaluator.run(task, fewer.player)) < spent["policy"]


@pytest.mark.parametrize(("changed", "first"), [("stop", ["shout"]), ("kill", [])])
def test_on_a_language_model_best_of_k_is_a_vote_of_forms(
    changed: str, first: list[str], evaluator: Evaluator, tiny_task: MakeTask
) -> None:
    shout = LocalOperator(name="shout", summary="Turn.", function=lambda text, context: text.replace("kill", changed))
    task = tiny_task(forms=[FORMS.get(name) for name in ("few_words", "restate", "read_twice")], ask="form")
    task = replace(task, operators=(shout, *task.operators[1:]))
    ran = contest(evaluator, task, ["few_words", "ask", "restate", "ask", "submit"])
    ran.run()
    forms = [name for name in ran.ranking if name in {form.name for form in task.forms}]
    outcome = ran.results().outcomes["best_of_k"][1]
    assert ran.k == outcome.calls == 2
    assert list(outcome.steps) == [*first, forms[0], forms[1], "submit"]
    assert outcome.why == "the most frequent of 2 answers"


def test_one_rewrite_alone_never_asks_the_original(
    evaluator: Evaluator, recording: FakeClient, tiny_task: MakeTask
) -> None:
    task = tiny_task(skip_unchanged=False)
    method = chain_of("best_single", task, ["filler", "submit"])
    (outcome, *_) = evaluator.run(method.rules(task), method.player)
    assert (outcome.steps, outcome.asked, outcome.calls) == (("filler", "submit"), ("sort my list",), 2)
    asked = [(one.model, one.messages[-1].content) for one in recording.requests]
    assert ("librarian", "plz sort my list") not in asked


@pytest.fixture
def run(trained: Callable[..., Path]) -> str:
    return str(trained("--no-evaluate", "--eval-interval", "0"))


def test_a_row_for_every_method_and_question(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert qm("eval", "--checkpoint", run, "--evaluation", str(path), "--guard", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    rows = list(read_json_lines(path))
    assert Counter((row["method"], row["set"]) for row in rows) == {
        (name, part): count for name in report["methods"] for part, count in (("test", report["n"]), ("guard", 28))
    }
    for row in rows:
        assert row["answers"][row["submitted"]]
        assert len(row["rewrites"]) == len(row["steps"])
        assert len(row["asked"]) == len(row["answers"]) == len(row["parts"]) == len(row["scores"]) == len(row["fits"])
        assert row["scores"][row["submitted"]] == pytest.approx(row["score"], abs=1e-4)
        assert row["parts"][row["submitted"]]["right"] == row["success"]
        assert row["question"]
        assert row["accepted"] or row["set"] == "guard"
        assert "answer" in row["why"]
    of_policy = [row for row in rows if (row["method"], row["set"]) == ("policy", "test")]
    mean = sum(row["calls"] for row in of_policy) / len(of_policy)
    assert mean == pytest.approx(report["methods"]["policy"]["calls_per_question"])
    assert qm("eval", "--checkpoint", run, "--evaluation", str(path)) == 2  # an earlier output needs --force
    assert qm("eval", "--checkpoint", run, "--evaluation", str(path), "--force") == 0
    out = capsys.readouterr().out
    assert {row["set"] for row in read_json_lines(path)} == {"test"}  # a file of one's own, without --guard
    assert "false refusals" in out
    assert "guard" not in out


def test_eval_calls_bounds_the_calls_by_a_sample_of_the_questions(
    run: str, tiny_server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "others.jsonl"
    write_dataset(path, [(f"plz sort list number {n}", "sorted") for n in range(60)])
    argv = ["eval", "--checkpoint", run, "--dataset", str(path), "--cache", "off", "--json"]
    before = tiny_server.stats()["calls"]
    assert qm(*argv, "--eval-calls", "400") == 0
    made = tiny_server.stats()["calls"] - before
    out, err = capsys.readouterr()
    first = json.loads(out)
    assert " of 60 questions, " in err
    assert made <= first["calls"] <= first["calls_at_most"] == 400  # the plans of the search are asked once
    assert 5 <= first["n"] == first["asked"] < first["available"] == 60
    assert all(method["scored"] == first["n"] for method in first["methods"].values())
    assert qm(*argv, "--eval-calls", "400") == 0
    second = json.loads(capsys.readouterr().out)
    assert second["methods"]["policy"]["success"] == first["methods"]["policy"]["success"]  # the same sample
    assert qm(*argv[:-1], "--eval-calls", "200") == 0
    out, err = capsys.readouterr()
    warning, title, *_ = out.splitlines()
    assert re.match(rf"\d+ questions of {path} that training did not have: differences under \d+ points", warning)
    assert re.match(rf"\d+ of 60 questions of {path} .*, limited to 200 calls, answered by", title)
    assert "No verdict: " in out.splitlines()[-1]
    assert "evaluation: at most 200 model calls for " in err
    assert " of 60 questions" in err
    assert qm(*argv, "--eval-calls", "20") == 2
    assert "--eval-calls 20 does not allow one question of each method; give at least" in capsys.readouterr().err


def test_the_second_authors_general_questions_are_opened_by_the_command_that_logs_each_reading(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, limit = tmp_path / "readings.jsonl", ["--eval-flags", "--eval-calls 200"]
    assert exit_code(second_author, [run, "--log", str(log), *limit], prog="second_author") == 0
    assert "general_2.jsonl that training did not have" in capsys.readouterr().out
    (reading,) = read_json_lines(log)
    assert reading["checkpoints"] == [run]
    assert reading["flags"] == ["--eval-calls", "200"]
    assert reading["dataset_sha256"] == file_sha256(GENERAL_2)
    assert exit_code(second_author, [str(tmp_path / "none.pt"), "--log", str(log)], prog="second_author") == 2
    assert len(list(read_json_lines(log))) == 1  # nothing was asked
    assert qm("eval", "--checkpoint", run, "--dataset", "general-2") == 2
    assert "only for evaluation, by `python -m benchmarks.second_author`" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_evaluation_prints_the_questions_that_all_methods_finished(
    tiny_flags: list[str], tmp_path: Path
) -> None:
    models: list[Any] = [Librarian(), Softener()]
    path = write_dataset(tmp_path / "many.jsonl", [(f"plz sort list number {n}", "sorted") for n in range(400)])
    with start_server(models, num_parallel=8, latency_ms=20) as server:
        flags = [*tiny_flags[2:], "--ollama-url", server.url, "--eval-interval", "0", "--no-evaluate"]
        assert exit_code(train_main, flags, prog="train") == 0
        before = server.stats()["calls"]
        argv = ["eval", "--checkpoint", str(tmp_path / "runs" / "latest"), "--dataset", str(path), "--plan-calls", "0"]
        argv += ["--ollama-url", server.url]
        process = subprocess.Popen(
            [sys.executable, "-m", "query_mutator", *argv, "--evaluation", str(tmp_path / "rows.jsonl")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while server.stats()["calls"] < before + 300:
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "more were not finished)" in out.splitlines()[0]
    assert "\nidentity " in out
    assert "\npolicy " in out
    rows = Counter(row["method"] for row in read_json_lines(tmp_path / "rows.jsonl") if row["set"] == "test")
    assert rows["identity"] == rows["policy"] == int(out.split()[0])
