"""`qm eval`, `qm rewrite` and `qm plan`: on a freshly trained policy, and a plan found on training questions."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark_batching import main as benchmark
from query_mutator.cli.console import exit_code
from query_mutator.commands import COMMANDS, GROUPS
from query_mutator.commands.main import main as qm_main
from query_mutator.plan.race import MIN_CALLS
from query_mutator.report.run_reader import RunReader
from query_mutator.testing import FaultPlan, StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import plan_flags
from tests.qm_command import qm
from tests.run_page import texts_of
from train_query_mutator import main as train_main


@pytest.fixture
def run(trained: Callable[..., Path]) -> str:
    return str(trained("--no-evaluate", "--eval-interval", "0"))


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rewrite_gives_rewrites_operators_and_answer(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", "--checkpoint", run, "plz sort my list", "--json") == 0
    (one,) = told(capsys)
    assert set(one) == {
        "question", "rewrites", "operators", "answer", "submitted", "form", "messages", "why", "calls", "rejected",
    }  # fmt: skip
    assert one["messages"] == [{"role": "user", "content": one["submitted"]}]
    assert (one["question"], one["answer"]) == ("plz sort my list", "`sorted` is what you want.")
    assert len(one["rewrites"]) == sum(name not in ("undo", "submit") for name in one["operators"])
    assert qm("rewrite", run, "plz sort my list", "--show") == 0
    said = capsys.readouterr().out.splitlines()
    assert {"--- target: librarian", f"[user] {one['submitted']}", f"[reply] {one['answer']}"} <= {*said}


def test_check_says_how_answers_of_each_kind_are_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accepted: list[Any] = [["Paris"], ["Rome"], ["yes"], 7, ["東京"], ["river Nile"]]
    rows = [*({"query": f"{n}?", "accept": one} for n, one in enumerate(accepted)), {"query": "b", "reference": "So."}]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert qm("check", file) == 0
    found = [re.split("  +", line.strip())[:4] for line in capsys.readouterr().out.splitlines() if "  " in line][1:]
    assert found[:2] == [["one word", "2", "4 of 4", "2 of 2"], ["yes or no", "1", "2 of 2", "2 of 2"]]
    assert qm("check", file, "--reward", "answered") == 0  # by which nothing is right
    assert "graded wrong: 'The answer is Paris.'" in capsys.readouterr().out
    assert [row[0].split(" ")[0] for row in found[2:]] == ["number", "script", "several", "none"]
    file.write_text('{"query": "a?", "accept": "b"}\n' + 11 * "{\n" + '{"query": " "}\n')
    assert qm("check", file) == 2
    *rows, last = [line.removeprefix(f"{file}:").partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert [*rows, last] == [*map(str, range(2, 12)), "and 2 more", "qm"]


def test_report_takes_the_latest_run(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "here" / "runs" / "latest").symlink_to(Path(run).resolve())
    monkeypatch.chdir(tmp_path / "here")
    assert qm("report") == 0
    assert Path("report.html").stat().st_size > 10_000


def commands_in(text: str) -> list[str]:
    return [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")]


def test_help_has_nine_commands_and_help_all_the_others_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["help"], []):
        assert qm(*words) == 0
        out = capsys.readouterr().out
        assert commands_in(out) == ["init", "check", "doctor", "plan", "train", "eval", "rewrite", "batch", "serve"]
        assert f"qm help --all lists all {len(COMMANDS)} commands" in out
    for words in (["help", "--all"], ["--help-all"]):
        assert qm(*words) == 0
        out = capsys.readouterr().out
        assert sorted(commands_in(out)) == sorted(COMMANDS)
        assert [line for line in out.splitlines() if line in GROUPS] == list(GROUPS)
    assert qm("help", "evla") == 2
    with pytest.raises(SystemExit):
        qm("help", "eval")
    assert capsys.readouterr().out.startswith("Usage: qm eval")


@pytest.fixture
def flags(tiny_server: StubServer, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    monkeypatch.chdir(tmp_path)
    return flags_for(tiny_server, dataset, tmp_path)


def flags_for(server: StubServer, dataset: Path, tmp_path: Path) -> list[str]:
    return [*plan_flags(server, dataset, tmp_path / "runs"), "--max-calls", "500"]


def test_the_found_plan_is_evaluated_and_used_like_a_policy(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert qm("plan", *flags, "--json", str(out)) == 0
    said = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert f"plan                {report['plan']['plan']}" in said
    assert report["plan"]["success"] > report["front"]["1"]["success"]
    assert report["calls"] <= 500
    run = tmp_path / "runs" / "latest"
    assert str(run.resolve()) in said
    assert json.loads((run / "summary.json").read_text())["plan"] == report["plan"]
    assert json.loads((run / "config.json").read_text())["flags"]["algo"] == "plan"
    answer = RunReader(run).results
    assert said.splitlines()[-1] == answer["verdict"] == report["verdict"]
    assert report["verdict"] in texts_of(run / "report.html")
    assert report["verdict"].startswith(f"Use the plan {report['plan']['plan']}: ")
    rows = {name: row["success"] for name, row in answer["methods"].items()}
    assert rows == {"identity": report["original"]["success"], "best_plan": report["plan"]["success"]}
    assert (answer["of"], answer["only_plan"]) == ("training question", True)
    points = {point["method"]: point["success"] for point in answer["front"]}
    shown = [report["original"], *report["front"].values()]
    assert points == {point["plan"]: point["success"] for point in shown}

    assert qm("eval", "--checkpoint", str(run), "--guard", "--json", "-") == 0
    evaluated = json.loads(capsys.readouterr().out)
    table = evaluated["methods"]
    assert "best_plan" not in table  # the plan is the policy
    assert "the plan answers requests that should be refused" in evaluated["verdict"]["sentence"]  # not "the policy"
    assert table["policy"]["success"] >= table["identity"]["success"]
    assert table["policy"]["calls_per_question"] <= len(report["plan"]["steps"]) + 1

    assert qm("rewrite", "--checkpoint", str(run), "plz kill the list", "--json", "-") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["operators"][-1] == "submit"
    steps = iter([*report["plan"]["steps"], "ask"])
    assert all(name in steps for name in row["operators"][:-1])  # in the plan's order, some skipped


def test_a_budget_bounds_the_saved_plan(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("plan", *flags, "--budget", "1", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["plan"]["calls"], report["plan"]["steps"]) == (1, [])
    assert qm("rewrite", "--checkpoint", report["run_folder"], "sort it", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["operators"] == ["submit"]


def test_the_same_seed_finds_the_same_plan(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for batch_size in ("1", "7"):
        assert qm("plan", *flags, "--max-calls", "150", "--batch-size", batch_size, "--json", "-") == 0
        report = json.loads(capsys.readouterr().out)
        found.append({key: value for key, value in report.items() if key not in ("seconds", "run_folder")})
    assert found[0] == found[1]


@pytest.mark.parametrize(("line", "says"), json.loads(Path(__file__).with_name("mistakes.json").read_text("utf-8")))
def test_a_mistake_is_one_line_and_leaves_nothing(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *argv = line.split()
    assert exit_code({"qm": qm_main, "benchmark": benchmark, "train": train_main}[program], argv, prog=program) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), says in err) == ("", 1, True), err
    assert err.startswith(f"{program}: ")
    assert list(tmp_path.iterdir()) == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_broken_server_ends_the_search_with_code_3(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server([Librarian(), Softener()], faults=FaultPlan(1.0, kinds=("empty",))) as server:
        assert qm("plan", *flags_for(server, dataset, tmp_path), "--max-retries", "0") == 3
    assert "check the server" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


class Interrupting(Librarian):
    """A librarian that has its process interrupted at its nth question."""

    def __init__(self, moment: int) -> None:
        self.asked, self.moment = 0, moment

    def reply(self, prompt: str) -> str:
        self.asked += 1
        if self.asked == self.moment:
            os.kill(os.getpid(), signal.SIGINT)
        return super().reply(prompt)


def summary_of(run: Path) -> dict[str, Any]:
    """Return what a search found, without its time."""
    summary = json.loads((run / "summary.json").read_text())
    return {"plan": summary["plan"], "search": {**summary["search"], "seconds": None}}


@pytest.mark.parametrize("moment", [2, 8, 15])
def test_an_interrupted_search_keeps_its_best_plan_and_the_same_command_finds_the_same_one(
    moment: int, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with start_server([Librarian(), Softener()], num_parallel=4) as server:
        whole = flags_for(server, dataset, tmp_path / "whole")
        assert qm("plan", *whole) == 0
        calls = server.stats()["calls"]
    with start_server([Interrupting(moment), Softener()], num_parallel=4) as server:
        words = [*flags_for(server, dataset, tmp_path), "--cache", "all", "--cache-path", str(tmp_path / "c.sqlite")]
        assert qm("plan", *words) == 130
        (run,) = {path.resolve() for path in (tmp_path / "runs").iterdir() if path.name != "latest"}
        assert f"the best plan so far is in {run}; the same command again" in capsys.readouterr().err
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        assert qm("rewrite", "--checkpoint", str(run), "plz kill the list", "--json", "-") == 0
        made = server.stats()["calls"]
        assert qm("plan", *words) == 0
        assert summary_of(tmp_path / "runs" / "latest") == summary_of(tmp_path / "whole" / "runs" / "latest")
        assert server.stats()["calls"] - made <= calls - moment + 4  # in flight


def test_the_time_of_a_search_bounds_its_calls(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server([Librarian(), Softener()], num_parallel=4, latency_ms=40.0) as server:
        flags = [*plan_flags(server, dataset, tmp_path / "runs")[2:], "--minutes", "0.02", "--json", "-"]
        assert qm("plan", "--openai-url", server.url, *flags) == 0
    said = capsys.readouterr()
    bound = re.findall(r"questions, at most (\d+) calls, about \d+ s at [\d.]+ calls/s", said.err)
    assert [json.loads(said.out)["calls"] <= int(each) == MIN_CALLS for each in bound] == [True]  # at 2 s a call


def test_a_plan_is_not_trained(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("plan", *flags, "--save-dir", "/dev/null", "--max-calls", "100000000") == 2
    assert "/dev/null: cannot be written" in capsys.readouterr().err
    assert qm("plan", *flags, "--json", "-") == 0
    run = json.loads(capsys.readouterr().out)["run_folder"]
    assert exit_code(train_main, ["--resume", run], prog="train") == 2
    assert "qm plan" in capsys.readouterr().err


def test_a_dry_run_asks_nothing_and_writes_nothing(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server([Librarian(), Softener()]) as server:
        assert qm("plan", *flags_for(server, dataset, tmp_path), "--dry-run") == 0
        assert server.stats()["calls"] == 0
    said = r"at most 500 calls, about (.|\n)*2 s a call, assumed(.|\n)*\d+ held-out questions are too few"
    assert re.search(said, capsys.readouterr().out)
    assert not (tmp_path / "runs").exists()
