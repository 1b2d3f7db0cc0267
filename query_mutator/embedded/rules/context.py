"""Added context: the question with the field it belongs to said first."""

from __future__ import annotations


def add_context(text: str, domain: str) -> str:
    """Return "In <domain>: <question>"; a question that names the field already stays."""
    return text if domain.lower() in text.lower() else f"In {domain}: {text}"
