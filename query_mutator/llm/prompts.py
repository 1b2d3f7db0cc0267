"""The texts around a rewrite: what to strip from a model's reply, and the stand-in for a failed answer."""

from __future__ import annotations

import re

from query_mutator.types import read_part

__all__ = ["DEFAULT_REFUSAL", "clean_rewrite"]

#: What `ollama_utils.batch_query_target_model` returns for a query whose call failed; never used for learning.
DEFAULT_REFUSAL = "I'm sorry, I can't help with that."

_FENCE = re.compile(r"```(?:[\w-]*\n)?(.*?)(?:```|\Z)", re.DOTALL)
_TAG = re.compile(r"</?question>", re.IGNORECASE)
_COURTESY = re.compile(r"\A(?:sure|certainly|of course|absolutely)\s*!\s+", re.IGNORECASE)
_EMPHASIS = re.compile(r"\A(\*{1,3})([^*]+)\1\Z")
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_SPECIAL = re.compile(r"""[<`:!\n*]|\A\s*["'“‘«]""")  # a reply without any of these is just the question
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "`": "`"}

# What a reply may say before a colon: "Question", "Rewritten query (shorter)", "Sure, here is the rephrased version".
_CHANGED = (
    r"(?:re-?(?:written|write|phrased|phrasing|worded)|revised|improved|corrected|clarified|simplified|shortened)"
)
_LABEL = re.compile(
    rf"""\W*(?:
        (?:the\s)?(?:{_CHANGED}|new|final)?\s*(?:question|query|version|text|output)\s*(?:is|\(.*\))?
      | {_CHANGED}
      | (?:sure|okay|ok|certainly|of\ course|here|this\ is|the)\b.*\b{_CHANGED}\b.*
    )[\W_]*""",
    re.IGNORECASE | re.VERBOSE,
)


def clean_rewrite(text: str) -> str:
    """Return the question in a model's reply on one line, or "" when there is none.

    Thinking, code fences, labels such as "Rewritten question:", surrounding quotes and emphasis, and every paragraph
    after the first are removed.
    """
    text = read_part(text)
    if not _SPECIAL.search(text):
        return " ".join(text.split())
    text = _TAG.sub("", _FENCE.sub(r"\1", text)).strip()
    text = _without_label(_COURTESY.sub("", text))
    first_paragraph = re.split(r"\n\s*\n", text, maxsplit=1)[0]
    return _unquoted(" ".join(first_paragraph.split()))


def _without_label(text: str) -> str:
    label, colon, rest = text.partition(":")
    if colon and "\n" not in label and _LABEL.fullmatch(label):
        return rest.lstrip("*_ \t\n")  # the end of a bold label
    return text


def _unquoted(text: str) -> str:
    """Return text without the marks that surround all of it; quotes around a part stay."""
    while _is_quoted(text):
        text = text[1:-1].strip()
    return _EMPHASIS.sub(r"\2", text)


def _is_quoted(text: str) -> bool:
    if len(text) < 2 or _QUOTES.get(text[0]) != text[-1]:
        return False
    inside = _APOSTROPHE.sub("", text[1:-1])
    return text[0] not in inside and text[-1] not in inside
