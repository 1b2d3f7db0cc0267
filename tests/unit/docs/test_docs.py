"""The documentation: links, first lines, flags named in the text, and an index that lists every page."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from query_mutator.commands import COMMANDS
from scripts import flag_pages
from tests.docs_blocks import PAGES, ROOT

DOCS = ROOT / "docs"

#: Flags of other programs, and of scripts that have flags besides those of our commands.
OTHERS = {
    "--help", "--help-all", "--version", "--nproc-per-node", "--logdir", "--peer", "--points",
    "--seeds", "--repeats", "--threads", "--rounds", "--ceiling", "--servers", "--width", "--sigmas", "--modes",
    "--run", "--out", "--slots", "--calls", "--settings", "--gradient_checkpointing", "--bf", "--tag",
    "--generate", "--object-store-memory", "--resources",  # of ray
    "--lowest",  # of check_wheel.py
}  # fmt: skip

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]")


@functools.cache
def pages_of_flags() -> dict[str, str]:
    return flag_pages.pages()


@functools.cache
def flags_of_commands() -> set[str]:
    return {flag for text in pages_of_flags().values() for flag in _FLAG.findall(text)}


ids = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_says_what_it_is_for(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    assert lines[0].startswith("# ")
    assert not lines[1].startswith(("#", "|", "```")), "the first line under the title says what the page is for"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_flags_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = set(_FLAG.findall(text))
    if page.name not in ("log.md", "CHANGELOG.md"):
        assert named - flags_of_commands() <= OTHERS


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_named_in_the_text_exist(page: Path) -> None:
    if page.name in ("log.md", "CHANGELOG.md"):  # what was
        return
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])((?:query_mutator|ppo|tests|benchmarks|scripts|examples)/[\w/]+\.\w+)", text))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_row_of_what_is_trusted_names_a_test() -> None:
    text = (DOCS / "explanation" / "security.md").read_text(encoding="utf-8")
    table = text.partition("\n## ")[0].splitlines()
    rows = [line.split("|")[-2] for line in table if line.startswith("| ")][1:]
    assert rows
    for tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert named, tests
        assert all((ROOT / name).is_file() for name in named), tests
        assert set(re.findall(r"`(.*?)`", tests)) <= {*named, "make attack"}, tests


def test_index_lists_every_page() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", text)}
    assert {page for page in PAGES if DOCS in page.parents and page.name != "index.md"} <= linked


def test_every_command_has_its_flags_on_a_page_of_the_site() -> None:
    helps = dict(re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)^```$", "\n".join(pages_of_flags().values()), re.M | re.S))
    assert {f"qm {name}" for name, command in COMMANDS.items() if not command.takes_words} <= helps.keys()
    assert {name for name, text in helps.items() if not text.startswith("Usage: ")} == set()
