"""User code through each of the doors, callbacks and trackers among them: trained with, evaluated, resumed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from query_mutator import registry
from query_mutator.cli.console import exit_code
from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json, read_json_lines
from query_mutator.operators import OPERATORS
from query_mutator.session.policy_file import read_policy
from query_mutator.testing import StubServer
from query_mutator.training.callbacks import CALLBACKS, Callback, RunView
from tests.docs_blocks import ROOT
from tests.integration.conftest import ROWS, flags_of, write_dataset
from train_query_mutator import main

KEY = "plantedkey0123456789plantedkey0123456789"
SECRETS = ("OPENAI_API_KEY", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD")
Points = dict[int, dict[str, float]]  # step -> key -> value
PLUGINS = ROOT / "tests" / "plugins"
PLUGIN = PLUGINS / "csv_callback.py"


@dataclass(frozen=True)
class Tracked:
    """A training of two parts: its folder, and the rows that each part wrote."""

    run: Path
    first: list[dict[str, Any]]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, tiny_server: StubServer) -> Iterator[Tracked]:
    """Train with the callbacks of examples/, lose the last checkpoint as a kill would, and resume to a later end."""
    folder = tmp_path_factory.mktemp("tracked")
    files = [str(ROOT / "examples" / name) for name in ("wandb_callback.py", "mlflow_callback.py")]
    flags = flags_of(tiny_server, write_dataset(folder / "questions.jsonl", ROWS), folder / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        for name in SECRETS:
            patch.setenv(name, KEY)
        patch.setattr(sys, "orig_argv", ["python", "train.py", "--openai-url", f"http://me:{KEY}@localhost/v1"])
        patch.setattr(CALLBACKS, "_entries", {name: CALLBACKS.get(name) for name in CALLBACKS})
        patch.setattr(registry, "_loaded", dict(registry._loaded))
        patch.chdir(folder)
        more = ("--no-evaluate", "--no-use-linear-lr-decay", "--plugin", *files)
        assert exit_code(main, [*flags, *more], prog="train") == 0
        run = (folder / "runs" / "latest").resolve()
        first = [*read_json_lines(run / "metrics.jsonl")]
        (run / "resume.pt").unlink()
        named = ("--ollama-url", tiny_server.url, "--plugin", *files)
        assert exit_code(main, ["--resume", str(run), "--num-env-steps", "96", *named], prog="train") == 0
        yield Tracked(run, first, [*read_json_lines(run / "metrics.jsonl")])


@pytest.mark.slow
def test_mlflow_has_the_rows_of_one_run(tracked: Tracked) -> None:
    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("query-mutator").experiment_id
    [found] = client.search_runs([experiment])
    points: dict[int, dict[str, list[float]]] = {}
    for key in found.data.metrics:
        for point in client.get_metric_history(found.info.run_id, key):
            points.setdefault(point.step, {}).setdefault(key, []).append(point.value)
    last = {step: {key: values[-1] for key, values in row.items()} for step, row in points.items()}
    assert last == rows_by_step(tracked.rows)
    assert (found.info.status, found.info.run_name) == ("FINISHED", tracked.run.name)
    assert found.data.params["batch_size"] == "4"
    config = json.loads(Path(client.download_artifacts(found.info.run_id, "config.json")).read_text())
    assert config["versions"] == read_checked_json(tracked.run / "config.json")["versions"]
    summary = json.loads(Path(client.download_artifacts(found.info.run_id, "summary.json")).read_text())
    assert summary["env_steps"] == 96


@pytest.mark.slow
def test_no_tracker_writes_a_key(tracked: Tracked) -> None:
    assert "me:" not in (tracked.run / "config.json").read_text()
    files = [path for path in tracked.run.parents[1].rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def rows_by_step(rows: list[dict[str, Any]]) -> Points:
    return {row["step"]: {key: row[key] for key in row.keys() - {"step", "wall_s"}} for row in rows}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "plugin {plugin}:4: ZeroDivisionError: division by zero"),
        ("OSError('no\\nluck')", "plugin {plugin}:4: OSError: no luck"),
        ("5", "operator 'broken' returned int; return the question as text"),
    ],
)
def test_an_operator_that_fails_is_one_line(
    body: str,
    said: str,
    tiny_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = tmp_path / "broken.py"
    result = f"raise {body}" if "Error" in body else f"return {body}"
    plugin.write_text(
        "from query_mutator.operators import OPERATORS, LocalOperator\n\n"
        f"def broken(question, context):\n    {result}\n"
        'OPERATORS.add("broken", LocalOperator(name="broken", summary="Fails.", function=broken))\n'
    )
    monkeypatch.setattr(OPERATORS, "_entries", dict(OPERATORS._entries))
    flags = [*tiny_flags, "--plugin", str(plugin), "--operators", "broken,spelling", "--no-evaluate"]
    assert exit_code(main, flags, prog="qm train") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"qm train: {said.format(plugin=plugin)}"


def test_a_plugins_operators_are_among_the_default_ones(tiny_flags: list[str], tmp_path: Path) -> None:
    at = tiny_flags.index("--operators")
    flags = [*tiny_flags[:at], *tiny_flags[at + 2 :], "--plugin", str(PLUGINS / "polite_operator.py")]
    assert main([*flags, "--no-evaluate", "--eval-interval", "0"]) == 0
    assert read_policy(tmp_path / "runs" / "latest").actions.count("polite") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file; give the path"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("from query_mutator.operators import OPERATORS\nOPERATORS.add('spelling', None)", "is registered already"),
    ],
)
def test_a_broken_plugin_is_one_line(
    text: str | None, said: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    assert exit_code(main, [*tiny_flags, "--plugin", str(path)], prog="train") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_callback_from_a_file_survives_a_kill(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--plugin", str(PLUGIN), "--save-interval", "1", "--num-env-steps", "96", "--no-evaluate"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*flags, "--save-dir", str(whole)]) == 0
    rows = (whole / "latest" / "rollouts.csv").read_text()
    steps = [int(row.split(",")[0]) for row in rows.splitlines()]
    assert steps[-1] == 96
    assert sum(int(row.split(",")[1]) for row in rows.splitlines()) == 96

    command = [sys.executable, "train_query_mutator.py", *flags, "--save-dir", str(killed)]
    environ = {**os.environ, "KILLED_AT": str(steps[-2])}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=120, check=False)
    assert done.returncode == 9
    run = (killed / "latest").resolve()
    assert len((run / "rollouts.csv").read_text().splitlines()) == len(steps) - 1
    assert main(["--resume", str(run), "--plugin", str(PLUGIN)]) == 0
    assert (run / "rollouts.csv").read_text() == rows
    assert "custom/csv_bytes" in list(read_json_lines(run / "metrics.jsonl"))[-1]


def test_an_error_in_a_callback_is_one_line_that_names_it(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("broken")
    class Broken(Callback):
        def on_rollout_end(self, run: RunView) -> None:
            raise KeyError("reward")

    with pytest.raises(UsageError, match="callback 'broken' failed in on_rollout_end: KeyError: 'reward'"):
        main([*tiny_flags, "--no-evaluate"])


def test_a_metric_of_a_callback_needs_its_prefix(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("namer")
    class Namer(Callback):
        def on_log(self, run: RunView) -> None:
            run.row["my/figure"] = 1.0

    with pytest.raises(UsageError, match="call it custom/figure"):
        main([*tiny_flags, "--no-evaluate"])
