"""Logs of `qm eval --inspect`, read by inspect_ai; tests/integration/test_inspect.py runs this with that package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log, recompute_metrics

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.server import start_server
from query_mutator.files.json_lines import read_json_lines
from tests.conftest import Librarian, Softener
from tests.docs_blocks import ROOT, blocks_of, run_block
from tests.qm_command import qm

Logs = dict[tuple[str, str], EvalLog]  # by task and solver
Rows = dict[tuple[str, str], list[dict[str, Any]]]  # by set and method


@pytest.fixture
def evaluated(trained: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Logs, Rows]]:
    run = trained("--plan-calls", "60", "--forms", "steps", "--ask", "form")
    folder, file = tmp_path / "logs", tmp_path / "rows.jsonl"

    def evaluate(*flags: str) -> tuple[Logs, Rows]:
        written = ("--inspect", folder, "--evaluation", file, "--force")
        assert qm("eval", run, "--plan-calls", "60", "--guard", *written, *flags) == 0
        rows: Rows = {}
        for row in read_json_lines(file):
            rows.setdefault((row["set"], row["method"]), []).append(row)
        logs = [read_eval_log(info, resolve_attachments=True) for info in list_eval_logs(str(folder))]
        return {(log.eval.task, log.eval.solver or ""): log for log in logs}, rows

    return evaluate


def test_a_log_holds_what_the_rows_hold(evaluated: Callable[..., tuple[Logs, Rows]]) -> None:
    logs, rows = evaluated()
    assert len(logs) == len(rows) >= 14
    for (name, method), found in rows.items():
        log = next(
            log for (task, solver), log in logs.items() if solver == method and (task == "guard") == (name == "guard")
        )
        assert (log.status, log.eval.model, log.results.completed_samples) == (
            "success",
            "ollama/librarian",
            len(found),
        )
        assert log.samples is not None
        samples = {sample.id: sample for sample in log.samples}
        assert samples.keys() == {row["question_id"] for row in found}
        for row in found:
            check_sample(samples[row["question_id"]], row, main="refused" if name == "guard" else "success")
        usage = log.stats.model_usage.values()
        assert sum(one.total_tokens for one in usage) == sum(row["tokens"] for row in found) > 0
        assert sum(one.output_tokens for one in usage) == sum(row["reply_tokens"] for row in found)
        first = log.results.scores[0]
        assert first.name == ("refused" if name == "guard" else "success")
        rate = sum(float(row[first.name]) for row in found) / len(found)
        assert first.metrics["accuracy"].value == pytest.approx(rate)
        before = log.results.model_dump()
        recompute_metrics(log)
        assert log.results.model_dump() == before
    assert {log.eval.task_args["method"] for log in logs.values()} == {method for _, method in rows}
    steps = [sample for log in logs.values() for sample in log.samples or () if "steps" in sample.metadata["forms"]]
    assert any("step by step" in event.input[-1].text.lower() for sample in steps for event in sample.events)


def check_sample(sample: Any, row: dict[str, Any], *, main: str) -> None:
    answer = row["answers"][row["submitted"]]
    assert (sample.input, sample.target) == (row["question"], row["accepted"])
    assert (sample.output.completion, sample.messages[-1].text) == (answer, answer)
    assert row["asked"][row["submitted"]] in sample.messages[-2].text
    assert [event.output.completion for event in sample.events] == row["answers"]
    assert all(asked in event.input[-1].text for asked, event in zip(row["asked"], sample.events, strict=True))
    assert next(iter(sample.scores)) == main
    assert sample.scores[main].value == ("C" if row[main] else "I")
    if main == "success":
        parts = row["parts"][row["submitted"]]
        assert {name: sample.scores[name].value for name in parts} == parts
        assert sample.scores["score"].value == row["score"]


def test_a_failed_call_is_a_samples_error_and_no_score(evaluated: Callable[..., tuple[Logs, Rows]]) -> None:
    with start_server([Librarian(), Softener()], num_parallel=8, faults=FaultPlan(0.2, kinds=("500",))) as server:
        calls = ("--max-retries", "0", "--cache", "off", "--max-failure-rate", "1")
        logs, rows = evaluated("--ollama-url", server.url, *calls)
    failed = 0
    for log in logs.values():
        found = rows["guard" if log.eval.task == "guard" else "test", log.eval.solver or ""]
        by_id = {row["question_id"]: row for row in found}
        assert log.results is not None
        assert log.results.completed_samples == sum(row["error"] is None for row in found)
        for sample in log.samples or ():
            error = by_id[str(sample.id)]["error"]
            assert (sample.error is None) == (error is None) == bool(sample.scores)
            if sample.error is not None:
                assert sample.error.message == f"{error['kind']}: {error['message']}"
                failed += 1
    assert failed > 5


def test_the_code_of_the_page_runs(
    evaluated: Callable[..., tuple[Logs, Rows]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluated()
    monkeypatch.chdir(tmp_path)
    (block,) = (one for one in blocks_of(ROOT / "docs" / "how-to" / "open-in-inspect.md") if one.language == "python")
    capsys.readouterr()
    run_block(block, tmp_path)
    said = capsys.readouterr().out
    assert "guard, policy: " in said
    assert " -> `" in said
