"""From token rows to one rectangular batch: padding, masks, positions and labels, for samples and for packs.

R rows (samples or packs), L columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import Field, model_validator

from query_mutator.batching.arrays import offsets_of
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.layout import (
    PADDING_SEGMENT,
    labels_of,
    lay_out,
    segment_begins,
    segment_positions,
)
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.records import Int32Matrix, Record, UInt8Matrix
from query_mutator.errors import UsageError

Batch = dict[str, Any]
#: Turns sample dictionaries (`input_ids`, `loss_mask`), a length and a padding id into arrays.
CollateFn = Callable[[Sequence[Mapping[str, Any]], int, int], Mapping[str, NDArray[Any]]]


class CollatedBatch(Record):
    """A batch ready for training; its arrays are also available by name, as `batch["labels"]`.

    All matrices are [R, L]. Packs have `segment_ids` (−1 in padding); `sample_ids` lists their samples row by row. A
    filler microbatch has `is_padding`: give it loss weight 0. Made without `attention_mask` and `position_ids`, all
    tokens are attended to, at their places in the row.
    """

    input_ids: Int32Matrix
    loss_mask: UInt8Matrix
    attention_mask: UInt8Matrix
    position_ids: Int32Matrix
    segment_ids: Int32Matrix | None = None
    sample_ids: tuple[str, ...]
    bucket_id: int = 0
    max_len: int = Field(ge=1)
    index: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)
    is_padding: bool = False
    extra: dict[str, Any] = Field(default_factory=dict)  # arrays of a user's collate function

    @model_validator(mode="before")
    @classmethod
    def _without_masks(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "input_ids" not in data:
            return data
        shape = np.shape(data["input_ids"])
        positions = np.broadcast_to(np.arange(shape[-1] if shape else 0, dtype=np.int32), shape)
        return {"attention_mask": np.ones(shape, np.uint8), "position_ids": positions, **data}

    @property
    def labels(self) -> NDArray[np.int64]:
        """`input_ids` where there is a loss, −100 elsewhere, int64 [R, L]."""
        return labels_of(self.input_ids, self.loss_mask)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.input_ids)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where sequences begin in the rows laid end to end without padding, int32 [number of sequences + 1]."""
        return offsets_of(self._lengths()).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return int(self._lengths().max())

    def _lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sequence, row by row."""
        if self.segment_ids is None:
            counts: NDArray[np.int64] = self.attention_mask.sum(axis=1, dtype=np.int64)
            return counts
        begins = segment_begins(self.segment_ids)
        lengths: NDArray[np.int64] = np.diff(begins, append=self.segment_ids.size)
        real: NDArray[np.bool_] = self.segment_ids.reshape(-1)[begins] != PADDING_SEGMENT
        return lengths[real]

    def __getitem__(self, name: str) -> Any:
        if name in self.extra:
            return self.extra[name]
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in (*self.extra, *type(self).model_fields, "labels", "cu_seqlens", "max_seqlen")

    def keys(self) -> Iterator[str]:
        """Yield the names of the arrays."""
        yield from self.arrays()

    def arrays(self) -> Batch:
        """Return the arrays by name, labels among them."""
        names = ("input_ids", "loss_mask", "attention_mask", "position_ids", "segment_ids", "labels")
        return {**{name: self[name] for name in names if self[name] is not None}, **self.extra}

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of arrays, which `np.savez` saves and `from_npz` loads without pickle."""
        fields = {name: np.array(self[name]) for name in ("bucket_id", "max_len", "index", "epoch", "is_padding")}
        arrays = {name: array for name, array in self.arrays().items() if name != "labels" and name not in self.extra}
        extra = {f"extra.{name}": array for name, array in self.extra.items()}
        return {**arrays, **extra, **fields, "sample_ids": np.array(self.sample_ids, dtype=np.str_)}

    @classmethod
    def from_npz(cls, data: Mapping[str, Any]) -> Self:
        """Return the batch of `to_dict`, from a mapping or an opened `.npz` file."""
        fields = {name: data[name] for name in data if not name.startswith("extra.")}
        for name in ("bucket_id", "max_len", "index", "epoch", "is_padding"):
            if name in fields:
                fields[name] = fields[name].item()
        fields["sample_ids"] = tuple(str(name) for name in fields["sample_ids"])
        extra = {name.partition(".")[2]: data[name] for name in data if name.startswith("extra.")}
        return cls(**fields, extra=extra)


def as_token_row(sample: Any) -> TokenRow:
    """Return ids and mask of a TokenRow, Sample, StreamSample or mapping; without a mask all tokens have a loss."""
    if isinstance(sample, Mapping):
        ids, mask = sample["input_ids"], sample.get("loss_mask")
    else:
        ids, mask = sample.input_ids, sample.loss_mask
    input_ids = np.asarray(ids, dtype=np.int32)
    loss_mask = np.ones(len(input_ids), np.uint8) if mask is None else np.asarray(mask, dtype=np.uint8)
    if input_ids.ndim != 1 or not len(input_ids) or loss_mask.shape != input_ids.shape:
        raise UsageError(
            f"input_ids has shape {input_ids.shape}, loss_mask {loss_mask.shape}; give two lists of one length"
        )
    return TokenRow(input_ids, loss_mask)


def pad_sequences(
    sequences: Sequence[Sequence[int] | NDArray[Any]],
    pad_value: int,
    max_length: int | None = None,
    dtype: DTypeLike = np.int32,
) -> NDArray[Any]:
    """Return the sequences as rows of a matrix; raise UsageError for one longer than `max_length`."""
    lengths = [len(one) for one in sequences]
    width = max(lengths, default=0) if max_length is None else max_length
    if max(lengths, default=0) > width:
        place = int(np.argmax(lengths))
        raise UsageError(
            f"sequence {place} has {lengths[place]} items, more than max_length={width}; truncate it first"
        )
    padded = np.full((len(sequences), width), pad_value, dtype=dtype)
    for row, one in zip(padded, sequences, strict=True):
        row[: len(one)] = one
    return padded


def default_collate(samples: Sequence[Any], max_len: int, pad_id: int = 0) -> Batch:
    """Return `input_ids`, `loss_mask`, `attention_mask` and `position_ids` [R, max_len]; longer samples are cut."""
    rows = [as_token_row(sample) for sample in samples]
    rows = [TokenRow(row.input_ids[:max_len], row.loss_mask[:max_len]) for row in rows]
    lengths = np.array([row.length for row in rows])
    columns = np.arange(max_len)
    inside = columns < lengths[:, None]
    return {
        "input_ids": pad_sequences([row.input_ids for row in rows], pad_id, max_len),
        "loss_mask": pad_sequences([row.loss_mask for row in rows], 0, max_len, np.uint8),
        "attention_mask": inside.astype(np.uint8),
        "position_ids": np.where(inside, columns, 0).astype(np.int32),
    }


def collate_microbatch(
    spec: MicrobatchSpec,
    rows: Sequence[TokenRow],
    *,
    epoch: int = 0,
    pad_id: int = 0,
    pack_config: PackingConfig | None = None,
) -> CollatedBatch:
    """Return the batch of a microbatch from the tokens of its samples, in the order of `spec.samples`.

    `rows` hold whole samples; they are cut here as the plan says. The first token of a row or of a pack's segment has
    no loss, because nothing predicts it: the masks add up to `spec.loss_tokens`.
    """
    pieces = [_piece(spec, place, row) for place, row in enumerate(rows)]
    longest = max((piece.length for piece in pieces), default=0)
    if longest > spec.max_len:
        raise UsageError(
            f"microbatch {spec.index} has a sample of {longest} tokens, the plan was made for {spec.max_len}; "
            "give the samples that the plan was made for"
        )
    if spec.packs is None:
        arrays = default_collate(pieces, spec.max_len, pad_id)
        arrays["loss_mask"][:, 0] = 0
    else:
        arrays = _packed(spec, pieces, pad_id, pack_config or PackingConfig(max_length=spec.max_len))
    return CollatedBatch(
        **arrays,
        sample_ids=spec.samples,
        bucket_id=spec.bucket_id,
        max_len=spec.max_len,
        index=spec.index,
        epoch=epoch,
        is_padding=spec.is_padding,
    )


def _piece(spec: MicrobatchSpec, place: int, row: TokenRow) -> TokenRow:
    if spec.starts is None or spec.stops is None:
        return row
    start, stop = int(spec.starts[place]), int(spec.stops[place])
    part = slice(start, None if stop == -1 else stop)
    return TokenRow(row.input_ids[part], row.loss_mask[part])


def _packed(spec: MicrobatchSpec, pieces: Sequence[TokenRow], pad_id: int, config: PackingConfig) -> Batch:
    assert spec.packs is not None
    remaining = iter(pieces)
    packs = [list(islice(remaining, len(pack))) for pack in spec.packs]
    rows = lay_out(packs, spec.max_len, pad_id, config.separator)
    return {
        **rows._asdict(),
        "attention_mask": (rows.segment_ids >= 0).astype(np.uint8),
        "position_ids": segment_positions(rows.segment_ids),
    }
