"""Command lines against a small real server: a dataset of a few questions and the flags that point at the server."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.data import load_questions, split_questions
from query_mutator.encoder import Encoder
from query_mutator.testing import StubServer
from tests.integration.llama_server import write_gguf
from tests.integration.proxied import proxy
from tests.qm_command import qm
from train_query_mutator import main as train_main

ROWS = [
    ("plz sort my list", "sorted"),
    ("how do i kill the process", "os.kill"),
    ("please count how often a word occurs", "collections.Counter"),
    ("umm join path parts", "os.path.join"),
    ("what is the length of it", "len"),
    ("plz sort", "list.sort"),
    ("kill it", "signal.raise_signal"),
    ("count words plz", "str.count"),
    ("join my words", "str.join"),
    ("umm length plz", "operator.length_hint"),
    # fold 0 of the training questions: validation
    ("kill the group plz", "os.killpg"),
    ("umm count up", "itertools.count"),
    ("are all of them true", "all"),
]


class HasUrl(Protocol):
    """A server, in this process or another."""

    url: str


def write_dataset(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    """Write questions and their answers; return the path."""
    lines = [json.dumps({"id": f"q{n}", "query": text, "accept": [name]}) for n, (text, name) in enumerate(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "questions.jsonl", ROWS)


@pytest.fixture
def validation(dataset: Path) -> list[str]:
    """Return the texts of the dataset's validation questions."""
    return [q.text for q in split_questions(load_questions(dataset), 0).validation]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for `LlamaServer`."""
    return write_gguf(tmp_path_factory.mktemp("gguf"))


#: Every rewrite is asked about, as in the documents: without forms, P(right) and a budget.
EVERY_STEP = ("--forms", "none", "--ask", "every_step", "--max-episode-steps", "5")


@pytest.fixture
def tiny_flags(tiny_server: StubServer, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run of two updates that takes a second.

    Commands that use it find the server in the environment, and the questions in the current folder.
    """
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    monkeypatch.chdir(tmp_path)
    return flags_of(tiny_server, dataset, tmp_path / "runs")


def flags_of(server: StubServer, dataset: Path, save_dir: Path) -> list[str]:
    return [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(dataset), "--embedding-dims", "4", *EVERY_STEP, "--cache", "eval"),
        *("--operators", "spelling,neutral,filler", "--save-dir", str(save_dir)),
        *("--num-processes", "4", "--num-steps", "8", "--batch-size", "4"),
        *("--num-mini-batch", "2", "--num-env-steps", "64", "--save-interval", "1", "--eval-questions", "3"),
    ]


def plan_flags(server: HasUrl, dataset: Path, save_dir: Path) -> list[str]:
    """Return the flags of a search for a plan that takes a second."""
    return [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(dataset), "--operators", "spelling,neutral,filler"),
        *("--save-dir", str(save_dir), "--batch-size", "4", "--cache", "off"),
    ]


@pytest.fixture
def plan(
    tiny_server: StubServer,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the folder of a plan that asks once, whose server is in the environment."""
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    flags = plan_flags(tiny_server, dataset, tmp_path / "plans")
    assert qm("plan", *flags, "--max-calls", "300", "--budget", "2") == 0
    capsys.readouterr()
    return (tmp_path / "plans" / "latest").resolve()


@pytest.fixture(scope="module")
def gate(tiny_server: StubServer, hash_encoder: Encoder) -> Iterator[str]:
    """Return the address of a proxy in front of the tiny server, which rewrites what was refused."""
    with proxy(tiny_server.url, hash_encoder) as url:
        yield url


@pytest.fixture(scope="session")
def trained_once(
    tiny_server: StubServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], Path]:
    """Return a function that trains with `flags_of` and more flags, once a session, and returns the run folder."""

    @functools.cache
    def train(more: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        write_dataset(folder / "questions.jsonl", ROWS)
        flags = flags_of(tiny_server, Path("questions.jsonl"), Path("runs"))
        with contextlib.chdir(folder):
            assert exit_code(train_main, [*flags, *more], prog="train") == 0
        return (folder / "runs" / "latest").resolve()

    return train


@pytest.fixture
def trained(
    trained_once: Callable[[tuple[str, ...]], Path],
    tiny_server: StubServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Path]:
    """Return a function that returns the test's own copy of the run of `trained_once`, in `tmp_path / "runs"`.

    Commands that use it find its server in the environment, and its questions in the current folder.
    """
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    monkeypatch.chdir(tmp_path)

    def copy(*more: str) -> Path:
        run = trained_once(more)
        shutil.copy(run.parents[1] / "questions.jsonl", tmp_path)
        capsys.readouterr()
        own = tmp_path / "runs" / run.name
        shutil.copytree(run, own)
        (own.parent / "latest").symlink_to(own.name)
        return own

    return copy
