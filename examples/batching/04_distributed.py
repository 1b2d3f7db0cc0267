"""Several ranks: equal steps, balanced work, and resuming in the middle of an epoch.

python examples/batching/04_distributed.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    CheckpointPosition,
    DistributedConfig,
    compute_shard_stats,
    interleave_microbatches,
    iter_from_checkpoint,
    save_batch_plan,
    shard_batch_plan,
)


def main() -> None:
    here = DistributedConfig.from_env()
    print(f"this process is rank {here.rank} of {here.world_size}")
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 5000), 1, 1024).astype(int)
    config = BatchingConfig(token_budget=4096, bucket_edges=(128, 256, 512), overflow_max=1024)
    plan = BatchPlanBuilder(lengths, config, "demo", "demo").build_sync(num_epochs=2)
    for equal_steps in (False, True):
        for rank, stats in compute_shard_stats(plan, world_size=4, equal_steps=equal_steps).items():
            fillers = f"{stats['num_padding']} of them fillers, " if equal_steps else ""
            print(f"rank {rank}: {stats['num_batches']} microbatches, {fillers}{stats['total_tokens']} tokens")
    equal = shard_batch_plan(plan, DistributedConfig(rank=0, world_size=4), equal_steps=True).get_epoch(0)
    print(f"equal steps by pad: {len(equal)} on every rank")
    mixed = interleave_microbatches(list(plan.iter_epoch(0)))
    print(f"interleaved buckets: {[batch.bucket_id for batch in mixed[:8]]}")
    shard = plan.shard(0, 4, equal_steps=True)
    stopped = CheckpointPosition.at(shard, epoch=0, microbatch_idx=40, global_step=40)
    left = sum(1 for _ in iter_from_checkpoint(shard, stopped))
    print(
        f"rank 0 stopped after step {stopped.microbatch_idx} of {shard.total_microbatches}; resumed, it has {left} left"
    )
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(4):
            save_batch_plan(plan.shard(rank, 4), Path(folder) / f"rank_{rank}")
        print(f"written: {sorted(one.name for one in Path(folder).iterdir())}")


if __name__ == "__main__":
    main()
