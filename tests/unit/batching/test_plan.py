"""Plans: what they hold, fingerprints, damaged files, packs; ranks: who runs what, equal steps, resuming."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    CheckpointPosition,
    DistributedConfig,
    PackingConfig,
    TokenBudgetBatchSampler,
    check_plan,
    compute_batch_fingerprint,
    compute_batch_fingerprint_async,
    compute_shard_stats,
    interleave_microbatches,
    iter_from_checkpoint,
    load_batch_plan,
    load_batch_plan_async,
    load_checkpoint_position,
    load_fingerprint,
    save_batch_plan,
    save_batch_plan_async,
    save_checkpoint_position,
    save_fingerprint,
    shard_batch_plan,
    verify_batch_fingerprint,
    verify_batch_plan,
)
from query_mutator.batching.planning.batch_plan import MicrobatchSpec
from query_mutator.errors import CheckpointError, UsageError

RNG = np.random.default_rng(0)
LENGTHS = {f"s{number}": int(length) for number, length in enumerate(RNG.integers(1, 300, 400))}
CONFIG = BatchingConfig(token_budget=1024, bucket_edges=(64, 128, 256), overflow_max=512, window=64)


def build(epochs: int = 2, lengths: object = None, config: BatchingConfig = CONFIG, **fields: object) -> BatchPlan:
    builder = BatchPlanBuilder(LENGTHS if lengths is None else lengths, config, "data", "tok", **fields)  # type: ignore[arg-type]
    return builder.build_sync(epochs)


def test_windows_pad_less_than_buckets_and_stay_random() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(200), 1.0, 60_000)), 1, 4096).astype(np.int32)
    config = BatchingConfig(token_budget=16384, bucket_edges=(128, 256, 512, 1024, 2048), overflow_max=4096)
    epoch = build(1, lengths, config).get_epoch(0)
    assert epoch.efficiency >= 0.95
    means = epoch.tokens / epoch.sizes
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    fixed = BatchingConfig.predictable(**config.model_dump(exclude={"mode", "pad_policy"}))
    bucketed = build(1, lengths, fixed).get_epoch(0)
    assert set(bucketed.max_len.tolist()) <= {128, 256, 512, 1024, 2048, 4096}
    assert 0.6 < bucketed.efficiency < epoch.efficiency
    assert bucketed.total_samples == 60_000


def test_the_async_methods_are_the_sync_ones(tmp_path: Path) -> None:
    plan = build(3, pack_config=PackingConfig(max_length=512, mode="best_fit"))

    async def collect() -> list[MicrobatchSpec]:
        await save_batch_plan_async(plan, tmp_path / "plan")
        loaded = await load_batch_plan_async(tmp_path / "plan")
        check_plan(loaded, dataset_hash="data", tokenizer_hash="tok", lengths=LENGTHS)
        assert (loaded.fingerprint, loaded.meta) == (plan.fingerprint, plan.meta)
        for place in (-1, loaded.get_epoch(0).num_microbatches + 1):
            with pytest.raises(IndexError):
                loaded.iter_from(0, place)
        return [batch async for batch in loaded.iter_epoch_async(1)]

    assert asyncio.run(collect()) == list(plan.iter_epoch(1))


def test_a_plan_saved_over_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    save_batch_plan(build(3), tmp_path / "plan")
    save_batch_plan(build(1), tmp_path / "plan")
    assert load_batch_plan(tmp_path / "plan").num_epochs == 1
    assert [one.name for one in tmp_path.iterdir()] == ["plan"]
    assert not (tmp_path / "plan" / "epoch_2.safetensors").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("keep me")
    with pytest.raises(UsageError, match="not a plan"):
        save_batch_plan(build(1), tmp_path / "other")


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    save_batch_plan(build(2), tmp_path / "good")
    save_batch_plan(build(2, config=CONFIG.changed(seed=1)), tmp_path / "other")
    epoch, meta = "epoch_1.safetensors", "meta.json"
    data, about = ((tmp_path / "good" / name).read_bytes() for name in (epoch, meta))
    flipped, others = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], (tmp_path / "other" / epoch).read_bytes()
    cases = [(epoch, broken) for broken in (data[:-10], flipped, others, None)]
    cases += [(meta, broken) for broken in (about[:-3], about.replace(b"256", b"257", 1), None)]
    for number, (name, broken) in enumerate(cases):
        copy = shutil.copytree(tmp_path / "good", tmp_path / f"copy{number}")
        (copy / name).unlink()
        if broken is not None:
            (copy / name).write_bytes(broken)
        with pytest.raises(UsageError, match=re.escape(name)):
            load_batch_plan(copy)


def test_a_plan_for_other_data_is_refused() -> None:
    plan = build(1)
    for given in ({"dataset_hash": "x"}, {"tokenizer_hash": "x"}, {"lengths": {**LENGTHS, "s0": 999}}):
        with pytest.raises(UsageError, match="made for"):
            check_plan(plan, **given)  # type: ignore[arg-type]
    check_plan(BatchPlanBuilder(LENGTHS, CONFIG).build_sync(), dataset_hash="x", tokenizer_hash="x")  # it knows none


def test_a_plan_can_be_rebuilt_from_itself(tmp_path: Path) -> None:
    save_batch_plan(build(2), tmp_path / "plan")
    plan = load_batch_plan(tmp_path / "plan")
    assert verify_batch_plan(plan, LENGTHS) == (True, "the plan follows from these lengths and settings")
    same, message = verify_batch_plan(plan, {**LENGTHS, "s0": 299})
    assert not same
    assert "lengths_hash" in message
    assert not verify_batch_plan(plan, {**LENGTHS, "s0": 5000})[0]


def test_packs_are_part_of_the_plan() -> None:
    plan = build(2, pack_config=PackingConfig(max_length=512))
    for batch in plan.iter_epoch(0):
        assert batch.packs is not None
        assert [one for pack in batch.packs for one in pack] == list(batch.samples)
    packs = [{pack for batch in plan.iter_epoch(epoch) for pack in batch.packs or ()} for epoch in (0, 1)]
    assert packs[0] != packs[1]
    with pytest.raises(UsageError, match="do not fit"):
        build(1, pack_config=PackingConfig(max_length=2048))


def test_drop_last_counts_what_it_drops_and_packs_of_their_own_length_pad_less() -> None:
    config = BatchingConfig.predictable(token_budget=1024, bucket_edges=(256,), overflow_max=512, drop_last=True)
    epoch = build(1, [200] * 10, config).get_epoch(0)
    assert (epoch.num_microbatches, epoch.total_samples, epoch.num_dropped) == (2, 8, 2)
    fixed = build(1, [200] * 50, pack_config=PackingConfig(max_length=512)).get_epoch(0)
    loose = build(1, [200] * 50, pack_config=PackingConfig(max_length=512, pad_to_max=False)).get_epoch(0)
    assert loose.padded_tokens.sum() < fixed.padded_tokens.sum()
    assert loose.padded_tokens.max() <= 1024


def test_batch_fingerprints_cover_order_settings_and_number(tmp_path: Path) -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, CONFIG.bucket_spec, 1024)
    batches = list(sampler.iter_epoch_sync(0))
    found = compute_batch_fingerprint(batches, CONFIG)
    assert asyncio.run(compute_batch_fingerprint_async(batches, CONFIG)) == found
    assert verify_batch_fingerprint(batches, found, CONFIG)[0]
    assert verify_batch_fingerprint(batches, found.fingerprint, CONFIG)[0]
    assert verify_batch_fingerprint(batches, found.full_hash, CONFIG)[0]
    swapped = batches[0].model_copy(update={"sample_ids": batches[0].sample_ids[::-1]})
    for others, expected, config in (
        (batches[:-1], found, CONFIG),
        ([*batches, batches[0]], found, CONFIG),
        ([batches[1], batches[0], *batches[2:]], found, CONFIG),
        ([swapped, *batches[1:]], found, CONFIG),
        (batches, found, None),
        (batches, "", CONFIG),
        (batches, found.fingerprint[:8], CONFIG),
    ):
        assert not verify_batch_fingerprint(others, expected, config)[0]
    assert compute_batch_fingerprint(batches, CONFIG, n_batches=3).num_batches == 3
    save_fingerprint(found, tmp_path / "f.json")
    assert load_fingerprint(tmp_path / "f.json") == found


@pytest.mark.parametrize("pack_config", [None, PackingConfig(max_length=8)])
def test_an_epoch_of_nothing_survives_its_file(pack_config: PackingConfig | None, tmp_path: Path) -> None:
    config = BatchingConfig(token_budget=8, bucket_edges=(8,), overflow_max=8, overlong="drop")
    packing = pack_config and pack_config.changed(overlong="drop")
    plan = BatchPlanBuilder([100, 200], config, pack_config=packing).build_sync(2)
    assert plan.total_microbatches == 0
    save_batch_plan(plan, tmp_path / "plan")
    loaded = load_batch_plan(tmp_path / "plan")
    assert loaded.fingerprint == plan.fingerprint
    assert [list(loaded.iter_epoch(number)) for number in (0, 1)] == [[], []]


# --- ranks ---

SIZES = np.clip(np.exp(np.random.default_rng(0).normal(5, 1, 3000)), 1, 1024).astype(np.int32)
SHARDED = BatchingConfig(token_budget=2048, bucket_edges=(64, 256, 512), overflow_max=1024, window=256)


@pytest.fixture(scope="module")
def plan() -> BatchPlan:
    return BatchPlanBuilder(SIZES, SHARDED, "d", "t").build_sync(2)


def test_more_ranks_than_microbatches_keep_their_epochs() -> None:
    small = BatchPlanBuilder([10, 20], SHARDED).build_sync(2)
    empty = small.shard(3, 8)
    assert (empty.num_epochs, empty.total_microbatches, list(empty.iter_epoch(1))) == (2, 0, [])
    filled = small.shard(3, 8, equal_steps=True)
    assert [batch.is_padding for batch in filled.iter_epoch(0)].count(False) <= 1
    assert filled.get_epoch(0).num_microbatches == 1


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_equal_steps_are_equal_and_alike(plan: BatchPlan, world_size: int) -> None:
    shards = [plan.shard(rank, world_size, equal_steps=True) for rank in range(world_size)]
    steps = list(zip(*(shard.iter_epoch(1) for shard in shards), strict=True))
    done = Counter(batch.index for step in steps for batch in step if not batch.is_padding)
    assert done == Counter(range(plan.get_epoch(1).num_microbatches))
    assert all(len({batch.bucket_id for batch in step}) == 1 for step in steps)
    costs = np.array([[batch.num_rows * batch.max_len for batch in step] for step in steps])
    assert (costs.max(axis=1) / costs.mean(axis=1) - 1).mean() < 0.05
    stats = compute_shard_stats(plan, world_size, equal_steps=True)
    for name, of_plan in (("total_samples", 2 * len(SIZES)), ("total_tokens", 2 * int(SIZES.sum()))):
        assert sum(one[name] for one in stats.values()) == of_plan
    fillers = sum(one["num_padding"] for one in stats.values())
    assert sum(one["num_batches"] for one in stats.values()) == plan.total_microbatches + fillers


def test_epochs_deal_out_differently_and_wrong_ranks_are_refused(plan: BatchPlan) -> None:
    shard = plan.shard(0, 4, equal_steps=True)
    assert [one.index for one in shard.iter_epoch(0)] != [one.index for one in shard.iter_epoch(1)]
    with pytest.raises(ValidationError, match="rank=2 must be below world_size=2"):
        plan.shard(2, 2)


def test_microbatches_interleave_by_bucket(plan: BatchPlan) -> None:
    batches = list(plan.iter_epoch(0))
    mixed = interleave_microbatches(batches)
    assert sorted(one.index for one in mixed) == list(range(len(batches)))
    assert [one.bucket_id for one in mixed[:4]] == [0, 1, 2, 3]


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "world rank": ("WORLD_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "open mpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "slurm": tuple(f"SLURM_{name}" for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE")),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_understood(launcher: str) -> None:
    values = ("3", "8", "1", "2(x4)" if launcher == "slurm" else "2")
    config = DistributedConfig.from_env(dict(zip(LAUNCHERS[launcher], values, strict=True)))
    assert (config.rank, config.world_size, config.local_rank, config.local_world_size) == (3, 8, 1, 2)
    assert config.is_distributed
    assert not config.is_main


def test_the_environment_may_say_nothing_or_nonsense() -> None:
    assert DistributedConfig.from_env({}) == DistributedConfig()
    assert DistributedConfig.from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == DistributedConfig()
    for env, message in (
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "is inconsistent"),
    ):
        with pytest.raises(UsageError, match=message):
            DistributedConfig.from_env(env)


def test_the_global_configuration_shards(plan: BatchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedConfig, "_global", None)
    DistributedConfig(rank=1, world_size=2).set_global()
    assert [one.index for one in shard_batch_plan(plan).iter_epoch(0)][:3] == [1, 3, 5]


def test_a_position_survives_its_file(plan: BatchPlan, tmp_path: Path) -> None:
    position = CheckpointPosition.at(plan.shard(1, 3, equal_steps=True), 1, 7, global_step=40)
    save_checkpoint_position(position, tmp_path / "position.json")
    assert load_checkpoint_position(tmp_path / "position.json") == position
    assert position.plan_fingerprint == plan.fingerprint
    (tmp_path / "position.json").write_text('{"epoch": 1}')
    with pytest.raises(UsageError, match=r"position\.json"):
        load_checkpoint_position(tmp_path / "position.json")
    with pytest.raises(ValidationError):
        CheckpointPosition(epoch=-1, microbatch_idx=0)


def test_a_position_goes_on_in_its_own_plan_only(plan: BatchPlan) -> None:
    shard = plan.shard(1, 3)
    position = CheckpointPosition.at(shard, 0, 5)
    everything = list(iter_from_checkpoint(shard))
    assert list(iter_from_checkpoint(shard, CheckpointPosition(epoch=0, microbatch_idx=5))) == everything[5:]
    for other in (plan, plan.shard(0, 3), plan.shard(1, 2)):
        with pytest.raises(CheckpointError):
            iter_from_checkpoint(other, position)
    changed = BatchPlanBuilder(SIZES, SHARDED.changed(seed=1), "d", "t").build_sync(2)
    with pytest.raises(CheckpointError, match="has plan_fingerprint="):
        iter_from_checkpoint(changed.shard(1, 3), position)
    with pytest.raises(IndexError):
        iter_from_checkpoint(shard, CheckpointPosition.at(shard, 0, shard.get_epoch(0).num_microbatches + 1))
