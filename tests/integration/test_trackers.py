"""The callbacks of docs/how-to/track-a-run.md with the real wandb and MLflow, offline: they have the rows of a run."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from query_mutator import plugins
from query_mutator.cli.console import exit_code
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.run_dir import checkpoints_in
from query_mutator.testing import StubServer
from query_mutator.training.callbacks import CALLBACKS
from tests.docs_blocks import ROOT, blocks_of
from tests.integration.conftest import ROWS, flags_of, write_dataset
from train_query_mutator import main

pytestmark = pytest.mark.slow

KEY = "plantedkey0123456789plantedkey0123456789"
SECRETS = ("OPENAI_API_KEY", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD")

Points = dict[int, dict[str, float]]  # step -> key -> value


@dataclass(frozen=True)
class Tracked:
    """A training of two parts: its folder, and the rows that each part wrote."""

    run: Path
    first: list[dict[str, Any]]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, tiny_server: StubServer) -> Iterator[Tracked]:
    """Train with the files of the page, lose the last checkpoint as a kill would, and resume to a later end."""
    folder = tmp_path_factory.mktemp("tracked")
    files = {block.file: block.code for block in blocks_of(ROOT / "docs/how-to/track-a-run.md") if block.file}
    assert set(files) == {"wandb_callback.py", "mlflow_callback.py"}
    for name, code in files.items():
        (folder / name).write_text(code, encoding="utf-8")
    flags = flags_of(tiny_server, write_dataset(folder / "questions.jsonl", ROWS), folder / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        for name in SECRETS:
            patch.setenv(name, KEY)
        patch.setattr(sys, "orig_argv", ["python", "train.py", "--openai-url", f"http://me:{KEY}@localhost/v1"])
        patch.setattr(CALLBACKS, "_entries", {name: CALLBACKS.get(name) for name in CALLBACKS})
        patch.setattr(plugins, "_loaded", dict(plugins._loaded))
        patch.chdir(folder)
        more = ("--no-evaluate", "--no-use-linear-lr-decay", "--plugin", *files)
        assert exit_code(main, [*flags, *more], prog="train") == 0
        run = (folder / "runs" / "latest").resolve()
        first = [*read_json_lines(run / "metrics.jsonl")]
        checkpoints_in(run)[0].unlink()
        assert exit_code(main, ["--resume", str(run), "--num-env-steps", "96"], prog="train") == 0
        yield Tracked(run, first, [*read_json_lines(run / "metrics.jsonl")])


def test_wandb_has_the_rows_and_those_that_a_resume_cut_once(tracked: Tracked) -> None:
    internal = importlib.import_module("wandb.proto.wandb_internal_pb2")
    points: Points = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    exits = []
    paths = sorted(tracked.run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(paths) == 2
    assert len({path.name for path in paths}) == 1
    for path in paths:
        for data in wandb_records(path.read_bytes()):
            record = internal.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                points[record.history.step.num] = {k: v for k, v in values.items() if not k.startswith("_")}
            elif kind == "run":
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "summary":
                summary |= {(u.key or u.nested_key[0]): json.loads(u.value_json) for u in record.summary.update}
            elif kind == "exit":
                exits.append(record.exit.exit_code)
    assert points == rows_by_step(tracked.rows)
    assert config["flags"]["batch_size"] == 4
    assert summary["env_steps"] == 96
    assert exits == [0, 0]


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


def test_no_tracker_writes_a_key(tracked: Tracked) -> None:
    assert "me:" not in (tracked.run / "config.json").read_text()
    files = [path for path in tracked.run.parents[1].rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def rows_by_step(rows: list[dict[str, Any]]) -> Points:
    return {row["step"]: {key: row[key] for key in row.keys() - {"step", "wall_s"}} for row in rows}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""
