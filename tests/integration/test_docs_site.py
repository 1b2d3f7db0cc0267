"""The docs site builds without a warning and its blocks run; Dockerfile and compose.yaml have what they name."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dockerfile
import pytest
import yaml

from query_mutator.cli.console import exit_code
from query_mutator.commands import COMMANDS
from query_mutator.testing import StubServer
from query_mutator.training.config import parse_config
from scripts import flag_pages
from tests.docs_blocks import DEFAULTS, PAGES, ROOT, SIZES, blocks_of, check_block, run_block
from tests.integration.conftest import ROWS, write_dataset
from tests.tiny_lm import pairs, write_rows
from train_query_mutator import main as train_main


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


@pytest.mark.slow
def test_navigation_has_every_page_once() -> None:
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_of(settings()["nav"])) == sorted([*pages, *flag_pages.pages()])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    html = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert [str(path) for path, text in html.items() if "```" in text or "<p>|" in text] == []
    first = html[tmp_path / "tutorials" / "first-run.html"]
    assert re.search(r'<code class="language-bash">make run', first)
    assert "<table" in first


def steps(path: Path = ROOT / "Dockerfile") -> list[Any]:
    return list(dockerfile.parse_file(str(path)))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = [name for step in steps() if step.cmd == "COPY" and not step.flags for name in step.value[:-1]]
    assert set(copied) == sent
    assert [name for name in copied if not (ROOT / name).exists()] == []
    modules = [path.name for path in ROOT.glob("*.py")]  # of the wheel, as the files of its build
    assert {"pyproject.toml", "README.md", "LICENSE", "ppo", "query_mutator", *modules} <= set(copied)


def test_the_image_installs_the_lock_and_the_tested_torch() -> None:
    runs = " ".join(step.value[0] for step in steps() if step.cmd == "RUN")
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert next(pin for pin in pins if pin.startswith("torch==")) in runs.split()
    assert "--constraint /dist/requirements.txt" in runs
    assert [step.value for step in steps() if step.cmd == "ENTRYPOINT"] == [("qm",)]


# --- compose.yaml ----------------------------------------------------------------------------------------------------


def test_what_the_trainer_runs_is_a_command_of_ours() -> None:
    trainer = compose()["services"]["trainer"]
    command = [word.partition(":-")[2].rstrip("}") if word.startswith("${") else word for word in trainer["command"]]
    assert command[0] in COMMANDS
    config = parse_config(command[1:])
    (pull,) = compose()["services"]["pull"]["command"]
    pulled = [word.partition(":-")[2].rstrip("}") for word in shlex.split(pull) if word.startswith("${")]
    assert pulled == [config.first_model, config.mutator_model]


DOCS = ROOT / "docs"  # whose blocks are many minutes of training runs
WITH_BLOCKS = [page for page in PAGES if any(not block.needs for block in blocks_of(page))]


@pytest.fixture(scope="session")
def small_run(tiny_server: StubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `questions.jsonl` and a run of two updates on them."""
    folder = tmp_path_factory.mktemp("docs")
    write_dataset(folder / "questions.jsonl", ROWS)
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
    shutil.copytree(small_run, tmp_path, symlinks=True, dirs_exist_ok=True)
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
