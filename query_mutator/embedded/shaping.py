"""From a model's text to the reply that was asked for: `format`, then `stop`, then `num_predict`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from query_mutator.embedded.structured import in_format

# A token is a word of up to eight letters or one sign, with the space before it; joined they give the text back.
_TOKEN = re.compile(r"\s*\w{1,8}|\s*[^\w\s]|\s+")


@lru_cache(maxsize=1024)
def tokens_of(text: str) -> tuple[str, ...]:
    """Return the pieces of `text` that count as tokens; joined they are the text."""
    return tuple(_TOKEN.findall(text))


def shape(
    text: str, *, format: str | Mapping[str, Any] | None, stop: Sequence[str], max_tokens: int | None
) -> tuple[Sequence[str], str]:
    """Return the tokens of the shaped reply and its `done_reason` ("stop" or "length").

    The order is a model's own: it writes the format, ends at a stop text, and is cut at `max_tokens` (None or below 1
    is without limit), if need be in the middle of its JSON.
    """
    if format:
        text = in_format(text, format)
    cuts = [at for word in stop if word and (at := text.find(word)) >= 0]
    tokens = tokens_of(text[: min(cuts)] if cuts else text)
    if max_tokens is not None and 0 < max_tokens < len(tokens):
        return tokens[:max_tokens], "length"
    return tokens, "stop"
