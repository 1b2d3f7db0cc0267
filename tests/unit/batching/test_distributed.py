"""Ranks: who runs what at which step, equal steps, like work, and going on after a stop."""

from __future__ import annotations

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
    compute_shard_stats,
    interleave_microbatches,
    iter_from_checkpoint,
    load_checkpoint_position,
    save_checkpoint_position,
    shard_batch_plan,
)
from query_mutator.errors import CheckpointError, UsageError

RNG = np.random.default_rng(0)
LENGTHS = np.clip(np.exp(RNG.normal(5, 1, 3000)), 1, 1024).astype(np.int32)
CONFIG = BatchingConfig(token_budget=2048, bucket_edges=(64, 256, 512), overflow_max=1024, window=256)


@pytest.fixture(scope="module")
def plan() -> BatchPlan:
    return BatchPlanBuilder(LENGTHS, CONFIG, "d", "t").build_sync(2)


def test_more_ranks_than_microbatches_keep_their_epochs() -> None:
    small = BatchPlanBuilder([10, 20], CONFIG).build_sync(2)
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
    for name, of_plan in (("total_samples", 2 * len(LENGTHS)), ("total_tokens", 2 * int(LENGTHS.sum()))):
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
    changed = BatchPlanBuilder(LENGTHS, CONFIG.changed(seed=1), "d", "t").build_sync(2)
    with pytest.raises(CheckpointError, match="has plan_fingerprint="):
        iter_from_checkpoint(changed.shard(1, 3), position)
    with pytest.raises(IndexError):
        iter_from_checkpoint(shard, CheckpointPosition.at(shard, 0, shard.get_epoch(0).num_microbatches + 1))
