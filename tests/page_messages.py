"""Read the messages back from the file of a page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r'<script type="application/json\+gzip" class="qm-message" data-kind="(\w+)">([^<]*)</script>')


def messages_of(path: Path) -> list[dict[str, Any]]:
    """Return the messages of a page in order."""
    text = path.read_text(encoding="utf-8")
    found = [(kind, json.loads(gzip.decompress(base64.b64decode(data)))) for kind, data in BLOCK.findall(text)]
    assert all(kind == message["kind"] for kind, message in found)
    return [message for _, message in found]


def section_of(path: Path, name: str, *, run: int = 0) -> dict[str, Any]:
    """Return the data of a section."""
    (data,) = [
        message["data"]
        for message in messages_of(path)
        if (message["kind"], message["run"], message.get("name")) == ("section", run, name)
    ]
    assert isinstance(data, dict)
    return data


def texts_of(path: Path, *, run: int = 0) -> list[str]:
    """Return the table of texts of a run."""
    texts: list[str] = []
    for message in messages_of(path):
        if message["kind"] == "texts" and message["run"] == run:
            texts += message["items"]
    return texts
