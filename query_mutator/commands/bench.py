"""`qm bench`: compare ways of batching on a dataset."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    JsonlSamples,
    PackingConfig,
    PackingMode,
    load_tokenizer,
)
from query_mutator.batching.records import settings_errors
from query_mutator.batching.training.config import parse_edges
from query_mutator.bounds import Count, Seed, Steps
from query_mutator.cli.console import progress, table
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class BenchFlags(JsonFlags):
    """Compare buckets, sorted windows and packs on a dataset: batches, padding, time to plan."""

    dataset: Annotated[str | None, Parameter(alias="-d")] = None
    """JSONL file; by default random log-normal lengths."""
    tokenizer: Annotated[str, Parameter(alias="-t")] = "gpt2"
    """Tokenizer for --dataset: a folder, a hub id, or bytes."""
    bucket_edges: str = "128,256,512"
    """Maximum length of each bucket, as a,b,c."""
    token_budget: Count = 4096
    """Maximum tokens of a batch, padding included."""
    max_length: Count = 2048
    """Maximum length of a sample; longer ones are dropped and counted."""
    max_samples: Steps | None = None
    """Number of rows of --dataset to use; by default all."""
    num_samples: Steps = 1000
    """Random samples, without --dataset."""
    seed: Seed = 42
    """Seed of lengths and order."""

    def __post_init__(self) -> None:
        if parse_edges(self.bucket_edges)[-1] > self.max_length:
            raise ValueError(f"--bucket-edges end above --max-length {self.max_length}; raise it, or leave edges out")
        if self.token_budget < self.max_length:
            raise ValueError(f"--token-budget {self.token_budget} is below --max-length {self.max_length}")


def bench(flags: BenchFlags) -> None:
    """Print a table with a row for each way of batching."""
    lengths = _lengths(flags)
    kept = lengths[lengths <= flags.max_length]
    if not len(kept):
        raise UsageError(f"no sample has at most --max-length {flags.max_length} tokens")
    rows = [_measured(name, builder) for name, builder in _ways(flags, kept).items()]
    data = {
        "samples": len(kept),
        "left_out": len(lengths) - len(kept),
        "tokens": int(kept.sum(dtype=np.int64)),
        "token_budget": flags.token_budget,
        "ways": rows,
    }
    show(flags, data, _table(data))


def _lengths(flags: BenchFlags) -> NDArray[np.int32]:
    if flags.dataset is not None:
        samples = JsonlSamples(flags.dataset, load_tokenizer(flags.tokenizer))
        names = list(samples)[: flags.max_samples]
        with progress("tokenizing", len(names), unit="row") as bar:
            samples.on_read = bar.update
            lengths = [samples[name].length for name in names]
        samples.close()
        return np.array(lengths, np.int32)
    drawn = np.random.default_rng(flags.seed).lognormal(np.log(200.0), 1.0, flags.num_samples)
    return np.clip(drawn, 1, flags.max_length).astype(np.int32)


def _ways(flags: BenchFlags, lengths: NDArray[np.int32]) -> dict[str, BatchPlanBuilder]:
    """Return the builder of each way."""
    given = parse_edges(flags.bucket_edges)
    edges = given if given[-1] == flags.max_length else (*given, flags.max_length)
    common: dict[str, Any] = {"token_budget": flags.token_budget, "seed": flags.seed}
    with settings_errors():
        buckets = BatchingConfig.predictable(bucket_edges=edges, overflow_max=edges[-1], **common)
        windows = BatchingConfig.throughput(bucket_edges=edges, overflow_max=edges[-1], **common)
    ways = {"buckets": BatchPlanBuilder(lengths, buckets), "sorted windows": BatchPlanBuilder(lengths, windows)}
    for mode in PackingMode:
        packing = PackingConfig(mode=mode, max_length=flags.max_length)
        ways[f"packed, {mode.value}"] = BatchPlanBuilder(lengths, windows, pack_config=packing)
    return ways


def _measured(name: str, builder: BatchPlanBuilder) -> dict[str, Any]:
    """Return the figures of one way."""
    begin = time.perf_counter()
    epoch = builder.build_epoch(0)
    plan_s = time.perf_counter() - begin
    return {
        "name": name,
        "batches": epoch.num_microbatches,
        "padded_tokens": int(epoch.padded_tokens.sum()),
        "efficiency": round(epoch.efficiency, 4),
        "squared_lengths": int(epoch.squares.sum()),
        "plan_s": round(plan_s, 4),
    }


def _table(data: dict[str, Any]) -> str:
    title = f"{data['samples']} samples, {data['tokens']} tokens, budget {data['token_budget']}"
    header = ("", "batches", "padded tokens", "efficiency", "attention", "plan s")
    rows = [
        (
            one["name"],
            str(one["batches"]),
            str(one["padded_tokens"]),
            f"{one['efficiency']:.1%}",
            f"{one['squared_lengths']:.3g}",
            f"{one['plan_s']:.3f}",
        )
        for one in data["ways"]
    ]
    left_out = [f"{data['left_out']} longer samples are left out"] if data["left_out"] else []
    return "\n".join([table(title, header, rows), *left_out])
