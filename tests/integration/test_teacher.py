"""`--teacher`: a plan, a searched plan or a checkpoint takes the first steps of a run, and the policy imitates it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.session.checkpoint import read_checkpoint
from tests.integration.conftest import ROWS
from tests.integration.training_runs import rows, the_run, train
from tests.qm_command import qm

SEARCH = ["--ask", "form", "--teacher", "search", "--plan-calls", "60", "--no-use-linear-lr-decay"]


def test_a_teacher_takes_the_first_steps_of_a_run(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = ["--no-evaluate", "--ask", "form", "--teacher", "filler,neutral", "--teacher-steps", "20"]
    flags += ["--deterministic"]
    assert train(*tiny_flags, *flags) == 0
    steps = rows(the_run(tmp_path), "transcripts")
    taught = [row["operator"] for row in steps if row["step"] < 8]  # a rollout: 20 steps are rounded up to it
    assert set(taught) == {"filler", "neutral", "submit"}
    assert {row["operator"] for row in steps} == set(taught)  # afterwards the policy does as it was taught


def test_a_checkpoint_can_be_the_teacher(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--no-evaluate", "--ask", "form"]
    assert train(*flags, "--teacher", "filler,neutral", "--num-env-steps", "32") == 0
    first = the_run(tmp_path)
    assert train(*flags, "--teacher", str(first), "--seed", "2", "--teacher-steps", "64") == 0
    assert the_run(tmp_path) != first


def test_the_bandit_starts_from_a_plan_and_keeps_it(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*tiny_flags, "--ask", "form", "--no-evaluate"]
    bandit = ["--algo", "bandit", "--teacher", "filler,neutral", "--teacher-steps", "20", "--lcb-alpha", "100"]
    assert train(*flags, *bandit) == 0
    run = the_run(tmp_path)
    taught = [row["operator"] for row in rows(run, "transcripts") if row["step"] < 8]
    assert set(taught) == {"filler", "neutral", "submit"}
    capsys.readouterr()
    assert qm("rewrite", run, ROWS[0][0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["operators"] == ["filler", "neutral", "submit"]
    assert qm("export-policy", run, "-o", tmp_path / "policy.qm") == 0
    capsys.readouterr()
    assert qm("rewrite", tmp_path / "policy.qm", ROWS[0][0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["operators"] == ["filler", "neutral", "submit"]
    assert train(*flags, "--algo", "bandit", "--teacher", str(run)) == 2
    assert "--algo bandit starts from a plan; name its steps, or search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("teacher", "line"),
    [
        ("filler,nuetral", "unknown step of --teacher 'nuetral' (did you mean 'neutral'?)"),
        ("filler,filler", "occurs twice"),
        ("runs/nothing", "no such file"),
    ],
)
def test_a_teacher_that_cannot_teach_is_one_line(
    teacher: str, line: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--ask", "form", "--teacher", teacher) == 2
    err = capsys.readouterr().err.strip()
    assert line in err
    assert "\n" not in err
    assert not (tmp_path / "runs").exists()


def test_a_plan_teaches_only_a_policy_that_asks(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*tiny_flags, "--teacher", "filler,neutral") == 2
    assert "add --ask form" in capsys.readouterr().err


def test_a_run_with_a_teacher_resumes_to_the_same_steps(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--no-evaluate", "--ask", "form", "--teacher", "filler", "--deterministic"]
    flags += ["--no-use-linear-lr-decay"]
    assert train(*flags, "--num-env-steps", "96", "--teacher-steps", "64", "--name", "whole") == 0
    whole = {(row["env"], row["step"]): row["operator"] for row in rows(the_run(tmp_path), "transcripts")}
    assert train(*flags, "--num-env-steps", "32", "--teacher-steps", "64", "--name", "part") == 0
    run = the_run(tmp_path)
    (run / "summary.json").unlink()
    assert train("--resume", str(run), "--num-env-steps", "96") == 0
    again = {(row["env"], row["step"]): row["operator"] for row in rows(run, "transcripts")}
    taught = {place for place in whole if place[1] < 16}
    assert {place: again[place] for place in taught} == {place: whole[place] for place in taught}


def test_the_plan_of_the_search_teaches_and_is_in_the_table(tiny_flags: list[str], tmp_path: Path) -> None:
    assert train(*tiny_flags, *SEARCH, "--teacher-steps", "64", "--max-episode-steps", "3") == 0
    run = the_run(tmp_path)
    plan, report = read_checked_json(run / "plan.json"), json.loads((run / "summary.json").read_text())["eval"]
    assert 0 < plan["search"]["calls"] <= 60
    assert report["plan_search"] == plan["search"]  # one search in all
    assert report["methods"]["best_plan"]["scored"] > 0
    taken = {row["operator"] for row in rows(run, "transcripts")}
    assert taken - {"submit"} <= {*plan["teacher"]["steps"], "ask"}
    assert len(plan["teacher"]["steps"]) <= 3


def test_the_estimate_has_the_calls_of_the_search(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*tiny_flags, *SEARCH, "--dry-run") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "to search for the teacher" in line]
    assert line.split()[-1] == "60"


def test_a_resumed_run_does_not_search_again(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*tiny_flags, *SEARCH, "--teacher-steps", "64", "--no-evaluate", "--eval-interval", "0"]
    assert train(*flags, "--num-env-steps", "32") == 0
    run = the_run(tmp_path)
    plan = read_checked_json(run / "plan.json")
    plan["teacher"]["steps"] = ["filler"]
    write_checked_json(run / "plan.json", plan)
    (run / "summary.json").unlink()
    assert train("--resume", str(run), "--num-env-steps", "64") == 0
    assert "teacher: filler" in capsys.readouterr().err
    assert json.loads((run / "summary.json").read_text())["eval_llm_calls"] == 0
    assert {row["operator"] for row in rows(run, "transcripts") if row["step"] >= 8} == {"filler", "submit"}


def test_a_search_again_teaches_no_call_twice(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, *SEARCH, "--algo", "bandit", "--no-evaluate", "--eval-interval", "0"]
    assert train(*flags, "--num-env-steps", "32") == 0
    run = the_run(tmp_path)
    before = read_checkpoint(run).learner["counts"]
    assert before["samples_learned"] > before["env_steps"]  # the search's too
    (run / "plan.json").unlink()
    (run / "summary.json").unlink()
    assert train("--resume", str(run), "--num-env-steps", "64") == 0
    after = read_checkpoint(run).learner["counts"]
    assert after["samples_learned"] - before["samples_learned"] <= after["env_steps"]  # a step is learned at its end


def test_a_damaged_plan_of_a_run_is_one_line(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, *SEARCH, "--no-evaluate", "--num-env-steps", "32") == 0
    path = the_run(tmp_path) / "plan.json"
    (the_run(tmp_path) / "summary.json").unlink()
    for content, line in (
        (path.read_text()[:-20], "damaged"),
        ('{"best": 3}', "holds no plan"),
        ("{}", "holds no plan"),
    ):
        path.write_text(content)
        assert train("--resume", str(the_run(tmp_path)), "--num-env-steps", "64") == 2
        err = capsys.readouterr().err
        assert line in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ask", "form", "--plan-calls", "5"], "--plan-calls=5 is too few"),
        (["--ask", "every_step"], "add --ask form"),
        (["--ask", "form", "--algo", "iqn"], "cannot imitate"),
    ],
)
def test_a_search_that_cannot_teach_is_one_line(
    flags: list[str], line: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*tiny_flags, "--teacher", "search", *flags) == 2
    err = capsys.readouterr().err.strip()
    assert line in err
    assert "\n" not in err
    assert not (tmp_path / "runs").exists()
