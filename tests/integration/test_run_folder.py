"""A run folder belongs to one process, and damage in it is found before anything in it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.attack.harness import Finished, run_cli, run_qm, unchanged
from query_mutator.files import LOCK, locked
from query_mutator.testing import start_server
from query_mutator.training.run_folder import read_checkpoint
from tests.conftest import Librarian, Softener
from tests.integration.killing import kill_when, run_in, start, train, transcript
from train_query_mutator import main


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    """Return a run of two updates with a checkpoint after each."""
    return trained("--no-evaluate", "--eval-interval", "0", "--no-use-linear-lr-decay", "--deterministic")


@pytest.fixture(autouse=True)
def no_lock_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob(LOCK))


def resume(run: Path, *flags: str) -> Finished:
    return run_cli(main, ["--resume", run, "--num-env-steps", "96", *flags], run.parents[1])


def refused(run: Path, message: str) -> None:
    """Check that a run is not resumed, that one line says why, and that none of its files changed."""
    with unchanged(run) as files:
        ended = resume(run)
    assert ended.code == 2, ended
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.err
    assert files.changed() == []


@pytest.mark.parametrize("command", ["sweep", "sft"])
def test_every_command_that_writes_a_run_folder_locks_it(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    argv = {
        "sweep": ["sweep", "--grid", "lr=1", "--out", folder, "--", "true"],
        "sft": ["train", "sft", "--model", "nowhere", "--dataset", "nowhere.jsonl", "--out", folder],
    }[command]
    with locked(folder):
        ended = run_qm(argv, tmp_path)
    assert ended.code == 2
    assert f"{folder} is being written by process" in ended.err
    assert not folder.exists()


def test_a_dry_run_and_a_reader_do_not_need_the_lock(run: Path) -> None:
    with locked(run):
        assert resume(run, "--dry-run").code == 0
        assert run_qm(["analyze", run, "--json"], run.parents[1]).code == 0


@pytest.mark.parametrize("name", ["transcripts.jsonl", "metrics.jsonl"])
def test_damaged_rows_are_named_and_nothing_changes(run: Path, name: str) -> None:
    path = run / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], lines[1].replace(b'"step":', b'"stap":', 1), *lines[2:]]))
    refused(run, f"{path}:2: damaged, it does not match its checksum; restore the file")
    path.write_bytes(b"".join(lines[:-1]))
    refused(run, f"{path}:{len(lines) - 1}: damaged, its whole lines take")
    path.write_bytes(b"".join(lines)[:-5])
    refused(run, f"{path}:{len(lines)}: damaged, its whole lines take")
    path.unlink()
    refused(run, f"{path}: cannot be read")


def test_a_damaged_config_is_named_and_nothing_changes(run: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"started": "2', '"started": "3'))
    refused(run, f"{path}: its content does not match its checksum")


def test_what_was_paid_before_a_kill_is_not_asked_again(tiny_flags: list[str], tmp_path: Path) -> None:
    with start_server([Librarian(), Softener()], num_parallel=8, latency_ms=4, latency_sigma=1.0) as server:
        flags = [*tiny_flags[2:], "--ollama-url", server.url, "--eval-interval", "0", "--no-evaluate", "--seed", "7"]
        flags += ["--num-env-steps", "256", "--save-interval", "100", "--save-dir", str(tmp_path)]
        assert kill_when(start(flags, tmp_path), lambda: server.stats()["calls"] >= 24)
        run = run_in(tmp_path)
        train(["--resume", str(run), "--ollama-url", server.url], tmp_path)
        answered = server.stats()["calls"]
    assert len(transcript(run)) == 256
    assert 0 <= answered - read_checkpoint(run).progress.totals.calls <= 4  # in flight
