"""Hook of mkdocs.yml: keep the language of a code block alone, without the ` needs: ...` that its test reads."""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^( *```\w+) [^\n`]+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page as Python-Markdown reads it."""
    return _FENCE.sub(r"\1", markdown)
