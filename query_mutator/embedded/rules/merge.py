"""Merging: the question joined with the nearest question from the training set."""

from __future__ import annotations

import re


def merge(text: str, neighbour: str | None) -> str:
    """Return both questions as one request, or the question where no neighbour is given."""
    if not neighbour or neighbour.strip().lower() == text.strip().lower():
        return text
    return f"{_open(text)}, in other words: {neighbour.strip()}"


def _open(text: str) -> str:
    return re.sub(r"[\s?.!,;:]+$", "", text)
