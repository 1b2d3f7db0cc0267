"""Added context: the question with the field it belongs to."""

from __future__ import annotations

import re

_END = re.compile(r"\s*([?.!]*)\s*\Z")


def add_context(text: str, domain: str) -> str:
    """Return "<question> (in <domain>)?"; a question that names the field already stays."""
    if domain.lower() in text.lower():
        return text
    end = _END.search(text)
    assert end is not None, "the pattern matches an empty end"
    return f"{text[: end.start()]} (in {domain}){end[1]}"
