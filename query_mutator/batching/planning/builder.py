"""Build plans: lengths and settings in, epochs of microbatches out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray, offsets_of, permutation, ranges_of, sums_of
from query_mutator.batching.core.config import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.core.filling import Batches, Items, fill_batches
from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport, Units, fit_units
from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.lengths import LengthSource, as_lengths, as_values
from query_mutator.batching.planning.batch_plan import BatchPlan, BatchPlanMeta, LazyEpochs
from query_mutator.batching.planning.binpacking import Packs
from query_mutator.batching.planning.epoch_plan import EpochPlan, PlanContext, SourceCount
from query_mutator.batching.planning.groups import Groups, GroupSource, find_groups
from query_mutator.batching.planning.mixture import Mixture, draw_epoch
from query_mutator.batching.planning.packing import PackingConfig, PackingMode, pack_lengths
from query_mutator.batching.sync import to_async
from query_mutator.errors import UsageError


class _Members(NamedTuple):
    """Items of an epoch and their units: item i has units[offsets[i]:offsets[i+1]], without offsets units[i]."""

    items: Items
    units: IndexArray
    offsets: NDArray[np.int64] | None

    def of(self, order: IndexArray) -> IndexArray:
        """Return the units of these items one after the other."""
        if self.offsets is None:
            return self.units[order]
        return self.units[ranges_of(self.offsets[order], np.diff(self.offsets)[order])]


class BatchPlanBuilder:
    """Form the microbatches of every epoch.

    `lengths` may be a mapping, a list or array, a length cache, or a `Mixture`. `loss_lengths` counts per sample the
    tokens with a loss (a causal model's first token has none); by default all tokens but the first. `groups` labels
    samples that must share a microbatch. With `pack_config` rows are packs.
    """

    def __init__(
        self,
        lengths: LengthSource | Mixture,
        batching_config: BatchingConfig | None = None,
        dataset_hash: str = "",
        tokenizer_hash: str = "",
        pack_config: PackingConfig | None = None,
        *,
        loss_lengths: Mapping[str, int] | Sequence[int] | NDArray[Any] | None = None,
        groups: GroupSource | None = None,
    ) -> None:
        self.config = batching_config or BatchingConfig()
        self.pack_config = pack_config
        self.dataset_hash = dataset_hash
        self.tokenizer_hash = tokenizer_hash
        self._mixture = lengths if isinstance(lengths, Mixture) else None
        self._table = lengths.table if isinstance(lengths, Mixture) else as_lengths(lengths)
        self._loss = None if loss_lengths is None else as_values(loss_lengths, self._table, "loss_lengths")
        if self._loss is not None and np.any((self._loss < 0) | (self._loss > self._table.lengths)):
            raise UsageError("loss_lengths must be between 0 and the sample's length")
        self._groups = None if groups is None else find_groups(groups, self._table)
        self._check_packing()
        self._units = self._fit()
        self._fill = _fill_config(self.config, pack_config)

    def build_sync(self, num_epochs: int = 1) -> BatchPlan:
        """Return the plan of this many epochs, each in a different order."""
        if num_epochs < 1:
            raise UsageError(f"num_epochs={num_epochs} must be at least 1")
        return BatchPlan(self.meta(num_epochs), {e: self.build_epoch(e) for e in range(num_epochs)}, self._table.ids)

    build = to_async(build_sync)

    def build_lazy(self, num_epochs: int = 1) -> BatchPlan:
        """Return the same plan with every epoch built on first use; saving it holds two epochs in memory."""
        makers = {epoch: partial(self.build_epoch, epoch) for epoch in range(num_epochs)}
        return BatchPlan(self.meta(num_epochs), LazyEpochs(makers), self._table.ids)

    @property
    def overlong(self) -> OverlongReport:
        """Counts of over-long samples and how they were handled."""
        return self._units.report

    @property
    def unit_lengths(self) -> NDArray[np.int32]:
        """Lengths of the samples and pieces of samples that take part."""
        return self._units.lengths[self._units.members]

    def meta(self, num_epochs: int) -> BatchPlanMeta:
        """Return everything the plan depends on."""
        return BatchPlanMeta(
            dataset_hash=self.dataset_hash,
            tokenizer_hash=self.tokenizer_hash,
            config=self.config,
            pack_config=self.pack_config,
            num_epochs=num_epochs,
            num_samples=len(self._table),
            lengths_hash=self._table.digest,
            inputs_hash=self._inputs_hash(),
            overlong=self._units.report,
        )

    def build_epoch(self, epoch: int) -> EpochPlan:
        """Return one epoch; the order follows from the seed and the epoch's number."""
        seed = (self.config.seed, epoch)
        # 1. Items: samples, groups, or what a mixture draws.
        members, chosen = self._members(epoch)
        # 2. With packing, packs become the items.
        packs: Packs | None = None
        if self.pack_config is not None:
            members, packs = self._pack(members, self.pack_config, seed)
        # 3. Fill batches with items, then list their units.
        batches = fill_batches(members.items, self._fill, seed=seed)
        order = members.of(batches.order)
        if packs is None:
            pack_offsets, offsets = None, self._sample_offsets(batches, members)
        else:
            pack_offsets, offsets = offsets_of(np.diff(packs.offsets)[batches.order]), batches.offsets
        return self._epoch(epoch, batches, order, offsets, pack_offsets, chosen)

    def _check_packing(self) -> None:
        if self.pack_config is None:
            return
        if self._groups is not None:
            raise UsageError("groups cannot be packed, a pack splits them; leave out groups or pack_config")
        if self.pack_config.max_length > self.config.token_budget:
            raise UsageError(
                f"packs of max_length={self.pack_config.max_length} do not fit "
                f"token_budget={self.config.token_budget}; raise the budget"
            )

    def _fit(self) -> Units:
        limits: int | NDArray[Any] = self.config.limit
        policy = self.config.overlong
        if self.pack_config is not None:
            limits = self.pack_config.max_length
            policy = self.pack_config.overlong if self.pack_config.overlong is not OverlongPolicy.ERROR else policy
        if self._groups is not None:
            sizes = self._groups.size_per_sample()
            if policy is OverlongPolicy.SPLIT:
                raise UsageError("groups cannot be split; choose error, drop or truncate for over-long samples")
            most = self.config.max_samples or self.config.token_budget
            if sizes.max(initial=1) > min(most, self.config.token_budget):
                raise UsageError(f"a group of {sizes.max()} samples fits no batch; raise max_samples or token_budget")
            limits = np.minimum(limits, self._groups_limit(sizes))
        units = fit_units(self._table, limits, policy, loss=self._loss, loss_limit=self.config.loss_token_budget)
        return units if self._groups is None else self._drop_groups(units, self._groups)

    def _groups_limit(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the maximum length of a member whose padded group still fits the budget."""
        config = self.config
        room = config.token_budget // sizes
        if config.bucket_pads is None:
            fits = room // config.pad_multiple * config.pad_multiple
        else:
            bounds = np.append(0, config.bucket_spec.upper_bounds)
            fits = bounds[np.searchsorted(np.array(config.bucket_pads), room, side="right")]
        fits = np.where(sizes == 1, config.limit, fits)
        if fits.min(initial=1) < 1:
            raise UsageError(f"a group of {sizes.max()} samples fits no batch; raise token_budget")
        return fits

    def _drop_groups(self, units: Units, groups: Groups) -> Units:
        """Leave out groups with a dropped member; raise UsageError for a group with too many loss tokens."""
        self._groups = groups = groups.whole(units.kept)
        budget = self.config.loss_token_budget
        if budget is not None:
            heavy = groups.items(units.lengths, units.targets).loss
            assert heavy is not None
            if np.any(heavy > budget):
                raise UsageError(
                    f"a group has {int(heavy.max())} loss tokens, more than loss_token_budget={budget}; raise it"
                )
        dropped = len(self._table) - len(groups.members)
        report = units.report.model_copy(update={"num_dropped": dropped})
        return replace(units, kept=np.sort(groups.members) if dropped else None, report=report)

    def _members(self, epoch: int) -> tuple[_Members, IndexArray | None]:
        """Return the items of an epoch, and for a mixture the units drawn."""
        units = self._units
        if self._groups is not None:
            items = self._groups.items(units.lengths, units.targets)
            members = _Members(items, self._groups.members, self._groups.offsets)
        else:
            loss = units.targets if self.config.loss_token_budget is not None else None
            items = Items(units.lengths, None, loss)
            members = _Members(items if units.kept is None else items.take(units.kept), units.members, None)
        if self._mixture is None:
            return members, None
        first = members.units if members.offsets is None else members.units[members.offsets[:-1]]
        source = self._mixture.source[units.cuts.resolve(first)[0]]
        drawn = draw_epoch(source, self._mixture, seed=self.config.seed, epoch=epoch)
        chosen = members.of(drawn)
        offsets = None if members.offsets is None else offsets_of(np.diff(members.offsets)[drawn])
        return _Members(members.items.take(drawn), chosen, offsets), chosen

    def _pack(self, members: _Members, config: PackingConfig, seed: tuple[int, ...]) -> tuple[_Members, Packs]:
        """Return packs as items; shuffle the samples first, so that packs differ between epochs."""
        units = members.units[permutation(len(members.units), *seed, 2)]
        if config.mode is PackingMode.ORDER_PRESERVING:
            units = members.units
        lengths = self._units.lengths[units]
        packs = pack_lengths(lengths, config) if len(units) else Packs(units, np.zeros(1, np.int64))
        sizes = np.diff(packs.offsets)
        rows = packs.totals(lengths) + int(config.add_separator) * (sizes - 1)
        if config.pad_to_max:
            rows = np.full(len(sizes), config.max_length)
        loss = None
        if self.config.loss_token_budget is not None:
            loss = packs.totals(self._units.targets[units])
        return _Members(Items(rows, None, loss), units[packs.order], packs.offsets), packs

    def _sample_offsets(self, batches: Batches, members: _Members) -> NDArray[np.int64]:
        if members.offsets is None:
            return batches.offsets
        return offsets_of(np.diff(members.offsets)[batches.order])[batches.offsets]

    def _epoch(
        self,
        epoch: int,
        batches: Batches,
        order: IndexArray,
        offsets: NDArray[np.int64],
        pack_offsets: NDArray[np.int64] | None,
        chosen: IndexArray | None,
    ) -> EpochPlan:
        lengths = self._units.lengths[order]
        begins = (offsets if pack_offsets is None else pack_offsets[offsets])[:-1]
        tokens = sums_of(lengths, begins)
        if self._loss is None:
            loss = tokens - np.diff(begins, append=len(order))
        else:
            loss = sums_of(self._units.targets[order], begins)
        squares = None if pack_offsets is None else sums_of(lengths.astype(np.int64) ** 2, begins)
        return EpochPlan(
            epoch=epoch,
            seed=self.config.seed,
            order=order.astype(np.int32, copy=False),
            offsets=offsets,
            pack_offsets=pack_offsets,
            max_len=batches.max_len,
            bucket=batches.bucket,
            tokens=tokens,
            loss_tokens=loss,
            segment_squares=squares,
            num_dropped=len(self._units.members if chosen is None else chosen) - len(order),
            sources={} if self._mixture is None else self._source_counts(order, self._mixture),
            context=PlanContext(ids=self._table.ids, cuts=self._units.cuts),
        )

    def _source_counts(self, order: IndexArray, mixture: Mixture) -> dict[str, SourceCount]:
        source = mixture.source[self._units.cuts.resolve(order)[0]]
        counts = {}
        for number, name in enumerate(mixture.names):
            here = order[source == number]
            tokens = int(self._units.lengths[here].sum(dtype=np.int64))
            repeats = len(here) - len(np.unique(here))
            counts[name] = SourceCount(samples=len(here), tokens=tokens, repeats=repeats)
        return counts

    def _inputs_hash(self) -> str:
        """Return a hash of the inputs other than lengths and settings, "" for none."""
        parts: list[Any] = []
        if self._loss is not None:
            parts += [b"loss", self._loss.astype(np.int64)]
        if self._groups is not None:
            parts += [b"groups", self._groups.digest.encode()]
        if self._mixture is not None:
            mix = self._mixture
            parts.append(json_bytes([list(mix.names), mix.weights.tolist(), mix.epoch_samples]))
        return sha256_of(parts) if parts else ""


def _fill_config(config: BatchingConfig, pack_config: PackingConfig | None) -> BatchingConfig:
    """Return how batches are filled; the rows of a packed plan have one bucket, up to their longest length."""
    if pack_config is None:
        return config
    longest, fixed = pack_config.max_length, pack_config.pad_to_max or config.is_predictable
    return config.changed(
        mode=BatchingMode.PREDICTABLE if fixed else BatchingMode.THROUGHPUT,
        pad_policy=PadPolicy.PAD_TO_BUCKET if fixed else PadPolicy.PAD_TO_MAX,
        bucket_edges=(longest,),
        overflow_max=longest,
        bucket_max_lengths=None,
    )


def verify_batch_plan(plan: BatchPlan, lengths: LengthSource | Mixture, **inputs: Any) -> tuple[bool, str]:
    """Rebuild the plan from its own settings; return whether it is the same, and the first difference.

    `inputs` are `loss_lengths` and `groups`, if the plan was built with them.
    """
    if plan.meta.shard is not None:
        return False, "the plan is a shard; verify the whole plan"
    meta = plan.meta
    try:
        builder = BatchPlanBuilder(
            lengths, meta.config, meta.dataset_hash, meta.tokenizer_hash, meta.pack_config, **inputs
        )
    except UsageError as error:
        return False, f"no plan can be built from these lengths: {error}"
    rebuilt = builder.meta(meta.num_epochs)
    for name in ("num_samples", "lengths_hash", "inputs_hash", "overlong", "version"):
        if getattr(rebuilt, name) != getattr(meta, name):
            return False, f"{name} differs: planned {getattr(meta, name)}, now {getattr(rebuilt, name)}"
    for number, digest in plan.digests.items():
        if builder.build_epoch(number).digest != digest:
            return False, f"epoch {number} differs in order or limits"
    return True, "the plan follows from these lengths and settings"
