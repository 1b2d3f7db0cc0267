"""Tokens written once, batches composed when read: what a plan needs, without the data set and its tokenizer.

    DIR/plan/               the plan
    DIR/tokens_00000.bin    samples in the order in which the plan first asks for them: many batches to a file,
                            ids as 16 bits where the vocabulary allows, masks as bits; no sample is stored twice
    DIR/collated_0_00000.bin    only with a collate function of one's own: its arrays, many batches to a file
    DIR/progress.json       the files that are done; an interrupted write goes on after them
    DIR/manifest.json       all of the above with checksums, written last: without it there is nothing to read

Every file is a checksummed safetensors file; no pickle is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from query_mutator.batching.planning.epoch_plan import EpochPlan, MicrobatchSpec
from query_mutator.batching.planning.plan_files import check_plan, load_batch_plan, save_batch_plan
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError

SHARD_TOKENS = 4_000_000  # about 9 MB with 16-bit ids


def first_uses(plan: BatchPlan, epochs: Sequence[int]) -> NDArray[np.int64]:
    """Return the positions in `plan.ids` that these epochs use, each once, in the order of first use."""
    known = np.zeros(len(plan.ids), dtype=bool)
    parts = [np.empty(0, np.int64)]
    for number in epochs:
        epoch = plan.get_epoch(number)
        positions = epoch.context.cuts.resolve(epoch.order)[0].astype(np.int64)
        new = positions[~known[positions]]
        _, first = np.unique(new, return_index=True)
        new = new[np.sort(first)]
        known[new] = True
        parts.append(new)
    return np.concatenate(parts)


class BatchWriter:
    """Writes what the batches of `plan` are made of.

    `samples` maps ids to samples (`Sample`, `TokenRow` or a mapping with `input_ids` and `loss_mask`); a `JsonlSamples`
    is read as it is needed. Hashes given must be those of the plan. Missing samples, or samples of other lengths than
    the plan was made for, are UsageErrors and no manifest is written.
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
            raise UsageError(f"shard_tokens={shard_tokens} is below 1")
        self.plan = plan
        self.samples = samples
        self.output_dir = Path(output_dir)
        self.collate_fn = collate_fn
        self.pad_id = pad_id
        self.shard_tokens = shard_tokens
        self._shards: list[ShardEntry] = []

    def write_all(self) -> list[Path]:
        """Write everything that is not there and return the files; a store that is complete is left as it is."""
        return self._write(list(self.plan.epochs))

    write_all_async = to_async(write_all)

    def write_epoch(self, epoch: int) -> list[Path]:
        """Write what the epochs up to this one need and return all files."""
        self.plan.get_epoch(epoch)
        return self._write([number for number in self.plan.epochs if number <= epoch])

    def _write(self, epochs: list[int]) -> list[Path]:
        positions = first_uses(self.plan, epochs)
        self._check_present(positions)
        self._shards = self._done()
        if not (self.output_dir / "plan").exists():
            save_batch_plan(self.plan, self.output_dir / "plan")
        self._write_tokens(positions)
        store = TokenStore(self.output_dir, self._manifest(epochs).of(None), self.plan)
        for number in epochs:
            _check_lengths(self.plan, number, store)
            if self.collate_fn is not None:
                self._write_collated(number, store, self.collate_fn)
        write_checked_json(self.output_dir / "manifest.json", self._manifest(epochs).model_dump(mode="json"))
        return [self.output_dir / shard.file for shard in self._shards]

    def _check_present(self, positions: NDArray[np.int64]) -> None:
        missing = [name for name in self.plan.ids.take(positions) if name not in self.samples]
        if missing:
            raise UsageError(f"{len(missing)} samples of the plan are missing, the first is {missing[0]!r}")

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
        """Return the files an earlier write of the same plan has finished; another plan's store is a UsageError."""
        found = next((self.output_dir / name for name in ("progress.json", "manifest.json") if self._has(name)), None)
        if found is None:
            if self._has("plan") or any(self.output_dir.glob("*.bin")):
                raise UsageError(f"{self.output_dir} holds something else; write to another folder")
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

    def _add(self, name: str, arrays: Mapping[str, NDArray[Any]], *, kind: str, **about: Any) -> None:
        """Write a file and note that it is done."""
        meta = {"fingerprint": self.plan.fingerprint, **about}
        digest = write_arrays(self.output_dir / name, arrays, kind=kind, meta=meta)
        self._shards.append(ShardEntry(file=name, sha256=digest, **about))
        write_checked_json(self.output_dir / "progress.json", self._manifest([]).model_dump(mode="json"))

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _write_tokens(self, positions: NDArray[np.int64]) -> None:
        written = [shard for shard in self._shards if shard.epoch is None]
        first = sum(shard.count for shard in written)
        rows: list[TokenRow] = []
        held = 0
        for place in range(first, len(positions)):
            row = as_token_row(self.samples[self.plan.ids[int(positions[place])]])
            rows.append(row)
            held += row.length
            if held >= self.shard_tokens or place == len(positions) - 1:
                begin = place + 1 - len(rows)
                name = f"tokens_{sum(shard.epoch is None for shard in self._shards):05d}.bin"
                arrays = token_arrays(rows, positions[begin : place + 1])
                self._add(name, arrays, kind=TOKENS_KIND, first=begin, count=len(rows), tokens=held)
                rows, held = [], 0

    def _write_collated(self, epoch: int, store: TokenStore, collate_fn: CollateFn) -> None:
        done = sum(shard.count for shard in self._shards if shard.epoch == epoch)
        plan = self.plan.get_epoch(epoch)
        arrays: dict[str, NDArray[Any]] = {}
        count = held = 0
        for place in range(done, plan.num_microbatches):
            spec = plan[place]
            rows = [{"input_ids": row.input_ids, "loss_mask": row.loss_mask} for row in store.rows(spec)]
            for name, array in collate_fn(rows, spec.max_len, self.pad_id).items():
                arrays[f"{place}.{name}"] = np.ascontiguousarray(array)
            count += 1
            held += spec.total_tokens
            if held >= self.shard_tokens or place == plan.num_microbatches - 1:
                name = f"collated_{epoch}_{sum(shard.epoch == epoch for shard in self._shards):05d}.bin"
                first = place + 1 - count
                self._add(name, arrays, kind=COLLATED_KIND, first=first, count=count, tokens=held, epoch=epoch)
                arrays, count, held = {}, 0, 0


def _check_lengths(plan: BatchPlan, epoch: int, store: TokenStore) -> None:
    """Compare the tokens of every microbatch with what the plan was made for."""
    part: EpochPlan = plan.get_epoch(epoch)
    positions, starts, stops = part.context.cuts.resolve(part.order)
    lengths = store.lengths_of(positions.astype(np.int64))
    if starts is not None and stops is not None:
        lengths = np.where(stops == -1, lengths - starts, np.minimum(stops, lengths) - starts)
    ends = part.unit_offsets.astype(np.int64)
    found = np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[ends])
    wrong = np.flatnonzero(found != part.tokens)
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(
            f"microbatch {place} of epoch {epoch} has {found[place]} tokens, the plan was made for "
            f"{part.tokens[place]}: these samples are not the planned ones"
        )


class BatchReader:
    """Reads what a BatchWriter wrote: any batch of any epoch, composed from the mapped token files.

    With hashes given, a store for other data or another tokenizer is a UsageError. Every file is checked against its
    checksum when the store is opened; `verify=False` leaves the tokens to `verify()`.
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
            raise BatchFileError(f"{self.batch_dir} holds no batches: {reason}")
        self.manifest = read_manifest(self.batch_dir / "manifest.json")
        self.plan = load_batch_plan(
            self.batch_dir / "plan", dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash, verify_all=verify
        )
        if self.plan.fingerprint != self.manifest.fingerprint:
            raise BatchFileError(f"{self.batch_dir / 'plan'} is not the plan the batches were written for")
        self._store = TokenStore(self.batch_dir, self.manifest.of(None), self.plan, verify=verify)
        if verify:
            self._verify_collated()

    @property
    def num_epochs(self) -> int:
        """Number of epochs that can be read."""
        return self.manifest.num_epochs

    @property
    def epochs(self) -> list[int]:
        """The numbers of the epochs that can be read."""
        return list(self.plan.epochs)[: self.num_epochs]

    @property
    def fingerprint(self) -> str:
        """The plan's fingerprint."""
        return self.manifest.fingerprint

    def verify_fingerprint(self, expected: str) -> bool:
        """Say whether the batches belong to the plan with this fingerprint, all of it."""
        return bool(expected) and expected == self.fingerprint

    def verify(self) -> None:
        """Check every file against its checksum; a damaged one is a BatchFileError that names it."""
        load_batch_plan(self.batch_dir / "plan", verify_all=True)
        TokenStore(self.batch_dir, self.manifest.of(None), self.plan, verify=True)
        self._verify_collated()

    def _verify_collated(self) -> None:
        for shard in self.manifest.shards:
            if shard.epoch is not None:
                self._collated(shard, verify=True)

    def _collated(self, shard: ShardEntry, *, verify: bool) -> dict[str, NDArray[Any]]:
        file = read_arrays(self.batch_dir / shard.file, kind=COLLATED_KIND, verify=verify)
        if file.sha256 != shard.sha256:
            raise BatchFileError(f"{file.path} belongs to another store")
        return file.arrays

    def _epoch(self, epoch: int) -> EpochPlan:
        if epoch not in self.epochs:
            raise KeyError(f"epoch {epoch} is not in {self.batch_dir}, which has {self.epochs}")
        return self.plan.get_epoch(epoch)

    def get_batch(self, epoch: int, index: int) -> CollatedBatch:
        """Return the batch at a place of an epoch; a place outside it is an IndexError."""
        plan = self._epoch(epoch)
        if not 0 <= index < plan.num_microbatches:
            raise IndexError(f"batch {index} is outside 0..{plan.num_microbatches - 1} of epoch {epoch}")
        return self._batch(epoch, index, plan[index])

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[CollatedBatch]:
        """Yield the batches of an epoch, from the place `start` on."""
        for _, batch in self.iter_epoch_specs(epoch, start):
            yield batch

    def iter_epoch_specs(self, epoch: int, start: int = 0) -> Iterator[tuple[MicrobatchSpec, CollatedBatch]]:
        """Yield each microbatch of the plan with its batch."""
        plan = self._epoch(epoch)
        for place in range(start, plan.num_microbatches):
            spec = plan[place]
            yield spec, self._batch(epoch, place, spec)

    iter_epoch_async = to_async_iterator(iter_epoch)

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
