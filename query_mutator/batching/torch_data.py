"""Plans in torch: a resumable batch sampler, a data set that cuts and packs, collators, attention masks.

B rows, L tokens a row. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from query_mutator.batching.distributed.checkpoint import CheckpointPosition
from query_mutator.batching.generation.collate import default_collate
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.planning.layout import (
    IGNORE_LABEL,
    PADDING_SEGMENT,
    labels_of,
    lay_out,
    packed_length,
    segment_begins,
    segment_positions,
)
from query_mutator.batching.samples.schema import Sample
from query_mutator.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Row(NamedTuple):
    """A sample's key and the range of its tokens that count (stop −1: to its end); `weight` 0 removes its loss."""

    key: int | str
    start: int = 0
    stop: int = -1
    weight: int = 1


Key = int | str | Row
Batch = list[Key] | list[list[Key]]


class PlanBatchSampler(Sampler[Batch]):
    """Yield the data set's keys of each microbatch, for `DataLoader(batch_sampler=...)`.

    Keys are positions if the plan was built from a list of lengths, else ids; `dataset_ids` turns ids into positions.
    A plan with packs yields lists of lists; cut samples and filler steps are `Row` records: `PlanDataset` reads all of
    these. Iteration covers the epoch of `set_epoch`; the state is two numbers, so resuming takes no time.
    """

    def __init__(self, plan: BatchPlan, *, epoch: int | None = None, dataset_ids: Sequence[str] | None = None) -> None:
        super().__init__()
        self.plan = plan
        self._places = None if dataset_ids is None else _places(plan, dataset_ids)
        self._epoch = next(iter(plan.epochs), 0) if epoch is None else epoch
        self._next = 0
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that iteration yields."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch that iteration yields; the epoch of a loaded state keeps its place."""
        self.plan.get_epoch(epoch)
        if epoch != self._epoch:
            self._epoch, self._next, self._resumed = epoch, 0, False

    def __len__(self) -> int:
        return self.plan.get_epoch(self._epoch).num_microbatches

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.plan.get_epoch(self._epoch)
        if not self._resumed:
            self._next = 0
        self._resumed = False
        while self._next < epoch.num_microbatches:
            self._next += 1
            yield self._batch(epoch, self._next - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch yielded, with the plan's fingerprint, rank and world size.

        A DataLoader with workers prefetches batches: use the state of torchdata's StatefulDataLoader, or pass the
        number of batches trained on to `state_at`.
        """
        return self.state_at(self._next)

    def state_at(self, microbatch_idx: int) -> dict[str, Any]:
        """Return the state after this many batches of the epoch."""
        return CheckpointPosition.at(self.plan, self._epoch, microbatch_idx).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where the state was taken; raise CheckpointError for another plan, rank or world size."""
        position = CheckpointPosition.from_dict(state)
        here = CheckpointPosition.at(self.plan, position.epoch, position.microbatch_idx)
        if here != position.model_copy(update={"global_step": here.global_step}):
            raise CheckpointError(
                "the state belongs to another plan or shard; use resume_shard to resume on other ranks"
            )
        count = self.plan.get_epoch(position.epoch).num_microbatches
        if position.microbatch_idx > count:
            raise CheckpointError(f"the state has {position.microbatch_idx} finished batches, the epoch has {count}")
        self._epoch, self._next, self._resumed = position.epoch, position.microbatch_idx, True

    def _batch(self, epoch: EpochPlan, number: int) -> Batch:
        # Plain keys for whole samples; rows with a range for cut ones, with weight 0 for fillers.
        samples, starts, stops = epoch.context.cuts.resolve(epoch.units_of(number))
        keys: list[Key] = self._keys(samples)
        filler = epoch.is_padding(number)
        if starts is not None or filler:
            begins = [0] * len(keys) if starts is None else starts.tolist()
            ends = [-1] * len(keys) if stops is None else stops.tolist()
            weight = 0 if filler else 1
            keys = [Row(k, b, e, weight) for k, b, e in zip(keys, begins, ends, strict=True)]  # type: ignore[arg-type]
        sizes = epoch.pack_sizes_of(number)
        if sizes is None:
            return keys
        limits = np.cumsum(sizes).tolist()
        return [keys[end - size : end] for end, size in zip(limits, sizes.tolist(), strict=True)]

    def _keys(self, samples: NDArray[Any]) -> list[Key]:
        ids = self.plan.ids
        if self._places is not None:
            return list(self._places[samples].tolist())
        return list((samples + ids.first).tolist() if ids.is_range else ids.take(samples))


def _places(plan: BatchPlan, dataset_ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the position in the data set of every id of the plan."""
    place_of = {one: place for place, one in enumerate(dataset_ids)}
    if len(place_of) != len(dataset_ids):
        raise UsageError("dataset_ids contains an id twice; ids must be unique")
    ids = plan.ids.to_list()
    missing = [one for one in ids if one not in place_of]
    if missing:
        raise UsageError(f"the data set lacks sample {missing[0]!r} of the plan ({len(missing)} in all)")
    return np.fromiter((place_of[one] for one in ids), np.int64, len(ids))


class PlanDataset(Dataset[Any]):
    """Samples by the keys of `PlanBatchSampler`: positions or ids, `Row` cuts, lists of either for packs."""

    def __init__(self, samples: Sequence[Sample] | Mapping[str, Sample]) -> None:
        self._samples = samples
        self._place_of: dict[str, int] = {}
        if not isinstance(samples, Mapping) and isinstance(samples, (list, tuple)):
            self._place_of = {one.meta.sample_id: place for place, one in enumerate(samples)}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, key: Key | list[Key]) -> Sample | list[Sample]:
        if isinstance(key, list):
            return [self._one(one) for one in key]
        return self._one(key)

    def _one(self, key: Key) -> Sample:
        row = key if isinstance(key, Row) else Row(key)
        sample = self._find(row.key)
        if row.start == 0 and row.stop == -1 and row.weight:
            return sample
        stop = sample.length if row.stop == -1 else row.stop
        if stop > sample.length:
            raise UsageError(
                f"sample {row.key!r} has {sample.length} tokens, the plan was built for {stop}; rebuild the plan"
            )
        cut = sample.cut(row.start, stop)
        return cut if row.weight else cut.model_copy(update={"loss_mask": np.zeros_like(cut.loss_mask)})

    def _find(self, key: int | str) -> Sample:
        if isinstance(self._samples, Mapping):
            return self._samples[str(key)]
        return self._samples[self._place_of[key] if isinstance(key, str) else key]


class PaddedCollator:
    """Pad samples into one batch of tensors.

    Gives int64 [B, L] `input_ids`, `labels` (−100 where there is no loss, and at every row's first token, which
    nothing precedes), `attention_mask` (1 = real), `position_ids` (0 in padding); L is the longest row rounded up
    to `multiple`, or `length` for batches of one shape.
    """

    def __init__(self, pad_token_id: int = 0, *, multiple: int = 8, length: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = multiple
        self.length = length

    def __call__(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        longest = max(sample.length for sample in samples)
        size = self.length or -(-longest // self.multiple) * self.multiple
        if longest > size:
            raise UsageError(f"a sample of {longest} tokens does not fit length={size}; truncate it or raise length")
        arrays = default_collate(samples, size, self.pad_token_id)
        labels = labels_of(arrays["input_ids"], arrays.pop("loss_mask"))
        labels[:, 0] = IGNORE_LABEL
        return _tensors(**arrays, labels=labels)


def _tensors(**arrays: NDArray[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


class PackedCollator:
    """Lay packs (lists of samples) out as rows of one batch with separate segments.

    Gives what `PaddedCollator` gives, positions counted from 0 in every segment and labels masked at its first token,
    and `segment_ids` int64 [B, L] (−1 in padding). For variable-length kernels over the flattened [B * L] tokens:
    `cu_seqlens` int32 and `max_seqlen`; the padding at a row's end counts as a sequence there. With `flat` all
    segments form one row, padded only to `multiple`.
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        *,
        max_length: int | None = None,
        multiple: int = 8,
        flat: bool = False,
        separator_token_id: int | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.multiple = multiple
        self.flat = flat
        self.separator_token_id = separator_token_id

    def __call__(self, packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        packs = [[sample for pack in packs for sample in pack]] if self.flat else packs
        longest = max(packed_length(pack, self.separator_token_id) for pack in packs)
        size = self.max_length if self.max_length and not self.flat else -(-longest // self.multiple) * self.multiple
        if longest > size:
            raise UsageError(f"a pack of {longest} tokens does not fit max_length={size}; raise max_length")
        rows = lay_out(packs, size, self.pad_token_id, self.separator_token_id)
        tensors: dict[str, Any] = _tensors(
            input_ids=rows.input_ids,
            labels=labels_of(rows.input_ids, rows.loss_mask),
            attention_mask=rows.segment_ids != PADDING_SEGMENT,
            position_ids=segment_positions(rows.segment_ids),
            segment_ids=rows.segment_ids,
        )
        bounds = np.append(segment_begins(rows.segment_ids), rows.segment_ids.size)
        tensors["cu_seqlens"] = torch.from_numpy(bounds.astype(np.int32))
        tensors["max_seqlen"] = int(np.diff(bounds).max())
        return tensors


def varlen_kwargs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of transformers' flash attention for a packed batch."""
    bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    return {**dict.fromkeys(names, bounds), "max_length_q": longest, "max_length_k": longest}


def sdpa_block_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return bool [B, 1, L, L] for scaled_dot_product_attention: True where a token may attend.

    Tokens attend to their own segment. A padding token attends to itself, because a row without any True gives NaN.
    """
    segments = segment_ids
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments != PADDING_SEGMENT)[:, :, None]
    length = segments.shape[1]
    if causal:
        mask &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mask |= torch.eye(length, dtype=torch.bool, device=segments.device)
    return mask[:, None]


def flex_block_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> BlockMask:
    """Return the mask of `sdpa_block_mask` for FlexAttention, which skips blocks without any True."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_attend(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (segment_ids[b, q] == segment_ids[b, k]) & (segment_ids[b, q] != PADDING_SEGMENT)
        return ((same & (q >= k)) if causal else same) | (q == k)

    rows, length = segment_ids.shape
    return create_block_mask(may_attend, rows, None, length, length, device=str(segment_ids.device))
