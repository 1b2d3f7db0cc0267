"""Several sequences in one row, kept apart: which share a row, the packs, and how full they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport, fit_units
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthTable
from query_mutator.batching.planning.binpacking import (
    Packs,
    pack_best_fit,
    pack_decreasing,
    pack_first_fit,
    pack_in_order,
)
from query_mutator.batching.planning.layout import (
    labels_of,
    lay_out,
    packed_length,
    segment_begins,
    segment_positions,
)
from query_mutator.batching.records import Int32Array, Ratio, Record, TokenRecord, check_row


class PackingMode(StrEnum):
    """Which sequences share a pack."""

    FIRST_FIT = "first_fit"  # in the order given, the earliest pack with room
    BEST_FIT = "best_fit"  # in the order given, the fullest pack with room
    GREEDY = "greedy"  # longest first, the fullest pack with room
    ORDER_PRESERVING = "order_preserving"  # runs of neighbors


_PACKERS: dict[PackingMode, Callable[..., Packs]] = {
    PackingMode.FIRST_FIT: pack_first_fit,
    PackingMode.BEST_FIT: pack_best_fit,
    PackingMode.GREEDY: pack_decreasing,
    PackingMode.ORDER_PRESERVING: pack_in_order,
}


class PackingConfig(Record):
    """How sequences are packed; a separator ends every segment of a pack but the last and costs one token."""

    mode: PackingMode = PackingMode.FIRST_FIT
    max_length: int = Field(default=2048, ge=1)
    pad_to_max: bool = True
    add_separator: bool = False
    separator_token_id: int | None = Field(default=None, ge=0)
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    max_segments: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.add_separator and self.separator_token_id is None:
            raise ValueError("add_separator=True needs separator_token_id; set it")
        return self

    @classmethod
    def default(cls, max_length: int = 2048) -> Self:
        """Return first-fit packs of this length."""
        return cls(max_length=max_length)

    @property
    def separator(self) -> int | None:
        """Token between two segments, None for none."""
        return self.separator_token_id if self.add_separator else None


def pack_lengths(lengths: NDArray[Any], config: PackingConfig) -> Packs:
    """Return which of the sequences of these lengths [n], none over `max_length`, share a pack."""
    # A separator after every segment, in a row with room for one more, is a separator between segments.
    extra = int(config.add_separator)
    packer = _PACKERS[config.mode]
    return packer(lengths + extra, config.max_length + extra, max_segments=config.max_segments)


class SequenceToPack(TokenRecord):
    """One sequence: `input_ids` and `loss_mask`, each [L]."""

    sample_id: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_row(self.input_ids, self.loss_mask, repr(self.sample_id))
        return self


class PackedSequence(TokenRecord):
    """One row of several segments; all arrays are [L], padding has segment −1 and no loss.

    `loss_mask` is 0 at the first token of every segment, since nothing of the segment precedes it.
    """

    segment_ids: Int32Array
    sample_ids: tuple[str, ...]
    sample_lengths: tuple[int, ...]
    num_segments: int = Field(ge=1)
    total_tokens: int = Field(ge=1)
    padding_tokens: int = Field(ge=0)

    efficiency: ClassVar = Ratio("total_tokens", "length")

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where segments begin and the last one ends, int32 [num_segments + 1], without padding."""
        return np.append(segment_begins(self.segment_ids[: self.total_tokens]), self.total_tokens).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest segment."""
        return int(np.diff(self.cu_seqlens).max())

    @property
    def position_ids(self) -> NDArray[np.int32]:
        """Positions that begin at 0 in every segment, 0 in padding, int32 [L]."""
        return segment_positions(self.segment_ids)

    @property
    def labels(self) -> NDArray[np.int64]:
        """`input_ids` where there is a loss, −100 elsewhere, int64 [L]."""
        return labels_of(self.input_ids, self.loss_mask)


class PackedSequences(list[PackedSequence]):
    """The packs, and in `report` the counts of over-long sequences."""

    def __init__(self, packs: Sequence[PackedSequence], report: OverlongReport) -> None:
        super().__init__(packs)
        self.report = report


def pack_sequences(
    sequences: Sequence[SequenceToPack], config: PackingConfig, pad_token_id: int = 0
) -> PackedSequences:
    """Pack sequences by the mode of `config`; handle those over `max_length` by `config.overlong` and count them."""
    ids = IdTable.from_list([one.sample_id for one in sequences])
    table = LengthTable(ids=ids, lengths=np.array([one.length for one in sequences], np.int32))
    units = fit_units(table, config.max_length, config.overlong)
    if not len(units.members):
        return PackedSequences([], units.report)
    packs = pack_lengths(units.lengths[units.members], config)
    # Bin packing works on units (samples or pieces of them); resolve turns them back into ranges of samples.
    packed = []
    for row in np.split(units.members[packs.order], packs.offsets[1:-1]):
        samples, starts, stops = units.cuts.resolve(row)
        pieces = [sequences[sample] for sample in samples]
        if starts is not None and stops is not None:
            pieces = [one.cut(*ends) for one, *ends in zip(pieces, starts.tolist(), stops.tolist(), strict=True)]
        packed.append(_packed(pieces, config, pad_token_id))
    return PackedSequences(packed, units.report)


def _packed_by(mode: PackingMode) -> Callable[[Sequence[SequenceToPack], PackingConfig, int], PackedSequences]:
    def pack(sequences: Sequence[SequenceToPack], config: PackingConfig, pad_token_id: int = 0) -> PackedSequences:
        return pack_sequences(sequences, config.changed(mode=mode), pad_token_id)

    pack.__doc__ = f"Return `pack_sequences` with mode {mode.value}, whatever the mode of `config`."
    return pack


pack_sequences_first_fit = _packed_by(PackingMode.FIRST_FIT)
pack_sequences_best_fit = _packed_by(PackingMode.BEST_FIT)
pack_sequences_greedy = _packed_by(PackingMode.GREEDY)


class PackingBin:
    """A pack that is filled by hand: `add` sequences, then `to_packed_sequence`."""

    def __init__(self, max_length: int, pad_token_id: int = 0) -> None:
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.sequences: list[SequenceToPack] = []
        self.current_length = 0

    @property
    def remaining_space(self) -> int:
        """Tokens that still fit."""
        return self.max_length - self.current_length

    def can_fit(self, seq: SequenceToPack, separator_len: int = 0) -> bool:
        """Return whether a sequence fits with a separator of this many tokens."""
        return seq.length + separator_len <= self.remaining_space

    def add(self, seq: SequenceToPack, separator_len: int = 0) -> None:
        """Append a sequence; raise ValueError if it does not fit."""
        if not self.can_fit(seq, separator_len):
            raise ValueError(f"{seq.sample_id!r} needs {seq.length + separator_len} tokens, {self.remaining_space} fit")
        self.sequences.append(seq)
        self.current_length += seq.length + separator_len

    def to_packed_sequence(self, pad_to_max: bool = True, separator_token_id: int | None = None) -> PackedSequence:
        """Return the pack; raise ValueError without a sequence, or if separators do not fit."""
        if not self.sequences:
            raise ValueError("the bin has no sequence; add one")
        total = packed_length(self.sequences, separator_token_id)
        if total > self.max_length:
            raise ValueError(f"{total} tokens with separators do not fit {self.max_length}; add with separator_len=1")
        config = PackingConfig(
            max_length=self.max_length,
            pad_to_max=pad_to_max,
            add_separator=separator_token_id is not None,
            separator_token_id=separator_token_id,
        )
        return _packed(self.sequences, config, self.pad_token_id)


def _packed(segments: Sequence[SequenceToPack], config: PackingConfig, pad_token_id: int) -> PackedSequence:
    total = packed_length(segments, config.separator)
    size = config.max_length if config.pad_to_max else total
    rows = lay_out([segments], size, pad_token_id, config.separator)
    return PackedSequence(
        input_ids=rows.input_ids[0],
        loss_mask=rows.loss_mask[0],
        segment_ids=rows.segment_ids[0],
        sample_ids=tuple(one.sample_id for one in segments),
        sample_lengths=tuple(one.length for one in segments),
        num_segments=len(segments),
        total_tokens=total,
        padding_tokens=size - total,
    )


class PackingMetrics(Record):
    """Fill of a set of packs; every ratio is 0 when there is nothing to divide by."""

    num_original_samples: int = Field(default=0, ge=0)
    num_packed_sequences: int = Field(default=0, ge=0)
    num_skipped: int = Field(default=0, ge=0)
    total_tokens: int = Field(default=0, ge=0)
    total_padded_length: int = Field(default=0, ge=0)
    total_loss_tokens: int = Field(default=0, ge=0)

    packing_ratio: ClassVar = Ratio("num_original_samples", "num_packed_sequences")
    efficiency: ClassVar = Ratio("total_tokens", "total_padded_length")
    loss_efficiency: ClassVar = Ratio("total_loss_tokens", "total_padded_length")

    def record_packed_sequence(self, packed: PackedSequence) -> Self:
        """Return the counts with one more pack."""
        return self.plus(
            num_original_samples=packed.num_segments,
            num_packed_sequences=1,
            total_tokens=packed.total_tokens,
            total_padded_length=packed.length,
            total_loss_tokens=packed.num_loss_tokens,
        )

    def record_skip(self) -> Self:
        """Return the counts with one more sequence left out."""
        return self.plus(num_skipped=1)

    def saving_over(self, padded_tokens: int) -> float:
        """Return the fraction of tokens saved against the `padded_tokens` of another layout of the same samples."""
        return 1.0 - self.total_padded_length / padded_tokens if padded_tokens else 0.0

    def summary(self) -> dict[str, float | int]:
        """Return all figures by name."""
        rates = {name: getattr(self, name) for name in ("packing_ratio", "efficiency", "loss_efficiency")}
        return {**self.model_dump(), **rates}


def compute_packing_metrics(
    packed_sequences: Sequence[PackedSequence], num_skipped: int | None = None
) -> PackingMetrics:
    """Return the figures of these packs; sequences dropped by `pack_sequences` are counted as skipped."""
    if num_skipped is None:
        num_skipped = packed_sequences.report.num_dropped if isinstance(packed_sequences, PackedSequences) else 0
    return PackingMetrics(
        num_original_samples=sum(one.num_segments for one in packed_sequences),
        num_packed_sequences=len(packed_sequences),
        num_skipped=num_skipped,
        total_tokens=sum(one.total_tokens for one in packed_sequences),
        total_padded_length=sum(one.length for one in packed_sequences),
        total_loss_tokens=sum(one.num_loss_tokens for one in packed_sequences),
    )
