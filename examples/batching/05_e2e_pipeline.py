"""From a JSONL file to training batches: tokens, lengths, a plan, and three ways to feed it to a training loop.

    rows -> tokens -> length cache -> plan -> a) stream   b) a batch store   c) shards for several ranks

The loop at the end is a real one: a small softmax model learns which token follows which, and its loss falls.

    python examples/batching/05_e2e_pipeline.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from query_mutator.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchReader,
    BatchWriter,
    CollatedBatch,
    JsonlSamples,
    LengthCache,
    collate_microbatch,
    compute_dataset_fingerprint,
    tokenizer_fingerprint,
)

QUESTIONS = ["read a file", "sort a list", "join two paths", "count words", "parse a date", "copy a folder"]
DETAILS = [
    "with the standard library",
    "line by line",
    "without loading it whole",
    "in one call",
    "and say when it fails",
]


def main() -> None:
    """Run the stages in the order of the pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_rows(Path(folder) / "train.jsonl", count=200)
        tokenizer = train_tokenizer(data)
        samples = JsonlSamples(data, tokenizer)
        cache = cache_lengths(samples, tokenizer, Path(folder) / "lengths.bin")
        plan = build_plan(cache, data)
        streamed = list(stream(plan, samples))
        stored = store(plan, samples, Path(folder) / "batches")
        same = all(one == other for one, other in zip(streamed, stored, strict=True))
        print(f"both ways give the same {len(stored)} batches: {same}")
        show_shards(plan)
        train(stored, vocabulary=tokenizer.get_vocab_size())


def write_rows(path: Path, *, count: int) -> Path:
    """Write instruction and response rows of different lengths."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            topic = QUESTIONS[number % len(QUESTIONS)]
            answer = " ".join(rng.choice(DETAILS, size=int(rng.integers(1, 20))))
            row = {"id": number, "instruction": f"How do I {topic}?", "response": f"To {topic}: {answer}."}
            file.write(json.dumps(row) + "\n")
    print(f"{count} rows in {path.name}")
    return path


def train_tokenizer(data: Path) -> Tokenizer:
    """Train a small byte-pair tokenizer on the file's texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [value for line in data.open() for value in json.loads(line).values() if isinstance(value, str)]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cache_lengths(samples: JsonlSamples, tokenizer: Tokenizer, path: Path) -> LengthCache:
    """Tokenize once for the lengths; later runs load the file."""
    with LengthCache.create(path, tokenizer_fingerprint(tokenizer)) as cache:
        lengths = samples.lengths()
        cache.add_many_sync(list(lengths), list(lengths.values()))
    loaded = LengthCache.load_sync(path, expected_tokenizer_hash=cache.tokenizer_hash)
    print(f"{len(loaded)} lengths from {loaded.lengths.min()} to {loaded.lengths.max()} tokens")
    return loaded


def build_plan(cache: LengthCache, data: Path) -> BatchPlan:
    """Build a plan of two epochs."""
    config = BatchingConfig.throughput(token_budget=1024, bucket_edges=(32, 64, 128), overflow_max=256, seed=42)
    fingerprint = compute_dataset_fingerprint(data, cache.tokenizer_hash)
    builder = BatchPlanBuilder(
        lengths=cache,
        batching_config=config,
        dataset_hash=fingerprint.fingerprint,
        tokenizer_hash=cache.tokenizer_hash,
    )
    plan = builder.build_sync(num_epochs=2)
    for number in range(plan.num_epochs):
        epoch = plan.get_epoch(number)
        print(f"epoch {number}: {epoch.num_microbatches} batches, padding efficiency {epoch.efficiency:.3f}")
    return plan


def stream(plan: BatchPlan, samples: JsonlSamples) -> Iterable[CollatedBatch]:
    """a) Tokenize and collate while training."""
    for number in range(plan.num_epochs):
        for spec in plan.iter_epoch(number):
            yield collate_microbatch(spec, [samples[name] for name in spec.samples], epoch=number)


def store(plan: BatchPlan, samples: JsonlSamples, folder: Path) -> list[CollatedBatch]:
    """b) Write the tokens once and compose batches from the files."""
    files = BatchWriter(plan, samples, folder).write_all()
    reader = BatchReader(folder)
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files of {size} bytes, plan {reader.fingerprint[:16]}")
    return [batch for number in reader.epochs for batch in reader.iter_epoch(number)]


def show_shards(plan: BatchPlan) -> None:
    """c) Shard the batches over ranks; every rank runs the same number of steps."""
    for rank in range(2):
        epoch = plan.shard(rank, world_size=2, equal_steps=True).get_epoch(0)
        print(f"rank {rank} of 2: {epoch.num_microbatches} steps, {epoch.total_samples} samples")


def train(batches: Iterable[CollatedBatch], *, vocabulary: int) -> None:
    """Train a bigram model by gradient descent on the tokens with a loss."""
    logits = np.zeros((vocabulary, vocabulary))
    losses = [step(logits, batch, learning_rate=20.0) for batch in batches]
    print(f"loss of the first batch {losses[0]:.3f}, of the last {losses[-1]:.3f}")


def step(logits: NDArray[np.float64], batch: CollatedBatch, *, learning_rate: float) -> float:
    """Take one step and return the mean loss per token."""
    learned = batch.loss_mask[:, 1:] == 1
    before, after = batch.input_ids[:, :-1][learned], batch.input_ids[:, 1:][learned]
    chances = np.exp(logits[before])
    chances /= chances.sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(after)), after]).mean()
    chances[np.arange(len(after)), after] -= 1.0
    np.subtract.at(logits, before, learning_rate / len(after) * chances)
    return float(loss)


if __name__ == "__main__":
    main()
