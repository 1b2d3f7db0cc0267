"""One epoch of a plan as arrays, and one of its microbatches as a record.

S samples, P packs, B microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.files import arrays_checksum
from query_mutator.batching.lengths import IdTable
from query_mutator.batching.records import Int32Array, Record, UInt8Array, offsets_of, ranges_of

EPOCH_KIND = "batch plan epoch"
_CHUNK = 1024  # microbatches whose records are made at once


class MicrobatchSpec(Record):
    """What one rank runs at once; `index` is the position in the whole epoch.

    `packs` groups the ids into rows if the plan is packed. A microbatch with `is_padding` is a filler: run it with
    loss weight 0.
    """

    samples: tuple[str, ...]
    packs: tuple[tuple[str, ...], ...] | None = None
    bucket_id: int = Field(ge=0)
    max_len: int = Field(ge=1)
    index: int = Field(ge=0)
    total_tokens: int = Field(default=0, ge=0)
    is_padding: bool = False

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @property
    def num_packs(self) -> int:
        """Number of packs, 0 if the plan is not packed."""
        return len(self.packs) if self.packs is not None else 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch: packs, or samples."""
        return len(self.packs) if self.packs is not None else len(self.samples)


class EpochPlan(Record):
    """The microbatches of one epoch; iterating or indexing creates `MicrobatchSpec` records.

    `order` [S] lists positions in `ids`; microbatch b has samples offsets[b]:offsets[b+1] ([B+1]). In a packed plan it
    has these packs, and pack p has samples pack_offsets[p]:pack_offsets[p+1] ([P+1]). An epoch can also be made from
    `microbatches`, with `total_samples` and `total_tokens`.
    """

    epoch: int = Field(ge=0)
    seed: int
    order: Int32Array
    offsets: Int32Array
    pack_offsets: Int32Array | None = None
    max_len: Int32Array
    bucket: Int32Array
    tokens: Int32Array
    index: Int32Array | None = None
    padding: UInt8Array | None = None
    num_dropped: int = 0
    ids: IdTable = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _from_microbatches(cls, data: Any) -> Any:
        """Turn `microbatches`, with `total_samples` and `total_tokens`, into arrays."""
        if not isinstance(data, dict) or "microbatches" not in data:
            return data
        data = dict(data)
        made = _columns_of(data.pop("microbatches"), data.pop("total_samples", None), data.pop("total_tokens", None))
        return {**made, **data}

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
        """Number of samples in microbatches that are not padding."""
        return int(self.sizes[self._counted].sum())

    @property
    def total_tokens(self) -> int:
        """Number of real tokens in microbatches that are not padding."""
        return int(self.tokens[self._counted].sum())

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
    def _limits(self) -> NDArray[np.int32]:
        """Limits of the microbatches in `order` [B+1]."""
        return self.offsets if self.pack_offsets is None else self.pack_offsets[self.offsets]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of samples of every microbatch [B]."""
        return np.diff(self._limits).astype(np.int64)

    @property
    def squares(self) -> NDArray[np.int64]:
        """Sum of the squared lengths of the rows of every microbatch [B]."""
        return self.padded_tokens * self.max_len

    @property
    def _counted(self) -> NDArray[np.bool_]:
        return np.ones(self.num_microbatches, bool) if self.padding is None else self.padding == 0

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
        limits = self._limits[begin : end + 1]
        ids = self.ids.take(self.order[limits[0] : limits[-1]])
        indices = np.arange(self.num_microbatches) if self.index is None else self.index
        columns = (self.bucket, self.max_len, indices, self.tokens, ~self._counted)
        rows = zip(*(column[begin:end].tolist() for column in columns), strict=True)
        spans = pairwise((limits - limits[0]).tolist())
        for place, (first, last), row in zip(range(begin, end), spans, rows, strict=True):
            samples = tuple(ids[first:last])
            bucket, max_len, index, tokens, is_padding = row
            yield MicrobatchSpec.unchecked(
                {
                    "samples": samples,
                    "packs": self._packs(place, samples),
                    "bucket_id": bucket,
                    "max_len": max_len,
                    "index": index,
                    "total_tokens": tokens,
                    "is_padding": is_padding,
                }
            )

    def _packs(self, number: int, ids: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
        if self.pack_offsets is None:
            return None
        sizes = np.diff(self.pack_offsets[self.offsets[number] : self.offsets[number + 1] + 1])
        places = iter(ids)
        return tuple(tuple(islice(places, size)) for size in sizes.tolist())

    def take(self, numbers: NDArray[Any], *, padding: NDArray[Any]) -> EpochPlan:
        """Return an epoch of these microbatches, which keep their position in the whole epoch as `index`."""
        rows = self.rows[numbers]
        places = ranges_of(self.offsets[:-1][numbers], rows)
        pack_offsets = None
        if self.pack_offsets is not None:
            sizes = np.diff(self.pack_offsets)[places]
            pack_offsets = offsets_of(sizes)
            places = ranges_of(self.pack_offsets[:-1][places], sizes)
        return self.changed(
            order=self.order[places],
            offsets=offsets_of(rows),
            pack_offsets=pack_offsets,
            **{name: getattr(self, name)[numbers] for name in ("max_len", "bucket", "tokens")},
            index=numbers if self.index is None else self.index[numbers],
            padding=padding,
        )

    def over(self, ids: IdTable) -> EpochPlan:
        """Return the epoch with its samples looked up in another table, which has them all."""
        if self.ids is ids:
            return self
        places = ids.positions(self.ids.to_list()).astype(np.int32)
        return self.changed(order=places[self.order], ids=ids)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the epoch by name, as stored in its file."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in values if isinstance(value, np.ndarray)}

    @property
    def head(self) -> dict[str, Any]:
        """All other fields of the epoch, as JSON values."""
        return {"kind": EPOCH_KIND, "epoch": self.epoch, "seed": self.seed, "num_dropped": self.num_dropped}

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of arrays and head: the checksum of the epoch's file."""
        return arrays_checksum(self.head, self.arrays)


def _columns_of(
    microbatches: Sequence[MicrobatchSpec], total_samples: int | None, total_tokens: int | None
) -> dict[str, Any]:
    """Return the arrays of an epoch of these microbatches, and the table of their `ids`.

    Where the microbatches do not say how many tokens they have, `total_tokens` is divided among them by their padded
    size. Raises ValueError for a filler, for microbatches of which only some are packed, and for other totals.
    """
    microbatches = tuple(microbatches)
    if any(one.is_padding for one in microbatches):
        raise ValueError("an epoch is made without fillers; take it from the plan instead")
    packed = {one.packs is not None for one in microbatches}
    if len(packed) > 1:
        raise ValueError("all microbatches of an epoch have packs, or none has")
    names = [name for one in microbatches for name in one.samples]
    if total_samples not in (None, len(names)):
        raise ValueError(f"total_samples={total_samples}, but the microbatches have {len(names)} samples")
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    columns = {
        "ids": IdTable.from_list(list(places)),
        "order": [places[name] for name in names],
        "offsets": offsets_of(np.array([one.num_rows for one in microbatches], np.int64)),
        "max_len": [one.max_len for one in microbatches],
        "bucket": [one.bucket_id for one in microbatches],
        "tokens": _tokens(microbatches, total_tokens),
        "index": [one.index for one in microbatches],
    }
    if packed == {True}:
        sizes = [len(pack) for one in microbatches for pack in one.packs or ()]
        columns["pack_offsets"] = offsets_of(np.array(sizes, np.int64))
    return columns


def _tokens(microbatches: Sequence[MicrobatchSpec], total: int | None) -> NDArray[np.int64]:
    """Return the tokens of each microbatch [B]."""
    known = np.array([one.total_tokens for one in microbatches], np.int64)
    if total is None or known.sum() == total:
        return known
    padded = np.array([one.num_rows * one.max_len for one in microbatches], np.int64)
    if known.any() or total > padded.sum():
        raise ValueError(f"total_tokens={total}, but the microbatches have {known.sum()} of {padded.sum()} tokens")
    return np.diff(offsets_of(padded) * total // max(int(padded.sum()), 1))
