"""Read the file of a page: its HTML, and what was said, which is compressed."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from pathlib import Path

_BLOCK = re.compile(r'<script type="application/gzip">([^<]*)</script>')


def said_in(path: Path) -> list[str]:
    """Return the HTML of what was said on each question and in each episode, in order."""
    blocks = [json.loads(gzip.decompress(base64.b64decode(data))) for data in _BLOCK.findall(path.read_text())]
    return [part for block in blocks for part in block if isinstance(part, str)]


def whole_page(path: Path) -> str:
    """Return all HTML of a page."""
    return "\n".join([path.read_text(encoding="utf-8"), *said_in(path)])


def texts_of(path: Path) -> str:
    """Return what a reader of the page can see, without tags, each text on its own line."""
    return html.unescape(re.sub(r"<[^>]*>", "\n", whole_page(path)))
