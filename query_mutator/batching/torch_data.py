"""Plans in torch: a batch sampler that resumes at once, a data set that cuts and packs, collators, attention masks.

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
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.planning.packing import IGNORE_LABEL, PADDING_SEGMENT
from query_mutator.batching.samples import Sample
from query_mutator.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Row(NamedTuple):
    """A sample's key and which of its tokens count (stop −1: to its end); `weight` 0 takes its loss away."""

    key: int | str
    start: int = 0
    stop: int = -1
    weight: int = 1


Key = int | str | Row
Batch = list[Key] | list[list[Key]]


class PlanBatchSampler(Sampler[Batch]):
    """Yields the data set's keys of one microbatch after the other, for `DataLoader(batch_sampler=...)`.

    Keys are positions where the plan was built from a list of lengths, else ids, unless `dataset_ids` says where each
    id stands. A plan with packs yields lists of lists; cut samples and filler steps come as `Row`: `PlanDataset` reads
    all of these. Iterating goes through the epoch of `set_epoch`; the state is two numbers, so resuming costs nothing.
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
        """Choose the epoch that iteration yields; choosing the one a state was loaded for keeps its place."""
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

        A DataLoader with workers asks for batches ahead of training: take the state of torchdata's
        StatefulDataLoader then, or say with `state_at` how many batches were trained on.
        """
        return self.state_at(self._next)

    def state_at(self, microbatch_idx: int) -> dict[str, Any]:
        """Return the state of having yielded this many batches of the epoch."""
        return CheckpointPosition.at(self.plan, self._epoch, microbatch_idx).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; a state of another plan, rank or world size is a CheckpointError."""
        position = CheckpointPosition.from_dict(state)
        here = CheckpointPosition.at(self.plan, position.epoch, position.microbatch_idx)
        if here != position.model_copy(update={"global_step": here.global_step}):
            raise CheckpointError("the state belongs to another plan or shard; resume_shard resumes on other ranks")
        count = self.plan.get_epoch(position.epoch).num_microbatches
        if position.microbatch_idx > count:
            raise CheckpointError(f"the state says {position.microbatch_idx} batches are done, the epoch has {count}")
        self._epoch, self._next, self._resumed = position.epoch, position.microbatch_idx, True

    def _batch(self, epoch: EpochPlan, number: int) -> Batch:
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
    """Return for every id of the plan where it stands in the data set."""
    place_of = {one: place for place, one in enumerate(dataset_ids)}
    if len(place_of) != len(dataset_ids):
        raise UsageError("dataset_ids holds an id twice")
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
            raise UsageError(f"the plan counts {stop} tokens in sample {row.key!r}, it has {sample.length}")
        cut = slice(row.start, stop)
        return sample.model_copy(
            update={
                "input_ids": sample.input_ids[cut],
                "loss_mask": sample.loss_mask[cut] * np.uint8(row.weight),
                "segment_ids": None if sample.segment_ids is None else sample.segment_ids[cut],
            }
        )

    def _find(self, key: int | str) -> Sample:
        if isinstance(self._samples, Mapping):
            return self._samples[str(key)]
        return self._samples[self._place_of[key] if isinstance(key, str) else key]


class PaddedCollator:
    """Pads samples into one batch of tensors.

    Gives int64 [B, L] `input_ids`, `labels` (−100 where there is no loss, and at every row's first token, which
    nothing precedes), `attention_mask` (1 = real), `position_ids` (0 in padding); L is the longest row rounded up
    to `multiple`, or `length` where every batch is to have one shape.
    """

    def __init__(self, pad_token_id: int = 0, *, multiple: int = 8, length: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = multiple
        self.length = length

    def __call__(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        longest = max(sample.length for sample in samples)
        size = self.length or -(-longest // self.multiple) * self.multiple
        if longest > size:
            raise UsageError(f"a sample of {longest} tokens does not fit length={size}")
        input_ids = np.full((len(samples), size), self.pad_token_id, np.int64)
        labels = np.full((len(samples), size), IGNORE_LABEL, np.int64)
        mask = np.zeros((len(samples), size), np.int64)
        for row, sample in enumerate(samples):
            input_ids[row, : sample.length] = sample.input_ids
            labels[row, : sample.length] = _labels(sample)
            mask[row, : sample.length] = 1
        positions = (np.cumsum(mask, axis=1) - 1) * mask
        arrays = {"input_ids": input_ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _labels(sample: Sample) -> NDArray[np.int64]:
    labels = np.where(sample.loss_mask == 1, sample.input_ids, IGNORE_LABEL).astype(np.int64)
    labels[0] = IGNORE_LABEL
    return labels


class PackedCollator:
    """Lays packs (lists of samples) out as rows of one batch, every segment apart from the others.

    Gives what `PaddedCollator` gives, positions counted from 0 in every segment and labels masked at its first token,
    and `segment_ids` int64 [B, L] (−1 in padding). For kernels of variable length over the flattened [B * L] tokens:
    `cu_seqlens` int32 and `max_seqlen`; the padding at a row's end is a sequence of its own there. With `flat` all
    segments lie in one row, without padding but up to `multiple`.
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
        rows = [[sample for pack in packs for sample in pack]] if self.flat else [list(pack) for pack in packs]
        lengths = [self._segment_lengths(row) for row in rows]
        longest = max(sum(row) for row in lengths)
        size = self.max_length if self.max_length and not self.flat else -(-longest // self.multiple) * self.multiple
        if longest > size:
            raise UsageError(f"a pack of {longest} tokens does not fit max_length={size}")
        input_ids = np.full((len(rows), size), self.pad_token_id, np.int64)
        labels = np.full((len(rows), size), IGNORE_LABEL, np.int64)
        segments = np.full((len(rows), size), PADDING_SEGMENT, np.int64)
        positions = np.zeros((len(rows), size), np.int64)
        bounds: list[int] = [0]
        for number, (row, segment_lengths) in enumerate(zip(rows, lengths, strict=True)):
            begin = 0
            for segment, (sample, length) in enumerate(zip(row, segment_lengths, strict=True)):
                stop = begin + sample.length
                input_ids[number, begin:stop] = sample.input_ids
                labels[number, begin:stop] = _labels(sample)
                if length > sample.length and self.separator_token_id is not None:
                    input_ids[number, stop] = self.separator_token_id
                begin += length
                segments[number, begin - length : begin] = segment
                positions[number, begin - length : begin] = np.arange(length)
                bounds.append(number * size + begin)
            if begin < size:
                bounds.append((number + 1) * size)
        mask = (segments != PADDING_SEGMENT).astype(np.int64)
        arrays = {"input_ids": input_ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors["segment_ids"] = torch.from_numpy(segments)
        tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        tensors["max_seqlen"] = int(np.diff(bounds).max())
        return tensors

    def _segment_lengths(self, row: Sequence[Sample]) -> list[int]:
        """Return the length of every segment, a separator after each but the last counted in."""
        lengths = [sample.length + (self.separator_token_id is not None) for sample in row]
        lengths[-1] = row[-1].length
        return lengths


def varlen_kwargs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' flash attention takes for a packed batch: sequence limits and longest sequence."""
    bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    return {**dict.fromkeys(names, bounds), "max_length_q": longest, "max_length_k": longest}


def sdpa_block_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return bool [B, 1, L, L] for scaled_dot_product_attention: True where a token may attend.

    Tokens see their own segment alone. A padding token sees itself, because a row without any True gives NaN.
    """
    segments = segment_ids
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments != PADDING_SEGMENT)[:, :, None]
    length = segments.shape[1]
    if causal:
        mask &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mask |= torch.eye(length, dtype=torch.bool, device=segments.device)
    return mask[:, None]


def flex_block_mask(segment_ids: torch.Tensor, *, causal: bool = True) -> BlockMask:
    """Return the same as `sdpa_block_mask` for FlexAttention, whose blocks without any True cost nothing."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_attend(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (segment_ids[b, q] == segment_ids[b, k]) & (segment_ids[b, q] != PADDING_SEGMENT)
        return ((same & (q >= k)) if causal else same) | (q == k)

    rows, length = segment_ids.shape
    return create_block_mask(may_attend, rows, None, length, length, device=str(segment_ids.device))
