"""Added context: the question with the field it belongs to said first."""

from __future__ import annotations


def add_context(text: str, domain: str) -> str:
    """Return "In <domain>: <question>"; a question that begins so already stays."""
    opening = f"In {domain}:"
    return text if text.startswith(opening) else f"{opening} {text}"
