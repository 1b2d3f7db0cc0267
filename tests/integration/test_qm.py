"""`qm eval` and `qm rewrite` on a freshly trained policy."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands import COMMANDS, GROUPS
from query_mutator.commands.main import main as qm_main


def qm(*argv: str) -> int:
    return exit_code(qm_main, argv, prog="qm")


@pytest.fixture
def run(trained: Callable[..., Path]) -> str:
    return str(trained("--no-evaluate", "--eval-interval", "0"))


def test_eval_prints_the_table_and_writes_the_report(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert qm("eval", "--checkpoint", run, "--json", str(out)) == 0
    assert "held-out questions, answered by librarian" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["target"] == "librarian"
    assert set(report["methods"]) == {"identity", "random", "best_single", "best_of_k", "best_plan", "policy"}
    assert set(report["methods"]["policy"]) >= {
        "success", "success_ci", "score", "false_refusal", "guard_refusal", "calls_per_question",
    }  # fmt: skip


def test_eval_leaves_out_what_the_policy_was_trained_on(
    run: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qm("eval", "--checkpoint", run) == 0
    held_out = capsys.readouterr().out.splitlines()[0]
    assert qm("eval", "--checkpoint", run, "--dataset", str(dataset)) == 0
    assert capsys.readouterr().out.splitlines()[0] == held_out


def test_eval_of_other_questions_asks_them_all(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "others.csv"
    path.write_text("q,a\nplz sort by key,heapq.merge\njoin threads,threading.Thread.join\nlength umm,array.array\n")
    flags = ["--dataset", str(path), "--question-column", "q", "--answer-column", "a"]
    assert qm("eval", "--checkpoint", run, *flags) == 0
    warning, title, *_ = capsys.readouterr().out.splitlines()
    assert warning == f"3 questions of {path} that training did not have: differences under 65 points mean nothing."
    assert title.startswith(f"3 questions of {path} that training did not have, answered by librarian")


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rewrite_gives_rewrites_operators_and_answer(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", "--checkpoint", run, "plz sort my list", "--json") == 0
    (one,) = told(capsys)
    assert set(one) == {
        "question", "rewrites", "operators", "answer", "submitted", "form", "messages", "why", "calls", "rejected",
    }  # fmt: skip
    assert one["messages"] == [{"role": "user", "content": one["submitted"]}]
    assert one["question"] == "plz sort my list"
    assert one["answer"] == "`sorted` is what you want."
    assert len(one["rewrites"]) == sum(name not in ("undo", "submit") for name in one["operators"])


def test_report_takes_the_latest_run(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "here" / "runs" / "latest").symlink_to(Path(run).resolve())
    monkeypatch.chdir(tmp_path / "here")
    assert qm("report") == 0
    assert Path("report.html").stat().st_size > 10_000


def test_rewrite_takes_the_run_before_the_question(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", run, "plz sort my list", "--json") == 0
    assert told(capsys)[0]["question"] == "plz sort my list"
    assert qm("rewrite", run, "plz sort my list", "--checkpoint", "other") == 2
    assert f"{run} and --checkpoint other are two policies; give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ([""], "the question is empty"),
        ([], "is a run: give the question after it, and --json at the end"),
        (["--json", "plz sort my list"], "is a run: give the question after it, and --json at the end"),
    ],
)
def test_a_run_without_a_question_is_an_error(
    after: list[str], error: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert qm("rewrite", run, *after) == 2
    assert error in capsys.readouterr().err
    assert not list(here.iterdir())


def test_rewrite_reads_lines(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("join my words\n\n  umm length plz\n"))
    assert qm("rewrite", "--checkpoint", run, "--json", "-") == 0
    assert [one["question"] for one in told(capsys)] == ["join my words", "umm length plz"]


def test_rewrite_tells_it_in_words(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", "--checkpoint", run, "plz sort my list") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].split(maxsplit=1) == ["question", "plz sort my list"]
    assert lines[-1].split(maxsplit=1) == ["answer", "`sorted` is what you want."]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["evla"], "qm: unknown command 'evla'; did you mean eval?"),
        (["eval", "--chekpoint", "x"], "qm: unknown flag --chekpoint; did you mean --checkpoint?"),
        (["eval", "--checkpoint", "nowhere"], "qm: nowhere: no such file; give a run folder such as runs/latest"),
        (["rewrite"], "qm: question is missing; see --help"),
        (["rewrite", "one", "two", "three"], "qm: unexpected argument 'three'"),
        (["rewrite", "--batch-size", "0", "x"], "qm: batch_size=0 must be at least 1"),
    ],
)
def test_mistake_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_empty_question_is_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", "--checkpoint", run, "  ") == 2
    assert "the question is empty" in capsys.readouterr().err


def test_unwritable_report_is_one_line(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert qm("eval", "--checkpoint", run, "--json", str(tmp_path / "file" / "report.json")) == 2
    assert "choose another place to write to" in capsys.readouterr().err


def commands_in(text: str) -> list[str]:
    return [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")]


def test_help_has_eight_commands_and_help_all_the_others_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["help"], []):
        assert qm(*words) == 0
        out = capsys.readouterr().out
        assert commands_in(out) == ["init", "doctor", "plan", "train", "eval", "rewrite", "batch", "serve"]
        assert f"qm help --all lists all {len(COMMANDS)} commands" in out
    for words in (["help", "--all"], ["--help-all"]):
        assert qm(*words) == 0
        out = capsys.readouterr().out
        assert sorted(commands_in(out)) == sorted(COMMANDS)
        assert [line for line in out.splitlines() if line in GROUPS] == list(GROUPS)
    assert qm("help", "evla") == 2
    with pytest.raises(SystemExit):
        qm("help", "eval")
    assert capsys.readouterr().out.startswith("usage: qm eval")
