"""Command lines against a small real server: a dataset of a few questions and the flags that point at the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from query_mutator.data import load_questions, split_questions, validation_split
from query_mutator.embedded.server import EmbeddedServer
from tests.integration.llama_server import write_gguf

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
    return [q.text for q in validation_split(split_questions(load_questions(dataset)).train, 0).validation]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for `LlamaServer`."""
    return write_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def tiny_flags(tiny_server: EmbeddedServer, dataset: Path, tmp_path: Path) -> list[str]:
    """Flags of a run of two updates that takes a second."""
    return [
        *("--ollama-url", tiny_server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *(
            "--encoder",
            "hash",
            "--dataset",
            str(dataset),
            "--embedding-dims",
            "4",
            "--operators",
            "spelling,neutral,filler",
        ),
        *("--save-dir", str(tmp_path / "runs"), "--num-processes", "4", "--num-steps", "8", "--batch-size", "4"),
        *("--num-mini-batch", "2", "--num-env-steps", "64", "--save-interval", "1", "--eval-questions", "3"),
    ]
