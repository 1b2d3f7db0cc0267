"""Batch plans: built once, saved, verified, sharded, resumed.

python examples/batching/03_batch_plan.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    TokenBudgetBatchSampler,
    check_plan,
    compute_batch_fingerprint,
    load_batch_plan,
    save_batch_plan,
    verify_batch_plan,
)
from query_mutator.errors import UsageError


async def main() -> None:
    rng = np.random.default_rng(0)
    lengths = {f"s{number}": int(length) for number, length in enumerate(rng.integers(8, 500, 1000))}
    config = BatchingConfig(token_budget=4096, bucket_edges=(128, 256), overflow_max=512, seed=42)
    plan = await BatchPlanBuilder(lengths, config, dataset_hash="demo", tokenizer_hash="demo").build(num_epochs=3)
    print(f"{plan.num_epochs} epochs, {plan.total_microbatches} microbatches, fingerprint {plan.fingerprint[:16]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan"
        save_batch_plan(plan, path)
        loaded = load_batch_plan(path)
        check_plan(loaded, dataset_hash="demo", tokenizer_hash="demo")
        print(f"saved in {sum(one.stat().st_size for one in path.iterdir())} bytes, the same again: ", end="")
        print(loaded.fingerprint == plan.fingerprint)
        print(f"verified: {verify_batch_plan(loaded, lengths)[1]}")
        file = path / "epoch_1.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        try:
            load_batch_plan(path)
        except UsageError as error:
            print(f"damaged: {str(error).replace(folder, '...')}")
    for rank in range(2):
        epoch = plan.shard(rank, 2).get_epoch(0)
        print(f"rank {rank}: {epoch.num_microbatches} microbatches, {epoch.total_tokens} tokens")
    rest = sum(1 for _ in plan.iter_from(epoch=1, microbatch_idx=10))
    print(f"after epoch 1, microbatch 10: {rest} microbatches are left")
    sampler = TokenBudgetBatchSampler(lengths, config.bucket_spec, config.token_budget, seed=config.seed)
    prints = [compute_batch_fingerprint(sampler.iter_epoch_sync(0), config).fingerprint for _ in range(2)]
    print(f"batches fingerprinted twice: {prints[0]} {prints[1]}")


if __name__ == "__main__":
    asyncio.run(main())
