"""The commands on the toolkit's pages are run as they stand; blocks that need something are read for their flags."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.cli.flags import flags_of
from query_mutator.commands import COMMANDS
from query_mutator.commands.main import main as qm_main
from tests.tiny_lm import pairs, write_rows
from train_query_mutator import main as train_main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("batching.md", "sft.md")
_BLOCK = re.compile(r"^```bash( needs: \w+)?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(page: str, *, needing: bool) -> list[list[str]]:
    """Return the `qm` command lines of a page's blocks, as words."""
    blocks = _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    lines = [line for needs, block in blocks if bool(needs) is needing for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("qm ")]


def test_commands_of_the_page_of_batching_run(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", pairs(40))
    assert exit_code(train_main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    lines = commands("batching.md", needing=False)
    assert len(lines) >= 14
    for words in lines:
        assert exit_code(qm_main, words, prog="qm") == 0, (words, capsys.readouterr().err)


def test_commands_of_the_page_of_fine_tuning_run(
    tiny_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_lm, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", pairs(16))
    lines = commands("sft.md", needing=False)
    assert len(lines) >= 5
    for words in lines:
        assert exit_code(qm_main, words, prog="qm") == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES)
def test_other_commands_have_flags_that_exist(page: str) -> None:
    for words in commands(page, needing=True):
        name = next(name for name in COMMANDS if words[: len(name.split())] == name.split())
        known = {written for flag in flags_of(COMMANDS[name].flags).values() for written in flag.spellings}
        assert {word for word in words if word.startswith("-")} <= known
