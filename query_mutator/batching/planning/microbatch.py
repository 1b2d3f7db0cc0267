"""One microbatch as a record, and microbatches made by hand as the arrays of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.arrays import offsets_of
from query_mutator.batching.ids import IdTable
from query_mutator.batching.records import Int32Array, Int64Array, Record


class MicrobatchSpec(Record):
    """What one rank runs at once; `indices` are positions in the data set, `index` the position in the whole epoch.

    `packs` groups the ids into rows if the plan is packed. `starts` and `stops` are the range of tokens of each sample
    (stop −1: to its end), None for whole samples. `loss_tokens` counts tokens with a loss here, `step_loss_tokens`
    on all ranks at this step; divide a summed loss by the latter for token-correct gradients. A microbatch with
    `is_padding` is a filler: run it with loss weight 0.
    """

    samples: tuple[str, ...]
    packs: tuple[tuple[str, ...], ...] | None = None
    bucket_id: int = Field(ge=0)
    max_len: int = Field(ge=1)
    index: int = Field(ge=0)
    indices: Int64Array = Field(default_factory=lambda: np.empty(0, np.int64))
    starts: Int32Array | None = None
    stops: Int32Array | None = None
    total_tokens: int = Field(default=0, ge=0)
    loss_tokens: int = Field(default=0, ge=0)
    step_loss_tokens: int = Field(default=0, ge=0)
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


def columns_of(
    microbatches: Sequence[MicrobatchSpec], total_samples: int | None, total_tokens: int | None
) -> dict[str, Any]:
    """Return the arrays of an epoch of these microbatches, and the table of their `ids`.

    Where the microbatches do not say how many tokens they have, `total_tokens` is divided among them by their padded
    size. Raises ValueError for a microbatch that is part of a shard or of cut samples, and for other totals.
    """
    microbatches = tuple(microbatches)
    if any(one.is_padding or one.starts is not None for one in microbatches):
        raise ValueError("an epoch is made of whole samples and without fillers; take it from the plan instead")
    packed = [one.packs is not None for one in microbatches]
    if any(packed) and not all(packed):
        raise ValueError("all microbatches of an epoch have packs, or none has")
    sizes = np.array([one.batch_size for one in microbatches], np.int64)
    if total_samples is not None and total_samples != sizes.sum():
        raise ValueError(f"total_samples={total_samples}, but the microbatches have {sizes.sum()} samples")
    places = {name: place for place, name in enumerate(dict.fromkeys(_names(microbatches)))}
    tokens = _tokens(microbatches, total_tokens)
    loss_tokens = np.array([one.loss_tokens for one in microbatches], np.int64)
    columns = {
        "ids": IdTable.from_list(list(places)),
        "order": np.array([places[name] for name in _names(microbatches)], np.int32),
        "offsets": offsets_of(sizes),
        "max_len": [one.max_len for one in microbatches],
        "bucket": [one.bucket_id for one in microbatches],
        "tokens": tokens,
        "loss_tokens": loss_tokens if loss_tokens.any() else tokens,
        "index": np.array([one.index for one in microbatches], np.int32),
    }
    if any(packed):
        packs = [one.packs or () for one in microbatches]
        columns["offsets"] = offsets_of(np.array([len(one) for one in packs], np.int64))
        columns["pack_offsets"] = offsets_of(np.array([len(pack) for one in packs for pack in one], np.int64))
    return columns


def _names(microbatches: Sequence[MicrobatchSpec]) -> list[str]:
    return [name for one in microbatches for name in one.samples]


def _tokens(microbatches: Sequence[MicrobatchSpec], total: int | None) -> NDArray[np.int64]:
    """Return the tokens of each microbatch [B]."""
    known = np.array([one.total_tokens for one in microbatches], np.int64)
    if total is None or known.sum() == total:
        return known
    if known.any():
        raise ValueError(f"total_tokens={total}, but the microbatches have {known.sum()} tokens")
    padded = np.array([one.num_rows * one.max_len for one in microbatches], np.int64)
    if total > padded.sum():
        raise ValueError(f"total_tokens={total}, but the microbatches have room for {padded.sum()}")
    return np.diff(offsets_of(padded) * total // max(int(padded.sum()), 1))
