"""Packing: several sequences in one row, separated by segment ids, positions and masks.

python examples/batching/02_sequence_packing.py
"""

from __future__ import annotations

import numpy as np

from query_mutator.batching import (
    BucketSpec,
    PackingConfig,
    PackingMode,
    SequenceToPack,
    analyze_bucket_efficiency,
    compute_packing_metrics,
    create_segment_attention_mask,
    pack_sequences,
)


def make_sequences(count: int = 500) -> list[SequenceToPack]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.5, 0.8, count), 8, 512).astype(int)
    return [
        SequenceToPack(sample_id=f"s{number}", input_ids=rng.integers(5, 1000, length), loss_mask=np.ones(length, int))
        for number, length in enumerate(lengths)
    ]


def main() -> None:
    sequences = make_sequences()
    spec = BucketSpec(edges=(64, 128, 256, 512))
    bucketed = analyze_bucket_efficiency({one.sample_id: one.length for one in sequences}, spec)
    padded = sum(one.padded_tokens for one in bucketed.buckets)
    print(f"buckets:          {padded:>7} tokens, {bucketed.overall_efficiency:.1%} real")
    for mode in PackingMode:
        packs = pack_sequences(sequences, PackingConfig(mode=mode, max_length=512))
        metrics = compute_packing_metrics(packs)
        saved = 1 - metrics.total_padded_length / padded
        print(
            f"{mode.value:<16}: {metrics.total_padded_length:>7} tokens, {metrics.efficiency:.1%} real, "
            f"{len(packs)} packs, {saved:.0%} less than buckets"
        )
    short = [SequenceToPack(sample_id=name, input_ids=ids, loss_mask=[1] * len(ids)) for name, ids in SMALL.items()]
    (pack,) = pack_sequences(short, PackingConfig(max_length=8))
    print(f"\ntokens    {pack.input_ids.tolist()}\nsegments  {pack.segment_ids.tolist()}")
    print(f"positions {pack.position_ids.tolist()}\nlabels    {pack.labels.tolist()}")
    print(f"sequences begin and end at {pack.cu_seqlens.tolist()}; who may attend to whom:")
    for row in create_segment_attention_mask(pack.segment_ids).astype(int):
        print("  " + " ".join(map(str, row)))


SMALL = {"a": [11, 12, 13], "b": [21, 22], "c": [31, 32]}

if __name__ == "__main__":
    main()
