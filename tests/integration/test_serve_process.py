"""`qm serve` as a process: SIGTERM lets open streams end, and no prompt is left on disk or in the log."""

from __future__ import annotations

import shutil
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import requests

from query_mutator.runs.shadow import read_shadow
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.proxied import KILL, SORT, chat
from tests.qm_command import qm, serving


class Slow(Librarian):
    name = "slow"

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        time.sleep(1.0)
        return super().reply_many(prompts)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener(), Slow()], num_parallel=4) as found:
        yield found


@pytest.fixture
def plan(server: StubServer, dataset: Path, tmp_path: Path) -> Path:
    """Return the folder of a plan."""
    argv = [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(dataset), "--operators", "spelling,neutral,filler"),
        *("--save-dir", str(tmp_path / "plans"), "--max-calls", "300", "--budget", "2"),
        *("--cache", "eval", "--cache-path", str(tmp_path / "replies.sqlite")),
    ]
    assert qm("plan", *argv) == 0
    return (tmp_path / "plans" / "latest").resolve()


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


def test_shadow_keeps_pairs_in_the_run_folder(plan: Path, tmp_path: Path) -> None:
    with serving(plan, tmp_path, "--shadow", "1", "--slots", "4", "--judge-model", "librarian") as (process, url):
        chat(url, KILL)
        file = plan / "shadow.jsonl"
        end = time.monotonic() + 20
        while KILL.encode() not in file.read_bytes():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert qm("serve", str(plan), "--port", "0", "--shadow", "1") == 2  # one process writes a file
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert len(read_shadow(file)) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "{'kept': 1}" in (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert not (plan / "shadow.jsonl.lock").exists()


def test_a_shadow_that_cannot_be_kept_is_refused(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "notes.jsonl"
    other.write_bytes(b'{"mine": 1}\nno end of line')
    shutil.copy(plan / "policy.qm", tmp_path / "policy.qm")
    for flags, message in (
        ((str(plan), "--shadow", "1.5"), "between 0 and 1"),
        ((str(plan), "--judge-model", "librarian"), "needs --shadow"),
        ((str(plan), "--shadow", "1", "--shadow-file", str(other)), "notes.jsonl"),
        ((str(plan), "--shadow", "1", "--judge-model", "nobody"), "nobody"),
        ((str(tmp_path / "policy.qm"), "--shadow", "1"), "--shadow-file FILE"),
    ):
        assert qm("serve", *flags, "--port", "0") == 2
        assert message in capsys.readouterr().err
    assert other.read_bytes() == b'{"mine": 1}\nno end of line'


def test_two_policies_are_one_too_many(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("serve", plan, "--checkpoint", "other") == 2
    assert "give one" in capsys.readouterr().err
