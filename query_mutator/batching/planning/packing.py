"""Several sequences in one row, kept apart: which share a row, how the row is laid out, and how full it is.

Bin packing works on lengths alone, which are small integers: n sequences, P packs. Decreasing order places all
sequences of one length at once; best fit keeps the open packs in lists by the room left in them; first fit skips blocks
of full packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.core.buckets import OverlongPolicy, OverlongReport, fit_lengths
from query_mutator.batching.lengths import IdTable, LengthTable
from query_mutator.batching.records import IndexArray, Int32Array, Ratio, Record, TokenRecord, check_row, offsets_of
from query_mutator.errors import UsageError

PADDING_SEGMENT = -1
IGNORE_LABEL = -100  # ignore_index of torch's cross_entropy
_BLOCK = 64  # packs that share one entry for their largest room


class PackingMode(StrEnum):
    """Strategy for choosing the sequences of a pack."""

    FIRST_FIT = "first_fit"  # in the order given, the earliest pack with room
    BEST_FIT = "best_fit"  # in the order given, the fullest pack with room
    GREEDY = "greedy"  # longest first, the fullest pack with room


class PackingConfig(Record):
    """Settings of packing; a separator ends every segment of a pack but the last and costs one token."""

    mode: PackingMode = PackingMode.FIRST_FIT
    max_length: int = Field(default=2048, ge=1)
    pad_to_max: bool = True
    add_separator: bool = False
    separator_token_id: int | None = Field(default=None, ge=0)
    overlong: OverlongPolicy = OverlongPolicy.ERROR

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.add_separator and self.separator_token_id is None:
            raise ValueError("add_separator=True needs separator_token_id; set it")
        return self

    @property
    def separator(self) -> int | None:
        """Token between two segments, None for none."""
        return self.separator_token_id if self.add_separator else None


def pack_lengths(lengths: NDArray[Any], config: PackingConfig) -> Packs:
    """Return which of the sequences of these lengths [n], none over `max_length`, share a pack."""
    # A separator after every segment, in a row with room for one more, is a separator between segments.
    extra = int(config.add_separator)
    return _PACKERS[config.mode](lengths + extra, config.max_length + extra)


# --- which share a pack ----------------------------------------------------------------------------------------------


class Packs(NamedTuple):
    """Sequence numbers in pack order [n]; pack p has order[offsets[p]:offsets[p+1]]."""

    order: IndexArray
    offsets: NDArray[np.int64]


def pack_decreasing(lengths: NDArray[Any], capacity: int) -> Packs:
    """Pack longest first, each into the fullest pack that has room (best-fit decreasing)."""
    longest_first = np.argsort(-lengths.astype(np.int32), kind="stable")
    pack_of, count = _fill_equal_lengths(np.bincount(lengths), capacity)
    return _grouped(pack_of, count, longest_first)


def _fill_equal_lengths(counts: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int32], int]:
    """Return the pack of every sequence, longest first, and the number of packs, given the count of each length.

    All sequences of one length are placed at once: each pack with room r takes r // length of them.
    """
    pack_of = np.empty(int(counts.sum()), np.int32)
    rooms: list[list[NDArray[np.int32]]] = [[] for _ in range(capacity + 1)]  # packs by the room left in them
    open_rooms = 0  # bit r is set if packs with room r exist
    made = done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            # The lowest set bit from `length` up is the smallest room that fits; without one, open new packs.
            fitting = open_rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // length
            if not fitting:
                packs = np.arange(made, made - (-left // each), dtype=np.int32)
                made += len(packs)
            else:
                packs = rooms[room].pop()
                spare = len(packs) + (-left // each)
                if spare > 0:
                    rooms[room].append(packs[-spare:])
                    packs = packs[:-spare]
                elif not rooms[room]:
                    open_rooms ^= 1 << room
            placed = min(left, each * len(packs))
            pack_of[done : done + placed] = np.repeat(packs, each)[:placed]
            done, left = done + placed, left - placed
            # Every pack now has `each` more sequences, except that the last one may have fewer.
            whole = placed // each
            for some, rest in ((packs[:whole], room - each * length), (packs[whole:], room - placed % each * length)):
                if len(some) and rest:
                    rooms[rest].append(some)
                    open_rooms |= 1 << rest
    return pack_of, made


def pack_best_fit(lengths: NDArray[Any], capacity: int) -> Packs:
    """Pack in the order given, each into the fullest pack that has room."""
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]
    bits = [1 << room for room in range(capacity + 1)]
    open_rooms = made = 0
    pack_of: list[int] = []
    place = pack_of.append
    for length in lengths.tolist():
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            packs = rooms[room]
            pack = packs.pop()
            if not packs:
                open_rooms ^= bits[room]
        else:
            room, pack, made = capacity, made, made + 1
        place(pack)
        room -= length
        if room:
            rooms[room].append(pack)
            open_rooms |= bits[room]
    return _grouped(np.array(pack_of, np.int32), made, None)


def pack_first_fit(lengths: NDArray[Any], capacity: int) -> Packs:
    """Pack in the order given, each into the earliest pack that has room.

    Room only shrinks, so the earliest pack with room for a given length only moves forward: keep one pointer per
    length, and skip blocks of packs without room.
    """
    pointers = [0] * (capacity + 1)
    room: list[int] = []
    block_room: list[int] = []  # at least the largest room in the block
    pack_of: list[int] = []
    place = pack_of.append
    for length in lengths.tolist():
        pack = _first_with_room(length, pointers[length], room, block_room)
        if pack == len(room):
            if pack % _BLOCK == 0:
                block_room.append(capacity)
            room.append(capacity)
        pointers[length] = pack
        room[pack] -= length
        place(pack)
    return _grouped(np.array(pack_of, np.int32), len(room), None)


def _first_with_room(length: int, pack: int, room: list[int], block_room: list[int]) -> int:
    """Return the first pack from `pack` on with room for `length`, or the number of packs if there is none."""
    made = len(room)
    while pack < made:
        if room[pack] >= length:
            return pack
        block = pack // _BLOCK
        if block_room[block] >= length:
            begin, end = block * _BLOCK, min((block + 1) * _BLOCK, made)
            for candidate in range(pack + 1, end):
                if room[candidate] >= length:
                    return candidate
            if end - begin == _BLOCK:
                block_room[block] = max(room[begin:end])
        block += 1
        while block < len(block_room) and block_room[block] < length:
            block += 1
        pack = min(block * _BLOCK, made)
    return made


def _grouped(pack_of: NDArray[np.int32], count: int, names: IndexArray | None) -> Packs:
    """Return sequences by pack, in input order within a pack; `names` renames them."""
    bits = max(len(pack_of) - 1, 1).bit_length()
    keys = pack_of.astype(np.int64) << bits
    keys |= np.arange(len(pack_of))
    keys.sort()
    keys &= (1 << bits) - 1
    return Packs(keys if names is None else names[keys], offsets_of(np.bincount(pack_of, minlength=count)))


_PACKERS: dict[PackingMode, Callable[..., Packs]] = {
    PackingMode.FIRST_FIT: pack_first_fit,
    PackingMode.BEST_FIT: pack_best_fit,
    PackingMode.GREEDY: pack_decreasing,
}


# --- rows of packs ---------------------------------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """Packs as rows of matrices [R, L]; padding has segment −1, the first token of a segment has no loss."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    segment_ids: NDArray[np.int32]


def lay_out(packs: Sequence[Sequence[Any]], size: int, pad_id: int, separator: int | None = None) -> PackedRows:
    """Return packs as rows of `size` tokens: segments one after the other, separators between them, padding.

    A segment has `input_ids` and `loss_mask`: SequenceToPack, Sample, TokenRow.
    """
    rows = PackedRows(
        np.full((len(packs), size), pad_id, np.int32),
        np.zeros((len(packs), size), np.uint8),
        np.full((len(packs), size), PADDING_SEGMENT, np.int32),
    )
    for pack, input_ids, loss_mask, segment_ids in zip(packs, *rows, strict=True):
        begin = 0
        for number, one in enumerate(pack):
            end = begin + len(one.input_ids)
            input_ids[begin:end] = one.input_ids
            loss_mask[begin + 1 : end] = one.loss_mask[1:]  # nothing of the segment predicts its first token
            if separator is not None and number < len(pack) - 1:
                input_ids[end] = separator
                end += 1
            segment_ids[begin:end] = number
            begin = end
    return rows


def segment_begins(segment_ids: NDArray[Any]) -> IndexArray:
    """Return where segments begin, padding too, in the flattened segment ids [..., L]; every row begins one."""
    return np.flatnonzero(np.diff(segment_ids, axis=-1, prepend=PADDING_SEGMENT - 1))


def segment_positions(segment_ids: NDArray[Any]) -> NDArray[np.int32]:
    """Return the position of every token within its segment, 0 in padding, for segment ids [..., L]."""
    here = np.arange(segment_ids.shape[-1])
    begins = np.diff(segment_ids, axis=-1, prepend=PADDING_SEGMENT - 1) != 0
    positions = here - np.maximum.accumulate(np.where(begins, here, 0), axis=-1)
    return np.where(segment_ids == PADDING_SEGMENT, 0, positions).astype(np.int32)


def labels_of(input_ids: NDArray[Any], loss_mask: NDArray[Any]) -> NDArray[np.int64]:
    """Return `input_ids` where there is a loss, −100 elsewhere, as int64 (a model shifts labels itself)."""
    return np.where(loss_mask == 1, input_ids, IGNORE_LABEL).astype(np.int64)


def create_segment_attention_mask(
    segment_ids: Sequence[int] | NDArray[Any], use_mlx: bool = False, *, causal: bool = True
) -> Any:
    """Return bool [L, L], True where row may attend to column: the same segment, not later, never padding.

    Dense: L*L bytes. For long rows use `cu_seqlens` or the torch helpers instead. With `use_mlx` it is an array of MLX.
    """
    segments = np.asarray(segment_ids, np.int32)
    mask: NDArray[np.bool_] = segments[:, None] == segments[None, :]
    mask &= (segments != PADDING_SEGMENT)[:, None]
    if causal:
        mask &= np.tri(len(segments), dtype=bool)
    if not use_mlx:
        return mask
    try:
        import mlx.core
    except ImportError:
        raise UsageError("use_mlx=True needs MLX: pip install mlx, or leave it out for numpy") from None
    return mlx.core.array(mask)


# --- packing sequences -----------------------------------------------------------------------------------------------


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
        """Starts of segments and the end of the last one, int32 [num_segments + 1], without padding."""
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
    lengths, kept, report = fit_lengths(table, config.max_length, config.overlong)
    if not len(kept):
        return PackedSequences([], report)
    packs = pack_lengths(lengths[kept], config)
    rows = [kept[row].tolist() for row in np.split(packs.order, packs.offsets[1:-1])]
    return PackedSequences(
        [_packed([sequences[place].cut(config.max_length) for place in row], config, pad_token_id) for row in rows],
        report,
    )


def _packed(segments: Sequence[SequenceToPack], config: PackingConfig, pad_token_id: int) -> PackedSequence:
    separators = len(segments) - 1 if config.add_separator else 0
    total = sum(one.length for one in segments) + separators
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
