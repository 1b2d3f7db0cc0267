"""Bad input: one line that names it, exit code 2, no traceback, nothing written or overwritten."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.promises.helpers import (
    QM,
    ROOT,
    TRAIN,
    ModelServer,
    contents,
    one_line_error,
    run,
    train_flags,
    write_questions,
)

LINES: dict[str, list[list[str]]] = json.loads(Path(__file__).with_name("bad_input.json").read_text("utf-8"))
#: Flags after those of `train_flags`, and what the line names. Files are made by `bad_files`.
TRAINING = LINES["training"]

#: Other commands: the words after `python`, and what the line names.
COMMANDS = LINES["commands"]


@pytest.fixture
def closed_url() -> str:
    """Return an address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    """Write files that are not what they should be; return their folder."""
    (tmp_path / "folder").mkdir()
    for name, text in {
        "broken.json": '{"seed": ',
        "unknown.json": '{"batchsize": 8}',
        "empty.jsonl": "",
        "broken.jsonl": '{"query": "which planet", "accept": ["Jupiter"]}\n{"query": \n',
        "blank.jsonl": '{"query": "which planet", "accept": ["Jupiter"]}\n{"query": " ", "accept": ["x"]}\n',
        "columns.jsonl": '{"colour": "red"}\n',
        "garbage.pt": "this is not a checkpoint",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("flags", "named"), TRAINING, ids=[flags for flags, _ in TRAINING])
def test_bad_flag_of_a_training(flags: str, named: str, server: ModelServer, bad_files: Path, closed_url: str) -> None:
    """A training with a bad flag or file ends before it writes anything: one line that names it, exit code 2."""
    words = [*train_flags(server, bad_files), *flags.replace("CLOSED", closed_url).split()]
    before = contents(bad_files)
    said = one_line_error(run([*TRAIN, *words], cwd=bad_files))
    assert said.startswith("train_query_mutator.py: ")
    assert named in said
    assert {name: text for name, text in contents(bad_files).items() if not name.startswith(".")} == before


@pytest.mark.parametrize(("line", "named"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_bad_input_of_a_command(line: str, named: str, server: ModelServer, bad_files: Path, closed_url: str) -> None:
    """Every command ends bad input with one line that names it and exit code 2, and writes nothing."""
    write_questions(bad_files / "questions.jsonl")
    before = contents(bad_files)
    words = line.replace("CLOSED", closed_url).replace("URL", server.url).split()
    words = [*QM, *words[1:]] if words[0] == "QM" else words
    words[0] = str(ROOT / words[0]) if words[0].endswith(".py") else words[0]
    said = one_line_error(run(words, cwd=bad_files))
    assert named.replace("CLOSED", closed_url) in said
    assert {name: text for name, text in contents(bad_files).items() if not name.startswith(".")} == before
