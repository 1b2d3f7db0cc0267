"""Translate a hint in words ("Try placing 5 at row 3, column 4") into a command (`place 3 4 5`)."""

from __future__ import annotations

import re

__all__ = ["action_of_hint"]

ROW_COLUMN = r"row (?P<r>\d+), column (?P<c>\d+)"
CELL = r"\((?P<r>\d+),\s*(?P<c>\d+)\)"

# The first match wins; braces are filled from its groups.
PATTERNS = [
    (re.compile(pattern, re.IGNORECASE), command)
    for pattern, command in (
        (rf"placing (?P<v>-?\d+) at {ROW_COLUMN}", "place {r} {c} {v}"),
        (rf"placing a (?:queen|star|tent) at {ROW_COLUMN}", "place {r} {c} 1"),
        (rf"remove the (?:queen|star|tent) at {ROW_COLUMN}", "place {r} {c} 0"),
        (rf"marking {ROW_COLUMN} as filled", "place {r} {c} 1"),
        (rf"marking {ROW_COLUMN} as empty", "place {r} {c} 0"),
        (rf"pressing the light at {ROW_COLUMN}", "press {r} {c}"),
        (rf"(?:un)?shading cell at {ROW_COLUMN}", "shade {r} {c}"),
        (rf"revealing cell {CELL}", "reveal {r} {c}"),
        (rf"flagging cell {CELL}", "flag {r} {c}"),
        (rf"marking {CELL} as (?P<v>\w+)", "mark {r} {c} {v}"),
        (rf"setting (?P<v>[hv])\w* edge at {CELL} to line", "set {v} {r} {c} 1"),
        (
            rf"placing (?P<v>\d+) bridge\(s\) between {CELL} and \((?P<r2>\d+),\s*(?P<c2>\d+)\)",
            "bridge {r} {c} {r2} {c2} {v}",
        ),
        (r"secret code is:? (?P<v>\d+(?:\s+\d+)*)", "guess {v}"),
        (r"coloring node (?P<r>\d+) with .*\(color (?P<v>\d+)\)", "place {r} {v}"),
        (r"assigning (?P<r>[A-Za-z]) = (?P<v>\d+)", "assign {r} {v}"),
        (r"moving vehicle (?P<r>\w+) (?P<v>\w+)", "move {r} {v}"),
        (r"\bdeselecting item (?P<v>\d+)", "deselect {v}"),
        (r"\bselecting item (?P<v>\d+)", "select {v}"),
        (r"\bmove (?P<v>up|down|left|right)\b", "move {v}"),
        (r"`(?P<v>[^`]+)`", "{v}"),
    )
]


def action_of_hint(hint: str) -> str | None:
    """Return the command of a hint, or None if no pattern matches."""
    for pattern, command in PATTERNS:
        match = pattern.search(hint)
        if match:
            return command.format(**match.groupdict()).lower()
    return None
