"""Batch stores: what is read is what was planned, nothing is pickled, damage and mix-ups are named, writes resume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation.collate import (
    CollatedBatch,
    collate_microbatch,
    default_collate,
    pad_sequences,
)
from query_mutator.batching.generation.io import BatchReader, BatchWriter
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.samples.schema import Sample, SampleMeta
from query_mutator.errors import UsageError

Samples = dict[str, dict[str, list[int]]]


def make_samples(count: int, *, vocabulary: int = 1000, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    found = {}
    for number in range(count):
        length = int(rng.integers(1, 60))
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        found[f"s{number:03d}"] = {"input_ids": rng.integers(0, vocabulary, length).tolist(), "loss_mask": mask}
    return found


def make_plan(samples: Samples, *, epochs: int = 2, pack: PackingConfig | None = None, **fields: Any) -> BatchPlan:
    config = BatchingConfig.throughput(token_budget=256, bucket_edges=(16, 32), overflow_max=64, **fields)
    lengths = {name: len(sample["input_ids"]) for name, sample in samples.items()}
    builder = BatchPlanBuilder(lengths, config, dataset_hash="data", tokenizer_hash="tok", pack_config=pack)
    return builder.build_sync(num_epochs=epochs)


def stored(tmp_path: Path, count: int = 60, **options: Any) -> tuple[Samples, BatchPlan, BatchReader]:
    samples = make_samples(count)
    plan = make_plan(samples)
    BatchWriter(plan, samples, tmp_path / "out", **options).write_all()
    return samples, plan, BatchReader(tmp_path / "out")


def rows_of(batch: CollatedBatch) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield id, tokens and mask of every sample of an unpacked batch."""
    for name, ids, mask, inside in zip(
        batch.sample_ids, batch.input_ids, batch.loss_mask, batch.attention_mask == 1, strict=True
    ):
        yield name, ids[inside].tolist(), mask[inside].tolist()


def test_a_batch_by_its_place_and_from_a_place_on(tmp_path: Path) -> None:
    _, plan, reader = stored(tmp_path)
    whole = list(reader.iter_epoch(1))
    assert reader.get_batch(1, 2) == whole[2]
    assert list(reader.iter_epoch(1, start=2)) == whole[2:]

    async def run() -> list[CollatedBatch]:
        return [batch async for batch in reader.iter_epoch_async(1)]

    assert asyncio.run(run()) == whole
    for place in (-1, plan.get_epoch(1).num_microbatches):
        with pytest.raises(IndexError):
            reader.get_batch(1, place)
    with pytest.raises(FileNotFoundError, match="epoch 5"):
        reader.get_batch(5, 0)


def test_labels_positions_and_dictionary_access(tmp_path: Path) -> None:
    _, _, reader = stored(tmp_path, pad_id=7)
    batch = next(reader.iter_epoch(0))
    padding = batch.attention_mask == 0
    assert (batch["labels"] == np.where(batch["loss_mask"] == 1, batch["input_ids"], -100)).all()
    assert (batch.input_ids[padding] == 7).all()
    assert (batch.position_ids[0][batch.attention_mask[0] == 1] == np.arange(batch.attention_mask[0].sum())).all()
    lengths = batch.attention_mask.sum(axis=1)
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert batch.max_seqlen == lengths.max()
    assert set(batch.keys()) == {"input_ids", "loss_mask", "attention_mask", "position_ids", "labels"}
    with pytest.raises(KeyError):
        batch["nothing"]


@pytest.mark.parametrize("separator", [None, 5])
def test_packs_lie_side_by_side(tmp_path: Path, separator: int | None) -> None:
    samples = make_samples(40)
    pack = PackingConfig(max_length=64, add_separator=separator is not None, separator_token_id=separator)
    plan = make_plan(samples, epochs=1, pack=pack)
    BatchWriter(plan, samples, tmp_path).write_all()
    seen = []
    for spec, batch in BatchReader(tmp_path).iter_epoch_specs(0):
        assert spec.packs is not None
        assert batch.segment_ids is not None
        for row, pack_ids in enumerate(spec.packs):
            for segment, name in enumerate(pack_ids):
                here = batch.segment_ids[row] == segment
                tokens = batch.input_ids[row][here].tolist()
                length = len(samples[name]["input_ids"])
                assert tokens[:length] == samples[name]["input_ids"]
                assert tokens[length:] == [separator] * (len(tokens) - length)
                assert batch.position_ids[row][here].tolist() == list(range(len(tokens)))
                assert batch.loss_mask[row][here][0] == 0
                seen.append(name)
        assert (batch.attention_mask == (batch.segment_ids >= 0)).all()
        assert len(batch.cu_seqlens) - 1 == len(spec.samples)
    assert sorted(seen) == sorted(samples)


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_what_the_plan_cuts_is_cut(tmp_path: Path, policy: str) -> None:
    samples = make_samples(20)
    samples["long"] = {"input_ids": list(range(150)), "loss_mask": [1] * 150}
    plan = make_plan(samples, epochs=1, overlong=policy)
    BatchWriter(plan, samples, tmp_path).write_all()
    parts = [ids for batch in BatchReader(tmp_path).iter_epoch(0) for name, ids, _ in rows_of(batch) if name == "long"]
    assert sorted(token for part in parts for token in part) == list(range(64 if policy == "truncate" else 150))


def test_the_store_is_compact_and_nothing_is_stored_twice(tmp_path: Path) -> None:
    samples = {f"s{number:04d}": {"input_ids": [number % 900] * 50, "loss_mask": [1] * 50} for number in range(2000)}
    plan = make_plan(samples, epochs=5)
    files = BatchWriter(plan, samples, tmp_path, shard_tokens=30_000).write_all()
    assert [path.name for path in files] == [f"tokens_{number:05d}.bin" for number in range(4)]
    assert sum(path.stat().st_size for path in files) / (2000 * 50) < 2.5


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    samples = make_samples(10, vocabulary=200_000)
    BatchWriter(make_plan(samples), samples, tmp_path).write_all()
    for name, ids, _ in (row for batch in BatchReader(tmp_path).iter_epoch(0) for row in rows_of(batch)):
        assert ids == samples[name]["input_ids"]


def test_samples_of_every_kind_are_taken(tmp_path: Path) -> None:
    plain = make_samples(9)
    kinds: list[Any] = [
        lambda name, one: one,
        lambda name, one: TokenRow(np.array(one["input_ids"]), np.array(one["loss_mask"])),
        lambda name, one: Sample(**one, meta=SampleMeta(sample_id=name, dataset_id="d")),
    ]
    mixed = {name: kinds[number % 3](name, one) for number, (name, one) in enumerate(plain.items())}
    BatchWriter(make_plan(plain), mixed, tmp_path).write_all()
    found = {name: ids for batch in BatchReader(tmp_path).iter_epoch(0) for name, ids, _ in rows_of(batch)}
    assert found == {name: one["input_ids"] for name, one in plain.items()}


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_sample_is_named_before_anything_is_written(tmp_path: Path) -> None:
    samples = make_samples(20)
    plan = make_plan(samples)
    del samples["s007"]
    with pytest.raises(UsageError, match="s007"):
        BatchWriter(plan, samples, tmp_path / "out").write_all()
    assert not (tmp_path / "out").exists()


def test_samples_of_other_lengths_are_not_the_planned_ones(tmp_path: Path) -> None:
    samples = make_samples(20)
    plan = make_plan(samples)
    samples["s003"]["input_ids"].append(1)
    samples["s003"]["loss_mask"].append(1)
    with pytest.raises(UsageError, match="the plan was made for"):
        BatchWriter(plan, samples, tmp_path).write_all()
    with pytest.raises(BatchFileError, match="interrupted"):
        BatchReader(tmp_path)


def test_other_hashes_than_the_plans_are_refused(tmp_path: Path) -> None:
    samples = make_samples(10)
    plan = make_plan(samples)
    for wrong in ({"tokenizer_hash": "other"}, {"dataset_hash": "other"}):
        with pytest.raises(UsageError, match="other"):
            BatchWriter(plan, samples, tmp_path, **wrong)
    BatchWriter(plan, samples, tmp_path, dataset_hash="data", tokenizer_hash="tok").write_all()
    BatchReader(tmp_path, dataset_hash="data", tokenizer_hash="tok")
    with pytest.raises(UsageError, match="tokenizer"):
        BatchReader(tmp_path, tokenizer_hash="other")


@pytest.mark.parametrize("name", ["tokens_00001.bin", "manifest.json", "plan/epoch_0.safetensors", "plan/meta.json"])
@pytest.mark.parametrize("how", ["edited", "truncated", "missing"])
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, name: str, how: str) -> None:
    stored(tmp_path, shard_tokens=300)
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        content[-9] ^= 4
        path.write_bytes(content if how == "edited" else content[:-20])
    with pytest.raises(BatchFileError, match=r"out"):
        BatchReader(tmp_path / "out")


def test_a_file_of_another_store_is_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    other = make_samples(60, seed=5)
    BatchWriter(make_plan(other), other, tmp_path / "other").write_all()
    (tmp_path / "out" / "tokens_00000.bin").write_bytes((tmp_path / "other" / "tokens_00000.bin").read_bytes())
    with pytest.raises(BatchFileError, match=r"tokens_00000\.bin belongs to another"):
        BatchReader(tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    samples, plan, _ = stored(tmp_path)
    with pytest.raises(UsageError, match="pad_id 0, not 9"):
        BatchWriter(plan, samples, tmp_path / "out", pad_id=9).write_all()
    with pytest.raises(UsageError, match="fingerprint"):
        BatchWriter(make_plan(samples, seed=1), samples, tmp_path / "out").write_all()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.bin").touch()
    with pytest.raises(UsageError, match="not a batch store"):
        BatchWriter(plan, samples, tmp_path / "odd").write_all()


# --- resuming --------------------------------------------------------------------------------------------------------


class Failing(Mapping[str, Any]):
    """Samples whose reading breaks off after some."""

    def __init__(self, samples: Samples, reads: int) -> None:
        self.samples, self.left = samples, reads

    def __getitem__(self, name: str) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.samples[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, name: object) -> bool:
        return name in self.samples


def test_an_interrupted_write_goes_on_where_it_was(tmp_path: Path) -> None:
    samples = make_samples(60)
    plan = make_plan(samples)
    with pytest.raises(KeyboardInterrupt):
        BatchWriter(plan, Failing(samples, 40), tmp_path, shard_tokens=300).write_all()
    with pytest.raises(BatchFileError, match="interrupted"):
        BatchReader(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tokens_*.bin")}
    assert len(kept) >= 2
    rest = Failing(samples, 60 - 40 + 20)
    files = BatchWriter(plan, rest, tmp_path, shard_tokens=300).write_all()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert set(kept) < set(files)
    assert sum(batch.batch_size for batch in BatchReader(tmp_path).iter_epoch(0)) == 60


def test_a_complete_store_is_left_as_it_is_and_a_damaged_part_written_again(tmp_path: Path) -> None:
    samples, plan, _ = stored(tmp_path, shard_tokens=300)
    out = tmp_path / "out"
    assert BatchWriter(plan, Failing(samples, 0), out, shard_tokens=300).write_all()
    (out / "tokens_00001.bin").write_bytes(b"gone")
    BatchWriter(plan, samples, out, shard_tokens=300).write_all()
    BatchReader(out).verify()


def test_epoch_by_epoch_is_the_same_as_all_at_once(tmp_path: Path) -> None:
    samples = make_samples(40)
    plan = make_plan(samples, epochs=2, drop_last=True)
    writer = BatchWriter(plan, samples, tmp_path)
    writer.write_epoch(0)
    assert BatchReader(tmp_path).num_epochs == 1
    with pytest.raises(FileNotFoundError):
        BatchReader(tmp_path).get_batch(1, 0)
    writer.write_epoch(1)
    reader = BatchReader(tmp_path)
    assert reader.num_epochs == 2
    assert reader.get_batch(1, 0).batch_size > 0


def test_a_collate_function_of_ones_own_is_stored_and_resumed(tmp_path: Path) -> None:
    calls: list[int] = []

    def collate(rows: Any, max_len: int, pad_id: int) -> dict[str, Any]:
        calls.append(max_len)
        return {"sums": np.array([sum(row["input_ids"]) for row in rows], dtype=np.int64)}

    samples = make_samples(30)
    plan = make_plan(samples)
    BatchWriter(plan, samples, tmp_path, collate_fn=collate, shard_tokens=200).write_all()
    for batch in BatchReader(tmp_path).iter_epoch(1):
        assert batch["sums"].tolist() == [sum(samples[name]["input_ids"]) for name in batch.sample_ids]
    made = len(calls)
    assert made == plan.total_microbatches
    (tmp_path / "manifest.json").unlink()
    BatchWriter(plan, samples, tmp_path, collate_fn=collate, shard_tokens=200).write_all()
    assert len(calls) == made
    BatchReader(tmp_path).verify()


# --- collating -------------------------------------------------------------------------------------------------------


def test_a_batch_goes_through_an_npz_file_without_pickle(tmp_path: Path) -> None:
    _, _, reader = stored(tmp_path)
    batch = reader.get_batch(0, 0).model_copy(update={"extra": {"weights": np.ones(3)}})
    np.savez(tmp_path / "batch.npz", **batch.to_dict())
    with np.load(tmp_path / "batch.npz", allow_pickle=False) as data:
        assert CollatedBatch.from_npz(data).to_dict().keys() == batch.to_dict().keys()
        found = CollatedBatch.from_npz(data)
    assert found.model_copy(update={"extra": {}}) == batch.model_copy(update={"extra": {}})
    assert found["weights"].tolist() == [1.0, 1.0, 1.0]


def test_padding_never_cuts() -> None:
    assert pad_sequences([[1, 2], [3]], 0).tolist() == [[1, 2], [3, 0]]
    assert pad_sequences([], 0).shape == (0, 0)
    with pytest.raises(UsageError, match="sequence 1 has 3 items"):
        pad_sequences([[1], [1, 2, 3]], 0, max_length=2)
    with pytest.raises(UsageError, match="two lists of one length"):
        default_collate([{"input_ids": [1], "loss_mask": [1, 0]}], 4)
    assert default_collate([{"input_ids": [1, 2]}], 4)["loss_mask"].tolist() == [[1, 1, 0, 0]]


def test_the_default_collation_cuts_to_its_length() -> None:
    arrays = default_collate([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4]}], 2)
    assert arrays["input_ids"].tolist() == [[1, 2], [4, 0]]
    assert arrays["loss_mask"].tolist() == [[0, 1], [1, 0]]
    spec = MicrobatchSpec(samples=("a",), bucket_id=0, max_len=2, index=3)
    with pytest.raises(UsageError, match="microbatch 3 has a sample of 3 tokens"):
        collate_microbatch(spec, [TokenRow(np.arange(3, dtype=np.int32), np.ones(3, np.uint8))])


@pytest.mark.parametrize("overlong", ["error", "truncate", "split"])
@pytest.mark.parametrize("pack", [False, True])
def test_the_masks_of_a_batch_add_up_to_the_planned_loss(overlong: str, pack: bool) -> None:
    rng = np.random.default_rng(3)
    longest = 30 if overlong == "error" else 90
    rows = {}
    for number, size in enumerate(rng.integers(1, longest, 200).tolist()):  # an answer after its prompt
        mask = (np.arange(size) >= rng.integers(0, size)).astype(np.uint8)
        rows[f"s{number}"] = TokenRow(np.full(size, 7, np.int32), mask)
    lengths = {name: row.length for name, row in rows.items()}
    loss = {name: int(row.loss_mask[1:].sum()) for name, row in rows.items()}
    config = BatchingConfig(token_budget=64, bucket_edges=(8, 32), overflow_max=32, overlong=overlong)
    packing = PackingConfig(max_length=32, overlong=overlong) if pack else None
    plan = BatchPlanBuilder(lengths, config, pack_config=packing, loss_lengths=loss).build_sync(1)
    for spec in plan.iter_epoch(0):
        batch = collate_microbatch(spec, [rows[name] for name in spec.samples], pack_config=packing)
        assert int(batch.loss_mask.sum()) == spec.loss_tokens
        assert int((batch.labels != -100).sum()) == spec.loss_tokens
