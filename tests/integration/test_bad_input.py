"""Bad input: one line on stderr that says what to do, exit code 2, nothing written or overwritten."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from query_mutator.cli.console import exit_code
from query_mutator.testing import StubServer
from tests.integration.conftest import ROWS
from train_query_mutator import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train_query_mutator.py")


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a call with bad input ends with."""
    capsys.readouterr()
    code = exit_code(main, argv, prog="train_query_mutator.py")
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("train_query_mutator.py: ")
    assert err.count("\n") == 1, err
    return err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batchsize", "8"], "unknown flag --batchsize; did you mean --batch-size?"),
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--target-model", "librarianx"], "has no model 'librarianx': run `ollama pull librarianx`"),
        (["--mutator-model", "qwen2.5:3b"], "has no model 'qwen2.5:3b': run `ollama pull qwen2.5:3b`"),
        (["--operators", "spellling"], "unknown operator 'spellling' (did you mean 'spelling'?)"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--encoder", "ollama:nothing"], "nothing"),
        (["--device", "toaster"], "--device toaster cannot be used"),
        (["--reward", "rigth=1"], "rigth"),
        (["--resume", "nowhere"], "nowhere: no such file; give a run folder"),
    ],
)
def test_bad_flag_is_one_line(
    flags: list[str], message: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in complaint([*tiny_flags, *flags], capsys)
    assert not (tmp_path / "runs").exists()


def test_server_down_says_how_to_start_it(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint([*tiny_flags, "--ollama-url", f"http://127.0.0.1:{free_port()}"], capsys)
    assert "ollama serve" in line
    assert not (tmp_path / "runs").exists()


def test_server_without_a_model_named_lists_what_is_there(
    tiny_server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(["--ollama-url", tiny_server.url], capsys)
    assert "--target-model" in line
    assert "librarian" in line


def test_broken_row_is_named_by_file_and_line(
    tiny_flags: list[str], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset.write_text(dataset.read_text() + '\n{"id": "late", "query": ""}\n')
    assert f"{dataset}:{len(ROWS) + 1}: the question is empty" in complaint(tiny_flags, capsys)
    assert not (tmp_path / "runs").exists()


def test_unreadable_checkpoint_is_one_line(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step_8.pt"
    path.write_bytes(b"this is not a checkpoint")
    assert f"cannot read the checkpoint {path}" in complaint([*tiny_flags, "--resume", str(path)], capsys)
    torch.save({"policy": {}}, path)
    assert "not a checkpoint of query mutator" in complaint([*tiny_flags, "--resume", str(path)], capsys)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--operators", "spelling,slang"], "operators: then spelling,neutral,filler, now spelling,slang"),
        (["--num-processes", "8"], "num_processes: then 4, now 8"),
        (["--embedding-dims", "x"], "--embedding-dims must be a whole number"),
        ([], "give a larger --num-env-steps"),
    ],
)
def test_checkpoint_that_does_not_fit_changes_nothing(
    flags: list[str], message: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    before = contents(tmp_path / "runs")
    line = complaint(["--resume", str(tmp_path / "runs" / "latest"), *flags], capsys)
    assert message in line
    assert contents(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--operators", "spelling,slang"], "another operator set (only there: neutral, filler; only here: slang)"),
        (["--num-processes", "8"], "try num_processes=4"),
    ],
)
def test_policy_of_other_sizes_is_not_gone_on_from_in_a_new_folder(
    flags: list[str], message: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    (checkpoint,) = (tmp_path / "runs").glob("2*/checkpoints/step_64.pt")
    assert message in complaint(["--resume", str(checkpoint), "--num-env-steps", "1024", *flags], capsys)


def test_unwritable_place_is_one_line(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert "choose another place to write to" in complaint([*tiny_flags, "--save-dir", str(tmp_path / "taken")], capsys)


def limited_to(size_bytes: int) -> Callable[[], None]:
    """Return what makes the kernel refuse files longer than this, as a full disk does."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    return limit


@pytest.mark.slow
@pytest.mark.parametrize(("size_bytes", "file"), [(20_000, "step_0.pt"), (300_000, "transcripts.jsonl")])
def test_full_disk_ends_the_run_with_one_line(
    size_bytes: int, file: str, tiny_flags: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-B", SCRIPT, *tiny_flags, "--num-env-steps", "2048", "--eval-interval", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limited_to(size_bytes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("train_query_mutator.py: ")
    assert file in last
    assert "free some space" in last
    assert not list(tmp_path.rglob("*.partial"))


def test_command_itself_exits_with_two_and_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, SCRIPT, "--num-proceses", "4"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "train_query_mutator.py: unknown flag --num-proceses; did you mean --num-processes?\n"
