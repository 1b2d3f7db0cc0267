"""Batch plans: for every epoch, which samples form which microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Any, Self, Unpack

from pydantic import Field, model_validator

from query_mutator.batching.core.config import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport
from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.ids import IdTable
from query_mutator.batching.planning.epoch_plan import EpochPlan, PlanContext
from query_mutator.batching.planning.microbatch import MicrobatchSpec
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
        return {**_no_samples(settings["token_budget"]), **rest, "config": BatchingConfig(mode=mode, **settings)}

    @classmethod
    def create(
        cls,
        dataset_hash: str,
        tokenizer_hash: str,
        batching_config: BatchingConfig,
        num_epochs: int,
        pack_config: PackingConfig | None = None,
    ) -> Self:
        """Return the description of a plan that is made by hand."""
        return cls(
            dataset_hash=dataset_hash,
            tokenizer_hash=tokenizer_hash,
            config=batching_config,
            pack_config=pack_config,
            num_epochs=num_epochs,
            **_no_samples(batching_config.limit),
        )


#: Fields that may be given in place of `config`, and their names there.
_SETTINGS = {name: name for name in ("bucket_edges", "overflow_max", "token_budget", "pad_policy")} | {
    "base_seed": "seed"
}


def _no_samples(limit: int) -> dict[str, Any]:
    return {
        "num_samples": 0,
        "lengths_hash": "",
        "overlong": OverlongReport(policy=OverlongPolicy.ERROR, limit=limit),
    }


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
    """Epochs of microbatches over the samples of `ids`; without `ids`, those of the epochs, which can be made by hand.

    `epochs` maps numbers to epochs, which may be loaded on demand; `digests` are their known checksums; `whole` is the
    plan that this one is a shard of.
    """

    def __init__(
        self,
        meta: BatchPlanMeta,
        epochs: Mapping[int, EpochPlan] | None = None,
        ids: IdTable | None = None,
        *,
        digests: Mapping[int, str] | None = None,
        whole: BatchPlan | None = None,
    ) -> None:
        self.meta = meta
        self.epochs: Mapping[int, EpochPlan] = {} if epochs is None or ids is None else epochs
        self.ids = IdTable.from_list([]) if ids is None else ids
        self.whole = whole or self
        self._digests = dict(digests or {})
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

    def add_epoch(self, epoch_plan: EpochPlan) -> None:
        """Add an epoch under its number, and its samples; raise UsageError if the plan has one."""
        number = epoch_plan.epoch
        if number in self.epochs:
            raise UsageError(f"the plan already has an epoch {number}; give the epoch another number")
        self._add_ids(epoch_plan.context)
        epoch_plan = epoch_plan.over(self.ids)
        self.epochs = dict(sorted({**self.epochs, number: epoch_plan}.items()))
        self.meta = self.meta.model_copy(update={"num_epochs": len(self.epochs), "num_samples": len(self.ids)})

    def _add_ids(self, context: PlanContext) -> None:
        known = set() if context.ids is self.ids else set(self.ids.to_list())
        new = [] if context.ids is self.ids else [name for name in context.ids.to_list() if name not in known]
        if new:
            # New ids follow the known ones, so the epochs that the plan has keep their numbers.
            self.ids = IdTable.from_list([*self.ids.to_list(), *new])
            self.epochs = {number: epoch.over(self.ids) for number, epoch in self.epochs.items()}

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
