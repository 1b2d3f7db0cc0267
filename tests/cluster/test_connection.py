"""The connection to a cluster, and `qm eval` of several models, here and on Ray."""

from __future__ import annotations

import builtins
import json
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from ray.autoscaler._private import util
from ray.scripts.scripts import start

from query_mutator.cli.console import exit_code
from query_mutator.cluster.connection import _check_token, connected
from query_mutator.errors import UsageError
from query_mutator.testing import StubServer, start_server
from tests.cluster.conftest import RAY_ENV, RayCluster
from tests.conftest import Librarian, Softener
from tests.integration.conftest import ROWS, write_dataset
from tests.qm_command import qm
from train_query_mutator import main as train_main

pytestmark = pytest.mark.slow


def test_a_command_runs_tasks_on_the_cluster_of_ray_address_and_keeps_its_signal_handler(
    ray_cluster: RayCluster,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with connected(None) as ray:
        assert signal.getsignal(signal.SIGTERM) is before
        assert ray.get_runtime_context().gcs_address == ray_cluster.address
        square = ray.remote(lambda x: x * x)
        assert ray.get([square.remote(x) for x in range(4)]) == [0, 1, 4, 9]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not ray.is_initialized()
    assert ray_cluster.head.is_alive


def test_an_address_where_nothing_listens_is_one_line_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"no Ray cluster at {address} .*ray start --head"), connected(address):
            pass


def test_a_local_cluster_listens_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with connected(None) as ray:
        assert ray.get(ray.remote(lambda: 1).remote()) == 1
        new = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
        sockets = [one for each in new for one in each.net_connections() if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip.removeprefix("::ffff:") for one in sockets} <= {"127.0.0.1", "::1"}
    assert len(sockets) > 1


def test_several_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerAddress": f"10.0.0.{number}", "Alive": number < 3} for number in range(1, 4)]
    ray = SimpleNamespace(nodes=lambda: nodes)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UsageError, match="2 machines has no token"):
        _check_token(ray)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    _check_token(ray)
    monkeypatch.delenv("RAY_AUTH_MODE")
    nodes.pop(0)
    _check_token(ray)


def test_without_ray_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    words = ["sweep", "--grid", "x=1", "--out", tmp_path / "s", "--engine", "ray", "--", "true"]
    assert qm(*words) == 2
    assert capsys.readouterr().err.splitlines() == [
        "qm: --engine ray needs the package ray; pip install 'query-mutator[ray]'"
    ]
    assert list(tmp_path.iterdir()) == []


def test_ray_reads_the_example_of_a_cluster_file() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "ray_cluster.yaml"
    config = util.prepare_config(yaml.safe_load(path.read_text(encoding="utf-8")))
    util.validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"]) == 9
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (words,) = [words for words in map(shlex.split, commands) if "start" in words]
        given = {word.partition("=")[0] for word in words[words.index("start") + 1 :]}
        assert given <= {name for option in start.params for name in option.opts}


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
def run(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("OLLAMA_HOST", server.url)
    monkeypatch.chdir(tmp_path)
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
