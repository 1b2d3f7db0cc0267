"""Which requests to a virtual model are rewritten: one question in plain words that needs no context.

All others are forwarded unchanged. A chat page's own tasks (titles, tags, follow-up questions, search queries,
completions) come to the chat's model too; Open WebUI's templates for them begin with `### Task:`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from query_mutator.apply.proxy.requests import ChatCall

__all__ = ["SKIP_HEADER", "depends_on_earlier_turns", "skip_reason"]

SKIP_HEADER = "x-qm-skip"
MAX_QUESTION_TOKENS = 200
_CHARS_PER_TOKEN = 4

_UI_TASK = re.compile(
    r"\A\s*(?:#{1,4}\s*Task:"  # title, tags, follow-ups, queries, image prompt, completion, retrieved documents
    r"|Your task is to reflect the speaker's likely facial expression"
    r"|You have been provided with a set of responses from various models"
    r"|Create a concise, 3-5 word (?:title|phrase)"  # before templates had headings
    r"|Available Tools:)",
    re.IGNORECASE,
)
_CHAT_HISTORY = re.compile(r"<chat_history>|<context>|<source\b|Chat History:", re.IGNORECASE)
_CODE = re.compile(r"```|~~~|^(?: {4}|\t)\S", re.MULTILINE)

#: Words by which a question points at what was said before it.
_POINTING = re.compile(
    r"""\A\s*(?:and|but|so|or|then|also|why\s+not|what\s+about|how\s+about|what\s+else|same|again|continue|go\s+on
      |more|another|yes|no|ok(?:ay)?|sure|thanks|thank\s+you)\b
    |\b(?:it|its|it's|that|this|these|those|they|them|their|he|she|him|her|above|previous|earlier|before|last\s+one
      |first\s+one|second\s+one|former|latter|you\s+(?:said|mentioned|wrote|suggested|gave)|your\s+(?:answer|code|example))\b""",
    re.IGNORECASE | re.VERBOSE,
)
#: `it`, `that` and `this` that point at something within the question itself.
_WITHIN = re.compile(
    r"\b(?:that|which|who)\s+(?:is|are|has|have|was|were|can|do|does)\b|\bis\s+it\s+possible\b", re.IGNORECASE
)


def skip_reason(call: ChatCall, headers: Mapping[str, str], *, max_tokens: int = MAX_QUESTION_TOKENS) -> str | None:
    """Return in one word why a request passes untouched, None if its question is rewritten."""
    max_chars = max_tokens * _CHARS_PER_TOKEN
    text = None if call.question is None else call.question[: max_chars + 1]  # a longer one is not searched
    if headers.get(SKIP_HEADER, "").lower() not in ("", "0", "false"):
        return "asked"
    if call.special is not None:
        return call.special
    if call.has_images:
        return "images"
    if call.is_empty or (text is not None and not text.strip()):
        return "empty"
    if text is None:
        return "content"
    if is_ui_task(call, text):
        return "ui-task"
    if _CODE.search(text):
        return "code"
    if len(text) > max_chars:
        return "length"
    if call.earlier_turns and depends_on_earlier_turns(text):
        return "context"
    return None


def is_ui_task(call: ChatCall, text: str) -> bool:
    """Return whether a chat page sent the request for itself: by its metadata, or by the form of its prompt."""
    metadata = call.body.get("metadata")
    return (
        (isinstance(metadata, dict) and bool(metadata.get("task")))
        or _UI_TASK.search(text) is not None
        or _CHAT_HISTORY.search(text) is not None
    )


def depends_on_earlier_turns(text: str) -> bool:
    """Return whether a question seems to need what was said before it: it is very short, or points there."""
    return len(text.split()) < 4 or _POINTING.search(_WITHIN.sub(" ", text)) is not None
