"""Commands on the page about sizing have flags that exist and values that are allowed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from query_mutator.cli.flags import parse_flags
from query_mutator.commands import COMMANDS

PAGE = Path(__file__).parents[3] / "docs" / "sizing.md"
_BLOCK = re.compile(r"^```bash[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_commands_of_the_page_can_be_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines() if line.startswith("qm ")]
    lines += re.findall(r"`(qm size [^`]*--[^`]*)`", text)
    assert len(lines) >= 12
    for line in lines:
        words = shlex.split(line)[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        assert parse_flags(COMMANDS[name].flags, words[len(name.split()) :], prog="qm")


def test_every_command_of_sizing_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in COMMANDS:
        if name.startswith("size"):
            assert f"qm {name}" in text
