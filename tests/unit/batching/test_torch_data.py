"""Plans in torch: sampler, resume in mid-epoch, workers, collators by hand, and that no segment sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from query_mutator.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, PackingConfig, Sample, SampleMeta
from query_mutator.errors import CheckpointError, UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - torch may be absent

from query_mutator.batching.torch_data import (  # noqa: E402
    PackedCollator,
    PaddedCollator,
    PlanBatchSampler,
    PlanDataset,
    Row,
    flex_block_mask,
    sdpa_block_mask,
    varlen_kwargs,
)

CONFIG = BatchingConfig(token_budget=256, bucket_edges=(16, 32), overflow_max=64, window=32)
RNG = np.random.default_rng(0)


def sample(name: str, ids: list[int], mask: list[int] | None = None) -> Sample:
    return Sample(input_ids=ids, loss_mask=mask or [1] * len(ids), meta=SampleMeta.create(name, "data"))


SAMPLES = [
    sample(f"s{number}", RNG.integers(1, 100, size).tolist()) for number, size in enumerate(RNG.integers(1, 60, 120))
]
LENGTHS = [one.length for one in SAMPLES]
BY_ID = {one.meta.sample_id: one.length for one in SAMPLES}


def build(lengths: Any = LENGTHS, config: BatchingConfig = CONFIG, **fields: Any) -> BatchPlan:
    return BatchPlanBuilder(lengths, config, "d", "t", **fields).build_sync(2)


def test_the_sampler_yields_positions_or_ids() -> None:
    by_place, by_id = PlanBatchSampler(build()), PlanBatchSampler(build(BY_ID))
    assert sorted(one for batch in by_place for one in batch) == list(range(120))
    assert sorted(one for batch in by_id for one in batch) == sorted(BY_ID)
    assert len(by_place) == len(list(by_place))
    names = [one.meta.sample_id for one in SAMPLES][::-1]
    moved = PlanBatchSampler(build(BY_ID), dataset_ids=names)
    assert [[names[place] for place in batch] for batch in moved] == list(by_id)
    with pytest.raises(UsageError, match="lacks sample"):
        PlanBatchSampler(build(BY_ID), dataset_ids=names[1:])


def test_epochs_differ_and_an_unknown_one_is_an_error() -> None:
    sampler = PlanBatchSampler(build())
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    with pytest.raises(KeyError):
        sampler.set_epoch(5)


@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_state_resumes_in_mid_epoch(place: int) -> None:
    plan = build().shard(1, 2)
    sampler = PlanBatchSampler(plan)
    sampler.set_epoch(1)
    everything = list(sampler)
    begun = iter(sampler)
    for _ in range(place):
        next(begun)
    resumed = PlanBatchSampler(plan)
    resumed.load_state_dict(sampler.state_dict() if place else sampler.state_at(0))
    resumed.set_epoch(resumed.epoch)  # trainers call it at the start of every epoch: the place stays
    assert list(resumed) == everything[place:]
    assert list(resumed) == everything  # the epoch after that is whole again


def test_a_state_of_another_plan_or_rank_is_refused() -> None:
    state = PlanBatchSampler(build().shard(1, 2)).state_at(3)
    for plan in (build(), build().shard(0, 2), build(config=CONFIG.changed(seed=1)).shard(1, 2)):
        with pytest.raises(CheckpointError):
            PlanBatchSampler(plan).load_state_dict(state)
    sampler = PlanBatchSampler(build())
    with pytest.raises(CheckpointError, match="the epoch has"):
        sampler.load_state_dict(sampler.state_at(10_000))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_every_token_once(workers: int) -> None:
    loader = DataLoader(
        PlanDataset(SAMPLES),
        batch_sampler=PlanBatchSampler(build(BY_ID)),
        collate_fn=PaddedCollator(),
        num_workers=workers,
    )
    tokens = 0
    for batch in loader:
        assert batch["input_ids"].numel() <= 256
        tokens += int(batch["attention_mask"].sum())
    assert tokens == sum(LENGTHS)


def test_packs_cuts_and_fillers_reach_the_collator() -> None:
    config = CONFIG.changed(bucket_edges=(16,), overflow_max=32, overlong="split")
    plan = build(config=config, pack_config=PackingConfig(max_length=32, mode="greedy"))
    seen = 0
    steps = set()
    for rank in range(3):
        shard = plan.shard(rank, 3, equal_steps=True)
        loader = DataLoader(
            PlanDataset(SAMPLES), batch_sampler=PlanBatchSampler(shard), collate_fn=PackedCollator(max_length=32)
        )
        batches = list(loader)
        steps.add(len(batches))
        for batch, spec in zip(batches, shard.iter_epoch(0), strict=True):
            assert tuple(batch["input_ids"].shape) == (spec.num_packs, 32)
            labelled = int((batch["labels"] != -100).sum())
            assert labelled == spec.loss_tokens
            seen += 0 if spec.is_padding else int(batch["attention_mask"].sum())
    assert len(steps) == 1
    assert seen == sum(LENGTHS)


def test_the_dataset_reads_every_kind_of_key() -> None:
    data = PlanDataset(SAMPLES)
    assert data[3] == data["s3"] == PlanDataset({"s3": SAMPLES[3]})["s3"]
    assert data[[1, "s2"]] == [SAMPLES[1], SAMPLES[2]]
    cut = data[Row(3, 1, 2)]
    assert isinstance(cut, Sample)
    assert cut.input_ids.tolist() == SAMPLES[3].input_ids[1:2].tolist()
    with pytest.raises(UsageError, match="built for 10000"):
        data[Row(3, 0, 10_000)]


def test_a_padded_batch_by_hand() -> None:
    batch = PaddedCollator(pad_token_id=9, multiple=4)(
        [sample("a", [1, 2, 3], [0, 0, 1]), sample("b", [4, 5, 6, 7, 8])]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 5, 6, 7, 8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, -100, 3] + [-100] * 5, [-100, 5, 6, 7, 8] + [-100] * 3]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]
    assert batch["position_ids"].tolist() == [[0, 1, 2] + [0] * 5, [0, 1, 2, 3, 4] + [0] * 3]
    with pytest.raises(UsageError, match="length=4"):
        PaddedCollator(length=4)([sample("b", [4, 5, 6, 7, 8])])


def test_a_packed_batch_by_hand() -> None:
    packs = [[sample("a", [1, 2, 3]), sample("b", [4, 5], [0, 1])], [sample("c", [6, 7])]]
    batch = PackedCollator(pad_token_id=9, max_length=6)(packs)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9], [6, 7, 9, 9, 9, 9]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100], [-100, 7] + [-100] * 4]
    assert (batch["cu_seqlens"].tolist(), batch["max_seqlen"]) == ([0, 3, 5, 6, 8, 12], 4)
    assert batch["cu_seqlens"].dtype == torch.int32
    flat = PackedCollator(pad_token_id=9, multiple=4, flat=True)(packs)
    assert flat["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 9]]
    assert (flat["cu_seqlens"].tolist(), flat["max_seqlen"]) == ([0, 3, 5, 7, 8], 3)
    assert varlen_kwargs(flat)["max_length_q"] == 3
    separated = PackedCollator(separator_token_id=8, multiple=1)(packs[:1])
    assert separated["input_ids"].tolist() == [[1, 2, 3, 8, 4, 5]]
    assert separated["labels"].tolist() == [[-100, 2, 3, -100, -100, 5]]
    with pytest.raises(UsageError, match="max_length=4"):
        PackedCollator(max_length=4)(packs)


def attend(query: Any, mask: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def test_attention_in_a_pack_equals_attention_alone() -> None:
    torch.manual_seed(0)
    segments = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 1, 1]])
    query = torch.randn(2, 1, 6, 8)
    out = attend(query, sdpa_block_mask(segments))
    assert torch.isfinite(out).all()
    for row in range(2):
        for segment in range(2):
            here = segments[row] == segment
            alone = query[row : row + 1, :, here]
            expected = torch.nn.functional.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
            assert torch.allclose(out[row : row + 1, :, here], expected, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_flex_mask_is_the_sdpa_mask(causal: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    segments = torch.tensor([[0] * 50 + [1] * 70 + [-1] * 8])
    query = torch.randn(1, 2, 128, 16)
    expected = attend(query, sdpa_block_mask(segments, causal=causal))
    found = flex_attention(query, query, query, block_mask=flex_block_mask(segments, causal=causal))
    assert torch.allclose(found, expected, atol=1e-5)


def test_torchdata_resumes_with_workers() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        sampler = PlanBatchSampler(build())
        return stateful(PlanDataset(SAMPLES), batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=2)

    everything = [batch["input_ids"] for batch in loader()]
    begun = loader()
    rows = iter(begun)
    for _ in range(4):
        next(rows)
    resumed = loader()
    resumed.load_state_dict(begun.state_dict())
    rest = [batch["input_ids"] for batch in resumed]
    assert len(rest) == len(everything) - 4
    assert all(torch.equal(one, two) for one, two in zip(rest, everything[4:], strict=True))
