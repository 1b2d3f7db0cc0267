"""Token-budget batching: samples, their lengths, buckets, batches, and the cost of the batches.

python examples/batching/01_basic_batching.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from query_mutator.batching import BucketSpec, LengthCache, Sample, SampleMeta, TokenBudgetBatchSampler


def make_samples(count: int = 400) -> list[Sample]:
    """Return samples of very different lengths, the first quarter of each a prompt without loss."""
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(np.clip(rng.lognormal(4.5, 0.8, count), 8, 600).astype(int)):
        samples.append(
            Sample(
                input_ids=rng.integers(5, 1000, length),
                loss_mask=np.arange(length) >= length // 4,
                meta=SampleMeta.create(f"sample_{number:03d}", "demo"),
            )
        )
    return samples


async def cache_lengths(samples: list[Sample], path: Path) -> LengthCache:
    """Write every sample's length into a cache and read it back."""
    async with LengthCache.create(path, "demo-tokenizer") as cache:
        for sample in samples:
            await cache.add(sample.meta.sample_id, sample.length)
    return await LengthCache.load(path, "demo-tokenizer")


async def main() -> None:
    samples = make_samples()
    with tempfile.TemporaryDirectory() as folder:
        cache = await cache_lengths(samples, Path(folder) / "lengths.bin")
        print(f"{len(cache)} lengths cached; sample_000 has {cache.get('sample_000')} tokens")
    spec = BucketSpec(edges=(64, 128, 256), overflow_max=600)
    for pad_to_bucket in (True, False):
        sampler = TokenBudgetBatchSampler(cache, spec, token_budget=2048, seed=42, pad_to_bucket=pad_to_bucket)
        batches = [batch async for batch in sampler.iter_epoch(epoch=0)]
        metrics = sampler.compute_metrics({one.meta.sample_id: one.num_target_tokens for one in samples})
        print(f"\npadded to {'the bucket' if pad_to_bucket else 'the longest of the batch'}: {len(batches)} batches")
        for batch in batches[:3]:
            print(f"  bucket {batch.bucket_id}: {batch.batch_size} samples of up to {batch.max_length} tokens")
        print(f"  efficiency {metrics.efficiency:.1%}, tokens with a loss {metrics.loss_efficiency:.1%} of all")
    again = TokenBudgetBatchSampler(cache, spec, token_budget=2048, seed=42)
    print(f"\nthe same seed gives the same batches: {list(again.iter_epoch_sync(0)) == batches}")


if __name__ == "__main__":
    asyncio.run(main())
