"""Batch plans: for every epoch, which samples form which microbatch; the part of each rank; their files.

A plan on disk is a folder with meta.json, the ids, and one checksummed file of arrays per epoch. S samples, P packs,
B microbatches, T steps, W ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from query_mutator.batching.core.buckets import OverlongReport
from query_mutator.batching.files import (
    ArrayFile,
    arrays_checksum,
    json_bytes,
    read_arrays,
    sha256_of,
    write_arrays,
)
from query_mutator.batching.lengths import IdTable, LengthSource, as_lengths
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.predictability import BatchingConfig
from query_mutator.batching.records import Int32Array, Record, UInt8Array, offsets_of, permutation, ranges_of
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder, read_checked_json, write_checked_json

PLAN_VERSION = "3.0"
EPOCH_KIND = "batch plan epoch"
_META_FILE = "meta.json"
_IDS_FILE = "ids.safetensors"
_IDS_KIND = "batch plan ids"
_PLAN_FILES = re.compile(r"meta\.json|ids\.safetensors|epoch_\d+\.safetensors")
_CHUNK = 1024  # microbatches whose records are made at once
_ABSENT = -1
_QUADRATIC = 2e-4  # cost of a squared length in tokens: about 1 / (6 d) for a transformer of width d = 768


class MicrobatchSpec(Record):
    """Samples that one rank runs at once; `index` is the position in the whole epoch.

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
    has these packs, and pack p has samples pack_offsets[p]:pack_offsets[p+1] ([P+1]).
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
            index=numbers,
            padding=padding,
        )

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


# --- ranks -----------------------------------------------------------------------------------------------------------


class ShardSpec(Record):
    """A rank's part of a plan.

    Without `equal_steps`, or on one rank, rank r has microbatches r, r + W, ... of each epoch. With it every rank has
    the same number of steps, and at each step the ranks have microbatches of one bucket and of nearly equal cost.
    """

    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    equal_steps: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank={self.rank} must be below world_size={self.world_size}")
        return self


def shard_epoch(epoch: EpochPlan, spec: ShardSpec) -> EpochPlan:
    """Return the part of an epoch that one rank runs."""
    if spec.equal_steps and spec.world_size > 1:
        steps, fillers = _equal_steps(epoch, spec.world_size)
        return epoch.take(steps[:, spec.rank], padding=fillers[:, spec.rank])
    mine = np.arange(spec.rank, epoch.num_microbatches, spec.world_size)
    return epoch.take(mine, padding=np.zeros(len(mine), bool))


def _equal_steps(epoch: EpochPlan, world_size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microbatches by step and rank [T, W], and which of them are fillers.

    The microbatches of a step are neighbors by cost within their bucket. The last step of a bucket is filled with the
    bucket's last microbatches, whose cost is nearest, as often as needed.
    """
    costs = epoch.padded_tokens + _QUADRATIC * epoch.squares
    by_cost = np.lexsort((costs, epoch.bucket))
    limits = np.flatnonzero(np.diff(epoch.bucket[by_cost])) + 1
    rows, fillers = [np.empty(0, np.int64)], [np.empty(0, bool)]
    for bucket in np.split(by_cost, limits):
        missing = -len(bucket) % world_size
        rows.append(np.concatenate([bucket, np.resize(bucket[::-1][:world_size], missing)]))
        fillers.append(np.arange(len(bucket) + missing) >= len(bucket))
    steps, padding = (np.concatenate(part).reshape(-1, world_size) for part in (rows, fillers))
    # Shuffle the steps, and the ranks within each step, so that no rank always has the largest microbatch.
    by_step = permutation(len(steps), epoch.seed, world_size, 0)
    ranks = permutation(steps.size, epoch.seed, world_size, 1).reshape(steps.shape).argsort(axis=1)
    return np.take_along_axis(steps[by_step], ranks, axis=1), np.take_along_axis(padding[by_step], ranks, axis=1)


# --- plans -----------------------------------------------------------------------------------------------------------


class BatchPlanMeta(Record):
    """Everything a plan depends on; the fingerprint covers all of it except `created_at`."""

    dataset_hash: str
    tokenizer_hash: str
    config: BatchingConfig
    pack_config: PackingConfig | None = None
    num_epochs: int = Field(ge=0)
    num_samples: int = Field(ge=0)
    lengths_hash: str
    overlong: OverlongReport
    shard: ShardSpec | None = None
    parent_fingerprint: str | None = None
    created_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    version: str = PLAN_VERSION

    bucket_edges = property(attrgetter("config.bucket_edges"))
    overflow_max = property(attrgetter("config.overflow_max"))
    token_budget = property(attrgetter("config.token_budget"))
    pad_policy = property(attrgetter("config.pad_policy"))
    base_seed = property(attrgetter("config.seed"))


class BatchPlan:
    """Epochs of microbatches over the same samples; `epochs` maps numbers to epochs of a BatchPlanBuilder."""

    def __init__(self, meta: BatchPlanMeta, epochs: Mapping[int, EpochPlan] | None = None) -> None:
        self.meta = meta
        self.epochs = dict(sorted((epochs or {}).items()))

    def __repr__(self) -> str:
        return f"BatchPlan({self.num_epochs} epochs, {self.meta.num_samples} samples, {self.fingerprint[:16]})"

    @property
    def ids(self) -> IdTable:
        """Ids of the samples."""
        return next((epoch.ids for epoch in self.epochs.values()), IdTable.range(0))

    @property
    def num_epochs(self) -> int:
        """Number of epochs."""
        return len(self.epochs)

    @property
    def total_microbatches(self) -> int:
        """Number of microbatches in all epochs."""
        return sum(epoch.num_microbatches for epoch in self.epochs.values())

    @property
    def digests(self) -> dict[int, str]:
        """Checksum of every epoch."""
        return {number: epoch.digest for number, epoch in self.epochs.items()}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 of settings, data and tokenizer hashes, and of order and limits in every epoch."""
        meta = self.meta.model_dump(mode="json", exclude={"created_at"})
        return sha256_of([json_bytes(meta), json_bytes(list(self.digests.items()))])

    def get_epoch(self, epoch: int) -> EpochPlan:
        """Return an epoch; raise KeyError for an unknown number."""
        if epoch not in self.epochs:
            raise KeyError(f"the plan has no epoch {epoch}, it has {list(self.epochs)}")
        return self.epochs[epoch]

    def add_epoch(self, epoch_plan: EpochPlan) -> None:
        """Add an epoch under its number; raise UsageError if the plan has one, or is over other samples."""
        number = epoch_plan.epoch
        if number in self.epochs:
            raise UsageError(f"the plan already has an epoch {number}; give the epoch another number")
        if self.epochs and epoch_plan.ids.digest != self.ids.digest:
            raise UsageError(f"epoch {number} is over other samples than the plan; build it from the same lengths")
        self.epochs = dict(sorted({**self.epochs, number: epoch_plan}.items()))
        self.meta = self.meta.model_copy(update={"num_epochs": len(self.epochs)})

    def iter_epoch(self, epoch: int) -> Iterator[MicrobatchSpec]:
        """Yield the microbatches of an epoch."""
        return iter(self.get_epoch(epoch))

    iter_epoch_async = to_async_iterator(iter_epoch)

    def iter_from(self, epoch: int, microbatch_idx: int) -> Iterator[tuple[int, int, MicrobatchSpec]]:
        """Yield (epoch, position in it, microbatch) from a position to the end of the last epoch.

        The position may be one past the epoch's last microbatch; beyond that, or if negative, raise IndexError.
        """
        count = self.get_epoch(epoch).num_microbatches
        if not 0 <= microbatch_idx <= count:
            raise IndexError(f"microbatch {microbatch_idx} is outside 0..{count} of epoch {epoch}")
        return self._iter_from(epoch, microbatch_idx)

    def _iter_from(self, first: int, begin: int) -> Iterator[tuple[int, int, MicrobatchSpec]]:
        for number in self.epochs:
            if number >= first:
                epoch = self.epochs[number]
                for place in range(begin if number == first else 0, epoch.num_microbatches):
                    yield number, place, epoch[place]

    def shard(self, rank: int, world_size: int, *, equal_steps: bool = False) -> BatchPlan:
        """Return the part of the plan that one rank runs; see `ShardSpec`."""
        if self.meta.shard is not None:
            raise UsageError(f"this plan is already the shard of rank {self.meta.shard.rank}; shard the whole plan")
        spec = ShardSpec(rank=rank, world_size=world_size, equal_steps=equal_steps)
        meta = self.meta.model_copy(update={"shard": spec, "parent_fingerprint": self.fingerprint})
        return BatchPlan(meta, {number: shard_epoch(epoch, spec) for number, epoch in self.epochs.items()})


# --- files -----------------------------------------------------------------------------------------------------------


def save_batch_plan(plan: BatchPlan, path: str | Path) -> None:
    """Write a plan atomically, in place of an older plan; UsageError for a folder that holds anything else."""
    target = Path(path)
    if target.exists() and not (target.is_dir() and (is_batch_plan(target) or not any(target.iterdir()))):
        raise UsageError(f"{target} exists and is not a plan; choose another folder")
    with atomic_folder(target) as folder:
        for number, epoch in plan.epochs.items():
            write_arrays(folder / f"epoch_{number}.safetensors", epoch.arrays, kind=EPOCH_KIND, meta=epoch.head)
        ids = write_arrays(folder / _IDS_FILE, plan.ids.to_arrays(), kind=_IDS_KIND, meta={})
        epochs = {str(number): digest for number, digest in plan.digests.items()}
        about = {"epochs": epochs, "ids": ids, "fingerprint": plan.fingerprint}
        write_checked_json(folder / _META_FILE, {**plan.meta.model_dump(mode="json"), **about})


def is_batch_plan(path: Path) -> bool:
    """Return whether a folder holds the files of a plan and no other."""
    names = {one.name for one in path.iterdir()} if path.is_dir() else set()
    return _META_FILE in names and all(_PLAN_FILES.fullmatch(name) for name in names)


def load_batch_plan(path: str | Path) -> BatchPlan:
    """Load a plan; raise UsageError with the name of a damaged, missing or exchanged file. See `check_plan`."""
    folder = Path(path)
    body = read_checked_json(folder / _META_FILE)
    try:
        digests = {int(number): str(digest) for number, digest in body.pop("epochs").items()}
        ids_digest, fingerprint = body.pop("ids"), body.pop("fingerprint")
        meta = BatchPlanMeta.model_validate(body)
    except (KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / _META_FILE} is not a plan of this version: {error}") from error
    file = _read_part(folder / _IDS_FILE, _IDS_KIND, ids_digest)
    ids = IdTable.from_arrays(file.arrays, count=meta.num_samples, path=folder / _IDS_FILE)
    epochs = {
        number: _read_epoch(folder / f"epoch_{number}.safetensors", digest, ids) for number, digest in digests.items()
    }
    plan = BatchPlan(meta, epochs)
    if plan.fingerprint != fingerprint or meta.num_epochs != len(digests):
        raise UsageError(f"{folder / _META_FILE}: fingerprint {fingerprint[:16]} does not match the plan's parts")
    return plan


def check_plan(
    plan: BatchPlan,
    *,
    dataset_hash: str | None = None,
    tokenizer_hash: str | None = None,
    lengths: LengthSource | None = None,
) -> None:
    """Raise UsageError for a plan made for another data set, tokenizer or lengths, as far as the plan knows them."""
    pairs = (
        ("tokenizer", tokenizer_hash, plan.meta.tokenizer_hash),
        ("data set", dataset_hash, plan.meta.dataset_hash),  # its hash covers the tokenizer's
    )
    for what, given, planned in pairs:
        if given and planned and given != planned:
            raise UsageError(f"the plan was made for {what} {planned!r}, not {given!r}; build it again")
    if lengths is not None and as_lengths(lengths).digest != plan.meta.lengths_hash:
        raise UsageError("the plan was made for other samples or lengths; build it again")


def _read_part(path: Path, kind: str, digest: str) -> ArrayFile:
    file = read_arrays(path, kind=kind)
    if file.sha256 != digest:
        raise UsageError(f"{path} belongs to another plan than {path.with_name(_META_FILE)}")
    return file


def _read_epoch(path: Path, digest: str, ids: IdTable) -> EpochPlan:
    file = _read_part(path, EPOCH_KIND, digest)
    fields: dict[str, Any] = {**file.meta, **file.arrays, "ids": ids}
    try:
        return EpochPlan(**{name: value for name, value in fields.items() if name != "kind"})
    except ValidationError as error:
        raise UsageError(f"{path} is not an epoch: {error.errors()[0]['msg']}") from error


save_batch_plan_async = to_async(save_batch_plan)
load_batch_plan_async = to_async(load_batch_plan)
