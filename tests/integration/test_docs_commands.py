"""Every block of README and docs runs as written, or is marked with what it needs and its flags are parsed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.testing import StubServer
from tests.docs_blocks import DEFAULTS, PAGES, ROOT, SIZES, blocks_of, check_block, run_block
from tests.integration.conftest import ROWS
from tests.tiny_lm import pairs, write_rows
from train_query_mutator import main as train_main

DOCS = ROOT / "docs"  # whose blocks are many minutes of training runs
WITH_BLOCKS = [page for page in PAGES if any(not block.needs for block in blocks_of(page))]


@pytest.fixture(scope="session")
def small_run(tiny_server: StubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `questions.jsonl` and a run of two updates on them."""
    folder = tmp_path_factory.mktemp("docs")
    rows = [{"id": f"q{n}", "query": text, "accept": [name]} for n, (text, name) in enumerate(ROWS)]
    write_rows(folder / "questions.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OLLAMA_HOST", tiny_server.url)
        patch.setenv("QUERY_MUTATOR_REPLIES", str(folder / "replies.sqlite"))
        assert exit_code(train_main, [*DEFAULTS, *SIZES, "--no-evaluate"], prog="train") == 0
    return folder


@pytest.fixture
def folder(
    small_run: Path, tiny_server: StubServer, tiny_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The working directory of a page: a checkout's files, a finished run, rows to train on and a small model."""
    for name in ("questions.jsonl", "runs"):
        source = small_run / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name, **({"symlinks": True} if source.is_dir() else {}))
    for name in ("examples", "scripts", "benchmarks", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(tiny_lm, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", pairs(40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_HOST", tiny_server.url)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=(pytest.mark.slow, pytest.mark.timeout(900)) if DOCS in page.parents else ())
        for page in WITH_BLOCKS
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_of_the_page_run(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if not block.needs:
            run_block(block, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_blocks_have_flags_that_exist(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.needs:
            check_block(block)
        elif block.file:
            (folder / block.file).write_text(block.code, encoding="utf-8")
