"""Embedding texts for either wire format: an empty text gets an empty vector and never reaches the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from query_mutator.embedded.catalogue import Entry
from query_mutator.embedded.engine import Engine
from query_mutator.embedded.options import call_options
from query_mutator.embedded.shaping import tokens_of
from query_mutator.embedded.wire import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors in the order of their texts, with the server's account."""

    vectors: list[list[float]]
    tokens: int
    total_ns: int
    load_ns: int


def texts_of(value: Any) -> list[str]:
    """Return the texts of an `input`: one text, a list of them, or nothing for "" and null.

    Raises ApiError 400 for anything else.
    """
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "invalid input type")
    return texts


async def vectors_of(
    engine: Engine,
    entry: Entry,
    texts: Sequence[str],
    options: Mapping[str, Any],
    *,
    keep_alive_s: float | None = None,
    dimensions: int = 0,
    fault: str | None = None,
) -> Embedded:
    """Return a unit vector for each text, cut to `dimensions` when that is above 0 and below the encoder's.

    Faults of a reply that concern its text ("empty", "incomplete") leave out the vectors.
    """
    call_options(options)
    written = [text for text in texts if text]
    if not written:
        await engine.load(entry, options, keep_alive_s=keep_alive_s)
        return Embedded(vectors=[[] for _ in texts], tokens=0, total_ns=0, load_ns=0)
    rows, clock = await engine.embed(entry, written, options, keep_alive_s=keep_alive_s, fault=fault)
    if fault in ("empty", "incomplete"):
        return Embedded(vectors=[[] for _ in texts], tokens=0, total_ns=clock.ended - clock.came, load_ns=0)
    vectors = iter(_cut(row.tolist(), dimensions) for row in rows)
    return Embedded(
        vectors=[next(vectors) if text else [] for text in texts],
        tokens=sum(len(tokens_of(text)) for text in written),
        total_ns=clock.ended - clock.came,
        load_ns=clock.loaded - clock.came,
    )


def _cut(vector: list[float], dimensions: int) -> list[float]:
    if not 0 < dimensions < len(vector):
        return vector
    head = vector[:dimensions]
    norm = max(sum(x * x for x in head) ** 0.5, 1e-12)
    return [x / norm for x in head]
