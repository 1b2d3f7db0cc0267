"""The names that docs/reference/batching/differences.md promises to users of chuk-lazarus, each by its use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from query_mutator.batching import (
    AsyncOfflineDatasetStream,
    BatchingConfig,
    BatchMetrics,
    BatchPlan,
    BatchPlanMeta,
    BatchShapeHistogram,
    EpochPlan,
    MicrobatchSpec,
    OfflineDatasetStream,
    PackingConfig,
    PackingMode,
    PadPolicy,
    SequenceToPack,
    load_batch_plan,
    pack_sequences,
    save_batch_plan,
)
from query_mutator.batching.planning.packing import (
    PackingBin,
    pack_sequences_best_fit,
    pack_sequences_first_fit,
    pack_sequences_greedy,
)
from query_mutator.batching.streaming.telnet_client import (
    PuzzleEpisode,
)


def sequence(name: str, length: int) -> SequenceToPack:
    return SequenceToPack(sample_id=name, input_ids=range(1, length + 1), loss_mask=[1] * length)


def meta(num_epochs: int = 2) -> BatchPlanMeta:
    return BatchPlanMeta(
        dataset_hash="data",
        tokenizer_hash="tokens",
        bucket_edges=(64, 128),
        overflow_max=256,
        token_budget=1024,
        pad_policy=PadPolicy.PAD_TO_BUCKET,
        num_epochs=num_epochs,
        base_seed=7,
        created_at="2026-01-02T03:04:05",
    )


def epoch(number: int, names: list[tuple[str, ...]], **fields: object) -> EpochPlan:
    rows = [MicrobatchSpec(samples=one, bucket_id=0, max_len=64, index=place) for place, one in enumerate(names)]
    totals = {"total_samples": sum(map(len, names)), "total_tokens": 50 * len(names)}
    return EpochPlan(epoch=number, microbatches=rows, seed=7 + number, **{**totals, **fields})


@pytest.fixture
def plan() -> BatchPlan:
    plan = BatchPlan(meta=meta())
    plan.add_epoch(epoch(0, [("a", "b"), ("c",), ("d", "e")]))
    plan.add_epoch(epoch(1, [("e", "a"), ("new",), ("b", "c"), ("d",)]))
    return plan


# --- plans by hand ---------------------------------------------------------------------------------------------------


def test_a_description_of_a_plan_takes_its_settings_one_by_one() -> None:
    described = meta()
    assert (described.bucket_edges, described.overflow_max, described.token_budget) == ((64, 128), 256, 1024)
    assert (described.pad_policy, described.base_seed) == (PadPolicy.PAD_TO_BUCKET, 7)
    assert described.created_at == "2026-01-02T03:04:05"
    config = BatchingConfig.predictable(token_budget=512, bucket_edges=(32, 64), overflow_max=128, seed=3)
    made = BatchPlanMeta.create("data", "tokens", config, 5)
    assert (made.config, made.num_epochs, made.base_seed) == (config, 5, 3)
    packed = BatchPlanMeta.create("data", "tokens", config, 1, pack_config=PackingConfig(max_length=64))
    assert packed.pack_config == PackingConfig(max_length=64)


def test_an_epoch_is_made_of_microbatches() -> None:
    made = epoch(3, [("x", "y"), ("z",)])
    assert (made.epoch, made.seed, made.num_microbatches) == (3, 10, 2)
    assert (made.total_samples, made.total_tokens) == (3, 100)
    assert [one.samples for one in made] == [("x", "y"), ("z",)]
    assert made[1].samples == ("z",)
    assert made.microbatches[0].max_len == 64
    packs = (("x",), ("y", "z"))
    row = MicrobatchSpec(samples=("x", "y", "z"), packs=packs, bucket_id=1, max_len=64, index=0, total_tokens=90)
    packed = EpochPlan(epoch=0, microbatches=(row,), seed=0, total_samples=3, total_tokens=90)
    assert packed[0].packs == packs
    assert (packed[0].num_packs, packed.total_tokens) == (2, 90)
    assert EpochPlan(epoch=0, microbatches=(), seed=0, total_samples=0, total_tokens=0).num_microbatches == 0


def test_a_plan_made_by_hand_is_saved_sharded_and_resumed(plan: BatchPlan, tmp_path: Path) -> None:
    assert (plan.num_epochs, plan.total_microbatches, plan.meta.num_samples) == (2, 7, 6)
    save_batch_plan(plan, tmp_path / "plan")
    loaded = load_batch_plan(tmp_path / "plan")
    assert loaded.fingerprint == plan.fingerprint
    for number in (0, 1):
        assert list(loaded.iter_epoch(number)) == list(plan.iter_epoch(number))
    assert [name for _, _, one in plan.iter_from(0, 2) for name in one.samples] == ["d", "e", *"ea", "new", *"bcd"]
    parts = [plan.shard(rank, 2) for rank in (0, 1)]
    names = [name for part in parts for one in part.iter_epoch(1) for name in one.samples]
    assert sorted(names) == ["a", "b", "c", "d", "e", "new"]
    whole = BatchPlan(meta=meta(), epochs={0: plan.get_epoch(0), 1: plan.get_epoch(1)})
    assert [one.samples for one in whole.iter_epoch(1)] == [one.samples for one in plan.iter_epoch(1)]


# --- packs -----------------------------------------------------------------------------------------------------------


def test_a_bin_is_filled_by_hand() -> None:
    box = PackingBin(max_length=8, pad_token_id=9)
    assert (box.max_length, box.current_length, box.remaining_space, box.sequences) == (8, 0, 8, [])
    box.add(sequence("a", 2))
    assert box.can_fit(sequence("b", 5), separator_len=1)
    assert not box.can_fit(sequence("b", 6), separator_len=1)
    box.add(sequence("b", 3), separator_len=1)
    assert (box.current_length, box.remaining_space) == (6, 2)
    packed = box.to_packed_sequence(pad_to_max=True, separator_token_id=5)
    assert packed.input_ids.tolist() == [1, 2, 5, 1, 2, 3, 9, 9]
    assert packed.segment_ids.tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert (packed.sample_ids, packed.sample_lengths, packed.padding_tokens) == (("a", "b"), (2, 3), 2)
    assert packed.efficiency == 0.75
    assert box.to_packed_sequence(pad_to_max=False, separator_token_id=5).length == 6
    with pytest.raises(ValueError, match="2 fit"):
        box.add(sequence("c", 3))
    with pytest.raises(ValueError, match="no sequence"):
        PackingBin(8).to_packed_sequence()


@pytest.mark.parametrize(
    ("pack", "mode"),
    [
        (pack_sequences_first_fit, PackingMode.FIRST_FIT),
        (pack_sequences_best_fit, PackingMode.BEST_FIT),
        (pack_sequences_greedy, PackingMode.GREEDY),
    ],
)
def test_each_way_of_packing_has_its_function(pack: object, mode: PackingMode) -> None:
    sequences = [sequence(f"s{place}", length) for place, length in enumerate([5, 6, 3, 4, 2])]
    other = PackingMode.GREEDY if mode is PackingMode.FIRST_FIT else PackingMode.FIRST_FIT
    packed = pack(sequences, PackingConfig(mode=other, max_length=10), 0)  # type: ignore[operator]
    assert packed == pack_sequences(sequences, PackingConfig(mode=mode, max_length=10))


# --- batches and buckets ---------------------------------------------------------------------------------------------


def test_batches_are_counted_by_bucket_and_size() -> None:
    shapes = BatchShapeHistogram().record_batch(0, 6).record_batch(1, 2)
    assert (shapes.total_batches, shapes.total_samples) == (2, 8)
    assert shapes.bucket_fraction(0) == 0.75
    metrics = BatchMetrics().record_sample(0, 10, 4, 32).record_sample(0, 20, 4, 32).record_batch(0, 2)
    assert (metrics.total_samples, metrics.total_batches, metrics.avg_batch_size) == (2, 1, 2.0)
    assert metrics.shape_histogram.bucket_samples == {0: 2}
    with pytest.raises(TypeError, match="batch_size"):
        BatchMetrics().record_batch(0)


# --- streams and puzzles ---------------------------------------------------------------------------------------------


def test_rows_with_nested_meta_are_streamed(tmp_path: Path) -> None:
    nested = {"sample_id": "s7", "difficulty": "hard", "reward": 0.5, "success": True, "episode_id": "e1"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "meta": nested}) + "\n", encoding="utf-8")
    stream = OfflineDatasetStream(path)
    (sample,) = stream
    assert (sample.sample_id, sample.difficulty, sample.reward) == ("s7", 0.75, 0.5)
    assert (sample.success, sample.episode_id) == (True, "e1")
    assert stream.get_length_distribution() == {"s7": 3}
    assert asyncio.run(AsyncOfflineDatasetStream(path).get_length_distribution()) == {"s7": 3}


class Words:
    """A tokenizer with a token per word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_puzzle_that_was_played_is_text_to_train_on() -> None:
    episode = PuzzleEpisode(
        game="sudoku",
        difficulty="easy",
        seed=42,
        initial_grid=[[0, 1], [2, 0]],
        final_grid=[[3, 1], [2, 4]],
        moves=["place 1 1 3", "place 2 2 4"],
        success=True,
        total_moves=2,
        invalid_moves=0,
        hints_used=0,
        optimal_steps=2,
        difficulty_profile=None,
    )
    input_ids, loss_mask = episode.to_training_text(Words())
    assert len(input_ids) == len(loss_mask)
    assert loss_mask == sorted(loss_mask)  # no loss on the puzzle, then loss on the moves
    assert loss_mask.count(1) == 9
    assert (episode.moves, episode.final_grid) == (("place 1 1 3", "place 2 2 4"), [[3, 1], [2, 4]])
