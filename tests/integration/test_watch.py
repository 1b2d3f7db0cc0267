"""`qm watch` as a process: a run that begins later, is killed and is resumed, on an open page; Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from query_mutator.embedded.server import start_server
from query_mutator.files.json_lines import read_json_lines
from tests.conftest import Librarian, Softener
from tests.event_stream import Page
from tests.integration import killing
from tests.qm_command import qm

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16  # of a rollout, after which a checkpoint is saved


@contextmanager
def watcher(*runs: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a `qm watch` and its port."""
    command = [sys.executable, "-m", "query_mutator", "watch", *map(str, runs), "--no-browser"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found, process.communicate()
            yield process, int(found[1])
        finally:
            process.kill()


class Shown:
    """What a page shows after the messages of a stream, which a thread reads."""

    def __init__(self, port: int) -> None:
        self.sections: dict[str, Any] = {}
        self.steps: list[int] = []  # of metrics
        self.rewards: list[float] = []  # of the transcript
        self.resets = 0
        self._page = Page(port)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                _, event, message = self._page.take(1)[0]
            except AssertionError:  # the watcher has ended
                return
            if event != "message":
                pytest.fail(f"event {event}")
            if message["kind"] == "section":
                self.sections[message["name"]] = message["data"]
            elif message["kind"] == "metrics":
                self.steps = [*([] if message["reset"] else self.steps), *message["steps"]]
            elif message["kind"] == "transcripts":
                self.resets += message["reset"]
                self.rewards = [*([] if message["reset"] else self.rewards), *message["columns"]["reward"]]

    @property
    def state(self) -> str | None:
        state: str | None = self.sections.get("answer", {}).get("state")
        return state


def until(condition: Callable[[], bool], what: str) -> None:
    tick = threading.Event()
    for _ in range(3000):
        if condition():
            return
        tick.wait(0.02)
    pytest.fail(f"not within 60 s: {what}")


@pytest.fixture
def slow_flags(tiny_flags: list[str]) -> Iterator[list[str]]:
    """The flags of a run that takes seconds, because its server does."""
    with start_server([Librarian(), Softener()], num_parallel=8, latency_ms=250) as server:
        yield ["--ollama-url", server.url, *tiny_flags[2:], "--eval-interval", "0", "--no-evaluate", "--num-steps", "4"]


def kill_behind_a_checkpoint(flags: list[str], folder: Path, seen: Callable[[], int]) -> None:
    """Train until rows are written behind a checkpoint; kill the trainer when all of them are `seen`."""
    rows = folder / "runs" / "latest" / "transcripts.jsonl"
    process = killing.start(flags, folder)

    def count() -> int:
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    def is_behind() -> bool:
        if count() <= STEPS:
            return False
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        if count() % STEPS:
            until(lambda: seen() == count(), "all rows on the page")
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    assert killing.kill_when(process, is_behind), (folder / "output.txt").read_text(encoding="utf-8")


def files_of(run: Path) -> tuple[list[int], list[float]]:
    """Return the steps of the metrics and the rewards of the transcript."""
    rows = list(read_json_lines(run / "transcripts.jsonl"))
    metrics = [int(row["step"]) for row in read_json_lines(run / "metrics.jsonl")]
    return metrics, [round(row["reward"], 4) for row in rows]


@pytest.fixture
def tabs() -> Iterator[list[Any]]:
    """Two tabs of a headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context()
        yield [context.new_page(), context.new_page()]
        browser.close()


def open_page(tab: Any, port: int, errors: list[str]) -> None:
    """Open the page in a tab and mark it, so that a reload is seen; errors on it are added to the list."""
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(f"http://127.0.0.1:{port}/")
    tab.evaluate("window.mark = 'not reloaded'")


def rows_shown(tab: Any) -> int:
    """Return how many steps of transcripts a tab has."""
    return int(tab.evaluate("runs[0]?.transcripts.env.length ?? 0"))


@pytest.mark.slow
def test_an_open_page_follows_a_run_that_begins_is_killed_and_is_resumed(
    slow_flags: list[str], tiny_flags: list[str], tabs: list[Any], tmp_path: Path
) -> None:
    latest = tmp_path / "runs" / "latest"
    with watcher(latest) as (process, port):
        waiting = f"waiting for {latest}: there is no config.json yet"
        errors: list[str] = []
        shown = Shown(port)
        for tab in tabs:
            open_page(tab, port, errors)
            tab.get_by_text(waiting).wait_for()
        kill_behind_a_checkpoint(slow_flags, tmp_path, lambda: len(shown.rewards))
        until(lambda: shown.state == "killed", "the state killed")
        before = rows_shown(tabs[0])
        assert before > STEPS
        killing.train(["--ollama-url", tiny_flags[1], "--resume", str(latest.resolve())], tmp_path)
        until(lambda: shown.state == "finished", "the state finished")
        until(lambda: (shown.steps, shown.rewards) == files_of(latest), "the rows of the files")
        assert shown.resets == 1  # the rows behind the checkpoint
        late = Shown(port)
        until(lambda: (late.steps, late.rewards) == files_of(latest), "the same on a late page")
        until(lambda: late.sections == shown.sections, "the same sections on a late page")
        for tab in tabs:
            tab.locator(".pill.finished").wait_for()
            assert tab.evaluate("window.mark") == "not reloaded"
            assert rows_shown(tab) == len(shown.rewards)
            assert tab.locator("#live").text_content() == "Live"
        assert errors == []
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert err.replace("qm: interrupted\n", "") == f"{waiting}\n"
        tabs[0].get_by_text("Not connected").wait_for()


def test_a_file_in_place_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("", encoding="utf-8")
    assert qm("watch", path, "--no-browser") == 2
    assert capsys.readouterr().err.splitlines() == [f"qm: {path} is a file; give a run folder such as runs/latest"]
