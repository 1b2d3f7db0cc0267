"""The embedded server's life: starting, closing, settings, and `python -m query_mutator.embedded`."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from raw_http import FOREVER_MS, Held, TwoNumbers, count, in_flight, until

from query_mutator.embedded.server import start_server
from query_mutator.errors import UsageError
from tests.conftest import Upper

COMMAND = [sys.executable, "-m", "query_mutator.embedded"]


def test_close_is_idempotent_and_leaves_no_thread_and_no_socket() -> None:
    before = set(threading.enumerate())
    server = start_server([Upper()], encoder=TwoNumbers(), latency_ms=FOREVER_MS)
    held = Held(server, "x", model="upper")
    until(lambda: count(server, "in_service") == 1)
    server.close()
    server.close()
    assert set(threading.enumerate()) == before
    assert held.socket.recv(1) == b""
    held.leave()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_two_servers_live_side_by_side_and_a_taken_port_is_a_usage_error() -> None:
    with start_server([]) as one, start_server([]) as other:
        assert one.port != other.port
        with pytest.raises(UsageError, match="in use"):
            start_server([], port=one.port)


@pytest.mark.parametrize(
    "setting",
    [
        {"num_parallel": 0},
        {"max_queue": 0},
        {"latency_ms": -1},
        {"latency_sigma": -0.1},
        {"running_speed": float("nan")},
        {"request_timeout_s": float("inf")},
        {"latency_ms": 1, "running_speed": 1},
        {"port": 70_000},
    ],
)
def test_settings_out_of_range_are_usage_errors(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        start_server([], **setting)


def test_the_command_serves_on_a_free_port_until_a_signal() -> None:
    command = [*COMMAND, "--model", "echo", "--port", "0"]
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"Ollama is running"
            taken = subprocess.run([*COMMAND, "--model", "echo", "--port", str(port)], capture_output=True, text=True)
            process.send_signal(number)
            assert process.wait(20) == 0
            connection.close()
        assert (taken.returncode, len(taken.stderr.splitlines())) == (2, 1)
        assert "in use" in taken.stderr


def test_the_command_takes_its_slots_from_ollamas_variable() -> None:
    command = [*COMMAND, "--model", "echo", "--port", "0", "--latency-ms", str(FOREVER_MS)]
    environment = os.environ | {"OLLAMA_NUM_PARALLEL": "3"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = SimpleNamespace(port=int(process.stdout.readline().rsplit(":", 1)[1]))
        held = [Held(address, str(i)) for i in range(5)]
        until(lambda: in_flight(address) == (3, 2))
        process.terminate()
        assert process.wait(20) == 0
    for each in held:
        each.leave()


def test_more_clients_than_open_files_wait_and_one_line_says_why() -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    command = [*COMMAND, "--model", "echo", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=few_files) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        assert "too many open files for another connection" in process.stderr.readline()
        for client in clients:
            client.close()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"Ollama is running"
        connection.close()
        process.terminate()
        assert len(process.stderr.readlines()) < 60  # one a second
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--prot", "3"], "did you mean --port?"),
        (["--model", "ecko"], "did you mean 'echo'?"),
        (["--model", "echo", "--num-parallel", "0"], "at least 1"),
        (["--model", "echo", "--faults", "0.1", "--fault-kinds", "rest"], "did you mean 'reset'?"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(flags: list[str], hint: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert hint in done.stderr


def test_help_and_echo_need_no_torch() -> None:
    code = (
        "import sys; from query_mutator.commands.embedded import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--num-parallel" in done.stdout
