"""Batch plans: for every epoch, which samples form which microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Unpack

from pydantic import Field

from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.core.overlong import OverlongReport
from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.ids import IdTable
from query_mutator.batching.planning.epoch_plan import EpochPlan, MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.sharding import (
    ShardReport,
    ShardSettings,
    ShardSpec,
    report_epoch,
    shard_epoch,
)
from query_mutator.batching.records import Record
from query_mutator.batching.sync import to_async_iterator
from query_mutator.errors import UsageError

PLAN_VERSION = "2.0"
_KEPT_EPOCHS = 2  # epochs built or loaded on demand that stay in memory


class BatchPlanMeta(Record):
    """Everything a plan depends on; the fingerprint covers all of it except `created_at`."""

    dataset_hash: str
    tokenizer_hash: str
    config: BatchingConfig
    pack_config: PackingConfig | None = None
    num_epochs: int = Field(ge=0)
    num_samples: int = Field(ge=0)
    lengths_hash: str
    inputs_hash: str = ""  # loss lengths, groups, and weights of a mixture
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


class LazyEpochs(Mapping[int, EpochPlan]):
    """Epochs that are built or loaded on access; the last two stay in memory."""

    def __init__(self, makers: Mapping[int, Callable[[], EpochPlan]]) -> None:
        self._makers = dict(sorted(makers.items()))
        self._kept: dict[int, EpochPlan] = {}

    def __getitem__(self, epoch: int) -> EpochPlan:
        if epoch not in self._kept:
            made = self._makers[epoch]()
            while len(self._kept) >= _KEPT_EPOCHS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[epoch] = made
        return self._kept[epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class BatchPlan:
    """Epochs of microbatches over the samples of `ids`.

    `epochs` maps numbers to epochs, which may be loaded on demand; `digests` are their known checksums; `whole` is the
    plan that this one is a shard of.
    """

    def __init__(
        self,
        meta: BatchPlanMeta,
        epochs: Mapping[int, EpochPlan],
        ids: IdTable,
        *,
        digests: Mapping[int, str] | None = None,
        whole: BatchPlan | None = None,
    ) -> None:
        self.meta = meta
        self.epochs = epochs
        self.ids = ids
        self.whole = whole or self
        self._digests = dict(digests or {})

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
        for number in self.epochs:
            if number not in self._digests:
                self._digests[number] = self.epochs[number].digest
        return dict(sorted(self._digests.items()))

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

    def add_epoch(self, epoch: EpochPlan) -> None:
        """Add an epoch under its number; raise UsageError if the plan has one."""
        if epoch.epoch in self.epochs:
            raise UsageError(f"the plan already has an epoch {epoch.epoch}; give the epoch another number")
        self.epochs = dict(sorted({**self.epochs, epoch.epoch: epoch}.items()))
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

    def shard(self, rank: int, world_size: int, **settings: Unpack[ShardSettings]) -> BatchPlan:
        """Return the part of the plan that one rank runs; the settings are fields of `ShardSpec`."""
        return self.shard_by(ShardSpec.of(rank, world_size, **settings))

    def shard_by(self, spec: ShardSpec) -> BatchPlan:
        """Return the part of the plan that `spec` describes, without the epochs before its first."""
        if self.meta.shard is not None:
            raise UsageError(f"this plan is already the shard of rank {self.meta.shard.rank}; shard the whole plan")
        numbers = [number for number in self.epochs if number >= spec.first_epoch]
        makers = {number: partial(self._shard_epoch, number, spec) for number in numbers}
        fields = {"shard": spec, "parent_fingerprint": self.fingerprint, "num_epochs": len(numbers)}
        return BatchPlan(self.meta.model_copy(update=fields), LazyEpochs(makers), self.ids, whole=self)

    def _shard_epoch(self, number: int, spec: ShardSpec) -> EpochPlan:
        return shard_epoch(self.epochs[number], spec)

    def shard_report(self, epoch: int | None = None) -> ShardReport:
        """Return how evenly an epoch (by default the first) is distributed over the ranks."""
        if self.meta.shard is None or self.whole is self:
            raise UsageError("this plan has no whole plan to report on; use report_shards, or shard a whole plan")
        number = next(iter(self.epochs)) if epoch is None else epoch
        return report_epoch(self.whole.get_epoch(number), self.meta.shard)
