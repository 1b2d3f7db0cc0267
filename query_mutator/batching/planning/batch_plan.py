"""Batch plans: for every epoch, which samples form which microbatch; and their files.

A plan on disk is a folder with meta.json, the ids, and one checksummed file of arrays per epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from query_mutator.batching.core.buckets import OverlongPolicy, OverlongReport
from query_mutator.batching.files import (
    ArrayFile,
    BatchFileError,
    json_bytes,
    read_arrays,
    read_checked_json,
    sha256_of,
    write_arrays,
)
from query_mutator.batching.lengths import IdTable, LengthSource, as_lengths
from query_mutator.batching.planning.epoch_plan import EPOCH_KIND, EpochPlan, MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.predictability import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.planning.sharding import ShardSpec, shard_epoch
from query_mutator.batching.records import Record
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder, write_checked_json

PLAN_VERSION = "3.0"
_META_FILE = "meta.json"
_IDS_FILE = "ids.safetensors"
_IDS_KIND = "batch plan ids"
_PLAN_FILES = re.compile(r"meta\.json|ids\.safetensors|epoch_\d+\.safetensors")


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

    @model_validator(mode="before")
    @classmethod
    def _from_settings(cls, data: Any) -> Any:
        """Collect settings given one by one in `config`."""
        if not isinstance(data, dict) or "config" in data or "token_budget" not in data:
            return data
        settings = {key: data[name] for name, key in _SETTINGS.items() if name in data}
        predictable = settings.get("pad_policy") == PadPolicy.PAD_TO_BUCKET
        mode = BatchingMode.PREDICTABLE if predictable else BatchingMode.THROUGHPUT
        rest = {name: value for name, value in data.items() if name not in _SETTINGS}
        config = BatchingConfig(mode=mode, **settings)
        overlong = OverlongReport(policy=OverlongPolicy.ERROR, limit=config.limit)
        return {"num_samples": 0, "lengths_hash": "", "overlong": overlong, **rest, "config": config}


#: Fields that may be given in place of `config`, and their names there.
_SETTINGS = {name: name for name in ("bucket_edges", "overflow_max", "token_budget", "pad_policy")} | {
    "base_seed": "seed"
}


class BatchPlan:
    """Epochs of microbatches over the samples of `ids`; without `ids`, those of the epochs, which can be made by hand.

    `epochs` maps numbers to epochs.
    """

    def __init__(
        self,
        meta: BatchPlanMeta,
        epochs: Mapping[int, EpochPlan] | None = None,
        ids: IdTable | None = None,
    ) -> None:
        self.meta = meta
        self.epochs = {} if epochs is None or ids is None else dict(sorted(epochs.items()))
        self.ids = IdTable.from_list([]) if ids is None else ids
        if ids is None:
            for epoch in (epochs or {}).values():
                self.add_epoch(epoch)

    def __repr__(self) -> str:
        return f"BatchPlan({self.num_epochs} epochs, {self.meta.num_samples} samples, {self.fingerprint[:16]})"

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
        """Add an epoch under its number, and its samples; raise UsageError if the plan has one."""
        number = epoch_plan.epoch
        if number in self.epochs:
            raise UsageError(f"the plan already has an epoch {number}; give the epoch another number")
        if epoch_plan.ids is not self.ids:
            # New ids follow the known ones, so the epochs that the plan has keep their numbers.
            known = dict.fromkeys([*self.ids.to_list(), *epoch_plan.ids.to_list()])
            self.ids = IdTable.from_list(list(known))
            self.epochs = {one: epoch.over(self.ids) for one, epoch in self.epochs.items()}
        self.epochs = dict(sorted({**self.epochs, number: epoch_plan.over(self.ids)}.items()))
        self.meta = self.meta.model_copy(update={"num_epochs": len(self.epochs), "num_samples": len(self.ids)})

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
        return self.shard_by(ShardSpec(rank=rank, world_size=world_size, equal_steps=equal_steps))

    def shard_by(self, spec: ShardSpec) -> BatchPlan:
        """Return the part of the plan that `spec` describes, without the epochs before its first."""
        if self.meta.shard is not None:
            raise UsageError(f"this plan is already the shard of rank {self.meta.shard.rank}; shard the whole plan")
        epochs = {number: shard_epoch(one, spec) for number, one in self.epochs.items() if number >= spec.first_epoch}
        fields = {"shard": spec, "parent_fingerprint": self.fingerprint, "num_epochs": len(epochs)}
        return BatchPlan(self.meta.model_copy(update=fields), epochs, self.ids)


# --- files -----------------------------------------------------------------------------------------------------------


def save_batch_plan(plan: BatchPlan, path: str | Path) -> None:
    """Write a plan atomically, in place of an older plan; UsageError for a folder that holds anything else."""
    target = Path(path)
    if target.exists() and not (target.is_dir() and (is_batch_plan(target) or not any(target.iterdir()))):
        raise UsageError(f"{target} exists and is not a plan; choose another folder")
    with atomic_folder(target) as folder:
        for number, epoch in plan.epochs.items():
            write_arrays(folder / _epoch_name(number), epoch.arrays, kind=EPOCH_KIND, meta=epoch.head)
        ids = write_arrays(folder / _IDS_FILE, plan.ids.to_arrays(), kind=_IDS_KIND, meta={})
        epochs = {str(number): digest for number, digest in plan.digests.items()}
        about = {"epochs": epochs, "ids": ids, "fingerprint": plan.fingerprint}
        write_checked_json(folder / _META_FILE, {**plan.meta.model_dump(mode="json"), **about})


def is_batch_plan(path: Path) -> bool:
    """Return whether a folder holds the files of a plan and no other."""
    names = {one.name for one in path.iterdir()} if path.is_dir() else set()
    return _META_FILE in names and all(_PLAN_FILES.fullmatch(name) for name in names)


def _epoch_name(number: int) -> str:
    return f"epoch_{number}.safetensors"


def load_batch_plan(
    path: str | Path,
    *,
    dataset_hash: str | None = None,
    tokenizer_hash: str | None = None,
    lengths: LengthSource | None = None,
) -> BatchPlan:
    """Load a plan.

    Raises BatchFileError with the name of a damaged, missing or exchanged file, and UsageError if hashes or lengths are
    given and the plan was made for others.
    """
    folder = Path(path)
    body = read_checked_json(folder / _META_FILE)
    try:
        digests = {int(number): str(digest) for number, digest in body.pop("epochs").items()}
        ids_digest, fingerprint = body.pop("ids"), body.pop("fingerprint")
        meta = BatchPlanMeta.model_validate(body)
    except (KeyError, ValueError, AttributeError) as error:
        raise BatchFileError(f"{folder / _META_FILE} is not a plan of this version: {error}") from error
    file = _read_part(folder / _IDS_FILE, _IDS_KIND, ids_digest)
    ids = IdTable.from_arrays(file.arrays, count=meta.num_samples, path=file.path)
    epochs = {number: _read_epoch(folder / _epoch_name(number), digest, ids) for number, digest in digests.items()}
    plan = BatchPlan(meta, epochs, ids)
    if plan.fingerprint != fingerprint or meta.num_epochs != len(digests):
        raise BatchFileError(f"{folder / _META_FILE}: fingerprint {fingerprint[:16]} does not match the plan's parts")
    check_plan(plan, dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash, lengths=lengths)
    return plan


def check_plan(
    plan: BatchPlan,
    *,
    dataset_hash: str | None = None,
    tokenizer_hash: str | None = None,
    lengths: LengthSource | None = None,
) -> None:
    """Raise UsageError for a plan that was made for another data set, tokenizer or lengths."""
    pairs = (
        ("data set", dataset_hash, plan.meta.dataset_hash),
        ("tokenizer", tokenizer_hash, plan.meta.tokenizer_hash),
    )
    for what, given, planned in pairs:
        if given is not None and given != planned:
            raise UsageError(f"the plan was made for {what} {planned!r}, not {given!r}; build it again")
    if lengths is not None and as_lengths(lengths).digest != plan.meta.lengths_hash:
        raise UsageError("the plan was made for other samples or lengths; build it again")


def _read_part(path: Path, kind: str, digest: str) -> ArrayFile:
    file = read_arrays(path, kind=kind)
    if file.sha256 != digest:
        raise BatchFileError(f"{path} belongs to another plan than {path.with_name(_META_FILE)}")
    return file


def _read_epoch(path: Path, digest: str, ids: IdTable) -> EpochPlan:
    file = _read_part(path, EPOCH_KIND, digest)
    fields: dict[str, Any] = {**file.meta, **file.arrays, "ids": ids}
    try:
        return EpochPlan(**{name: value for name, value in fields.items() if name != "kind"})
    except ValidationError as error:
        raise BatchFileError(f"{path} is not an epoch: {error.errors()[0]['msg']}") from error


save_batch_plan_async = to_async(save_batch_plan)
load_batch_plan_async = to_async(load_batch_plan)
