"""Rows of several segments as arrays: tokens, segment ids, positions, labels and attention masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray
from query_mutator.errors import UsageError

PADDING_SEGMENT = -1
IGNORE_LABEL = -100  # ignore_index of torch's cross_entropy


class Tokens(Protocol):
    """A token sequence with its loss mask: SequenceToPack, Sample, TokenRow."""

    @property
    def input_ids(self) -> NDArray[Any]: ...

    @property
    def loss_mask(self) -> NDArray[Any]: ...


class PackedRows(NamedTuple):
    """Packs as rows of matrices [R, L]; padding has segment −1, the first token of a segment has no loss."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    segment_ids: NDArray[np.int32]


def packed_length(segments: Sequence[Tokens], separator: int | None) -> int:
    """Return the tokens of a pack, with a separator after each segment but the last."""
    return sum(len(one.input_ids) for one in segments) + (len(segments) - 1) * (separator is not None)


def lay_out(packs: Sequence[Sequence[Tokens]], size: int, pad_id: int, separator: int | None = None) -> PackedRows:
    """Return packs as rows of `size` tokens: segments one after the other, separators between them, padding."""
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
