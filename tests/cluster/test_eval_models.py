"""`qm eval --target-model A B`: a row and files for each model, here and on Ray, resumed by the same command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.testing import StubServer, start_server
from tests.cluster.conftest import RayCluster
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS, write_dataset
from tests.qm_command import qm
from train_query_mutator import main as train_main

pytestmark = pytest.mark.slow


class Polite(Librarian):
    """A librarian that also answers questions with `plz`, by the name that sorts."""

    name = "polite"

    def reply(self, prompt: str) -> str:
        return "`sorted`" if "plz" in prompt else super().reply(prompt)


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Polite(), Softener()], num_parallel=8) as server:
        yield server


@pytest.fixture
def run(server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    dataset = write_dataset(tmp_path / "questions.jsonl", ROWS)
    words = (
        f"--ollama-url {server.url} --target-model librarian --mutator-model softener --encoder hash "
        f"--dataset {dataset} --save-dir {tmp_path / 'runs'} --embedding-dims 4 --operators spelling,neutral,filler "
        "--num-processes 4 --num-steps 8 --batch-size 4 --num-mini-batch 2 --num-env-steps 32 --eval-interval 0"
    )
    assert exit_code(train_main, [*words.split(), "--no-evaluate"], prog="train") == 0
    capsys.readouterr()
    return (tmp_path / "runs" / "latest").resolve()


def reports_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())["models"]
    for report in found.values():
        (report["plan_search"] or {}).pop("seconds", None)
    return found


def test_models_are_compared_the_same_on_ray_and_a_rerun_evaluates_what_is_missing(
    ray_cluster: RayCluster, run: Path, server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, on_ray = tmp_path / "local", tmp_path / "ray"
    assert qm("eval", run, "--target-model", "librarian", "missing", "--out", out, "--plan-calls", "20") == 3
    told = capsys.readouterr()
    assert "missing  " in told.out
    assert "no result" in told.out
    assert "1 of 2 evaluations failed; --retry-failed" in told.err
    first = out / "trials" / "target_model=librarian,seed=1"
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert {path.name for path in before} >= {"report.json", "evaluation.jsonl", "command.txt"}
    models = ["--target-model", "librarian", "polite", "--plan-calls", "20"]
    assert qm("eval", run, *models, "--out", out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("librarian", "polite"))] == ["librarian", "polite"]
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before  # not evaluated twice
    flags = ["--local-server-url", server.url, "--engine", "ray", "--out", on_ray]
    assert qm("eval", run, *models, *flags) == 0
    assert reports_of(on_ray) == reports_of(out)
    assert {name: report["target"] for name, report in reports_of(out).items()} == {
        "librarian": "librarian", "polite": "polite",
    }  # fmt: skip
    polite = reports_of(out)["polite"]["methods"]["policy"]
    low, high = polite["calls_per_question_ci"]
    assert low <= polite["calls_per_question"] <= high
    assert qm("eval", run, *models, "--seed", "2", "--eval-calls", "9", "--out", out) == 2
    assert "holds a sweep of another command" in capsys.readouterr().err


def test_invalid_comparisons_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("eval", "x", "--target-model", "a", "b", "--evaluation", tmp_path / "rows.jsonl") == 2
    assert "--evaluation names one file" in capsys.readouterr().err
    two = ["--ollama-url", "http://a:1", "--local-server-url", "http://b:1"]
    assert qm("eval", "x", *two) == 2
    assert "give one of them" in capsys.readouterr().err
    assert qm("eval", "x", "--task-resources", "server") == 2
    assert "write NAME=AMOUNT" in capsys.readouterr().err
