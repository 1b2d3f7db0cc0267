"""`qm serve` as a process: SIGTERM lets open streams end, and no prompt is left on disk or in the log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from query_mutator.embedded.server import EmbeddedServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, SORT, VIRTUAL, chat
from tests.qm_command import qm

ROOT = Path(__file__).resolve().parents[2]


class Slow(Librarian):
    name = "slow"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        time.sleep(1.0)
        return super().reply_many(prompts)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with start_server([Librarian(), Softener(), Slow()], num_parallel=4) as found:
        yield found


@pytest.fixture
def plan(server: EmbeddedServer, dataset: Path, tmp_path: Path) -> Path:
    """Return the folder of a plan."""
    argv = [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(dataset), "--operators", "spelling,neutral,filler"),
        *("--save-dir", str(tmp_path / "plans"), "--max-calls", "300", "--budget", "2"),
        *("--cache", "eval", "--cache-path", str(tmp_path / "replies.sqlite")),
    ]
    assert qm("plan", *argv) == 0
    return (tmp_path / "plans" / "latest").resolve()


@contextmanager
def serving(run: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `qm serve RUN` with its files under `folder`; yield the process and its address."""
    command = [sys.executable, "-m", "query_mutator", "serve", str(run), "--port", "0", *flags]
    settings = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**settings, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("listening on "), (folder / "log.txt").read_text(encoding="utf-8")
            yield process, line.split()[-1]
        finally:
            process.kill()
            process.wait(20)
            process.stdout.close()  # type: ignore[union-attr]


def test_sigterm_lets_an_open_stream_end(plan: Path, tmp_path: Path) -> None:
    with serving(plan, tmp_path) as (process, url):
        body = {"model": "slow:latest", "messages": [{"role": "user", "content": SORT}]}
        with requests.post(f"{url}/api/chat", json=body, stream=True, timeout=20) as reply:
            process.send_signal(signal.SIGTERM)
            lines = list(reply.iter_lines())
        assert b'"done":true' in lines[-1].replace(b" ", b"")
        assert process.wait(20) == 128 + signal.SIGTERM  # as a shell reports it
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/healthz", timeout=5)


def test_no_prompt_is_on_disk_or_in_the_log(plan: Path, tmp_path: Path) -> None:
    marked = KILL + " zanzibar"
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(plan, folder, "--mode", "full") as (process, url):
        for model in (VIRTUAL, "no-such-model+qm", "librarian:latest"):
            chat(url, marked, model=model)
        process.terminate()
        process.wait(20)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert folder / "log.txt" in kept
    assert [path for path, content in kept.items() if b"zanzibar" in content] == []


def test_two_policies_are_one_too_many(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("serve", plan, "--checkpoint", "other") == 2
    assert "give one" in capsys.readouterr().err
