"""Histograms, buckets and edges against numpy; caches of lengths and stores of batches, whole or named as damaged."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.batching import (
    BucketSpec,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
    visualize_buckets,
)
from query_mutator.batching.generation.io import (
    BatchReader,
    BatchWriter,
    collate_microbatch,
    default_collate,
    pad_sequences,
)
from query_mutator.batching.generation.length_cache import LengthCache
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan, MicrobatchSpec
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.predictability import BatchingConfig
from query_mutator.errors import UsageError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SUFFIXES = ["lengths.jsonl", "lengths.json", "lengths.bin"]


@given(lengths=LENGTHS, bins=st.integers(1, 12))
@settings(max_examples=60)
def test_a_histogram_counts_everything_once(lengths: list[int], bins: int) -> None:
    histogram = compute_length_histogram(lengths, num_bins=bins)
    assert len(histogram.bins) == min(bins, max(lengths) - min(lengths) + 1)
    assert sum(one.count for one in histogram.bins) == len(lengths)
    for one in histogram.bins:
        assert one.count == sum(one.min_length <= length < one.max_length for length in lengths)
    assert histogram.mean_length == pytest.approx(np.mean(lengths))
    assert histogram.std_length == pytest.approx(np.std(lengths))
    for name in ("p10", "p25", "p50", "p75", "p90", "p95", "p99"):
        assert getattr(histogram, name) == pytest.approx(np.percentile(lengths, float(name[1:])))


def test_a_histogram_of_fixed_width_is_drawn() -> None:
    histogram = compute_length_histogram([3, 12, 14, 27], bin_width=10)
    assert [(one.label, one.count) for one in histogram.bins] == [("0-9", 1), ("10-19", 2), ("20-29", 1)]
    lines = histogram.to_ascii(width=8).splitlines()
    assert lines[1] == "10-19 | ######## 2  50.0%"
    assert "4 samples, 3 to 27 tokens" in lines[3]
    with pytest.raises(UsageError):
        compute_length_histogram([])


def test_bucket_efficiency_by_hand() -> None:
    analysis = analyze_bucket_efficiency({"a": 5, "b": 10, "c": 15, "d": 99}, BucketSpec(edges=(10, 20, 30)))
    assert [one.sample_count for one in analysis.buckets] == [2, 1, 0]
    assert [one.padded_tokens for one in analysis.buckets] == [20, 20, 0]
    assert [one.padded_tokens - one.total_tokens for one in analysis.buckets] == [5, 5, 0]
    assert (analysis.overall_efficiency, analysis.overall_waste) == (0.75, 25.0)
    assert (analysis.empty_buckets, analysis.num_left_out) == (1, 1)
    assert "overall efficiency 75.0%" in analysis.to_ascii()
    picture = visualize_buckets([5, 10, 20], BucketSpec(edges=(10, 20)), width=20)
    assert "|###############..... 2 samples" in picture.replace("| ", "|")
    assert analyze_bucket_efficiency([99], BucketSpec(edges=(10,))).overall_efficiency == 0.0


def cost(edges: tuple[int, ...], lengths: list[int], power: int) -> int:
    return sum(min(edge for edge in edges if edge >= length) ** power for length in lengths)


@given(lengths=LENGTHS, number=st.integers(1, 4))
@settings(max_examples=60)
@pytest.mark.parametrize(("goal", "power"), [("minimize_waste", 1), ("minimize_memory", 2)])
def test_suggested_edges_are_the_best_there_are(goal: str, power: int, lengths: list[int], number: int) -> None:
    suggestion = suggest_bucket_edges(lengths, number, goal)
    *below, longest = sorted(set(lengths))
    every = combinations(below, min(number, len(below) + 1) - 1)
    assert cost(suggestion.edges, lengths, power) == min(cost((*one, longest), lengths, power) for one in every)
    assert suggestion.estimated_efficiency == pytest.approx(sum(lengths) / cost(suggestion.edges, lengths, 1))


def test_edges_keep_to_a_longest_length() -> None:
    suggestion = suggest_bucket_edges([5, 17, 30, 99], 3, max_length=40)
    assert (suggestion.edges, suggestion.num_left_out, suggestion.overflow_max) == ((5, 17, 30), 1, 40)
    assert suggest_bucket_edges([10, 100], 2, max_length=4096).overflow_max == 4096
    assert suggest_bucket_edges([10, 100], 2).overflow_max == 100
    with pytest.raises(UsageError):
        suggest_bucket_edges([99], 2, max_length=40)


def test_a_report_adds_up() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5, 1, 3000)), 1, 1024).astype(np.int32)
    report = create_efficiency_report(lengths, BucketSpec(edges=(64, 512, 1024)))
    assert (report.total_samples, report.total_tokens) == (3000, int(lengths.sum()))
    assert report.overall_efficiency == pytest.approx(report.total_tokens / report.total_padded)
    assert [one.optimization_goal for one in report.suggestions] == list(OptimizationGoal)
    balanced = suggest_bucket_edges(list(range(1, 101)), 4, OptimizationGoal.BALANCE_BUCKETS)
    assert balanced.edges == (25, 50, 75, 100)
    assert any("fewer tokens than these buckets" in one for one in report.recommendations)
    assert "overall efficiency" in report.to_ascii()


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def build(path: Path, entries: dict[object, int], tokenizer_hash: str = "tok") -> None:
    with LengthCache.create(path, tokenizer_hash) as cache:
        for name, length in entries.items():
            cache.add_sync(name, length)


def test_what_was_added_is_read_back_in_order_and_added_to(path: Path) -> None:
    build(path, {"b": 3, "ä/ö": 0, 0: 7})
    with LengthCache.load_sync(path, "tok") as cache:
        assert list(cache.items()) == [("b", 3), ("ä/ö", 0), ("0", 7)]
        assert (cache.get(0), cache.get("nobody"), len(cache), "b" in cache) == (7, None, 3, True)
        assert cache.lengths.tolist() == [3, 0, 7]
        cache.add_sync("c", 2)
        cache.add_many_sync(["d"], np.array([3]))
    assert LengthCache.load_sync(path).get_all() == {"b": 3, "ä/ö": 0, "0": 7, "c": 2, "d": 3}


def test_async_methods_are_the_sync_ones(path: Path) -> None:
    async def run() -> None:
        async with LengthCache.create(path, "tok") as cache:
            await cache.add("a", 1)
            await cache.add_many(["b", "c"], [2, 3])
        loaded = await LengthCache.load(path)
        assert loaded.get_all() == {"a": 1, "b": 2, "c": 3}
        assert [entry async for entry in LengthCache.stream(path)] == list(LengthCache.stream_sync(path))
        assert await loaded.validate({"a", "z"}) == ({"z"}, {"b", "c"})
        assert len(await LengthCache.load_or_create(path, "tok")) == 3

    asyncio.run(run())


def test_an_interrupted_build_leaves_the_file_that_was_there(path: Path) -> None:
    build(path, {"a": 1})

    def interrupted() -> None:
        with LengthCache.create(path, "tok") as cache:
            cache.add_sync("b", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert LengthCache.load_sync(path).get_all() == {"a": 1}
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [0, 1, 20, 60])
def test_a_truncated_or_edited_file_is_an_error_that_names_it(path: Path, cut: int) -> None:
    build(path, {f"sample{index}": index for index in range(9)})
    content = bytearray(path.read_bytes())
    content[-4] ^= not cut
    path.write_bytes(content[: len(content) - cut])
    with pytest.raises(UsageError, match=path.name):
        LengthCache.load_sync(path)


def test_another_tokenizer_is_refused_and_begun_anew_when_asked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(path, {"a": 1}, tokenizer_hash="old")
    with pytest.raises(UsageError, match=r"tokenizer old, not new"):
        LengthCache.load_sync(path, "new")
    assert len(LengthCache.load_or_create_sync(path, "new")) == 0
    assert "built again" in caplog.text
    assert LengthCache.load_sync(path).get("a") == 1


def test_ids_come_once_and_lengths_are_whole_numbers_and_a_refused_batch_adds_nothing(path: Path) -> None:
    cache = LengthCache.create(path, "tok")
    cache.add_sync("1", 4)
    odd: list[tuple[Any, Any, str]] = [(1, 4, "'1'")]
    odd += [("a", length, "length") for length in (-1, 1.5, True, 2**31, "7")]
    odd += [(name, 1, "sample id") for name in ("", None, 1.0, True)]
    for name, length, said in odd:
        with pytest.raises(UsageError, match=said):
            cache.add_sync(name, length)
    with pytest.raises(UsageError, match="occurs twice"):
        cache.add_many_sync(["2", "3", "2"], [1, 1, 1])
    assert len(cache) == 1


ROW = '{"sample_id": "a", "tokenizer_hash": "tok", "length": 3}'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", ROW, "header"),
        ("rows.jsonl", '{"tokenizer_hash": "tok", "version": 2}\n' + ROW, "version 2"),
        ("rows.jsonl", '{"tokenizer_hash": "tok", "version": 1}\n' + ROW, "interrupted"),
        ("none.bin", None, r"none\.bin"),
        ("other.bin", "PK\x03\x04 something else", r"other\.bin"),
    ],
)
def test_what_is_no_cache_of_lengths_is_refused(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=says):
        LengthCache.load_sync(tmp_path / name)


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


def test_a_batch_by_its_place_and_from_a_place_on(tmp_path: Path) -> None:
    _, plan, reader = stored(tmp_path)
    whole = list(reader.iter_epoch(1))
    assert reader.get_batch(1, 2) == whole[2]
    assert list(reader.iter_epoch(1, start=2)) == whole[2:]
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
    assert set(batch.arrays()) == {"input_ids", "loss_mask", "attention_mask", "position_ids", "labels"}
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


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_sample_is_named_before_anything_is_written_and_others_are_not_the_planned_ones(
    tmp_path: Path,
) -> None:
    samples = make_samples(20)
    plan = make_plan(samples)
    missing = {name: one for name, one in samples.items() if name != "s007"}
    with pytest.raises(UsageError, match="s007"):
        BatchWriter(plan, missing, tmp_path / "out").write_all()
    assert not (tmp_path / "out").exists()
    samples["s003"] = {name: [*one, 1] for name, one in samples["s003"].items()}
    with pytest.raises(UsageError, match="the plan was made for"):
        BatchWriter(plan, samples, tmp_path / "out").write_all()
    with pytest.raises(UsageError, match="interrupted"):
        BatchReader(tmp_path / "out")


@pytest.mark.parametrize("name", ["epoch_1/batch_000001.npz", "manifest.json", "plan/epoch_1.safetensors"])
@pytest.mark.parametrize("how", ["edited", "truncated", "missing", "another's"])
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, name: str, how: str) -> None:
    samples, plan, _ = stored(tmp_path)
    path = tmp_path / "out" / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "another's":
        other = make_samples(60, seed=5)
        BatchWriter(make_plan(other), other, tmp_path / "other").write_all()
        path.write_bytes((tmp_path / "other" / name).read_bytes())
    else:
        place = max(content.find(b"input_ids.npy"), 0) + 60
        edited = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
        path.write_bytes(edited if how == "edited" else content[:-20])
    with pytest.raises(UsageError, match=r"out"):
        list(BatchReader(tmp_path / "out").iter_epoch(1))
    if name.endswith("npz"):
        BatchWriter(plan, samples, tmp_path / "out").write_all()
        assert path.read_bytes() == content


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    samples, plan, _ = stored(tmp_path)
    with pytest.raises(UsageError, match="has the batches of plan"):
        BatchWriter(make_plan(samples, seed=1), samples, tmp_path / "out").write_all()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.bin").touch()
    with pytest.raises(UsageError, match="not a folder of batches"):
        BatchWriter(plan, samples, tmp_path / "odd").write_all()


@pytest.mark.parametrize("pack", [None, PackingConfig(max_length=64, overlong="truncate")])
def test_what_the_plan_cuts_is_cut(tmp_path: Path, pack: PackingConfig | None) -> None:
    samples = make_samples(20)
    samples["long"] = {"input_ids": list(range(1000, 1150)), "loss_mask": [1] * 150}
    plan = make_plan(samples, epochs=1, overlong="truncate", pack=pack)
    BatchWriter(plan, samples, tmp_path).write_all()
    tokens = np.concatenate([batch.input_ids.reshape(-1) for batch in BatchReader(tmp_path).iter_epoch(0)])
    assert tokens[tokens >= 1000].tolist() == list(range(1000, 1064))


# --- resuming --------------------------------------------------------------------------------------------------------


class Failing(dict[str, Any]):
    """Samples whose reading breaks off after some."""

    def __init__(self, samples: Samples, reads: int) -> None:
        super().__init__(samples)
        self.left = reads

    def __getitem__(self, name: str) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(name)


def test_an_interrupted_write_resumes_after_the_batches_it_has(tmp_path: Path) -> None:
    samples = make_samples(60)
    plan = make_plan(samples)
    with pytest.raises(KeyboardInterrupt):
        BatchWriter(plan, Failing(samples, 40), tmp_path).write_all()
    with pytest.raises(UsageError, match="interrupted"):
        BatchReader(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")}
    assert len(kept) >= 2
    files = BatchWriter(plan, Failing(samples, 2 * 60 - 40 + 20), tmp_path).write_all()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert set(kept) < set(files)
    assert sum(batch.batch_size for batch in BatchReader(tmp_path).iter_epoch(0)) == 60
    assert BatchWriter(plan, Failing(samples, 0), tmp_path).write_all() == files


def test_epoch_by_epoch_is_the_same_as_all_at_once(tmp_path: Path) -> None:
    samples = make_samples(40)
    writer = BatchWriter(make_plan(samples, epochs=2, drop_last=True), samples, tmp_path)
    for epoch in (0, 1):
        writer.write_epoch(epoch)
        reader = BatchReader(tmp_path)
        assert reader.num_epochs == epoch + 1
        assert reader.get_batch(epoch, 0).batch_size > 0
        with pytest.raises(FileNotFoundError, match=f"epoch {epoch + 1}"):
            reader.get_batch(epoch + 1, 0)


def test_a_collate_function_of_ones_own_is_stored_and_resumed(tmp_path: Path) -> None:
    calls: list[int] = []

    def collate(rows: Any, max_len: int, pad_id: int) -> dict[str, Any]:
        calls.append(max_len)
        return {"sums": np.array([sum(row["input_ids"]) for row in rows], dtype=np.int64)}

    samples = make_samples(30)
    plan = make_plan(samples)
    BatchWriter(plan, samples, tmp_path, collate_fn=collate).write_all()
    for batch in BatchReader(tmp_path).iter_epoch(1):
        assert batch["sums"].tolist() == [sum(samples[name]["input_ids"]) for name in batch.sample_ids]
    made = len(calls)
    assert made == plan.total_microbatches
    (tmp_path / "manifest.json").unlink()
    BatchWriter(plan, samples, tmp_path, collate_fn=collate).write_all()
    assert len(calls) == made
    assert len(list(BatchReader(tmp_path).iter_epoch(0))) == plan.get_epoch(0).num_microbatches


# --- collating -------------------------------------------------------------------------------------------------------


def test_padding_never_cuts() -> None:
    assert pad_sequences([[1, 2], [3]], 0).tolist() == [[1, 2], [3, 0]]
    assert pad_sequences([], 0).shape == (0, 0)
    with pytest.raises(UsageError, match="sequence 1 has 3 items"):
        pad_sequences([[1], [1, 2, 3]], 0, max_length=2)
    with pytest.raises(UsageError, match="one per token"):
        default_collate([{"input_ids": [1], "loss_mask": [1, 0]}], 4)
    assert default_collate([{"input_ids": [1, 2]}], 4)["loss_mask"].tolist() == [[1, 1, 0, 0]]
    assert default_collate([{"input_ids": [1, 2, 3]}], 2)["input_ids"].tolist() == [[1, 2]]
    spec = MicrobatchSpec(samples=("a",), bucket_id=0, max_len=2, index=3, total_tokens=3)
    with pytest.raises(UsageError, match="microbatch 3 has 2 tokens, the plan was made for 3"):
        collate_microbatch(spec, [TokenRow(np.arange(3, dtype=np.int32), np.ones(3, np.uint8))])
