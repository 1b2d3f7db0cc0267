"""Batches as arrays: collated from token rows, and stored as one file per batch.

    DIR/plan/                       the plan
    DIR/epoch_0/batch_000000.npz    the arrays of one batch, compressed; ids as text, nothing is pickled
    DIR/manifest.json               the plan's fingerprint and what is there, written last: without it nothing is read

R rows (samples or packs), L columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import Field

from query_mutator.batching.files import reading
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import (
    BatchPlan,
    EpochPlan,
    MicrobatchSpec,
    is_batch_plan,
    load_batch_plan,
    save_batch_plan,
)
from query_mutator.batching.planning.packing import (
    PADDING_SEGMENT,
    PackingConfig,
    labels_of,
    lay_out,
    segment_begins,
    segment_positions,
)
from query_mutator.batching.records import Int32Matrix, Record, UInt8Matrix, offsets_of
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, read_checked_json, write_checked_json

Batch = dict[str, Any]
#: Turns sample dictionaries (`input_ids`, `loss_mask`), a length and a padding id into arrays.
CollateFn = Callable[[Sequence[Mapping[str, Any]], int, int], Mapping[str, NDArray[Any]]]

_ABOUT = ("bucket_id", "max_len", "index", "epoch", "is_padding")
_MANIFEST = "manifest.json"


class CollatedBatch(Record):
    """A batch ready for training; its arrays are also available by name, as `batch["labels"]`.

    All matrices are [R, L]. Packs have `segment_ids` (−1 in padding); `sample_ids` lists their samples row by row. A
    filler microbatch has `is_padding`: give it loss weight 0. Made without `attention_mask` and `position_ids`, all
    tokens are attended to, at their places in the row.
    """

    input_ids: Int32Matrix
    loss_mask: UInt8Matrix
    attention_mask: UInt8Matrix = Field(default_factory=lambda fields: np.ones_like(fields["input_ids"], np.uint8))
    position_ids: Int32Matrix = Field(default_factory=lambda fields: np.indices(fields["input_ids"].shape)[1])
    segment_ids: Int32Matrix | None = None
    sample_ids: tuple[str, ...]
    bucket_id: int = 0
    max_len: int = Field(ge=1)
    index: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)
    is_padding: bool = False
    extra: dict[str, Any] = Field(default_factory=dict)  # arrays of a user's collate function

    @property
    def labels(self) -> NDArray[np.int64]:
        """`input_ids` where there is a loss, −100 elsewhere, int64 [R, L]."""
        return labels_of(self.input_ids, self.loss_mask)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.input_ids)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Start of each sequence in the concatenated rows without padding, int32 [number of sequences + 1]."""
        return offsets_of(self._lengths()).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return int(self._lengths().max())

    def _lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sequence, row by row."""
        if self.segment_ids is None:
            counts: NDArray[np.int64] = self.attention_mask.sum(axis=1, dtype=np.int64)
            return counts
        begins = segment_begins(self.segment_ids)
        lengths: NDArray[np.int64] = np.diff(begins, append=self.segment_ids.size)
        real: NDArray[np.bool_] = self.segment_ids.reshape(-1)[begins] != PADDING_SEGMENT
        return lengths[real]

    def __getitem__(self, name: str) -> Any:
        if name in self.extra:
            return self.extra[name]
        if name not in (*type(self).model_fields, "labels", "cu_seqlens", "max_seqlen"):
            raise KeyError(name)
        return getattr(self, name)

    def arrays(self) -> Batch:
        """Return the arrays by name, labels among them."""
        names = ("input_ids", "loss_mask", "attention_mask", "position_ids", "segment_ids", "labels")
        return {**{name: self[name] for name in names if self[name] is not None}, **self.extra}

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of arrays, which `np.savez` saves and `from_npz` loads without pickle."""
        fields = {name: np.array(self[name]) for name in _ABOUT}
        arrays = {name: array for name, array in self.arrays().items() if name != "labels" and name not in self.extra}
        extra = {f"extra.{name}": array for name, array in self.extra.items()}
        return {**arrays, **extra, **fields, "sample_ids": np.array(self.sample_ids, dtype=np.str_)}

    @classmethod
    def from_npz(cls, data: Mapping[str, Any]) -> Self:
        """Return the batch of `to_dict`, from a mapping or an opened `.npz` file."""
        fields = {name: data[name] for name in data if not name.startswith("extra.")}
        fields |= {name: fields[name].item() for name in _ABOUT if name in fields}
        fields["sample_ids"] = tuple(str(name) for name in fields["sample_ids"])
        extra = {name.partition(".")[2]: data[name] for name in data if name.startswith("extra.")}
        return cls(**fields, extra=extra)


# --- collating -------------------------------------------------------------------------------------------------------


def pad_sequences(
    sequences: Sequence[Sequence[int] | NDArray[Any]],
    pad_value: int,
    max_length: int | None = None,
    dtype: DTypeLike = np.int32,
) -> NDArray[Any]:
    """Return the sequences as rows of a matrix; raise UsageError for one longer than `max_length`."""
    lengths = [len(one) for one in sequences]
    width = max(lengths, default=0) if max_length is None else max_length
    if max(lengths, default=0) > width:
        place = int(np.argmax(lengths))
        raise UsageError(
            f"sequence {place} has {lengths[place]} items, more than max_length={width}; truncate it first"
        )
    padded = np.full((len(sequences), width), pad_value, dtype=dtype)
    for row, one in zip(padded, sequences, strict=True):
        row[: len(one)] = one
    return padded


def default_collate(samples: Sequence[Any], max_len: int, pad_id: int = 0) -> Batch:
    """Return `input_ids`, `loss_mask`, `attention_mask` and `position_ids` [R, max_len]; longer samples are cut."""
    rows = [TokenRow.of(sample).cut(max_len) for sample in samples]
    lengths = np.array([row.length for row in rows])
    columns = np.arange(max_len)
    inside = columns < lengths[:, None]
    return {
        "input_ids": pad_sequences([row.input_ids for row in rows], pad_id, max_len),
        "loss_mask": pad_sequences([row.loss_mask for row in rows], 0, max_len, np.uint8),
        "attention_mask": inside.astype(np.uint8),
        "position_ids": np.where(inside, columns, 0).astype(np.int32),
    }


def collate_microbatch(
    spec: MicrobatchSpec,
    rows: Sequence[TokenRow],
    *,
    epoch: int = 0,
    pad_id: int = 0,
    pack_config: PackingConfig | None = None,
) -> CollatedBatch:
    """Return the batch of a microbatch from the tokens of its samples, in the order of `spec.samples`.

    Rows longer than the microbatch are cut, as the policy "truncate" plans them; a number of tokens other than the
    planned one is a UsageError. The first token of a row or of a pack's segment has no loss: nothing predicts it.
    """
    pieces = [row.cut(spec.max_len) for row in rows]
    found = sum(piece.length for piece in pieces)
    if spec.total_tokens not in (0, found):
        raise UsageError(
            f"microbatch {spec.index} has {found} tokens, the plan was made for {spec.total_tokens}; "
            "give the samples that the plan was made for"
        )
    if spec.packs is None:
        arrays = default_collate(pieces, spec.max_len, pad_id)
        arrays["loss_mask"][:, 0] = 0
    else:
        remaining = iter(pieces)
        packs = [list(islice(remaining, len(pack))) for pack in spec.packs]
        laid = lay_out(packs, spec.max_len, pad_id, None if pack_config is None else pack_config.separator)
        inside = laid.segment_ids != PADDING_SEGMENT
        positions = segment_positions(laid.segment_ids)
        arrays = {**laid._asdict(), "attention_mask": inside.astype(np.uint8), "position_ids": positions}
    return CollatedBatch(
        **arrays,
        sample_ids=spec.samples,
        bucket_id=spec.bucket_id,
        max_len=spec.max_len,
        index=spec.index,
        epoch=epoch,
        is_padding=spec.is_padding,
    )


# --- files -----------------------------------------------------------------------------------------------------------


def has_batches(path: Path) -> bool:
    """Return whether a folder holds batches of a plan, finished or not."""
    return is_batch_plan(path / "plan")


def _batch_path(folder: Path, epoch: int, place: int) -> Path:
    return folder / f"epoch_{epoch}" / f"batch_{place:06d}.npz"


def _read_batch(path: Path, spec: MicrobatchSpec) -> CollatedBatch:
    """Load one batch; raise UsageError with its name for a damaged file and for the batch of another microbatch."""
    try:
        with reading(path), np.load(path, allow_pickle=False) as data:
            batch = CollatedBatch.from_npz(data)
    except UsageError:
        raise
    except Exception as error:  # a damaged archive fails in many ways
        raise UsageError(f"{path} is not a whole batch, it was truncated or edited: {error}") from error
    if (batch.sample_ids, batch.index, batch.max_len) != (spec.samples, spec.index, spec.max_len):
        raise UsageError(f"{path} belongs to another plan")
    return batch


class BatchWriter:
    """Write the batches of `plan`.

    `samples` maps ids to samples (`Sample`, `TokenRow` or a mapping with `input_ids` and `loss_mask`); a `JsonlSamples`
    is read row by row. `collate_fn` adds arrays. Raises UsageError, without writing a manifest, for missing
    samples and for samples of other lengths than the planned ones.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: Mapping[str, Any],
        output_dir: str | Path,
        collate_fn: CollateFn | None = None,
        pad_id: int = 0,
    ) -> None:
        self.plan = plan
        self.samples = samples
        self.output_dir = Path(output_dir)
        self.collate_fn = collate_fn
        self.pad_id = pad_id

    def write_all(self) -> list[Path]:
        """Write all missing or damaged files and return all files."""
        return self._write(list(self.plan.epochs))

    def write_epoch(self, epoch: int) -> list[Path]:
        """Write the epochs up to this one and return their files."""
        self.plan.get_epoch(epoch)
        return self._write([number for number in self.plan.epochs if number <= epoch])

    def _write(self, numbers: list[int]) -> list[Path]:
        used = np.unique(np.concatenate([self.plan.get_epoch(number).order for number in numbers]))
        missing = [name for name in self.plan.ids.take(used) if name not in self.samples]
        if missing:
            raise UsageError(f"{len(missing)} samples of the plan are missing; the first is {missing[0]!r}")
        self._begin()
        files = [
            self._write_batch(number, place, spec)
            for number in numbers
            for place, spec in enumerate(self.plan.iter_epoch(number))
        ]
        about = {"fingerprint": self.plan.fingerprint, "num_epochs": len(numbers), "total_batches": len(files)}
        write_checked_json(self.output_dir / _MANIFEST, about)
        return files

    def _begin(self) -> None:
        """Save the plan, or resume in a folder that has it; raise UsageError for a folder of anything else."""
        folder = self.output_dir / "plan"
        if folder.exists():
            known = load_batch_plan(folder).fingerprint
            if known != self.plan.fingerprint:
                raise UsageError(f"{self.output_dir} has the batches of plan {known[:16]}; write to another folder")
        elif self.output_dir.exists() and any(self.output_dir.iterdir()):
            raise UsageError(f"{self.output_dir} is not a folder of batches; write to another folder")
        else:
            save_batch_plan(self.plan, folder)

    def _write_batch(self, number: int, place: int, spec: MicrobatchSpec) -> Path:
        path = _batch_path(self.output_dir, number, place)
        if path.exists():
            try:
                _read_batch(path, spec)
                return path
            except UsageError:
                pass  # damaged: written again
        rows = [TokenRow.of(self.samples[name]) for name in spec.samples]
        batch = collate_microbatch(spec, rows, epoch=number, pad_id=self.pad_id, pack_config=self.plan.meta.pack_config)
        if self.collate_fn is not None:
            own = self.collate_fn([row._asdict() for row in rows], spec.max_len, self.pad_id)
            batch = batch.changed(extra=dict(own))
        with atomic_write(path) as file:
            np.savez_compressed(file, **batch.to_dict())
        return path


class BatchReader:
    """Read what a BatchWriter wrote: any batch of any epoch, checked as it is read; `plan` is the plan."""

    def __init__(self, batch_dir: str | Path) -> None:
        self.batch_dir = Path(batch_dir)
        if not (self.batch_dir / _MANIFEST).exists():
            raise UsageError(
                f"{self.batch_dir} has no {_MANIFEST}: it is no folder of batches, or its write was interrupted; "
                "write it again to finish it"
            )
        self.manifest = read_checked_json(self.batch_dir / _MANIFEST)
        self.plan = load_batch_plan(self.batch_dir / "plan")
        if self.plan.fingerprint != self.manifest.get("fingerprint"):
            raise UsageError(f"{self.batch_dir / 'plan'} is not the plan the batches were written for")

    @property
    def num_epochs(self) -> int:
        """Number of epochs in the folder."""
        return int(self.manifest["num_epochs"])

    @property
    def epochs(self) -> list[int]:
        """Numbers of the epochs in the folder."""
        return list(self.plan.epochs)[: self.num_epochs]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan."""
        return self.plan.fingerprint

    def verify_fingerprint(self, expected: str) -> bool:
        """Return whether the batches belong to the plan with this full fingerprint."""
        return bool(expected) and expected == self.fingerprint

    def get_batch(self, epoch: int, index: int) -> CollatedBatch:
        """Return the batch at a position of an epoch; raise IndexError for a position outside it."""
        return self._batch(epoch, index, self._epoch(epoch)[index])

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[CollatedBatch]:
        """Yield the batches of an epoch, from position `start`."""
        for _, batch in self.iter_epoch_specs(epoch, start):
            yield batch

    def iter_epoch_specs(self, epoch: int, start: int = 0) -> Iterator[tuple[MicrobatchSpec, CollatedBatch]]:
        """Yield each microbatch of the plan with its batch."""
        plan = self._epoch(epoch)
        for place in range(start, plan.num_microbatches):
            spec = plan[place]
            yield spec, self._batch(epoch, place, spec)

    def _epoch(self, epoch: int) -> EpochPlan:
        if epoch not in self.epochs:
            raise FileNotFoundError(f"epoch {epoch} is not in {self.batch_dir}, which has {self.epochs}")
        return self.plan.get_epoch(epoch)

    def _batch(self, epoch: int, place: int, spec: MicrobatchSpec) -> CollatedBatch:
        return _read_batch(_batch_path(self.batch_dir, epoch, place), spec)
