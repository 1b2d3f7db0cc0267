"""The page of a run and comparisons of runs: numbers of the files, texts that stay texts, and `qm watch`."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.evaluation.summary import Outcome, Results, summarize
from query_mutator.files import JsonLines, read_json_lines, write_checked_json
from query_mutator.report.build import MARK, MAX_CHARS, write_page
from query_mutator.report.run_reader import RunReader, pairs_of
from query_mutator.training.callbacks import CALLBACKS, Callback, RunView
from query_mutator.types import ErrorInfo, Question
from tests.browser.page_runs import write_run
from tests.patience import until
from tests.qm_command import qm
from tests.run_page import said_in, texts_of, whole_page
from train_query_mutator import main as train_main

COMPARED = ("--eval-interval", "32", "--plan-calls", "0")


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    return trained(*COMPARED)


@pytest.fixture
def page(run: Path, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    return path


def summary_of(run: Path) -> dict[str, Any]:
    found = json.loads((run / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def test_the_numbers_are_those_of_the_summary(run: Path, page: Path) -> None:
    report, found = summary_of(run)["eval"], RunReader(run)
    results, texts = found.results, texts_of(page)
    assert (found.state, found.step, results["n"]) == ("finished", 64, report["n"])
    for name, row in results["methods"].items():
        of_summary = report["methods"][name]
        assert row == of_summary
        low, high = (100 * end for end in of_summary["success_ci"])
        assert f"{100 * of_summary['success']:.1f} \n[{low:.1f}, {high:.1f}]" in texts
    assert "3 held-out questions: differences under 65 points mean nothing." in texts
    assert results["tags"] == report["by_group"]
    assert [{key: point[key] for key in report["front"][0]} for point in results["front"]] == report["front"]
    for row in results["paired"]:
        of_summary = report["policy_minus"][row["method"]]
        assert (row["difference"], row["ci"]) == (of_summary["success"], of_summary["success_ci"])
        assert row["gained"] + row["lost"] + row["same_right"] + row["same_wrong"] == of_summary["questions"]
        assert (row["gained"] - row["lost"]) / of_summary["questions"] == pytest.approx(of_summary["success"])


def test_the_page_has_what_was_said_in_every_row(run: Path, page: Path) -> None:
    said = [html.unescape(re.sub("<[^>]*>", "", part)) for part in said_in(page)]
    for row in read_json_lines(run / "evaluation.jsonl"):
        shown = [part for part in said if f"{row['question_id']} · " in part or f"{row['question_id']}\n" in part]
        assert any(all(text in part for text in (row["question"], *row["answers"], *row["accepted"])) for part in shown)
    steps = list(read_json_lines(run / "transcripts.jsonl"))
    for step in steps:
        assert any(step["question"] in part and step["answer"] in part for part in said)
    assert RunReader(run).episodes.total == len({(step["env"], step["episode"]) for step in steps})


def test_questions_hold_the_way_of_each_method(run: Path) -> None:
    shown = {(row["set"], row["id"]): row for row in RunReader(run).questions}
    for row in read_json_lines(run / "evaluation.jsonl"):
        question = shown[row["set"], row["question_id"]]
        assert (question["text"], question["accepted"]) == (row["question"], row["accepted"])
        way = question["ways"][row["method"]]
        assert [step["name"] for step in way["steps"][1:]] == row["steps"]
        assert [step["text"] for step in way["steps"][1:]] == row["rewrites"]
        answers = [answer for step in way["steps"] for answer in step["answers"]]
        for name, values in {"answer": row["answers"], "score": row["scores"], "fit": row["fits"]}.items():
            assert [answer[name] for answer in answers] == values
        assert [answer["number"] for answer in answers if answer["submitted"]] == [row["submitted"] + 1]
        if row["set"] == "test":
            assert (way["outcome"] == "right") == (row["success"] == 1.0)


def test_two_runs_are_paired_as_compare_pairs_them(
    run: Path, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(train_main, [*tiny_flags, "--seed", "2", "--plan-calls", "0"], prog="train") == 0
    other = (tmp_path / "runs" / "latest").resolve()
    path = tmp_path / "two.html"
    assert qm("report", run, other, "-o", path) == 0
    capsys.readouterr()
    assert qm("compare", run, other, "--json") == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    rows = pairs_of([(each.name, RunReader(each).evaluation) for each in (run, other)])
    (row,) = [row for row in rows if row["method"] == "policy"]
    assert row["title"] == f"{other.name} against {run.name}"
    for name in ("gained", "lost", "same_right", "same_wrong", "p", "difference", "ci", "questions"):
        assert row[name] == pair[name]
    assert row["title"] in texts_of(path)


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--", "\u2028 \u202e", "\ud800 alone", "x" * 10**6]
)
def test_whatever_a_model_said_stays_a_text(run: Path, tmp_path: Path, text: str) -> None:
    row = json.dumps({**next(read_json_lines(run / "evaluation.jsonl")), "answers": [text], "method": "policy"})
    (run / "evaluation.jsonl").write_text(row + "\n")
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    assert text.replace("\ud800", "\ufffd")[:MAX_CHARS] in texts_of(path)
    assert text not in whole_page(path) or "<" not in text
    assert len(whole_page(path)) < 1_000_000


def test_the_page_of_a_long_run_is_bounded(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.report.run_reader.MAX_QUESTIONS", 2)
    monkeypatch.setattr("query_mutator.report.run_reader.MAX_EPISODES", 3)
    found = RunReader(run)
    assert [row["set"] for row in found.questions].count("test") == 2
    assert len(found.evaluation.left_out) == 1
    assert found.episodes.total > 3 >= len(found.episode_rows) > 1
    numbers = [each["number"] for each in found.episode_rows]
    assert numbers[0] == 1
    assert len({later - earlier for earlier, later in pairwise(numbers)}) == 1
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    assert "1 more questions are in the figures above" in texts_of(path)
    assert f"of {found.episodes.total} episodes, evenly spread over training" in texts_of(path)


def test_a_run_writes_its_page_at_its_end(trained_once: Callable[[tuple[str, ...]], Path], tmp_path: Path) -> None:
    run, page = trained_once(COMPARED), tmp_path / "page.html"
    with chdir(run.parent.parent):  # the page names the folder as the run did
        assert qm("report", Path("runs") / run.name, "-o", page) == 0
    assert (run / "report.html").read_text() == page.read_text()
    config = json.loads((run / "config.json").read_text())
    shown, texts = RunReader(run).origin, texts_of(page)
    assert len(shown["dataset_sha256"]) == 64
    for name in ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started"):
        assert shown[name] == config[name]
    for text in (config["command_line"], config["commit"], config["dataset_sha256"], *config["versions"].values()):
        assert text in texts


def test_a_run_writes_its_page_at_each_evaluation(tiny_flags: list[str], tmp_path: Path) -> None:
    shown = []

    def written(page: Path) -> int:
        steps = r"running.*\b(\d+) of 128 steps · started .* · written"
        found = re.search(steps, texts_of(page), re.DOTALL) if page.exists() else None
        return int(found[1]) if found else -1

    @CALLBACKS.register("reader of pages")
    class Pages(Callback):
        def on_rollout_end(self, run: RunView) -> None:
            shown.append(0 if run.env_steps <= 96 else 64)
            until(lambda: written(run.folder / "report.html") >= shown[-1])  # once calls of a rollout are in flight

    flags = ("--num-env-steps", "128", "--eval-interval", "2", "--no-evaluate")
    assert exit_code(train_main, [*tiny_flags, *flags], prog="train") == 0
    assert len(shown) == 4
    texts = texts_of(tmp_path / "runs" / "latest" / "report.html")
    assert "finished" in texts
    assert "written" not in texts


def test_a_page_that_cannot_be_written_fails_no_run(
    tiny_flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_page(*_: object, **__: object) -> None:
        raise RuntimeError("the page is broken")

    monkeypatch.setattr("query_mutator.report.build.write_page", no_page)
    assert exit_code(train_main, [*tiny_flags, "--no-evaluate"], prog="train") == 0
    assert "could not be written (the page is broken); try qm show" in caplog.text
    assert (tmp_path / "runs" / "latest" / "summary.json").exists()


def test_show_writes_the_page_where_it_is_missing_or_old(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    path = run / "report.html"
    for spoil in (lambda: None, path.unlink, lambda: os.utime(path, (1, 1))):
        spoil()
        assert qm("show", run) == 0
        assert path.stat().st_mtime > 1
        assert capsys.readouterr().out.endswith(f"{path}\n")
    assert opened == [path.as_uri()] * 3
    before = path.stat().st_mtime_ns
    assert qm("show", run) == 0
    assert path.stat().st_mtime_ns == before
    (run / "summary.json").unlink()  # as of a run that was killed behind its last page
    assert qm("show", run) == 0
    assert "interrupted" in texts_of(path)
    assert qm("show", run / "nothing") == 2


KEY = "plantedKEY0123456789"


def test_secrets_in_settings_and_the_environment_are_not_on_the_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXY_TOKEN", f"env-{KEY}")
    config = json.loads((run / "config.json").read_text())
    config["flags"] |= {"openai_url": f"http://me:{KEY}@host/v1?api_key={KEY}", "plugin_settings": {"api_key": KEY}}
    config["command_line"] = f"qm --judge-key {KEY} --header 'Authorization: Bearer {KEY}' X-Api-Key:{KEY} sk-{KEY}x"
    config["resumed"] = [{"command_line": f"train --token={KEY} --target-max-tokens 256"}]
    del config["file_sha256"]
    (run / "config.json").write_text(json.dumps(config))
    row = next(read_json_lines(run / "evaluation.jsonl")) | {"answers": [f"it is env-{KEY}, or {KEY}"]}
    (run / "evaluation.jsonl").write_text(json.dumps({name: row[name] for name in row if name != "crc"}) + "\n")
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    assert KEY not in whole_page(path)
    assert "it is ***, or ***" in texts_of(path)
    shown = RunReader(run).origin
    assert shown["flags"]["openai_url"] == "http://***@host/v1?api_key=***"
    assert shown["resumed"][0]["command_line"] == "train --token=*** --target-max-tokens 256"


def test_an_interrupted_run_has_a_page_without_a_verdict(run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    path = tmp_path / "page.html"
    for questions in (True, False):
        assert qm("report", run, "-o", path, "--force") == 0
        found = RunReader(run)
        assert (found.state, found.results["methods"], found.is_greedy) == ("interrupted", {}, questions)
        assert "No comparison with the baselines yet" in texts_of(path)
        assert bool(found.questions) is questions
        (run / "evaluation.jsonl").unlink(missing_ok=True)


ROWS = {
    "transcripts": {"env": [1], "parts": {"right": "much"}, "score": "high", "error": "late"},
    "evaluation": {"answers": 1, "parts": [None], "success": "yes", "steps": None},
    "metrics": {"llm/calls": [1], "llm/latency_s": "high"},
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in ROWS.items() for name in names])
def test_a_row_of_another_program_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, name: str
) -> None:
    path = run / f"{file}.jsonl"
    rows = list(read_json_lines(path))
    rows[-1] = {**rows[-1], name: ROWS[file][name]}
    path.write_text("".join(json.dumps({key: row[key] for key in row if key != "crc"}) + "\n" for row in rows))
    capsys.readouterr()
    assert qm("report", run, "-o", tmp_path / "x.html") == 2
    assert f"{path} is not a file of a run" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def watcher(run: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Yield a `qm watch`, the path of its page, and its port."""
    command = [sys.executable, "-m", "query_mutator", "watch", str(run), "--no-browser"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)(/\S*) ", process.stdout.readline())
            assert found, process.communicate()
            yield process, found[2], int(found[1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, the link to it, and files and folders that are no pages."""
    runs = tmp_path_factory.mktemp("parent") / "runs"
    run = write_run(runs / "one")
    write_page([run], run / "report.html")
    (runs / "latest").symlink_to("one")
    for name, text in {"stranger": "<script>1</script>", "of a link": ""}.items():
        (runs / name).mkdir()
        (runs / name / "config.json").write_text("{}")
        (runs / name / "report.html").write_text(text)
    (runs / "of a link" / "report.html").unlink()
    (runs / "of a link" / "report.html").symlink_to(run / "config.json")
    shutil.copy(run / "report.html", runs.parent / "report.html")
    shutil.copy(run / "report.html", runs / "report.html")
    return runs


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with watcher(runs) as (_, path, port):
        assert path == "/"
        yield port


def ask(
    port: int, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[HTTPResponse, str]:
    """Return a reply and its body."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as client:
        client.request(method, path, headers=headers or {})
        reply = client.getresponse()
        return reply, reply.read().decode()


@pytest.mark.parametrize("name", ["one", "latest"])
def test_the_page_of_a_run_is_its_file_and_a_script_that_loads_it_again(runs: Path, port: int, name: str) -> None:
    reply, body = ask(port, f"/{name}/")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    tag = reply.headers["ETag"]
    start, _, end = body.partition('<script>\n"use strict";\nsetInterval')
    policy = f"; connect-src http://127.0.0.1:{port}/{name}/"
    assert start.replace(policy, "") + "</body>\n</html>\n" == (runs / "one" / "report.html").read_text()
    assert f"tag !== '{tag}'" in end
    head, nothing = ask(port, f"/{name}/", method="HEAD")
    assert (head.status, head.headers["ETag"], nothing) == (200, tag, "")
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert policy in reply.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]


def test_the_runs_are_listed_with_links_to_their_pages(port: int) -> None:
    reply, body = ask(port, "/")
    assert reply.status == 200
    assert set(re.findall(r'href="([^"]*)"', body)) == {"/one/", "/latest/", "/stranger/"}


@pytest.mark.parametrize(
    "path",
    ["/one", "/one/config.json", "/one/report.html", "/../", "/%2e%2e/", "/./", "/one/../one/",
     "/..%2fruns%2fone/", "/one%2f/", "/etc/passwd", "*", "/one%00/", "/%c3%a9/", "/%ff/", f"/{'x' * 300}/"],
)  # fmt: skip
def test_nothing_else_is_served(port: int, path: str) -> None:
    reply, body = ask(port, path)
    assert reply.status in (400, 404) or "there is no page yet" in body
    assert MARK not in body


def test_a_file_that_is_no_page_of_a_run_is_not_served(port: int) -> None:
    _, body = ask(port, "/stranger/")
    assert "is not a page of a run" in body
    assert "<script>1</script>" not in body
    assert "there is no page yet" in ask(port, "/of%20a%20link/")[1]


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "localhost@evil.example"}, {"Host": ""},
     {"Origin": "http://evil.example"}, {"Origin": "null"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/one/"])
def test_other_sites_get_nothing(port: int, path: str, headers: dict[str, str]) -> None:
    reply, body = ask(port, path, headers=headers)
    assert reply.status == 403
    assert "only pages that this server sent" in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_it_is_read_only(port: int, method: str) -> None:
    assert ask(port, "/one/", method=method)[0].status == 501


def test_a_run_that_begins_later_is_waited_for_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with watcher(tmp_path / "runs" / "latest") as (process, path, port):
        assert path == "/latest/"
        waiting, body = ask(port, path)
        assert f"Waiting for {tmp_path}/runs/latest" in body
        run = write_run(tmp_path / "runs" / "one")
        (tmp_path / "runs" / "latest").symlink_to("one")
        assert ask(port, path, method="HEAD")[0].headers["ETag"] == waiting.headers["ETag"]
        tags = {waiting.headers["ETag"]}
        for count in (2, 3):
            write_page([run], run / "report.html")
            tags.add(ask(port, path, method="HEAD")[0].headers["ETag"])
            assert len(tags) == count
        assert MARK in ask(port, path)[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_a_file_in_place_of_a_run_and_a_port_in_use_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("", encoding="utf-8")
    assert qm("watch", path, "--no-browser") == 2
    assert capsys.readouterr().err.splitlines() == [f"qm: {path} is a file; give a run folder such as runs/latest"]
    assert qm("watch", tmp_path, "--no-browser", "--port", str(port)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"port {port} of 127.0.0.1 cannot be used" in line


RIGHT, WRONG, LOST = 1.0, 0.0, None


def outcome(name: str, success: float | None) -> Outcome:
    error = ErrorInfo(kind="timeout", message="no reply") if success is None else None
    return Outcome(question_id=name, success=float("nan") if success is None else success, score=0.5, error=error)


def results(methods: Mapping[str, Sequence[float | None]], *, targets: int = 10**6, text: str = "question") -> Results:
    """Return results on questions q0, q1, ... about `targets` things."""
    count = len(next(iter(methods.values())))
    questions = [Question(id=f"q{n}", text=f"{text} {n}", accept=(f"target {n % targets}",)) for n in range(count)]
    outcomes = {name: [outcome(f"q{n}", one) for n, one in enumerate(found)] for name, found in methods.items()}
    return Results(questions=questions, outcomes=outcomes, guard=(), guarded=dict.fromkeys(methods, ()))


def write_results(
    folder: Path, found: Results, *, seed: int = 1, model: str = "llama", dataset: str = "general"
) -> Path:
    folder.mkdir(parents=True)
    flags = {"seed": seed, "dataset": dataset}
    write_checked_json(folder / "config.json", {"flags": flags, "backend": {"target_model": model}})
    with closing(JsonLines(folder / "evaluation.jsonl", cut_at=0)) as file:
        file.append(*found.rows())
    return folder


def report_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert qm("compare", *argv, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_two_methods_of_one_run_have_the_interval_of_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(
        {"identity": [RIGHT, WRONG, WRONG, LOST] * 20, "policy": [RIGHT, RIGHT, WRONG, RIGHT] * 10 + [WRONG] * 40},
        targets=11,
    )
    known = summarize(found)["policy_minus"]["identity"]
    run = write_results(tmp_path / "a", found)
    [pair] = report_of(capsys, run, run, "--method", "identity", "policy")["pairs"]
    assert (pair["difference"], pair["ci"], pair["questions"]) == (known["success"], known["success_ci"], 60)
    assert (pair["gained"], pair["lost"], pair["same_right"], pair["same_wrong"]) == (10, 10, 10, 30)
    assert pair["left_out"]["unscored"] == 20


def test_runs_are_compared_on_the_same_questions_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_results(tmp_path / "a", results({"policy": [WRONG] * 30 + [RIGHT] * 10}))
    b = write_results(tmp_path / "b", results({"policy": [RIGHT] * 25 + [WRONG] * 3}), seed=2)
    report = report_of(capsys, a, b)
    [pair] = report["pairs"]
    assert (pair["questions"], pair["gained"], pair["same_wrong"]) == (28, 25, 3)
    assert pair["left_out"] == {"only A has": 12, "only B has": 0, "changed": 0, "unscored": 0}
    assert pair["p"] == pytest.approx(2 * 0.5**25)
    assert [(run["seed"], run["scored"]) for run in report["runs"]] == [(1, 40), (2, 28)]
    assert qm("compare", a, b) == 0
    out = capsys.readouterr().out
    assert "B is better than A on such questions. Left out: 12 only A has." in out
    assert "The intervals say nothing about other seeds" in out
    assert max(map(len, out.splitlines())) <= 80


def test_models_datasets_and_other_wordings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results({"policy": [RIGHT] * 9})
    other = results({"policy": [RIGHT] * 9}, text="request")
    mixed = Results(
        questions=[*found.questions[:4], *other.questions[4:]], outcomes=found.outcomes, guard=(), guarded=found.guarded
    )
    a = write_results(tmp_path / "a", found)
    b = write_results(tmp_path / "b", mixed, model="qwen", dataset="mine.jsonl")
    [pair] = report_of(capsys, a, b)["pairs"]
    assert (pair["questions"], pair["left_out"]["changed"]) == (4, 5)
    assert qm("compare", a, b) == 0
    out = capsys.readouterr().out
    assert "target llama, questions general" in out
    assert "target qwen, questions mine.jsonl" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "runs named: 1; give 2 to 26"),
        (["a", "a"], "a run is compared with itself"),
        (["a", "none"], "none: no such run"),
        (["a", "b", "--method", "plocy"], "unknown method of a 'plocy' (did you mean 'policy'?)"),
        (["a", "b", "--method", "policy", "policy", "identity"], "--method has 3 names for 2 runs"),
        (["a", "empty"], "empty has no evaluation.jsonl: its evaluation did not finish"),
        (["a", "other.jsonl"], "other.jsonl has no rows of an evaluation"),
        (["a", "apart"], "no held-out question in common: a (general) and apart (mine)"),
        (["a", "guard.jsonl"], "no row of a held-out question"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_results(Path(name), results({"policy": [RIGHT, WRONG]}))
    write_results(Path("apart"), results({"policy": [LOST]}), dataset="mine")
    Path("empty").mkdir()
    Path("other.jsonl").write_text('{"method": "policy", "question_id": 3, "success": "yes"}\n', encoding="utf-8")
    guard = [json.dumps({**row, "set": "guard"}) for row in results({"policy": [RIGHT]}).rows()]
    Path("guard.jsonl").write_text("\n".join([*guard, ""]), encoding="utf-8")
    assert qm("compare", *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
