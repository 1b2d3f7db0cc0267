"""Build plans: lengths and settings in, epochs of microbatches out.

A batch is filled so: shuffle the items (samples, or packs of them), sort within windows, cut at the budget, shuffle the
batches. n items, B batches.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.core.buckets import OverlongPolicy, OverlongReport, fit_lengths
from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.planning.batch_plan import BatchPlan, BatchPlanMeta, EpochPlan
from query_mutator.batching.planning.packing import PackingConfig, Packs, pack_lengths
from query_mutator.batching.planning.predictability import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.records import IndexArray, index_type, offsets_of, permutation, ranges_of, sums_of
from query_mutator.batching.sync import to_async
from query_mutator.errors import UsageError


class Batches(NamedTuple):
    """Items in batch order [kept]; batch b has order[offsets[b]:offsets[b+1]], padded to max_len[b]."""

    order: IndexArray
    offsets: IndexArray
    max_len: IndexArray
    bucket: IndexArray


def fill_batches(lengths: NDArray[Any], config: BatchingConfig, *, seed: tuple[int, ...]) -> Batches:
    """Return the batches of one epoch; the order of items [n] and of batches follows from `seed` alone.

    The padded row of every item must fit the token budget on its own.
    """
    # 0, 1: separate random streams for items and for batches (2 is for packs)
    order = permutation(len(lengths), *seed, 0)
    batches = (_fill_buckets if config.is_predictable else _fill_windows)(lengths, order, config)
    if config.interleave_buckets:
        return _arrange(batches, permutation(len(batches.max_len), *seed, 1))
    return _arrange(batches, np.argsort(batches.bucket, kind="stable"))


def _fill_windows(lengths: NDArray[Any], order: IndexArray, config: BatchingConfig) -> Batches:
    """Cut sorted windows; pool the remainders at the windows' ends and cut them in windows twice as wide."""
    parts: list[Batches] = []
    window = config.window
    while True:
        # 1. Sort every window by length, longest first, and cut it into batches.
        order = order[_window_sort(lengths[order], window)]
        here = lengths[order]
        edges = [*range(0, len(order), window), len(order)]
        starts, sizes, full = _cut(_longest_pads(here, config), edges, config)
        # 2. Keep full batches; the last window also keeps its remainder, unless drop_last.
        last = len(edges) <= 2
        taken = full if last and config.drop_last else full | last
        parts.append(_batches(order, here, starts[taken], sizes[taken], config))
        if last:
            return _join(parts)
        # 3. Repeat with the remainders of all windows.
        order = order[ranges_of(starts[~full], sizes[~full])]
        window *= 2  # one batch may hold a whole window, which then stays a remainder until the window is wider


def _fill_buckets(lengths: NDArray[Any], order: IndexArray, config: BatchingConfig) -> Batches:
    """Cut every bucket in shuffled order, padded to the bucket."""
    assert config.bucket_pads is not None
    bounds = config.bucket_spec.upper_bounds
    buckets = np.searchsorted(bounds, lengths[order]).astype(np.int16)
    order = order[np.argsort(buckets, kind="stable")]
    edges = offsets_of(np.bincount(buckets, minlength=len(bounds))).tolist()
    starts, sizes, full = _cut(np.repeat(np.array(config.bucket_pads), np.diff(edges)), edges, config)
    taken = full if config.drop_last else np.ones(len(full), bool)
    return _batches(order, lengths[order], starts[taken], sizes[taken], config)


def _longest_pads(lengths: NDArray[Any], config: BatchingConfig) -> NDArray[Any]:
    """Return the padded length of a batch whose longest row has this length, for every length."""
    multiple = config.pad_multiple
    pads: NDArray[Any] = np.minimum((lengths + (multiple - 1)) // multiple * multiple, config.limit)
    return pads


def _window_sort(lengths: NDArray[Any], window: int) -> IndexArray:
    """Return positions that put every window of `lengths` in descending order; equal lengths keep their order."""
    count = len(lengths)
    whole = count // window * window
    order = np.empty(count, index_type(count))
    if whole:
        order[:whole] = _sort_rows(lengths[:whole].reshape(-1, window)).reshape(-1)
    if whole < count:
        order[whole:] = _sort_rows(lengths[None, whole:])[0] + whole
    return order


def _sort_rows(lengths: NDArray[Any]) -> IndexArray:
    """Return positions in the flattened array [w, window] that put each row in descending order."""
    rows, width = lengths.shape
    longest = int(lengths.max())
    bits = max(width - 1, 1).bit_length()
    # One sort of unique integers (length, then place) is several times faster than an argsort with ties.
    wide: Any = np.uint32 if longest.bit_length() + bits <= 32 else np.uint64
    keys: NDArray[Any] = (longest - lengths).astype(wide) << wide(bits)
    keys |= np.arange(width, dtype=wide)
    keys.sort(axis=1)
    keys &= wide((1 << bits) - 1)
    begins = np.arange(rows, dtype=index_type(lengths.size)) * width
    order: IndexArray = keys.astype(begins.dtype) + begins[:, None]
    return order


def _cut(
    pads: NDArray[Any], edges: list[int], config: BatchingConfig
) -> tuple[IndexArray, IndexArray, NDArray[np.bool_]]:
    """Return start, size and fullness of the batches that fill the budget from the front of each stretch.

    A batch that begins at i is padded to pads[i], so pads must not rise within a stretch. A batch is full if the
    budget ended it, not the stretch.
    """
    budget, pad_at = config.token_budget, pads.item
    most = config.max_samples or budget
    starts: list[int] = []
    full: list[bool] = []
    for begin, end in pairwise(edges):
        position = begin
        while position < end:
            reach = position + max(1, min(budget // pad_at(position), most))
            starts.append(position)
            full.append(reach <= end)
            position = min(reach, end)
    index = np.array(starts, np.int64)
    return index, np.diff(index, append=edges[-1]), np.array(full, bool)


def _batches(
    order: IndexArray, lengths: NDArray[Any], starts: IndexArray, sizes: IndexArray, config: BatchingConfig
) -> Batches:
    """Return batches of stretches of `order`; the first row of each is its longest, or any row of its bucket."""
    longest = lengths[starts]
    bucket = np.searchsorted(config.bucket_spec.upper_bounds, longest)
    pads = config.bucket_pads
    max_len = _longest_pads(longest, config) if pads is None else np.array(pads)[bucket]
    return Batches(order[ranges_of(starts, sizes)], offsets_of(sizes), max_len.astype(np.int64), bucket)


def _join(parts: list[Batches]) -> Batches:
    order, sizes, max_len, bucket = (
        np.concatenate(columns)
        for columns in zip(*((one.order, np.diff(one.offsets), one.max_len, one.bucket) for one in parts), strict=True)
    )
    return Batches(order, offsets_of(sizes), max_len, bucket)


def _arrange(batches: Batches, order: IndexArray) -> Batches:
    """Return the batches in another order."""
    sizes = np.diff(batches.offsets)[order]
    kept = batches.order[ranges_of(batches.offsets[:-1][order], sizes)]
    return Batches(kept, offsets_of(sizes), batches.max_len[order], batches.bucket[order])


class BatchPlanBuilder:
    """Form the microbatches of every epoch.

    `lengths` may be a mapping, a list or array, or a length cache. With `pack_config` rows are packs.
    """

    def __init__(
        self,
        lengths: LengthSource,
        batching_config: BatchingConfig | None = None,
        dataset_hash: str = "",
        tokenizer_hash: str = "",
        pack_config: PackingConfig | None = None,
    ) -> None:
        self.config = config = batching_config or BatchingConfig()
        self.pack_config = pack_config
        self.dataset_hash = dataset_hash
        self.tokenizer_hash = tokenizer_hash
        self._table = as_lengths(lengths)
        limit, policy = config.limit, config.overlong
        if pack_config is not None:
            limit = pack_config.max_length
            policy = pack_config.overlong if pack_config.overlong is not OverlongPolicy.ERROR else policy
            if limit > config.token_budget:
                raise UsageError(
                    f"packs of max_length={limit} do not fit token_budget={config.token_budget}; raise the budget"
                )
        self._fitted = fit_lengths(self._table, limit, policy)

    def build_sync(self, num_epochs: int = 1) -> BatchPlan:
        """Return the plan of this many epochs, each in a different order."""
        if num_epochs < 1:
            raise UsageError(f"num_epochs={num_epochs} must be at least 1")
        meta = BatchPlanMeta(
            dataset_hash=self.dataset_hash,
            tokenizer_hash=self.tokenizer_hash,
            config=self.config,
            pack_config=self.pack_config,
            num_epochs=num_epochs,
            num_samples=len(self._table),
            lengths_hash=self._table.digest,
            overlong=self.overlong,
        )
        return BatchPlan(meta, {number: self.build_epoch(number) for number in range(num_epochs)})

    build = to_async(build_sync)

    @property
    def overlong(self) -> OverlongReport:
        """Counts of over-long samples and how they were handled."""
        return self._fitted.report

    @property
    def kept_lengths(self) -> NDArray[np.int32]:
        """Lengths of the samples that take part."""
        return self._fitted.lengths[self._fitted.kept]

    def build_epoch(self, epoch: int) -> EpochPlan:
        """Return one epoch; the order follows from the seed and the epoch's number."""
        seed = (self.config.seed, epoch)
        lengths, samples, _ = self._fitted
        if self.pack_config is None:
            batches = fill_batches(self.kept_lengths, self.config, seed=seed)
            order, offsets, pack_offsets = samples[batches.order], batches.offsets, None
            begins = offsets[:-1]
        else:
            # Packs become the items; the samples are shuffled first, so that packs differ between epochs.
            samples = samples[permutation(len(samples), *seed, 2)]
            packs, rows = self._packs(lengths[samples], self.pack_config)
            batches = fill_batches(rows, _row_config(self.config, self.pack_config), seed=seed)
            sizes = np.diff(packs.offsets)[batches.order]
            order = samples[packs.order][ranges_of(packs.offsets[batches.order], sizes)]
            offsets, pack_offsets = batches.offsets, offsets_of(sizes)
            begins = pack_offsets[offsets[:-1]]
        return EpochPlan(
            epoch=epoch,
            seed=self.config.seed,
            order=order.astype(np.int32, copy=False),
            offsets=offsets,
            pack_offsets=pack_offsets,
            max_len=batches.max_len,
            bucket=batches.bucket,
            tokens=sums_of(lengths[order], begins),
            num_dropped=len(samples) - len(order),
            ids=self._table.ids,
        )

    def _packs(self, lengths: NDArray[np.int32], config: PackingConfig) -> tuple[Packs, IndexArray]:
        """Return the packs of samples of these lengths, and the length of each row."""
        if not len(lengths):
            return Packs(np.empty(0, np.int32), np.zeros(1, np.int64)), np.empty(0, np.int32)
        packs = pack_lengths(lengths, config)
        sizes = np.diff(packs.offsets)
        if config.pad_to_max:
            return packs, np.full(len(sizes), config.max_length)
        tokens = sums_of(lengths[packs.order], packs.offsets[:-1])
        return packs, tokens + int(config.add_separator) * (sizes - 1)


def _row_config(config: BatchingConfig, packing: PackingConfig) -> BatchingConfig:
    """Return how batches of packs are filled: one bucket, up to the longest row."""
    fixed = packing.pad_to_max or config.is_predictable
    return config.changed(
        mode=BatchingMode.PREDICTABLE if fixed else BatchingMode.THROUGHPUT,
        pad_policy=PadPolicy.PAD_TO_BUCKET if fixed else PadPolicy.PAD_TO_MAX,
        bucket_edges=(packing.max_length,),
        overflow_max=packing.max_length,
        bucket_max_lengths=None,
    )


def verify_batch_plan(plan: BatchPlan, lengths: LengthSource) -> tuple[bool, str]:
    """Rebuild the plan from its own settings; return whether it is the same, and the first difference."""
    meta = plan.meta
    if meta.shard is not None:
        return False, "the plan is a shard; verify the whole plan"
    try:
        builder = BatchPlanBuilder(lengths, meta.config, meta.dataset_hash, meta.tokenizer_hash, meta.pack_config)
        rebuilt = builder.build_sync(meta.num_epochs)
    except UsageError as error:
        return False, f"no plan can be built from these lengths: {error}"
    for name in ("num_samples", "lengths_hash", "overlong", "version"):
        if getattr(rebuilt.meta, name) != getattr(meta, name):
            return False, f"{name} differs: planned {getattr(meta, name)}, now {getattr(rebuilt.meta, name)}"
    for number, digest in plan.digests.items():
        if rebuilt.digests.get(number) != digest:
            return False, f"epoch {number} differs in order or limits"
    return True, "the plan follows from these lengths and settings"
