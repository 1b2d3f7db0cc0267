"""Commands on the pages about sizing have flags that exist and values that are allowed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from query_mutator.cli.flags import parse_flags
from query_mutator.commands import COMMANDS

DOCS = Path(__file__).parents[4] / "docs"
PAGES = (
    "how-to/size-a-training-step.md",
    "how-to/size-workers.md",
    "how-to/speed-up-calls.md",
    "explanation/memory-estimates.md",
)
TEXT = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
_BLOCK = re.compile(r"^```bash[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_commands_of_the_pages_can_be_read() -> None:
    lines = [line for block in _BLOCK.findall(TEXT) for line in block.splitlines() if line.startswith("qm size ")]
    lines += re.findall(r"`(qm size [^`]*--[^`]*)`", TEXT)
    assert len(lines) >= 12
    for line in lines:
        words = shlex.split(line)[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        assert parse_flags(COMMANDS[name].flags, words[len(name.split()) :], prog="qm")


def test_every_command_of_sizing_is_on_a_page() -> None:
    for name in COMMANDS:
        if name.startswith("size"):
            assert f"qm {name}" in TEXT
