"""Packing by hand and against plain algorithms; what must hold for any lengths and settings, found by hypothesis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    CheckpointPosition,
    PackingConfig,
    PackingMode,
    SequenceToPack,
    compute_packing_metrics,
    iter_from_checkpoint,
    pack_sequences,
)
from query_mutator.batching.planning.packing import (
    pack_best_fit,
    pack_decreasing,
    pack_first_fit,
)
from query_mutator.errors import UsageError


def sequence(name: str, ids: list[int], mask: list[int] | None = None) -> SequenceToPack:
    return SequenceToPack(sample_id=name, input_ids=ids, loss_mask=mask or [1] * len(ids))


def test_greedy_fills_almost_completely() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(200), 1.0, 100_000)), 1, 2048).astype(np.int32)
    for packer, least in ((pack_decreasing, 0.9998), (pack_first_fit, 0.996), (pack_best_fit, 0.996)):
        packs = packer(lengths, 2048)
        assert lengths.sum() / (2048 * (len(packs.offsets) - 1)) >= least


def test_a_pack_is_laid_out_by_hand() -> None:
    packs = pack_sequences([sequence("a", [1, 2, 3], [0, 1, 1]), sequence("b", [4, 5])], PackingConfig(max_length=8), 9)
    (pack,) = packs
    assert pack.input_ids.tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert pack.segment_ids.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert pack.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]  # b's first token follows a's last: no loss on it
    assert pack.labels.tolist() == [-100, 2, 3, -100, 5, -100, -100, -100]
    assert pack.cu_seqlens.tolist() == [0, 3, 5]
    assert (pack.max_seqlen, pack.total_tokens, pack.padding_tokens, pack.num_segments) == (3, 5, 3, 2)
    assert (pack.sample_ids, pack.sample_lengths, pack.efficiency) == (("a", "b"), (3, 2), 5 / 8)


def test_separators_stand_between_segments() -> None:
    config = PackingConfig(max_length=11, add_separator=True, separator_token_id=7, pad_to_max=False)
    (pack,) = pack_sequences([sequence("a", [1] * 5), sequence("b", [2] * 5)], config)
    assert pack.input_ids.tolist() == [1, 1, 1, 1, 1, 7, 2, 2, 2, 2, 2]
    assert pack.segment_ids.tolist() == [0] * 6 + [1] * 5
    assert pack.loss_mask[5] == 0
    assert len(pack_sequences([sequence("a", [1] * 5), sequence("b", [2] * 6)], config)) == 2
    with pytest.raises(ValidationError, match="separator_token_id"):
        PackingConfig(add_separator=True)


@pytest.mark.parametrize("mode", list(PackingMode))
def test_overlong_sequences_follow_the_named_policy(mode: PackingMode) -> None:
    sequences = [sequence("long", list(range(1, 11))), sequence("short", [1, 2])]
    with pytest.raises(UsageError, match="1 of 2 samples are longer than 4"):
        pack_sequences(sequences, PackingConfig(mode=mode, max_length=4))
    dropped = pack_sequences(sequences, PackingConfig(mode=mode, max_length=4, overlong="drop"))
    assert (dropped.report.num_dropped, compute_packing_metrics(dropped).num_skipped) == (1, 1)
    truncated = pack_sequences(sequences, PackingConfig(mode=mode, max_length=4, overlong="truncate"))
    assert sorted(one for pack in truncated for one in pack.sample_lengths) == [2, 4]
    assert truncated.report.tokens_lost == 6


FAST = settings(max_examples=60)
ANY_LENGTHS = st.dictionaries(st.text("abc01é", min_size=1, max_size=6), st.integers(1, 300), min_size=1, max_size=80)


@st.composite
def configs(draw: st.DrawFn) -> BatchingConfig:
    edges = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=4)))
    make = draw(st.sampled_from([BatchingConfig.throughput, BatchingConfig.predictable]))
    return make(
        token_budget=draw(st.integers(1, 600)),
        bucket_edges=tuple(edges),
        overflow_max=edges[-1] + draw(st.integers(0, 100)),
        seed=draw(st.integers(0, 5)),
        window=draw(st.integers(1, 50)),
        pad_multiple=draw(st.sampled_from([1, 8, 64])),
        overlong=draw(st.sampled_from(["drop", "truncate"])),
        max_samples=draw(st.sampled_from([None, 1, 7])),
        interleave_buckets=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, int], BatchPlan]:
    lengths, config = draw(ANY_LENGTHS), draw(configs())
    packs = None
    if draw(st.booleans()):
        mode = draw(st.sampled_from(["first_fit", "best_fit", "greedy"]))
        size = draw(st.integers(1, config.token_budget))
        packs = PackingConfig(mode=mode, max_length=size, pad_to_max=draw(st.booleans()), overlong="drop")
    return lengths, BatchPlanBuilder(lengths, config, "d", "t", packs).build_sync(2)


def rows(plan: BatchPlan, epoch: int) -> Counter[str]:
    """Return how often each sample occurs in an epoch."""
    return Counter(one for batch in plan.iter_epoch(epoch) if not batch.is_padding for one in batch.samples)


@given(case=plans())
@FAST
def test_every_kept_id_comes_exactly_once_an_epoch(case: tuple[dict[str, int], BatchPlan]) -> None:
    lengths, plan = case
    report = plan.meta.overlong
    for epoch in range(2):
        found = rows(plan, epoch)
        assert set(found.values()) <= {1}
        assert len(found) == len(lengths) - report.num_dropped
        assert plan.get_epoch(epoch).total_tokens == sum(lengths.values()) - report.tokens_lost


@given(case=plans())
@FAST
def test_no_batch_is_over_budget_or_too_short_for_its_rows(case: tuple[dict[str, int], BatchPlan]) -> None:
    lengths, plan = case
    config = plan.meta.config
    for batch in plan.iter_epoch(0):
        assert batch.num_rows * batch.max_len <= config.token_budget
        assert config.max_samples is None or batch.num_rows <= config.max_samples
        sizes = [min(lengths[one], plan.meta.overlong.limit) for one in batch.samples]
        assert max(sizes) <= batch.max_len
        assert sum(sizes) == batch.total_tokens <= batch.num_rows * batch.max_len
        if batch.packs is not None:
            ends = [sum(len(pack) for pack in batch.packs[: number + 1]) for number in range(batch.num_packs)]
            packed = [sum(sizes[end - len(pack) : end]) for pack, end in zip(batch.packs, ends, strict=True)]
            assert max(packed) <= batch.max_len


@given(case=plans(), world_size=st.integers(1, 5), equal_steps=st.booleans(), data=st.data())
@FAST
def test_the_shards_together_are_the_plan_and_each_resumes_anywhere(
    case: tuple[dict[str, int], BatchPlan], world_size: int, equal_steps: bool, data: Any
) -> None:
    plan = case[1]
    shards = [plan.shard(rank, world_size, equal_steps=equal_steps) for rank in range(world_size)]
    assert sum((rows(shard, 0) for shard in shards), Counter()) == rows(plan, 0)
    if equal_steps:
        assert len({shard.get_epoch(0).num_microbatches for shard in shards}) == 1
    shard = data.draw(st.sampled_from(shards))
    place = data.draw(st.integers(0, shard.get_epoch(0).num_microbatches))
    position = CheckpointPosition.at(shard, 0, place)
    assert list(iter_from_checkpoint(shard, position)) == list(shard.iter_from(0, 0))[place:]


BASE = BatchingConfig(token_budget=600, bucket_edges=(300,), overflow_max=600, overlong="drop")
PACKS = PackingConfig(max_length=600, overlong="drop", separator_token_id=2)
CHANGES: tuple[dict[str, Any], ...] = (
    {"token_budget": 601},
    {"seed": 77},
    {"window": 51},
    {"pad_multiple": 16},
    {"drop_last": True},
    {"max_samples": 9},
    {"overflow_max": 400},
    {"bucket_max_lengths": {0: 999}},
    {"overlong": "truncate"},
    {"bucket_edges": (201,)},
    {"interleave_buckets": not BASE.interleave_buckets},
    {"mode": "predictable", "pad_policy": "pad_to_bucket"},
)
PACK_CHANGES: tuple[dict[str, Any], ...] = (
    {"mode": "best_fit"},
    {"max_length": 599},
    {"pad_to_max": False},
    {"add_separator": True},
    {"separator_token_id": 3},
    {"overlong": "truncate"},
)


def test_the_plan_changes_with_every_setting() -> None:
    assert {name for change in CHANGES for name in change} == {*BatchingConfig.model_fields}
    assert {name for change in PACK_CHANGES for name in change} == {*PackingConfig.model_fields}
    lengths = {f"s{number}": 7 * number for number in range(1, 80)}
    settings = [(BASE.changed(**change), None) for change in ({}, *CHANGES)]
    settings += [(BASE, PACKS.changed(**change)) for change in ({}, *PACK_CHANGES)]
    plans = [BatchPlanBuilder(lengths, config, "d", "t", packs).build_sync(1) for config, packs in settings]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plans[0].fingerprint == BatchPlanBuilder(lengths, BASE, "d", "t").build_sync(1).fingerprint


@given(lengths=ANY_LENGTHS, data=st.data())
@FAST
def test_the_plan_changes_with_the_data_not_with_their_order(lengths: dict[str, int], data: Any) -> None:
    config = BatchingConfig(token_budget=600, bucket_edges=(300,), overflow_max=301)
    plan = BatchPlanBuilder(lengths, config, "d", "t").build_sync(1)
    shuffled = dict(data.draw(st.permutations(list(lengths.items()))))
    assert BatchPlanBuilder(shuffled, config, "d", "t").build_sync(1).fingerprint == plan.fingerprint
    one = data.draw(st.sampled_from(sorted(lengths)))
    longer = {**lengths, one: lengths[one] + 1}
    assert BatchPlanBuilder(longer, config, "d", "t").build_sync(1).fingerprint != plan.fingerprint


@given(seeds=st.sets(st.integers(0, 2**40), min_size=2, max_size=2), epochs=st.integers(2, 4))
@settings(max_examples=20)
def test_seeds_and_epochs_never_share_an_order(seeds: set[int], epochs: int) -> None:
    orders = set()
    for seed in seeds:
        plan = BatchPlanBuilder([10] * 50, BatchingConfig(seed=seed)).build_sync(epochs)
        orders |= {tuple(plan.get_epoch(epoch).order.tolist()) for epoch in range(epochs)}
    assert len(orders) == 2 * epochs


SCRIPT = """
import json, sys
from query_mutator.batching import BatchingConfig, BatchPlanBuilder, PackingConfig
lengths = {f"id{n * 7919 % 1000}": 1 + n * 31 % 300 for n in range(500)}
config = BatchingConfig(token_budget=1024, bucket_edges=(64, 256), overflow_max=300, seed=3)
plan = BatchPlanBuilder(lengths, config, "d", "t").build_sync(2)
packed = BatchPlanBuilder(lengths, config, "d", "t", PackingConfig(max_length=512, mode="greedy")).build_sync(1)
shard = plan.shard(1, 3, equal_steps=True)
json.dump([plan.fingerprint, packed.fingerprint, shard.fingerprint, list(plan.get_epoch(0)[3].samples)], sys.stdout)
"""


def test_another_process_with_another_hash_seed_builds_the_same_plan() -> None:
    command = [sys.executable, "-c", SCRIPT]
    outputs = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("0", "4242")
    ]
    assert outputs[0] == outputs[1] != b""
