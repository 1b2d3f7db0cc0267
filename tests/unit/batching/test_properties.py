"""What must hold for any lengths and settings, found by hypothesis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    CheckpointPosition,
    DistributedConfig,
    PackingConfig,
    resume_shard,
)

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = st.dictionaries(st.text("abc01é", min_size=1, max_size=6), st.integers(1, 300), min_size=1, max_size=80)


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
        overlong=draw(st.sampled_from(["drop", "truncate", "split"])),
        max_samples=draw(st.sampled_from([None, 1, 7])),
        interleave_buckets=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, int], BatchPlan]:
    lengths, config = draw(LENGTHS), draw(configs())
    packs = None
    if draw(st.booleans()):
        mode = draw(st.sampled_from(["first_fit", "best_fit", "greedy", "order_preserving"]))
        size = draw(st.integers(1, config.token_budget))
        packs = PackingConfig(mode=mode, max_length=size, pad_to_max=draw(st.booleans()), overlong="drop")
    return lengths, BatchPlanBuilder(lengths, config, "d", "t", packs).build_sync(2)


def rows(plan: BatchPlan, epoch: int) -> Counter[tuple[str, int, int]]:
    """Return how often each piece of a sample occurs in an epoch."""
    found: Counter[tuple[str, int, int]] = Counter()
    for batch in plan.iter_epoch(epoch):
        starts = [0] * batch.batch_size if batch.starts is None else batch.starts.tolist()
        stops = [-1] * batch.batch_size if batch.stops is None else batch.stops.tolist()
        if not batch.is_padding:
            found.update(zip(batch.samples, starts, stops, strict=True))
    return found


@given(case=plans())
@FAST
def test_every_kept_id_comes_exactly_once_an_epoch(case: tuple[dict[str, int], BatchPlan]) -> None:
    lengths, plan = case
    report = plan.meta.overlong
    for epoch in range(2):
        found = rows(plan, epoch)
        assert set(found.values()) <= {1}
        assert len({one for one, _, _ in found}) == len(lengths) - report.num_dropped
        tokens = sum((lengths[one] if stop == -1 else stop) - start for one, start, stop in found)
        assert tokens == sum(lengths.values()) - report.tokens_lost == plan.get_epoch(epoch).total_tokens


@given(case=plans())
@FAST
def test_no_batch_is_over_budget_or_too_short_for_its_rows(case: tuple[dict[str, int], BatchPlan]) -> None:
    lengths, plan = case
    config = plan.meta.config
    for batch in plan.iter_epoch(0):
        assert batch.num_rows * batch.max_len <= config.token_budget
        assert config.max_samples is None or batch.num_rows <= config.max_samples
        starts = [0] * batch.batch_size if batch.starts is None else batch.starts.tolist()
        stops = [-1] * batch.batch_size if batch.stops is None else batch.stops.tolist()
        sizes = [
            (lengths[one] if stop == -1 else stop) - start
            for one, start, stop in zip(batch.samples, starts, stops, strict=True)
        ]
        assert max(sizes) <= batch.max_len
        assert sum(sizes) == batch.total_tokens <= batch.num_rows * batch.max_len
        if batch.packs is not None:
            ends = [sum(len(pack) for pack in batch.packs[: number + 1]) for number in range(batch.num_packs)]
            packed = [sum(sizes[end - len(pack) : end]) for pack, end in zip(batch.packs, ends, strict=True)]
            assert max(packed) <= batch.max_len


@given(case=plans(), world_size=st.integers(1, 5), equal_steps=st.booleans())
@FAST
def test_the_shards_together_are_the_plan(
    case: tuple[dict[str, int], BatchPlan], world_size: int, equal_steps: bool
) -> None:
    plan = case[1]
    shards = [plan.shard(rank, world_size, equal_steps=equal_steps) for rank in range(world_size)]
    together = sum((rows(shard, 0) for shard in shards), Counter())
    assert together == rows(plan, 0)
    if equal_steps:
        assert len({shard.get_epoch(0).num_microbatches for shard in shards}) == 1


@given(case=plans(), data=st.data())
@FAST
def test_resuming_anywhere_continues_as_if_never_stopped(case: tuple[dict[str, int], BatchPlan], data: Any) -> None:
    plan = case[1]
    world_size = data.draw(st.integers(1, 4))
    shard = plan.shard(data.draw(st.integers(0, world_size - 1)), world_size, equal_steps=data.draw(st.booleans()))
    place = data.draw(st.integers(0, shard.get_epoch(0).num_microbatches))
    resumed, begin = resume_shard(plan, CheckpointPosition.at(shard, 0, place))
    assert list(resumed.iter_from(0, begin)) == list(shard.iter_from(0, 0))[place:]


@given(case=plans(), data=st.data())
@FAST
def test_other_ranks_take_over_what_is_left(case: tuple[dict[str, int], BatchPlan], data: Any) -> None:
    plan = case[1]
    equal_steps = data.draw(st.booleans())
    position = CheckpointPosition.at(plan.shard(0, 1, equal_steps=equal_steps), 0, 0)
    done: Counter[int] = Counter()
    for world_size in [*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), 2]:
        begins = {resume_shard(plan, position, DistributedConfig(rank=0, world_size=world_size))[1]}
        steps = data.draw(st.integers(0, 3))
        shards = []
        for rank in range(world_size):
            shard, begin = resume_shard(plan, position, DistributedConfig(rank=rank, world_size=world_size))
            shards.append(shard)
            begins.add(begin)
            batches = list(shard.iter_epoch(0))[begin : begin + steps]
            done.update(batch.index for batch in batches if not batch.is_padding)
        (begin,) = begins
        here = min(begin + steps, shards[0].get_epoch(0).num_microbatches)
        position = CheckpointPosition.at(shards[0], 0, here)
    for rank in range(3):
        shard, begin = resume_shard(plan, position, DistributedConfig(rank=rank, world_size=3))
        done.update(batch.index for batch in list(shard.iter_epoch(0))[begin:] if not batch.is_padding)
    assert done == Counter(range(plan.get_epoch(0).num_microbatches))


CHANGES: dict[str, Any] = {
    "token_budget": 601,
    "seed": 77,
    "window": 51,
    "pad_multiple": 16,
    "drop_last": True,
    "max_samples": 9,
    "overflow_max": 400,
    "loss_token_budget": 599,
    "bucket_max_lengths": {0: 999},
    "overlong": "split",
}


def changes_of(config: BatchingConfig) -> dict[str, dict[str, Any]]:
    """Return for every field of the settings what to change; fields that only go together are changed together."""
    other = BatchingConfig.throughput() if config.is_predictable else BatchingConfig.predictable()
    mode = {"mode": other.mode, "pad_policy": other.pad_policy}
    return {
        **{name: {name: value} for name, value in CHANGES.items()},
        "interleave_buckets": {"interleave_buckets": not config.interleave_buckets},
        "bucket_edges": {"bucket_edges": (201,), "overflow_max": max(201, config.overflow_max)},
        "mode": mode,
        "pad_policy": mode,
    }


@given(lengths=LENGTHS, config=configs(), name=st.sampled_from(list(BatchingConfig.model_fields)))
@FAST
def test_the_plan_changes_with_every_setting(lengths: dict[str, int], config: BatchingConfig, name: str) -> None:
    config = config.changed(overlong="drop", bucket_max_lengths=None)
    other = config.changed(**changes_of(config)[name])
    one, two = (BatchPlanBuilder(lengths, each, "d", "t").build_sync(1) for each in (config, other))
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == BatchPlanBuilder(lengths, config, "d", "t").build_sync(1).fingerprint


PACKING: dict[str, Any] = {
    "mode": "best_fit",
    "max_length": 599,
    "pad_to_max": False,
    "add_separator": True,
    "separator_token_id": 3,
    "overlong": "truncate",
    "max_segments": 5,
}


@given(lengths=LENGTHS, name=st.sampled_from(list(PackingConfig.model_fields)))
@FAST
def test_the_plan_changes_with_every_setting_of_its_packs(lengths: dict[str, int], name: str) -> None:
    config = BatchingConfig(token_budget=1200, bucket_edges=(600,), overflow_max=600)
    packs = PackingConfig(max_length=600, overlong="drop", separator_token_id=2)
    other = packs.changed(**{name: PACKING[name]})
    one, two = (BatchPlanBuilder(lengths, config, "d", "t", each).build_sync(1) for each in (packs, other))
    assert one.fingerprint != two.fingerprint


@given(lengths=LENGTHS, data=st.data())
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
@settings(max_examples=20, deadline=None)
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
groups = {one: f"g{n // 2}" for n, one in enumerate(lengths) if n < 100}
config = BatchingConfig(token_budget=1024, bucket_edges=(64, 256), overflow_max=300, seed=3)
plan = BatchPlanBuilder(lengths, config, "d", "t", groups=groups).build_sync(2)
packed = BatchPlanBuilder(lengths, config, "d", "t", PackingConfig(max_length=512, mode="greedy")).build_sync(1)
shard = plan.shard(1, 3, equal_steps=True)
json.dump([plan.fingerprint, packed.fingerprint, shard.fingerprint, list(plan.get_epoch(0)[3].samples)], sys.stdout)
"""


def test_another_process_with_another_hash_seed_builds_the_same_plan() -> None:
    outputs = []
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(json.loads(run.stdout))
    assert outputs[0] == outputs[1]
