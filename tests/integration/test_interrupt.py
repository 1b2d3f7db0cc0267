"""Ctrl-C, SIGTERM and cancelled tasks: connections are cut, a checkpoint is left, nobody else is hurt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from query_mutator.encoder import Encoder
from query_mutator.env.scheduling import Call, Flow, run_flow_async
from query_mutator.files import read_json_lines
from query_mutator.llm.cache import Cache
from query_mutator.llm.client import DEFAULT_POLICY, Client, complete_in_thread
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import Limit
from query_mutator.testing import StubServer, start_server
from query_mutator.training.run_folder import read_checkpoint
from query_mutator.types import ChatRequest, Completion
from tests.conftest import Librarian, Softener
from train_query_mutator import main

SLOW = ChatRequest.user("plz sort my list", model="slow")
ROOT = Path(__file__).resolve().parents[2]
LONG_MS = 120_000  # no call comes back before its test gives up


class Slow(Librarian):
    """Answers once `goes_on` is set."""

    name = "slow"

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def reply(self, prompt: str) -> str:
        self.goes_on.wait(60)
        return super().reply(prompt)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def server(slow: Slow) -> Iterator[StubServer]:
    with start_server([slow], num_parallel=1) as found:
        yield found
        slow.goes_on.set()


@pytest.fixture
def client(server: StubServer) -> Iterator[Client]:
    found = Cache(Limit(OllamaBackend(server.url, timeout_s=20, pool_size=1), limit=1))
    yield found
    found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def cancelled(task: asyncio.Task[Completion]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_server_is_left_and_the_connection_is_not_used_again(
    server: StubServer, client: Client, slow: Slow
) -> None:
    async def leave_and_ask() -> Completion:
        task = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        await cancelled(task)
        await until(lambda: server.stats()["cancelled"] == 1)
        slow.goes_on.set()
        return await complete_in_thread(client, ChatRequest.user("count plz", model="slow"))

    assert asyncio.run(leave_and_ask()).text == "`collections.Counter` is what you want."
    assert server.stats()["calls"] == 1


def test_a_call_that_waits_for_its_turn_is_not_made(server: StubServer, client: Client, slow: Slow) -> None:
    async def leave_the_line() -> Completion:
        first = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        second = asyncio.create_task(complete_in_thread(client, ChatRequest.user("count plz", model="slow")))
        await asyncio.sleep(0.1)
        await cancelled(second)
        slow.goes_on.set()
        return await first

    assert asyncio.run(leave_the_line()).ok
    assert server.stats()["routes"]["/api/chat"] == 1


def test_one_who_shares_the_call_asks_again(
    server: StubServer, client: Client, slow: Slow, hash_encoder: Encoder
) -> None:
    def asking() -> Flow:
        completion: Completion = yield Call(SLOW)
        return completion

    async def share_and_leave() -> Completion:
        first = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        other = asyncio.create_task(
            run_flow_async(
                asking(),
                complete=lambda request: complete_in_thread(client, request),
                encoder=hash_encoder,
                retry_policy=DEFAULT_POLICY,
            )
        )
        await until(lambda: isinstance(client, Cache) and client.shared_calls == 1)
        await cancelled(first)
        slow.goes_on.set()
        found: Completion = await other
        return found

    found = asyncio.run(share_and_leave())
    assert (found.text, found.attempts) == ("`sorted` is what you want.", 1)  # one that was left costs no attempt


@pytest.fixture
def slow_server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8, latency_ms=LONG_MS) as server:
        yield server


def started(flags: list[str], tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Return a trainer that has begun, and its run folder."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train_query_mutator.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("run folder: "), process.communicate()
    return process, Path(line.removeprefix("run folder: ").strip())


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; a process that ends before is a failure."""
    while not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"ended with {process.wait(timeout=0.02)}: {process.communicate()}")


def ended(process: subprocess.Popen[str], name: str = "SIGINT") -> str:
    """Send a trainer a signal, which ends it in order; return what it said."""
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, name), err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("SIGINT", ["--use-batching"]),
        ("SIGTERM", ["--no-batching"]),
        pytest.param("SIGTERM", ["--use-batching"], marks=pytest.mark.slow),
        pytest.param("SIGINT", ["--algo", "iqn", "--eval-interval", "0"], marks=pytest.mark.slow),
    ],
)
def test_calls_in_flight_are_cut_and_a_checkpoint_left(
    name: str, more: list[str], tiny_flags: list[str], slow_server: StubServer, tmp_path: Path
) -> None:
    many = ["--num-processes", "8"]  # than calls in flight, so that some calls still wait for a place
    process, run = started([*tiny_flags, *many, *more, "--ollama-url", slow_server.url], tmp_path)
    wait_until(lambda: slow_server.stats()["in_service"] > 0, process)
    assert f"continue with --resume {run}" in ended(process, name)
    assert read_checkpoint(run).progress.env_steps == 0
    assert b"cancelled" not in stored(run)  # or the resumed run would take it for the server's failure


class Stalling(Librarian):
    """Answers while `goes_on` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()

    def reply(self, prompt: str) -> str:
        self.goes_on.wait()
        return super().reply(prompt)


@pytest.fixture
def stalling() -> Iterator[tuple[StubServer, Stalling]]:
    model = Stalling()
    with start_server([model, Softener()], num_parallel=8, latency_ms=4) as server:
        yield server, model
        model.goes_on.set()


def stored(run: Path) -> bytes:
    """Return the bytes of a run's store."""
    return b"".join(path.read_bytes() for path in run.glob("replies.sqlite*"))


def rows_in(run: Path) -> int:
    return len((run / "transcripts.jsonl").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_final_comparison_can_be_ended_and_made_up_for(
    name: str, tiny_flags: list[str], stalling: tuple[StubServer, Stalling], tmp_path: Path
) -> None:
    server, model = stalling
    flags = [*tiny_flags[2:], "--ollama-url", server.url, "--eval-interval", "0"]
    process, run = started(flags, tmp_path)
    wait_until(lambda: rows_in(run) == 64, process)
    model.goes_on.clear()
    wait_until(lambda: server.stats()["in_service"] > 0, process)
    ended(process, name)
    assert not (run / "summary.json").exists()
    model.goes_on.set()
    assert main(["--resume", str(run), "--ollama-url", server.url]) == 0
    assert (run / "summary.json").exists()
    assert rows_in(run) == 64


KILLS_ITSELF = """
import os, pathlib, signal
from query_mutator.training.callbacks import CALLBACKS, Callback

@CALLBACKS.register("kill")
class Kill(Callback):
    def on_step(self, run, steps, records):
        marker = pathlib.Path("killed")
        if run.updates_done == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_row_whose_evaluation_was_being_made_is_written_after_a_kill(tiny_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "kills_itself.py").write_text(KILLS_ITSELF)
    plugin = ["--plugin", str(tmp_path / "kills_itself.py")]
    process, run = started([*tiny_flags, *plugin, "--eval-interval", "1", "--no-evaluate"], tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert main(["--resume", str(run), *tiny_flags[:2], *plugin]) == 0
    rows = list(read_json_lines(run / "metrics.jsonl"))
    assert [row["step"] for row in rows if "validation/success" in row] == [0, 32, 64]
    assert [row["step"] for row in rows if "losses/policy_loss" in row] == [32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_wait_for_a_server_can_be_ended_and_costs_no_step(name: str, tiny_flags: list[str], tmp_path: Path) -> None:
    models: list[Any] = [Librarian(), Softener()]
    server = start_server(models, num_parallel=8, latency_ms=4)
    flags = [*tiny_flags[2:], "--ollama-url", server.url, "--eval-interval", "0", "--no-evaluate"]
    process, run = started(flags, tmp_path)
    wait_until(lambda: rows_in(run) >= 8, process)
    server.close()
    assert process.stderr is not None
    said = b""
    while b"server away since" not in said:  # at the end of a bar, which is no line yet
        said += (piece := os.read(process.stderr.fileno(), 4096))
        assert piece, said
    ended(process, name)
    assert b'"kind":"connect"' not in stored(run)
    with start_server(models, num_parallel=8, port=server.port):
        assert main(["--resume", str(run), "--ollama-url", server.url]) == 0
    assert all(row["valid"] for row in read_json_lines(run / "transcripts.jsonl"))


@pytest.mark.parametrize("command", [["train_query_mutator.py"], ["benchmark_batching.py"], ["-m", "query_mutator"]])
def test_ctrl_c_while_modules_load_shows_no_traceback(command: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command, "--help"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    while "query_mutator.cli" not in process.stderr.readline():  # it loads the product now
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err
    assert "Traceback" not in err
