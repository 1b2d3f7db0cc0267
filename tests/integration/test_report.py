"""The page of a run: its numbers are those of the run's files, and whatever a text says, it stays a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.files.json_lines import read_json_lines
from query_mutator.report.page.messages import chunks
from query_mutator.report.page.run_reader import RunReader
from query_mutator.training.callbacks import CALLBACKS, Callback, RunView
from tests.page_messages import messages_of, section_of, texts_of
from tests.qm_command import qm
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
    report = summary_of(run)["eval"]
    answer = section_of(page, "answer")
    assert (answer["state"], answer["step"], answer["n"]) == ("finished", 64, report["n"])
    for row in answer["methods"]:
        of_summary = report["methods"][row["method"]]
        for name in ("success", "success_ci", "false_refusal", "false_refusal_ci", "guard_refusal", "scored"):
            assert row[name] == of_summary[name]
        assert (row["calls"], row["tokens"]) == (of_summary["calls_per_question"], of_summary["tokens_per_question"])
    assert [line for line in answer["warnings"] if "mean nothing" in line] == [
        "3 held-out questions: differences under 65 points mean nothing."
    ]
    assert {row["tag"]: row["methods"] for row in section_of(page, "tags")["tags"]} == {
        name: group["methods"] for name, group in (report["by_group"] | report["by_tag"]).items()
    }
    front = section_of(page, "front")["points"]
    assert [{key: point[key] for key in ("method", "calls", "success", "on_front")} for point in front] == report[
        "front"
    ]
    for row in section_of(page, "paired")["rows"]:
        found = report["policy_minus"][row["baseline"]]
        assert (row["difference"], row["ci"]) == (found["success"], found["success_ci"])
        assert row["gained"] + row["lost"] + row["same_right"] + row["same_wrong"] == found["questions"]
        assert (row["gained"] - row["lost"]) / found["questions"] == pytest.approx(found["success"])


def test_the_page_has_every_row_of_the_files(run: Path, page: Path) -> None:
    texts, messages = texts_of(page), messages_of(page)
    columns = [message["columns"] for message in messages if message["kind"] == "transcripts"]
    steps = list(read_json_lines(run / "transcripts.jsonl"))
    for name, field in (("rewrite", "rewrite"), ("op", "operator"), ("q", "question"), ("id", "question_id")):
        assert [texts[number] for each in columns for number in each[name]] == [step[field] for step in steps]
    answers = [number for each in columns for number in each["answer"]]
    assert ["" if number < 0 else texts[number] for number in answers] == [step["answer"] for step in steps]
    (metrics,) = [message for message in messages if message["kind"] == "metrics"]
    rows = list(read_json_lines(run / "metrics.jsonl"))
    assert metrics["steps"] == [row["step"] for row in rows]
    for key in ("charts/episodic_return", "validation/success", "llm/calls"):
        assert metrics["columns"][key] == [row.get(key) for row in rows]
    low, high = (metrics["columns"][f"validation/success_{end}"][-1] for end in ("low", "high"))
    assert low < rows[-1]["validation/success"] < high or rows[-1]["validation/success"] in (low, high)


def test_questions_hold_the_way_of_each_method(run: Path, page: Path) -> None:
    texts = texts_of(page)
    (message,) = [message for message in messages_of(page) if message["kind"] == "questions"]
    rows = {(row["set"], row["id"]): row for row in message["rows"]}
    for row in read_json_lines(run / "evaluation.jsonl"):
        shown = rows[row["set"], row["question_id"]]
        assert texts[shown["q"]] == row["question"]
        assert [texts[number] for number in shown["accepted"]] == row["accepted"]
        way = shown["methods"][row["method"]]
        assert [texts[number] for number in way["answers"]] == row["answers"]
        for name in ("steps", "submitted", "why", "success", "parts", "scores", "fits", "calls"):
            assert way[name] == row[name]
        right = way["verdicts"][way["submitted"]]
        assert (right == "right") == (row["success"] == 1.0)
        assert (right == "refused") == row["refused"]


def test_every_choice_of_training_and_of_the_policy_is_counted(run: Path, page: Path) -> None:
    policy = section_of(page, "policy")
    rows = [
        row for row in read_json_lines(run / "evaluation.jsonl") if (row["method"], row["set"]) == ("policy", "test")
    ]
    taken = sum(len(row["steps"]) for row in rows)
    for name in ("by_step", "by_verdict"):
        assert sum(count for row in policy[name] for count in row["counts"].values()) == taken
    assert (policy["episodes"], policy["source"]) == (len(rows), "held-out questions, greedy policy")
    assert policy["submit"] == sum(row["steps"].count("submit") for row in rows)
    operators = {"spelling", "neutral", "filler"}
    steps = list(read_json_lines(run / "transcripts.jsonl"))
    assert {row["operator"] for row in policy["gains"]} <= operators
    used = sum(step["operator"] in operators and step["valid"] for step in steps)
    assert used - 4 <= sum(row["chosen"] + row["random_n"] for row in policy["gains"]) <= used  # 4 episodes are open


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
    (row,) = [row for row in section_of(path, "pairs", run=-1)["rows"] if row["method"] == "policy"]
    assert (row["a"], row["b"]) == (run.name, other.name)
    for name in ("gained", "lost", "same_right", "same_wrong", "p", "difference", "ci", "questions"):
        assert row[name] == pair[name]
    assert section_of(path, "answer", run=1)["name"] == other.name


@pytest.mark.parametrize("rows", [7, 32, 64])
def test_many_rows_come_in_parts_and_the_sections_last(
    run: Path, page: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(chunks, "__defaults__", (rows,))  # 64 steps: also a whole number of parts
    messages = [*RunReader(run).messages()]
    sizes = [len(message["columns"]["env"]) for message in messages if message["kind"] == "transcripts"]
    assert sizes == [min(rows, 64 - start) for start in range(0, 64, rows)]
    kinds = [message["kind"] for message in messages]
    assert kinds.index("section") == kinds.index("section", -kinds.count("section"))
    shown = {message["name"]: message["data"] for message in messages if message["kind"] == "section"}
    assert all(data == section_of(page, name) for name, data in shown.items())


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--", "\u2028 \u202e", "\ud800 alone", "x" * 10**6]
)
def test_whatever_a_model_said_stays_a_text(run: Path, tmp_path: Path, text: str) -> None:
    row = json.dumps({**next(read_json_lines(run / "evaluation.jsonl")), "answers": [text], "method": "policy"})
    (run / "evaluation.jsonl").write_text(row + "\n")
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    assert text.replace("\ud800", "\ufffd") in texts_of(path)
    assert text not in path.read_text()


def test_a_run_writes_its_page_at_its_end(trained_once: Callable[[tuple[str, ...]], Path], tmp_path: Path) -> None:
    run, page = trained_once(COMPARED), tmp_path / "page.html"
    assert qm("report", run, "-o", page) == 0
    assert messages_of(run / "report.html") == messages_of(page)
    config = json.loads((run / "config.json").read_text())
    shown = section_of(page, "reproduce")
    assert len(shown["dataset_sha256"]) == 64
    for name in ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started"):
        assert shown[name] == config[name]


def test_a_run_writes_its_page_at_each_evaluation(tiny_flags: list[str], tmp_path: Path) -> None:
    shown = []

    @CALLBACKS.register("reader of pages")
    class Pages(Callback):
        def on_rollout_end(self, run: RunView) -> None:
            page = run.folder / "report.html"
            answer = section_of(page, "answer")
            (metrics,) = [message for message in messages_of(page) if message["kind"] == "metrics"]
            shown.append((answer["state"], answer["step"], len(metrics["columns"]["validation/success"])))
            assert answer["written"]

    flags = ("--num-env-steps", "128", "--eval-interval", "2", "--no-evaluate")
    assert exit_code(train_main, [*tiny_flags, *flags], prog="train") == 0
    assert shown == [("running", 0, 1), ("running", 0, 1), ("running", 64, 3), ("running", 64, 3)]
    page = tmp_path / "runs" / "latest" / "report.html"
    assert section_of(page, "answer")["state"] == "finished"
    assert section_of(page, "answer")["written"] is None


def test_a_page_that_cannot_be_written_fails_no_run(
    tiny_flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_page(*_: object, **__: object) -> None:
        raise RuntimeError("the page is broken")

    monkeypatch.setattr("query_mutator.report.page.build.write_page", no_page)
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
    assert section_of(path, "answer")["state"] == "interrupted"
    assert qm("show", run / "nothing") == 2


def test_the_cost_is_tokens_times_prices(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path, "--price-in", "2", "--price-out", "10") == 0
    price, summary = section_of(path, "calls")["price"], summary_of(run)
    prompts, replies = summary["eval_tokens"] - summary["eval_reply_tokens"], summary["eval_reply_tokens"]
    assert replies > 0
    assert price["evaluations"] == pytest.approx((2 * prompts + 10 * replies) / 1e6)
    total = list(read_json_lines(run / "metrics.jsonl"))[-1]["counters/tokens"]
    assert 2 * total / 1e6 < price["training"] < 10 * total / 1e6
    asked = [
        row for row in read_json_lines(run / "evaluation.jsonl") if (row["method"], row["set"]) == ("identity", "test")
    ]
    cost = (
        sum(2 * (row["tokens"] - row["reply_tokens"]) + 10 * row["reply_tokens"] for row in asked) / len(asked) / 1000
    )
    assert price["identity, 1,000 questions"] == pytest.approx(cost)
    assert section_of(run / "report.html", "calls")["price"] is None
    capsys.readouterr()
    assert qm("report", run, "-o", path, "--price-in", "2") == 2
    assert "both --price-in and --price-out" in capsys.readouterr().err
    assert qm("report", run, "-o", path, "--price-in", "-1", "--price-out", "1") == 2


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
    assert KEY not in json.dumps(messages_of(path)) + path.read_text()
    assert "it is ***, or ***" in texts_of(path)
    shown = section_of(path, "reproduce")
    assert shown["flags"]["openai_url"] == "http://***@host/v1?api_key=***"
    assert shown["resumed"][0]["command_line"] == "train --token=*** --target-max-tokens 256"


def test_a_damaged_row_is_named_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run / "transcripts.jsonl"
    steps.write_bytes(steps.read_bytes().replace(b'"step":1,', b'"step":9,', 1))
    assert qm("report", run, "-o", tmp_path / "x.html") == 2
    assert "transcripts.jsonl:" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_an_interrupted_run_has_a_page_without_a_verdict(run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    path = tmp_path / "page.html"
    assert qm("report", run, "-o", path) == 0
    answer = section_of(path, "answer")
    assert (answer["state"], bool(answer["verdict"])) == ("interrupted", True)  # from the rows that are there
    (run / "evaluation.jsonl").unlink()
    assert qm("report", run, "-o", path, "--force") == 0
    answer = section_of(path, "answer")
    assert (answer["methods"], answer["verdict"]) == ([], None)
    assert section_of(path, "policy")["source"] == "training"


ROWS = {
    "transcripts": {"env": "x", "operator": None, "parts": {"right": "much"}, "error": "late", "valid": 1},
    "evaluation": {
        "set": 3, "answers": "one", "submitted": 99, "parts": [None], "fits": "x", "error": {}, "success": "yes",
        "steps": [],
    },
    "metrics": {"step": None, "llm/calls": [1], "charts/success": "high"},
}  # fmt: skip


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
    assert f"{path}: not a file of a run" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [{"eval": {"methods": 3}}, {"eval": []}, {"plan": None}, {"eval": {"n": 1}}])
def test_a_summary_of_another_program_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: dict[str, Any]
) -> None:
    (run / "summary.json").write_text(json.dumps(broken))
    (run / "evaluation.jsonl").unlink()
    capsys.readouterr()
    code = qm("report", run, "-o", tmp_path / "x.html")
    assert code == (0 if broken == {"eval": []} else 2)
    assert code == 0 or "summary.json or config.json is not that of a run" in capsys.readouterr().err
