"""Grammar: word order and forms that English has where other languages have not."""

from __future__ import annotations

import re
from functools import cache

from query_mutator.embedded.rules.tables import load_rows
from query_mutator.embedded.rules.text import tidy


@cache
def repairs() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the patterns of `repairs.tsv` with what stands in their place, in order."""
    return tuple((re.compile(pattern, re.IGNORECASE), new) for pattern, new in load_rows("repairs.tsv"))


def repair(text: str) -> str:
    """Return the text with second-language constructions put into English."""
    for pattern, new in repairs():
        text = pattern.sub(new, text)
    return tidy(text)
