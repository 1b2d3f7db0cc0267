"""The real wandb, trackio and MLflow, offline: what is read back from each equals metrics.jsonl."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from query_mutator.cli.console import exit_code, note
from query_mutator.embedded.server import EmbeddedServer
from query_mutator.files import read_checked_json, tracking, write_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.metrics import MetricsWriter
from query_mutator.files.run_dir import checkpoints_in
from query_mutator.files.trackers import TrackedRun, open_sink
from query_mutator.files.tracking import TRACKING, Tracker, TrackFlags, tracked
from tests.integration.conftest import ROWS, write_dataset
from train_query_mutator import main

pytestmark = pytest.mark.slow

TRACKERS: tuple[Tracker, ...] = ("wandb", "trackio", "mlflow")
KEY = "plantedkey0123456789plantedkey0123456789"
SECRETS = ("OPENAI_API_KEY", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "TRACKIO_WRITE_TOKEN", "HF_TOKEN")

Points = dict[int, dict[str, list[float]]]  # step -> key -> the values that were sent


@dataclass(frozen=True)
class Recorded:
    """What a tracker has of a run: all points, its config, tags, summary and state."""

    points: Points
    config: dict[str, Any]
    tags: set[str]
    summary: dict[str, Any]
    state: str


@dataclass(frozen=True)
class TrackedTraining:
    """A training of two parts: its folder, and the rows that each part wrote."""

    run: Path
    first: list[dict[str, Any]]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_server: EmbeddedServer) -> Iterator[TrackedTraining]:
    """Train, lose the last checkpoint as a kill would, and resume to a later end."""
    folder = tmp_path_factory.mktemp("tracked")
    dataset = write_dataset(folder / "questions.jsonl", ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name in SECRETS:
            patch.setenv(name, KEY)
        patch.setattr(sys, "orig_argv", ["python", "train.py", "--openai-url", f"http://me:{KEY}@localhost/v1"])
        argv = [
            *("--ollama-url", tiny_server.url, "--target-model", "librarian", "--mutator-model", "softener"),
            *(
                "--dataset",
                str(dataset),
                "--encoder",
                "hash",
                "--embedding-dims",
                "4",
                "--operators",
                "spelling,filler",
            ),
            *("--save-dir", str(folder / "runs"), "--num-processes", "4", "--num-steps", "8", "--num-mini-batch", "2"),
            *("--num-env-steps", "96", "--save-interval", "1", "--eval-questions", "2", "--no-use-linear-lr-decay"),
            *("--no-evaluate", "--seed", "11", "--track", *TRACKERS, "--track-project", "tests", "--track-group", "g"),
        ]
        assert exit_code(main, argv, prog="train") == 0
        run = (folder / "runs" / "latest").resolve()
        first = [*read_json_lines(run / "metrics.jsonl")]
        checkpoints_in(run)[0].unlink()
        assert exit_code(main, ["--resume", str(run), "--num-env-steps", "128"], prog="train") == 0
        yield TrackedTraining(run, first, [*read_json_lines(run / "metrics.jsonl")])


def test_a_tracker_has_the_rows_of_metrics_and_those_that_a_resume_cut_once(trained: TrackedTraining) -> None:
    assert [row["step"] for row in trained.first] == [0, 32, 64, 96]
    assert [row["step"] for row in trained.rows] == [0, 32, 64, 96, 128]
    # The resumed run took the step 96 again, which the trackers had.
    sent = [*trained.first, trained.rows[-1]]
    expected = {row["step"]: {key: [value] for key, value in row.items() if key != "step"} for row in sent}
    for tracker, read in READERS.items():
        assert read(trained.run).points == expected, tracker


def test_a_tracker_has_config_tags_summary_and_state(trained: TrackedTraining) -> None:
    summary = read_checked_json(trained.run / "summary.json")
    for tracker, read in READERS.items():
        found = read(trained.run)
        assert found.config["flags"]["lr"] == 0.002, tracker
        assert found.config["versions"] == read_checked_json(trained.run / "config.json")["versions"], tracker
        assert {"seed:11", "algo:ppo", "target_model:librarian", "mutator_model:softener"} <= found.tags, tracker
        assert found.summary["env_steps"] == summary["env_steps"] == 128, tracker
        assert found.state == "finished", tracker


def test_a_resumed_run_is_the_same_run_of_the_tracker(trained: TrackedTraining) -> None:
    wandb_files = sorted(trained.run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(wandb_files) == 2
    assert len({path.name for path in wandb_files}) == 1
    with sqlite3.connect(trained.run.parents[1] / "trackio" / "tests.db") as database:
        assert database.execute("SELECT COUNT(DISTINCT run_id) FROM metrics").fetchone() == (1,)
    client, runs = mlflow_runs(trained.run)
    assert [(run.info.status, run.info.run_name, run.data.tags["group"]) for run in runs] == [
        ("FINISHED", trained.run.name, "g")
    ]
    assert client.get_experiment_by_name("tests") is not None


def test_no_tracker_writes_a_key(trained: TrackedTraining) -> None:
    assert "me:" not in (trained.run / "config.json").read_text()
    files = [path for path in trained.run.parents[1].rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


# --- what each tracker has -------------------------------------------------------------------------------------------


def read_wandb(run: Path) -> Recorded:
    internal = importlib.import_module("wandb.proto.wandb_internal_pb2")
    points: Points = {}
    config: dict[str, Any] = {}
    tags: set[str] = set()
    summary: dict[str, Any] = {}
    state = ""
    for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = internal.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                add(points, record.history.step.num, {k: v for k, v in values.items() if not k.startswith("_")})
            elif kind == "run":
                tags |= set(record.run.tags)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "summary":
                summary |= {(u.key or u.nested_key[0]): json.loads(u.value_json) for u in record.summary.update}
            elif kind == "exit":
                state = "finished" if record.exit.exit_code == 0 else "failed"
    assert summary["state"] == state
    return Recorded(points, config, tags, summary, state)


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


def read_trackio(run: Path) -> Recorded:
    points: Points = {}
    summary: dict[str, Any] = {}
    with sqlite3.connect(run.parents[1] / "trackio" / "tests.db") as database:
        for step, text in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            row = json.loads(text)
            if "state" in row:
                summary = {key.removeprefix("summary/"): value for key, value in row.items()}
            else:
                add(points, step, row)
        [config] = [json.loads(text) for (text,) in database.execute("SELECT config FROM configs")]
    tags = {f"{name}:{value}" for name, value in config["tags"].items()}
    assert config["_Group"] == "g"
    return Recorded(points, config, tags, summary, summary["state"])


def mlflow_runs(run: Path) -> tuple[Any, list[Any]]:
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    return client, list(client.search_runs([client.get_experiment_by_name("tests").experiment_id]))


def read_mlflow(run: Path) -> Recorded:
    client, [found] = mlflow_runs(run)
    points: Points = {}
    for key in found.data.metrics:
        for point in client.get_metric_history(found.info.run_id, key):
            if not key.startswith("summary/"):
                add(points, point.step, {key: point.value})
    summary = {key.removeprefix("summary/"): value for key, value in found.data.metrics.items()}
    tags = {f"{name}:{value}" for name, value in found.data.tags.items()}
    assert found.data.params["flags.lr"] == "0.002"
    config = json.loads(Path(client.download_artifacts(found.info.run_id, "config.json")).read_text())
    return Recorded(points, config, tags, summary, found.data.tags["state"])


def add(points: Points, step: int, row: dict[str, float]) -> None:
    for key, value in row.items():
        points.setdefault(step, {}).setdefault(key, []).append(value)


READERS: dict[str, Callable[[Path], Recorded]] = {
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


# --- trackers that fail, and ends of runs ----------------------------------------------------------------------------


def write_run(folder: Path, *, steps: int) -> Path:
    """Write the files of a run that follows read."""
    folder.mkdir(parents=True)
    write_checked_json(folder / "config.json", {"flags": {"seed": 1, "algo": "ppo"}})
    metrics = MetricsWriter(folder)
    for step in range(steps):
        metrics.write({"charts/SPS": float(step)}, step=step, wall_s=0.0)
    metrics.close()
    return folder


def wait_for(run: Path, tracker: Tracker) -> None:
    """Wait for the process that follows a run."""
    with FileLock(run / TRACKING / f"{tracker}.lock", timeout=60):
        pass


def end_with(error: type[BaseException], run: Path) -> None:
    with tracked(run, TrackFlags(track=("trackio",), track_project="tests", track_group="g")):
        while not (run / TRACKING / "trackio.json").exists():
            time.sleep(0.01)
        raise error


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "crashed")])
def test_a_run_that_ends_early_says_how(
    error: type[BaseException], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = write_run(tmp_path / "runs" / "one", steps=3)
    with pytest.raises(error):
        end_with(error, run)
    wait_for(run, "trackio")
    found = read_trackio(run)
    assert found.state == state
    assert found.points == {step: {"charts/SPS": [step], "wall_s": [0.0]} for step in range(3)}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(600)", "did not take the whole run"),
        (
            "def init(**_): raise OSError('no route to http://me:pw@host')",
            "trackio failed: no route to http://***@host; the run continues",
        ),
        ("import os; os._exit(1)", "did not take the whole run"),
    ],
)
def test_a_tracker_that_fails_or_hangs_costs_one_line(
    code: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module that is imported in place of trackio is the user's environment gone wrong."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trackio.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.setattr(tracking, "END_S", 3.0)
    run = write_run(tmp_path / "run", steps=2)
    before = (run / "metrics.jsonl").read_bytes()
    with tracked(run, TrackFlags(track=("trackio",)), show=note):
        pass
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "trackio" in lines[0]
    assert said in lines[0]
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_missing_package_is_one_line_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2])])  # where packages are looked for
    assert exit_code(main, ["--track", "mlflow", "--save-dir", str(tmp_path / "runs")], prog="train") == 2
    assert capfd.readouterr().err == (
        "train: --track mlflow needs the package mlflow; install it with: pip install mlflow\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_killed_run_is_known_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = write_run(tmp_path / "runs" / "one", steps=2)
    code = (
        "import sys, time; from pathlib import Path; from query_mutator.files.lock import locked\n"
        "from query_mutator.files.tracking import TrackFlags, tracked\n"
        "run = Path(sys.argv[1]); flags = TrackFlags(track=('trackio',), track_project='tests', track_group='g')\n"
        "with locked(run), tracked(run, flags): time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run)]) as trainer:
        while not (run / TRACKING / "trackio.json").exists():
            time.sleep(0.01)
        trainer.kill()
    wait_for(run, "trackio")
    assert read_trackio(run).state == "killed"


def test_a_store_next_to_a_run_does_not_choose_where_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.create_experiment("questions", artifact_location="http://127.0.0.1:9/stranger")
    run = TrackedRun(id="ab", folder=tmp_path / "run", project="questions", group=None, config={})
    with pytest.raises(ValueError, match="sends files to http:"):
        open_sink("mlflow", run)
