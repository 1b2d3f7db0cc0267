"""Files of a batch store: their manifest, integrity checks, and access to the tokens in them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from query_mutator.batching.files import BatchFileError, read_arrays, read_checked_json
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError

logger = logging.getLogger(__name__)

VERSION = 1
TOKENS_KIND = "batch tokens"
COLLATED_KIND = "collated batches"


class ShardEntry(Record):
    """A file of the store; `first` and `count` are samples in the order of writing, or batches of `epoch`."""

    file: str
    sha256: str
    first: int
    count: int
    tokens: int
    epoch: int | None = None  # None: tokens


class Manifest(Record):
    """Contents of a store."""

    version: int = VERSION
    fingerprint: str
    dataset_hash: str
    tokenizer_hash: str
    pad_id: int
    num_epochs: int
    total_batches: int
    custom: bool = False  # with arrays of a user's collate function
    shards: tuple[ShardEntry, ...] = ()

    def of(self, epoch: int | None) -> list[ShardEntry]:
        """Return the token files, or the collated files of an epoch."""
        return [shard for shard in self.shards if shard.epoch == epoch]


def token_arrays(rows: Sequence[TokenRow], positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a token file: ids laid end to end, masks as bits, lengths and positions in the plan."""
    input_ids = np.concatenate([row.input_ids for row in rows])
    small = int(input_ids.min()) >= 0 and int(input_ids.max()) < 1 << 16
    return {
        "input_ids": input_ids.astype(np.uint16) if small else input_ids,
        "loss_mask": np.packbits(np.concatenate([row.loss_mask for row in rows])),
        "lengths": np.array([row.length for row in rows], dtype=np.int32),
        "positions": positions,
    }


def read_manifest(path: Path) -> Manifest:
    """Load a manifest, or the progress of an unfinished write; raise BatchFileError for a broken one."""
    try:
        manifest = Manifest.model_validate(read_checked_json(path))
    except ValidationError as error:
        raise BatchFileError(f"{path} is not the manifest of a batch store: {error.errors()[0]['msg']}") from error
    if manifest.version != VERSION:
        raise BatchFileError(f"{path} has version {manifest.version}, not {VERSION}; write the batches again")
    return manifest


def is_batch_store(path: Path) -> bool:
    """Return whether a folder holds batches of a plan, finished or not."""
    for name in ("progress.json", "manifest.json"):
        with suppress(BatchFileError):
            return bool(read_manifest(path / name))
    return False


def intact_files(folder: Path, shards: Sequence[ShardEntry]) -> list[ShardEntry]:
    """Return the files before the first that is missing or damaged; the others are written again."""
    kept: list[ShardEntry] = []
    for shard in shards:
        kind = TOKENS_KIND if shard.epoch is None else COLLATED_KIND
        try:
            same = read_arrays(folder / shard.file, kind=kind).sha256 == shard.sha256
        except BatchFileError as error:
            logger.warning("%s; it will be written again", error)
            same = False
        if not same:
            break
        kept.append(shard)
    return kept


class TokenStore:
    """Token files of a store, mapped into memory: any sample by its position in the plan's ids."""

    def __init__(self, folder: Path, shards: Sequence[ShardEntry], plan: BatchPlan, *, verify: bool = False) -> None:
        self._plan = plan
        self._ids: list[NDArray[Any]] = []
        self._masks: list[NDArray[np.uint8]] = []
        size = len(plan.ids)
        self._shard = np.full(size, -1, dtype=np.int32)
        self._begin = np.zeros(size, dtype=np.int64)
        self._length = np.zeros(size, dtype=np.int32)
        for number, shard in enumerate(shards):
            file = read_arrays(folder / shard.file, kind=TOKENS_KIND, verify=verify)
            if file.sha256 != shard.sha256 or file.meta.get("fingerprint") != plan.fingerprint:
                raise BatchFileError(f"{folder / shard.file} belongs to another store")
            self._ids.append(file.arrays["input_ids"])
            self._masks.append(file.arrays["loss_mask"])
            positions, lengths = file.arrays["positions"], file.arrays["lengths"]
            self._shard[positions] = number
            self._length[positions] = lengths
            self._begin[positions] = np.cumsum(lengths, dtype=np.int64) - lengths

    def lengths_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths in tokens of the samples at these positions."""
        return self._length[positions].astype(np.int64)

    def row(self, position: int) -> TokenRow:
        """Return the tokens of one sample."""
        shard, begin, length = int(self._shard[position]), int(self._begin[position]), int(self._length[position])
        if shard < 0:
            raise UsageError(f"sample {self._plan.ids[position]!r} is not in the store")
        # Masks are packed 8 tokens to a byte, so a sample may begin in the middle of one.
        end = begin + length
        bits = np.unpackbits(self._masks[shard][begin // 8 : (end + 7) // 8])
        ids = self._ids[shard][begin:end].astype(np.int32)
        return TokenRow(ids, bits[begin % 8 : begin % 8 + length])

    def rows(self, spec: MicrobatchSpec) -> list[TokenRow]:
        """Return the tokens of a microbatch's samples, whole."""
        return [self.row(position) for position in spec.indices.tolist()]
