"""One epoch of a plan as arrays: which samples form which microbatch, in which order.

U units (samples or pieces of them), P packs, B microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice, pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.arrays import IndexArray, offsets_of, ranges_of, sums_of
from query_mutator.batching.core.overlong import Cuts, is_cut
from query_mutator.batching.files import arrays_checksum
from query_mutator.batching.ids import IdTable
from query_mutator.batching.planning.microbatch import MicrobatchSpec, columns_of
from query_mutator.batching.records import Int32Array, Int64Array, Record, UInt8Array, readonly
from query_mutator.errors import UsageError

EPOCH_KIND = "batch plan epoch"
_CHUNK = 1024  # microbatches whose records are made at once


class SourceCount(Record):
    """One data set's share of an epoch; `repeats` counts units after their first occurrence."""

    samples: int
    tokens: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """Shared by all epochs of a plan: ids of the samples, and which units are part of a sample."""

    ids: IdTable
    cuts: Cuts = field(default_factory=Cuts.none)


class EpochPlan(Record):
    """The microbatches of one epoch; iterating or indexing creates `MicrobatchSpec` records.

    `order` [U] lists units; microbatch b has units offsets[b]:offsets[b+1] ([B+1]). In a packed plan it has these
    packs, and pack p has units pack_offsets[p]:pack_offsets[p+1] ([P+1]). `tokens`, `loss_tokens`, in packs
    `segment_squares` (sum of squared segment lengths), and in shards `shared_loss_tokens` (on all ranks at the step)
    are [B]. An epoch can also be made from `microbatches`, with `total_samples` and `total_tokens`.
    """

    epoch: int = Field(ge=0)
    seed: int
    order: Int32Array
    offsets: Int32Array
    pack_offsets: Int32Array | None = None
    max_len: Int32Array
    bucket: Int32Array
    tokens: Int32Array
    loss_tokens: Int32Array
    segment_squares: Int64Array | None = None
    shared_loss_tokens: Int64Array | None = None
    index: Int32Array | None = None
    padding: UInt8Array | None = None
    num_dropped: int = 0
    sources: dict[str, SourceCount] = Field(default_factory=dict)
    context: PlanContext = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _from_microbatches(cls, data: Any) -> Any:
        """Turn `microbatches`, with `total_samples` and `total_tokens`, into arrays."""
        if not isinstance(data, dict) or "microbatches" not in data:
            return data
        data = dict(data)
        columns = columns_of(data.pop("microbatches"), data.pop("total_samples", None), data.pop("total_tokens", None))
        ids = columns.pop("ids")
        return {**columns, "context": PlanContext(ids=ids), **data}

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return len(self.max_len)

    @property
    def microbatches(self) -> tuple[MicrobatchSpec, ...]:
        """All microbatches as records; iterate over a large epoch instead."""
        return tuple(self)

    @property
    def total_samples(self) -> int:
        """Number of samples (pieces of split ones count each) in microbatches that are not padding."""
        return int(self.sizes[self._counted].sum())

    @property
    def total_tokens(self) -> int:
        """Number of real tokens in microbatches that are not padding."""
        return int(self.tokens[self._counted].sum())

    @property
    def total_loss_tokens(self) -> int:
        """Number of tokens with a loss in microbatches that are not padding."""
        return int(self.loss_tokens[self._counted].sum())

    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """Tokens with padding of every microbatch [B]."""
        return self.rows * self.max_len.astype(np.int64)

    @property
    def efficiency(self) -> float:
        """Real tokens as a fraction of tokens with padding, 0 when empty."""
        padded = int(self.padded_tokens.sum())
        return int(self.tokens.sum()) / padded if padded else 0.0

    @property
    def rows(self) -> NDArray[np.int64]:
        """Number of rows (packs or samples) of every microbatch [B]."""
        return np.diff(self.offsets).astype(np.int64)

    @cached_property
    def unit_offsets(self) -> NDArray[np.int32]:
        """Limits of the microbatches in `order` [B+1]."""
        return self.offsets if self.pack_offsets is None else self.pack_offsets[self.offsets]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of samples of every microbatch [B]."""
        return np.diff(self.unit_offsets).astype(np.int64)

    @property
    def squares(self) -> NDArray[np.int64]:
        """Sum of the squared lengths of rows, or of segments in packs, of every microbatch [B]."""
        if self.segment_squares is not None:
            return self.segment_squares
        return self.rows * self.max_len.astype(np.int64) ** 2

    @property
    def step_loss_tokens(self) -> NDArray[np.int64]:
        """Tokens with a loss on all ranks at the step of every microbatch [B]."""
        return self.loss_tokens.astype(np.int64) if self.shared_loss_tokens is None else self.shared_loss_tokens

    @property
    def _counted(self) -> NDArray[np.bool_]:
        return np.ones(self.num_microbatches, bool) if self.padding is None else self.padding == 0

    def costs(self, *, linear: float = 1.0, quadratic: float = 0.0) -> NDArray[np.float64]:
        """Return linear * tokens with padding + quadratic * squared lengths of every microbatch [B]."""
        costs: NDArray[np.float64] = linear * self.padded_tokens + quadratic * self.squares
        return costs

    def loss_tokens_per_step(self, accumulation: int = 1) -> NDArray[np.int64]:
        """Return the tokens with a loss on all ranks of every optimizer step of `accumulation` microbatches."""
        if accumulation < 1:
            raise ValueError(f"accumulation={accumulation} must be at least 1")
        begins = np.arange(0, self.num_microbatches, accumulation)
        return sums_of(self.step_loss_tokens, begins)

    def longest_first(self) -> IndexArray:
        """Return the positions of the microbatches, most expensive first.

        Run the first few before training: if they fit into memory, all do.
        """
        return np.lexsort((-self.max_len.astype(np.int64), -self.padded_tokens, -self.squares))

    def units_of(self, number: int) -> NDArray[np.int32]:
        """Return the units of one microbatch, pack after pack."""
        return self.order[self.unit_offsets[number] : self.unit_offsets[number + 1]]

    def pack_sizes_of(self, number: int) -> NDArray[np.int32] | None:
        """Return the number of units of each pack of a microbatch, or None if the plan is not packed."""
        if self.pack_offsets is None:
            return None
        return np.diff(self.pack_offsets[self.offsets[number] : self.offsets[number + 1] + 1])

    def is_padding(self, number: int) -> bool:
        """Return whether a microbatch is a filler."""
        return self.padding is not None and bool(self.padding[number])

    def __len__(self) -> int:
        return self.num_microbatches

    def __iter__(self) -> Iterator[MicrobatchSpec]:  # type: ignore[override]
        for begin in range(0, self.num_microbatches, _CHUNK):
            yield from self._records(begin, min(begin + _CHUNK, self.num_microbatches))

    def __getitem__(self, idx: int) -> MicrobatchSpec:
        if not 0 <= idx < self.num_microbatches:
            raise IndexError(f"microbatch {idx} is outside 0..{self.num_microbatches - 1} of epoch {self.epoch}")
        return next(self._records(idx, idx + 1))

    def _records(self, begin: int, end: int) -> Iterator[MicrobatchSpec]:
        """Yield the microbatches begin..end-1; their ids and numbers are looked up at once."""
        limits = self.unit_offsets[begin : end + 1]
        samples, starts, stops = self.context.cuts.resolve(self.order[limits[0] : limits[-1]])
        for array in (starts, stops):
            if array is not None:
                readonly(array)
        ids = self.context.ids.take(samples)
        indices = readonly(samples.astype(np.int64) + self.context.ids.first)
        columns = (self.bucket, self.max_len, self._indices, self.tokens, self._own_loss_tokens, self.step_loss_tokens)
        rows = zip(*(column[begin:end].tolist() for column in columns), strict=True)
        padding = repeat(False) if self.padding is None else (self.padding[begin:end] == 1).tolist()
        spans = pairwise((limits - limits[0]).tolist())
        for place, (first, last), row, is_padding in zip(count(begin), spans, rows, padding, strict=False):
            bucket, max_len, index, tokens, loss_tokens, step_loss_tokens = row
            here = slice(first, last)
            cut = None if starts is None or stops is None else (starts[here], stops[here])
            own_starts, own_stops = cut if cut is not None and is_cut(*cut) else (None, None)
            yield MicrobatchSpec.unchecked(
                {
                    "samples": tuple(ids[here]),
                    "packs": self._packs(place, ids[here]),
                    "bucket_id": bucket,
                    "max_len": max_len,
                    "index": index,
                    "indices": indices[here],
                    "starts": own_starts,
                    "stops": own_stops,
                    "total_tokens": tokens,
                    "loss_tokens": loss_tokens,
                    "step_loss_tokens": step_loss_tokens,
                    "is_padding": is_padding,
                }
            )

    @property
    def _indices(self) -> NDArray[Any]:
        return np.arange(self.num_microbatches) if self.index is None else self.index

    @property
    def _own_loss_tokens(self) -> NDArray[Any]:
        return self.loss_tokens if self.padding is None else np.where(self._counted, self.loss_tokens, 0)

    def _packs(self, number: int, ids: list[str]) -> tuple[tuple[str, ...], ...] | None:
        sizes = self.pack_sizes_of(number)
        if sizes is None:
            return None
        places = iter(ids)
        return tuple(tuple(islice(places, size)) for size in sizes.tolist())

    def take(self, numbers: NDArray[Any], *, padding: NDArray[Any], step_loss_tokens: NDArray[Any]) -> EpochPlan:
        """Return an epoch of these microbatches, which keep their position in the whole epoch as `index`."""
        rows = self.rows[numbers]
        row_order = ranges_of(self.offsets[:-1][numbers], rows)
        pack_offsets, unit_order = None, row_order
        if self.pack_offsets is not None:
            pack_sizes = np.diff(self.pack_offsets)[row_order]
            unit_order = ranges_of(self.pack_offsets[:-1][row_order], pack_sizes)
            pack_offsets = offsets_of(pack_sizes)
        per_batch = ("max_len", "bucket", "tokens", "loss_tokens")
        return EpochPlan(
            epoch=self.epoch,
            seed=self.seed,
            order=self.order[unit_order],
            offsets=offsets_of(rows),
            pack_offsets=pack_offsets,
            **{name: getattr(self, name)[numbers] for name in per_batch},
            segment_squares=None if self.segment_squares is None else self.segment_squares[numbers],
            shared_loss_tokens=step_loss_tokens,
            index=numbers if self.index is None else self.index[numbers],
            padding=padding,
            num_dropped=self.num_dropped,
            sources=self.sources,
            context=self.context,
        )

    def over(self, ids: IdTable) -> EpochPlan:
        """Return the epoch with its samples looked up in another table, which has them all."""
        if self.context.ids is ids:
            return self
        if len(self.context.cuts):
            raise UsageError("the epoch has parts of samples; only its own plan can have it")
        places = ids.positions(self.context.ids.to_list()).astype(np.int32)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return EpochPlan(**{**fields, "order": places[self.order], "context": PlanContext(ids=ids)})

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the epoch by name, as stored in its file."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in values if isinstance(value, np.ndarray)}

    @property
    def head(self) -> dict[str, Any]:
        """All other fields of the epoch, as JSON values."""
        head = self.model_dump(mode="json", include={"epoch", "seed", "num_dropped", "sources"})
        return {"kind": EPOCH_KIND, **head}

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of arrays and head: the checksum of the epoch's file."""
        return arrays_checksum(self.head, self.arrays)
