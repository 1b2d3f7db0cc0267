"""Streams of samples: from a file, sync and async, filtered, in an order of their own, resumed, marked as replays.

python examples/batching/07_streaming.py
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np

from query_mutator.batching import (
    AsyncOfflineDatasetStream,
    OfflineDatasetStream,
    SampleSource,
    StreamMetrics,
    StreamSample,
)


def main() -> None:
    """Show one thing after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "train.jsonl")
        sync_stream(path)
        asyncio.run(async_stream(path))
        filtering(path)
        order_and_resume(path)
        bad_rows(Path(folder) / "broken.jsonl")
    metrics()
    replays()


def write_dataset(path: Path, count: int = 100) -> Path:
    """Write rows of token ids with a difficulty and an outcome."""
    rng = np.random.default_rng(42)
    rows = []
    for number in range(count):
        length = int(rng.integers(50, 200))
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        row = {"sample_id": f"sample_{number:04d}", "input_ids": list(range(length)), "loss_mask": mask}
        rows.append({**row, "difficulty": float(rng.random()), "success": bool(rng.random() > 0.3)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sync_stream(path: Path) -> None:
    """Iterate, stop halfway, resume."""
    stream = OfflineDatasetStream(path, dataset_id="demo")
    print(f"before: {stream.state}, {stream.count_samples()} rows")
    walk = iter(stream)
    first = [next(walk) for _ in range(5)]
    print(f"halfway: {stream.state}; the first sample is {first[0].sample_id} of {first[0].length} tokens")
    rest = list(stream)
    print(f"after: {stream.state}, {len(first)} + {len(rest)} samples")


async def async_stream(path: Path) -> None:
    """Use the same stream with `async for`."""
    async with AsyncOfflineDatasetStream(path, dataset_id="demo") as stream:
        lengths = [sample.length async for sample in stream]
        found = stream.metrics
        print(f"async: {len(lengths)} samples, {found.total_tokens} tokens, mean length {found.mean_length:.1f}")
        await stream.reset()
        print(f"after reset: {stream.state}, {stream.metrics.samples_produced} produced")


def filtering(path: Path) -> None:
    """Let only some samples through; what is held back is counted."""
    stream = OfflineDatasetStream(path, max_length=150, keep=lambda sample: sample.success is True)
    samples = list(stream)
    easy = sum(sample.difficulty is not None and sample.difficulty < 0.3 for sample in samples)
    print(f"kept {len(samples)} (easy ones: {easy}), filter rate {stream.metrics.filter_rate:.0%}")


def order_and_resume(path: Path) -> None:
    """Shuffle by seed and epoch, and resume in another process from a small state."""
    stream = OfflineDatasetStream(path, shuffle=True, seed=7)
    walk = iter(stream)
    for _ in range(30):
        next(walk)
    state = stream.state_dict()
    resumed = OfflineDatasetStream(path, shuffle=True, seed=7)
    resumed.load_state_dict(state)
    same = [one.sample_id for one in resumed] == [one.sample_id for one in walk]
    print(f"resumed at {state['position']}: the rest is the same: {same}")


def bad_rows(path: Path) -> None:
    """Rows that give nothing are errors with their line, or counted."""
    path.write_text('{"input_ids": [1, 2, 3]}\n{"question": "no text here"}\n')
    try:
        list(OfflineDatasetStream(path))
    except ValueError as error:
        print(f"refused: {str(error).removeprefix(str(path.parent) + '/')}")
    lenient = OfflineDatasetStream(path, skip_bad=True)
    print(f"with skip_bad: {len(list(lenient))} sample, {lenient.metrics.samples_errored} bad row counted")


def metrics() -> None:
    """Keep an account by hand."""
    account = StreamMetrics()
    for number in range(10):
        account = account.record_sample(make_sample(number))
    account = account.record_filtered()
    for success in (True, True, False):
        account = account.record_episode(success)
    print(f"account: filter rate {account.filter_rate:.1%}, mean reward {account.mean_reward:.2f}, "
          f"mean difficulty {account.mean_difficulty:.2f}, success rate {account.success_rate:.1%}")  # fmt: skip


def make_sample(number: int) -> StreamSample:
    """Return a sample of 100 tokens."""
    return StreamSample(
        input_ids=range(100),
        loss_mask=[1] * 100,
        sample_id=f"sample_{number}",
        dataset_id="demo",
        source=SampleSource.OFFLINE,
        difficulty=number / 10,
        reward=0.5 + number * 0.1,
    )


def replays() -> None:
    """A replay is a copy; the sample itself does not change."""
    original = make_sample(1)
    twice = original.with_replay().with_replay()
    print(f"replayed {twice.replay_count} times, source {twice.source}; the original: {original.replay_count}")


if __name__ == "__main__":
    main()
