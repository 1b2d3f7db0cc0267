"""The batching benchmark from flags to files, against the test server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmark_batching import (
    BenchmarkConfig,
    Measurement,
    Mode,
    Row,
    connect,
    main,
    make_queries,
    recommend,
    row_of,
    run_mode,
)
from query_mutator.cli.console import exit_code
from query_mutator.testing import Echo, FaultPlan, start_server

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--num-queries", "5", "--batch-sizes", "1,4", "--repeats", "1")


def report_of(folder: Path, *flags: str) -> dict[str, Any]:
    """Run the benchmark and return what it writes, in place of what it wrote before."""
    (folder / "out.json").unlink(missing_ok=True)
    assert exit_code(main, [*flags, "--json", str(folder / "out.json")], prog="benchmark_batching") == 0
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


class Diary:
    """A model that writes down what it was asked; a rewrite is the question with "please" before it."""

    name = "diary"

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if "<question>" not in prompt:
            return "An answer."
        return "please " + prompt.split("<question>")[1].split("</question>")[0].strip()


def asked_in_order(mode: Mode, batch_size: int, count: int) -> list[str]:
    """Return the prompts of one run in the order in which the server got them."""
    diary = Diary()
    with start_server([diary], num_parallel=8) as server:
        config = BenchmarkConfig(ollama_url=(server.url,), target_model="diary", batch_sizes=str(batch_size))
        with connect(config) as system:
            run_mode(system, make_queries(count), mode=mode, batch_size=batch_size)
    return diary.prompts


def is_rewrite(prompt: str) -> bool:
    return "<question>" in prompt


def test_json_has_every_row_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *QUICK, "--latency-ms", "5")
    assert set(report) == {"written_by", "rows", "inferred_slots", "recommended"}
    assert set(report["recommended"]) == {"batch_size", "num_processes", "steps_per_s", "why"}
    assert {(row["mode"], row["batch_size"]) for row in report["rows"]} == {
        ("sequential", 1), ("phase", 1), ("phase", 4), ("pipelined", 1), ("pipelined", 4), ("async", 1), ("async", 4),
    }  # fmt: skip
    for row in report["rows"]:
        assert list(row) == [
            "mode", "batch_size", "calls", "wall_s", "calls_per_s", "speedup", "efficiency", "p50_s", "p95_s",
            "queue_wait_s", "failed",
        ]  # fmt: skip
        assert row["calls"] == 2 * 5
        assert row["calls_per_s"] == pytest.approx(row["calls"] / row["wall_s"])
        assert row["p50_s"] >= 0.005
    assert report["rows"][0]["speedup"] == 1
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_asks_for_each_rewrite_and_then_its_answer(mode: Mode) -> None:
    prompts = asked_in_order(mode, 2, 7)
    answered = [prompt for prompt in prompts if not is_rewrite(prompt)]
    assert len(prompts) == 14
    assert sorted(answered) == sorted(f"please {query}" for query in make_queries(7))
    for query in make_queries(7):
        [rewrite] = [place for place, prompt in enumerate(prompts) if is_rewrite(prompt) and query in prompt]
        assert rewrite < prompts.index(f"please {query}")


def test_phases_and_pipelined_groups_wait_for_each_other() -> None:
    assert [is_rewrite(prompt) for prompt in asked_in_order("sequential", 1, 3)] == [True, False] * 3
    phases = [is_rewrite(prompt) for prompt in asked_in_order("phase", 2, 7)]
    assert phases == [True] * 4 + [False] * 4 + [True] * 3 + [False] * 3
    first_group = asked_in_order("pipelined", 2, 7)[:8]
    answered = [prompt for prompt in first_group if not is_rewrite(prompt)]
    assert sorted(answered) == sorted(f"please {query}" for query in make_queries(4))


def test_efficiency_is_the_share_of_the_least_wall_time() -> None:
    run = Measurement(calls=8, wall_s=0.5, service_s=0.8, p50_s=0.1, p95_s=0.1, queue_wait_s=0.0)
    four = row_of([run], ("async", 4), slots=64, sequential=8.0)
    assert four["efficiency"] == pytest.approx(0.8 / 4 / 0.5)
    assert (four["speedup"], four["calls_per_s"]) == (2.0, 16.0)
    assert row_of([run], ("async", 4), slots=2, sequential=8.0)["efficiency"] == pytest.approx(0.8)


def test_recommended_is_the_smallest_batch_near_the_best() -> None:
    def row(size: int, wall_s: float) -> Row:
        run = Measurement(calls=100, wall_s=wall_s, service_s=10.0, p50_s=0.1, p95_s=0.1, queue_wait_s=0.0)
        return row_of([run], ("async", size), slots=64, sequential=10.0)

    found = recommend([row(1, 10.0), row(4, 2.6), row(8, 1.3), row(16, 1.27)], slots=64)
    assert found is not None
    assert (found["batch_size"], found["num_processes"], round(found["steps_per_s"], 1)) == (8, 16, 38.5)
    assert found["why"] == "76.9 calls/s, 7.7 times sequential; larger sizes gain less than 5%"


def test_failed_calls_are_a_column_and_do_not_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = FaultPlan(0.4, kinds=("empty", "500"), seed=3)
    with start_server([Echo()], num_parallel=4, latency_ms=5, faults=faults) as server:
        rows = report_of(tmp_path, *QUICK, "--ollama-url", server.url, "--target-model", "echo")["rows"]
    assert sum(row["failed"] for row in rows) > 0
    assert all(row["failed"] <= row["calls"] == 10 for row in rows)
    assert all(row["calls_per_s"] == pytest.approx((10 - row["failed"]) / row["wall_s"]) for row in rows)
    assert " failed" in capsys.readouterr().err


def test_the_same_server_over_the_openai_routes(tmp_path: Path) -> None:
    with start_server([Echo()], num_parallel=4, latency_ms=5) as server:
        flags = ["--backend", "openai", "--openai-url", server.url, "--target-model", "echo"]
        rows = report_of(tmp_path, *QUICK, *flags)["rows"]
    assert [row["failed"] for row in rows] == [0] * 7
    assert rows[0]["efficiency"] is None  # these routes report no times


def test_the_budget_ends_it_with_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start_server([Echo()], num_parallel=1, latency_ms=30) as server:
        flags = ["--ollama-url", server.url, "--target-model", "echo", "--budget-s", "0.5"]
        rows = report_of(tmp_path, "--batch-sizes", "1,2,32", *flags)["rows"]
    said = capsys.readouterr().err
    assert "plan: " in said
    assert "--budget-s allows " in said
    assert rows[0]["mode"] == "sequential"
    assert 2 <= rows[0]["calls"] < 128


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_prints_what_it_has(number: signal.Signals, tmp_path: Path) -> None:
    flags = ["--num-queries", "6", "--batch-sizes", "1,4,8,16", "--latency-ms", "40"]
    flags += ["--repeats", "99", "--budget-s", "6000"]  # so that it cannot end before it is interrupted
    flags += ["--json", str(tmp_path / "out.json")]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "benchmark_batching.py"), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while not process.stderr.readline().startswith("async, batch size 1"):
            assert process.poll() is None
        process.send_signal(number)
        printed, said = process.communicate()
    assert process.returncode == 128 + number
    assert [line.split()[:3] for line in printed.splitlines() if line.startswith(("sequential", "async"))][:2] == [
        ["sequential", "1", "12"],
        ["async", "1", "12"],
    ]
    assert "recommended: " in printed
    assert said.splitlines()[-1].endswith(("interrupted", "terminated"))
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["mode"] == "sequential"
