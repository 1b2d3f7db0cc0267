"""What one rank runs at once: a planned microbatch with its tokens, which can be halved if it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from query_mutator.batching.generation.collate import CollatedBatch, collate_microbatch
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig

__all__ = ["Microbatch"]


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
            packs = tuple((name,) for name in packs[0])  # a row for each sample holds the same tokens
        samples = [1] * len(self.rows) if packs is None else [len(pack) for pack in packs]
        if len(samples) < 2:
            return None
        middle = len(samples) // 2
        cut = sum(samples[:middle])
        first, second = (None, None) if packs is None else (packs[:middle], packs[middle:])
        return self._part(slice(0, cut), first), self._part(slice(cut, None), second)

    def _part(self, part: slice, packs: tuple[tuple[str, ...], ...] | None) -> Microbatch:
        spec, rows = self.spec, self.rows[part]
        fields: dict[str, Any] = {"samples": spec.samples[part], "indices": spec.indices[part], "packs": packs}
        if spec.starts is not None and spec.stops is not None:
            fields |= {"starts": spec.starts[part], "stops": spec.stops[part]}
        cut = spec.changed(**fields)
        longest = min(spec.max_len, _longest_row(cut, rows))
        return Microbatch(spec=cut.changed(max_len=longest), rows=rows, packing=self.packing)


def _longest_row(spec: MicrobatchSpec, rows: list[TokenRow]) -> int:
    """Return the tokens of the longest row: a sample, or a pack with a separator between its segments."""
    lengths = [row.length for row in rows]
    if spec.starts is not None and spec.stops is not None:
        ends = [length if stop == -1 else stop for length, stop in zip(lengths, spec.stops.tolist(), strict=True)]
        lengths = [end - start for end, start in zip(ends, spec.starts.tolist(), strict=True)]
    if spec.packs is None:
        return max(lengths)
    limits = list(accumulate(len(pack) for pack in spec.packs))
    return max(sum(lengths[end - len(pack) : end]) + len(pack) for end, pack in zip(limits, spec.packs, strict=True))
