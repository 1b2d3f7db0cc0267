"""What one rank runs at once: a planned microbatch with its tokens, which can be cut in two when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from query_mutator.batching.generation.collate import CollatedBatch, collate_microbatch
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.epoch_plan import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch of a plan and the whole token rows of its samples, in their order."""

    spec: MicrobatchSpec
    rows: list[TokenRow]
    packing: PackingConfig | None = None

    @property
    def padded_tokens(self) -> int:
        """Return the tokens of the batch, padding included."""
        return self.spec.num_rows * self.spec.max_len

    def collated(self, pad_id: int) -> CollatedBatch:
        """Return the batch as arrays."""
        return collate_microbatch(self.spec, self.rows, pad_id=pad_id, pack_config=self.packing)

    def halves(self) -> tuple[Microbatch, Microbatch] | None:
        """Return two microbatches of half the rows, or of half a single pack's samples; None for a single sample."""
        packs = self.spec.packs
        if packs is not None and len(packs) == 1:
            packs = tuple((name,) for name in packs[0])  # rows of their own; they hold the same tokens
        rows = [1] * len(self.rows) if packs is None else [len(pack) for pack in packs]
        if len(rows) < 2:
            return None
        middle = len(rows) // 2
        cut = sum(rows[:middle])
        first = None if packs is None else packs[:middle]
        second = None if packs is None else packs[middle:]
        return self._part(0, cut, first), self._part(cut, len(self.rows), second)

    def _part(self, begin: int, end: int, packs: tuple[tuple[str, ...], ...] | None) -> Microbatch:
        spec, part = self.spec, slice(begin, end)
        rows = self.rows[part]
        fields: dict[str, Any] = {
            "samples": spec.samples[part],
            "indices": spec.indices[part],
            "starts": None if spec.starts is None else spec.starts[part],
            "stops": None if spec.stops is None else spec.stops[part],
            "packs": packs,
        }
        cut = spec.changed(**fields)
        longest = min(spec.max_len, _longest_row(cut, rows))
        return Microbatch(spec=cut.changed(max_len=longest), rows=rows, packing=self.packing)


def _longest_row(spec: MicrobatchSpec, rows: list[TokenRow]) -> int:
    """Return the tokens of the longest row: a sample, or a pack with a separator between its segments."""
    lengths = [_length(spec, place, row) for place, row in enumerate(rows)]
    if spec.packs is None:
        return max(lengths)
    ends = list(accumulate(len(pack) for pack in spec.packs))
    return max(sum(lengths[end - len(pack) : end]) + len(pack) for end, pack in zip(ends, spec.packs, strict=True))


def _length(spec: MicrobatchSpec, place: int, row: TokenRow) -> int:
    if spec.starts is None or spec.stops is None:
        return row.length
    start, stop = int(spec.starts[place]), int(spec.stops[place])
    return (row.length if stop == -1 else stop) - start
