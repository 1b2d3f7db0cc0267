"""The connection to a cluster."""

from __future__ import annotations

import shlex
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from ray.autoscaler._private import util
from ray.scripts.scripts import start

from query_mutator.cluster import _check_token, connected
from query_mutator.errors import UsageError
from tests.cluster.conftest import RAY_ENV, RayCluster

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


def test_ray_reads_the_example_of_a_cluster_file() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "ray_cluster.yaml"
    config = util.prepare_config(yaml.safe_load(path.read_text(encoding="utf-8")))
    util.validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"]) == 9
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (words,) = [words for words in map(shlex.split, commands) if "start" in words]
        given = {word.partition("=")[0] for word in words[words.index("start") + 1 :]}
        assert given <= {name for option in start.params for name in option.opts}
