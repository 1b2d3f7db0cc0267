"""Batch stores: tokens are written once, batches composed when read, without the data set and its tokenizer.

    DIR/plan/               the plan
    DIR/tokens_00000.bin    samples in the order in which the plan first uses them: many batches per file,
                            ids as 16 bits where the vocabulary allows, masks as bits; no sample is stored twice
    DIR/collated_0_00000.bin    only with a user's collate function: its arrays, many batches per file
    DIR/progress.json       the files that are done; an interrupted write resumes after them
    DIR/manifest.json       all of the above with checksums, written last: without it nothing can be read

Every file is a checksummed safetensors file; no pickle is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import offsets_of
from query_mutator.batching.files import BatchFileError, read_arrays, write_arrays, write_checked_json
from query_mutator.batching.generation.collate import CollatedBatch, CollateFn, as_token_row, collate_microbatch
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.generation.token_store import (
    COLLATED_KIND,
    TOKENS_KIND,
    Manifest,
    ShardEntry,
    TokenStore,
    intact_files,
    read_manifest,
    token_arrays,
)
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.plan_files import check_plan, load_batch_plan, save_batch_plan
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError

T = TypeVar("T")

SHARD_TOKENS = 4_000_000  # about 9 MB with 16-bit ids


def first_uses(plan: BatchPlan, epochs: Sequence[int]) -> NDArray[np.int64]:
    """Return the positions in `plan.ids` that these epochs use, each once, in the order of first use."""
    known = np.zeros(len(plan.ids), dtype=bool)
    parts = [np.empty(0, np.int64)]
    for number in epochs:
        epoch = plan.get_epoch(number)
        positions = epoch.context.cuts.resolve(epoch.order)[0].astype(np.int64)
        new = positions[~known[positions]]
        # np.unique sorts; the indices of first occurrence restore the order of use.
        _, first = np.unique(new, return_index=True)
        new = new[np.sort(first)]
        known[new] = True
        parts.append(new)
    return np.concatenate(parts)


class BatchWriter:
    """Write what the batches of `plan` are composed of.

    `samples` maps ids to samples (`Sample`, `TokenRow` or a mapping with `input_ids` and `loss_mask`); a `JsonlSamples`
    is read row by row. Hashes, if given, must be those of the plan. Raises UsageError, without writing a manifest, for
    missing samples and for samples of other lengths than the planned ones.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: Mapping[str, Any],
        output_dir: str | Path,
        collate_fn: CollateFn | None = None,
        pad_id: int = 0,
        *,
        dataset_hash: str | None = None,
        tokenizer_hash: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        check_plan(plan, dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash)
        if shard_tokens < 1:
            raise UsageError(f"shard_tokens={shard_tokens} must be at least 1")
        self.plan = plan
        self.samples = samples
        self.output_dir = Path(output_dir)
        self.collate_fn = collate_fn
        self.pad_id = pad_id
        self.shard_tokens = shard_tokens
        self._shards: list[ShardEntry] = []

    def write_all(self) -> list[Path]:
        """Write all missing files and return all files; a complete store is left unchanged."""
        return self._write(list(self.plan.epochs))

    write_all_async = to_async(write_all)

    def write_epoch(self, epoch: int) -> list[Path]:
        """Write what the epochs up to this one need and return all files."""
        self.plan.get_epoch(epoch)
        return self._write([number for number in self.plan.epochs if number <= epoch])

    def _write(self, epochs: list[int]) -> list[Path]:
        positions = first_uses(self.plan, epochs)
        missing = [name for name in self.plan.ids.take(positions) if name not in self.samples]
        if missing:
            raise UsageError(f"{len(missing)} samples of the plan are missing; the first is {missing[0]!r}")
        # Resume after the files of an earlier write that are intact.
        self._shards = self._done()
        if not self._has("plan"):
            save_batch_plan(self.plan, self.output_dir / "plan")
        self._write_tokens(positions)
        # Read the tokens back: the lengths written must be the planned ones.
        store = TokenStore(self.output_dir, self._manifest(epochs).of(None), self.plan)
        for number in epochs:
            _check_lengths(self.plan, number, store)
            if self.collate_fn is not None:
                self._write_collated(number, store, self.collate_fn)
        write_checked_json(self.output_dir / "manifest.json", self._manifest(epochs).model_dump(mode="json"))
        return [self.output_dir / shard.file for shard in self._shards]

    def _manifest(self, epochs: Sequence[int]) -> Manifest:
        return Manifest(
            fingerprint=self.plan.fingerprint,
            dataset_hash=self.plan.meta.dataset_hash,
            tokenizer_hash=self.plan.meta.tokenizer_hash,
            pad_id=self.pad_id,
            num_epochs=len(epochs),
            total_batches=sum(self.plan.get_epoch(number).num_microbatches for number in epochs),
            custom=self.collate_fn is not None,
            shards=tuple(self._shards),
        )

    # --- resuming --------------------------------------------------------------------------------------------------

    def _done(self) -> list[ShardEntry]:
        """Return the files that an earlier write of the same plan has finished; raise UsageError for another store."""
        found = next((self.output_dir / name for name in ("progress.json", "manifest.json") if self._has(name)), None)
        if found is None:
            if self._has("plan") or any(self.output_dir.glob("*.bin")):
                raise UsageError(f"{self.output_dir} is not a batch store; write to another folder")
            return []
        known, mine = read_manifest(found), self._manifest([])
        for field in ("fingerprint", "pad_id", "custom"):
            if getattr(known, field) != getattr(mine, field):
                raise UsageError(
                    f"{self.output_dir} was written for {field} {getattr(known, field)}, not {getattr(mine, field)}; "
                    "write to another folder"
                )
        return intact_files(self.output_dir, known.shards)

    def _has(self, name: str) -> bool:
        return (self.output_dir / name).exists()

    # --- shards ----------------------------------------------------------------------------------------------------

    def _write_tokens(self, positions: NDArray[np.int64]) -> None:
        def rows(first: int) -> Iterator[tuple[TokenRow, int]]:
            for position in positions[first:].tolist():
                row = as_token_row(self.samples[self.plan.ids[position]])
                yield row, row.length

        for first, part, tokens in self._parts(None, rows):
            self._add(None, token_arrays(part, positions[first : first + len(part)]), first, len(part), tokens)

    def _write_collated(self, epoch: int, store: TokenStore, collate_fn: CollateFn) -> None:
        plan = self.plan.get_epoch(epoch)

        def batches(first: int) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
            for place in range(first, plan.num_microbatches):
                spec = plan[place]
                arrays = collate_fn([row._asdict() for row in store.rows(spec)], spec.max_len, self.pad_id)
                yield {f"{place}.{name}": array for name, array in arrays.items()}, spec.total_tokens

        for first, part, tokens in self._parts(epoch, batches):
            arrays = {name: array for one in part for name, array in one.items()}
            self._add(epoch, arrays, first, len(part), tokens)

    def _parts(
        self, epoch: int | None, items: Callable[[int], Iterable[tuple[T, int]]]
    ) -> Iterator[tuple[int, list[T], int]]:
        """Yield the items that are not yet written, a file's worth at a time: position of the first, items, tokens."""
        first = sum(shard.count for shard in self._shards if shard.epoch == epoch)
        part: list[T] = []
        held = 0
        for item, tokens in items(first):
            part.append(item)
            held += tokens
            if held >= self.shard_tokens:
                yield first, part, held
                first, part, held = first + len(part), [], 0
        if part:
            yield first, part, held

    def _add(self, epoch: int | None, arrays: Mapping[str, NDArray[Any]], first: int, count: int, tokens: int) -> None:
        """Write a file and record it as done."""
        kind, stem = (TOKENS_KIND, "tokens") if epoch is None else (COLLATED_KIND, f"collated_{epoch}")
        name = f"{stem}_{sum(shard.epoch == epoch for shard in self._shards):05d}.bin"
        about = {"first": first, "count": count, "tokens": tokens, **({} if epoch is None else {"epoch": epoch})}
        meta = {"fingerprint": self.plan.fingerprint, **about}
        digest = write_arrays(self.output_dir / name, arrays, kind=kind, meta=meta)
        self._shards.append(ShardEntry.model_validate({"file": name, "sha256": digest, **about}))
        write_checked_json(self.output_dir / "progress.json", self._manifest([]).model_dump(mode="json"))


def _check_lengths(plan: BatchPlan, epoch: int, store: TokenStore) -> None:
    """Compare the tokens of every microbatch with the plan's counts."""
    part = plan.get_epoch(epoch)
    positions, starts, stops = part.context.cuts.resolve(part.order)
    lengths = store.lengths_of(positions.astype(np.int64))
    if starts is not None and stops is not None:
        lengths = np.where(stops == -1, lengths - starts, np.minimum(stops, lengths) - starts)
    found = np.diff(offsets_of(lengths)[part.unit_offsets])
    wrong = np.flatnonzero(found != part.tokens)
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(
            f"microbatch {place} of epoch {epoch} has {found[place]} tokens, the plan was made for "
            f"{part.tokens[place]}; give the samples that the plan was made for"
        )


class BatchReader:
    """Read what a BatchWriter wrote: any batch of any epoch, composed from the mapped token files.

    Raises UsageError if hashes are given and the store is for other data or another tokenizer. Opening checks every
    file against its checksum; `verify=False` leaves the tokens to `verify()`.
    """

    def __init__(
        self,
        batch_dir: str | Path,
        *,
        dataset_hash: str | None = None,
        tokenizer_hash: str | None = None,
        verify: bool = True,
    ) -> None:
        self.batch_dir = Path(batch_dir)
        if not (self.batch_dir / "manifest.json").exists():
            unfinished = (self.batch_dir / "progress.json").exists()
            reason = "its write was interrupted; write it again to finish it" if unfinished else "there is no manifest"
            raise BatchFileError(f"{self.batch_dir} is not a batch store: {reason}")
        self.manifest = read_manifest(self.batch_dir / "manifest.json")
        self.plan = load_batch_plan(
            self.batch_dir / "plan", dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash, verify_all=verify
        )
        if self.plan.fingerprint != self.manifest.fingerprint:
            raise BatchFileError(f"{self.batch_dir / 'plan'} is not the plan the batches were written for")
        self._store = TokenStore(self.batch_dir, self.manifest.of(None), self.plan, verify=verify)
        for shard in self.manifest.shards if verify else ():
            if shard.epoch is not None:
                self._collated(shard, verify=True)

    @property
    def num_epochs(self) -> int:
        """Number of epochs in the store."""
        return self.manifest.num_epochs

    @property
    def epochs(self) -> list[int]:
        """Numbers of the epochs in the store."""
        return list(self.plan.epochs)[: self.num_epochs]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan."""
        return self.manifest.fingerprint

    def verify_fingerprint(self, expected: str) -> bool:
        """Return whether the batches belong to the plan with this full fingerprint."""
        return bool(expected) and expected == self.fingerprint

    def verify(self) -> None:
        """Check every file against its checksum; raise BatchFileError with the name of a damaged one."""
        BatchReader(self.batch_dir, verify=True)

    def _collated(self, shard: ShardEntry, *, verify: bool) -> dict[str, NDArray[Any]]:
        file = read_arrays(self.batch_dir / shard.file, kind=COLLATED_KIND, verify=verify)
        if file.sha256 != shard.sha256:
            raise BatchFileError(f"{file.path} belongs to another store")
        return file.arrays

    def get_batch(self, epoch: int, index: int) -> CollatedBatch:
        """Return the batch at a position of an epoch; raise IndexError for a position outside it."""
        return self._batch(epoch, index, self._epoch(epoch)[index])

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[CollatedBatch]:
        """Yield the batches of an epoch, from position `start`."""
        for _, batch in self.iter_epoch_specs(epoch, start):
            yield batch

    iter_epoch_async = to_async_iterator(iter_epoch)

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
        batch = collate_microbatch(
            spec,
            self._store.rows(spec),
            epoch=epoch,
            pad_id=self.manifest.pad_id,
            pack_config=self.plan.meta.pack_config,
        )
        if not self.manifest.custom:
            return batch
        shard = next(one for one in self.manifest.of(epoch) if one.first <= place < one.first + one.count)
        arrays = self._collated(shard, verify=False)
        own = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{place}.")}
        return batch.model_copy(update={"extra": own})
