"""`qm data lengths`, `qm data batching`, `qm data batch`: lengths tokenized once, batches analyzed, their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from cyclopts import Parameter

from query_mutator.batching import (
    BatchWriter,
    BucketSpec,
    JsonlSamples,
    LengthCache,
    check_plan,
    compute_dataset_fingerprint,
    compute_length_histogram,
    create_efficiency_report,
    load_batch_plan,
    suggest_bucket_edges,
    tokenizer_fingerprint,
)
from query_mutator.batching.analyze.efficiency import PERCENTILES
from query_mutator.batching.generation.io import has_batches
from query_mutator.batching.records import settings_errors
from query_mutator.batching.tokenizers import load_tokenizer, pad_id_of
from query_mutator.batching.training.config import parse_edges
from query_mutator.bounds import Count, Parallel, Threads
from query_mutator.cli.console import progress
from query_mutator.cli.outputs import JsonFlags, JsonTo, Output, readable, rows_of, show
from query_mutator.errors import UsageError

OVERFLOW_MAX = 2048

GOALS = {"waste": "minimize_waste", "balance": "balance_buckets", "memory": "minimize_memory"}


@dataclass(frozen=True, kw_only=True)
class CacheFlags(JsonFlags):
    """Base of the commands that read a length cache."""

    cache: Annotated[str, Parameter(alias="-c")]
    """Length cache, as `qm data lengths build` writes it."""

    def load(self) -> LengthCache:
        """Return the cache."""
        return LengthCache.load_sync(self.cache)


@dataclass(frozen=True, kw_only=True)
class BatchPlanFlags(JsonFlags):
    """Base of the commands that read a batch plan."""

    plan: Annotated[str, Parameter(alias="-p")]
    """Folder of the plan."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags(JsonFlags):
    """Base of the commands that tokenize."""

    tokenizer: Annotated[str, Parameter(alias="-t")]
    """Tokenizer: a folder, a hub id, or bytes."""


@dataclass(frozen=True, kw_only=True)
class EdgeFlags(JsonFlags):
    """Base of the commands that form buckets."""

    bucket_edges: str = "128,256,512"
    """Longest length of each bucket, as a,b,c."""
    overflow_max: Count | None = None
    """Longest length allowed, by default 2048 or the last edge if that is longer; samples between the last edge and
    this length form one more bucket."""

    def __post_init__(self) -> None:
        last = self.edges[-1]
        if self.overflow_max is not None and self.overflow_max < last:
            raise ValueError(
                f"--overflow-max {self.overflow_max} is below the last of --bucket-edges, {last}; raise it"
            )

    @property
    def edges(self) -> tuple[int, ...]:
        """Return the edges; ValueError unless they are whole numbers above 0 that increase."""
        return parse_edges(self.bucket_edges)

    @property
    def longest(self) -> int:
        """Return the longest length allowed."""
        return max(OVERFLOW_MAX, self.edges[-1]) if self.overflow_max is None else self.overflow_max


@dataclass(frozen=True, kw_only=True)
class HistogramFlags(CacheFlags):
    """Draw the distribution of lengths."""

    bins: Parallel = 15
    """Number of bins."""
    width: Threads = 50
    """Characters of the longest bar."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags(CacheFlags, EdgeFlags):
    """Report the cost of buckets, and better ones."""

    json: Annotated[JsonTo, Parameter(alias=("--out", "--output", "-o"))] = None
    """Write the report as JSON to FILE; without FILE, or with -, print it in place of text."""


@dataclass(frozen=True, kw_only=True)
class SuggestFlags(CacheFlags):
    """Suggest bucket edges."""

    num_buckets: Annotated[Parallel, Parameter(alias="-n")] = 4
    """Number of buckets."""
    goal: Annotated[Literal["waste", "balance", "memory"], Parameter(alias="-g")] = "waste"
    """Least padding, equal shares, or the smallest attention scores."""
    max_length: Count = 2048
    """Longest length that fits a bucket."""


def show_histogram(flags: HistogramFlags) -> None:
    """Print a bar for each bin, and percentiles."""
    histogram = compute_length_histogram(flags.load(), num_bins=flags.bins)
    show(flags, histogram.model_dump(), histogram.to_ascii(flags.width))


def analyze_buckets(flags: AnalyzeFlags) -> None:
    """Print the efficiency report."""
    with settings_errors():
        spec = BucketSpec(edges=flags.edges, overflow_max=flags.longest)
    report = create_efficiency_report(flags.load(), spec)
    show(flags, report.model_dump(mode="json"), report.to_ascii())


def suggest_edges(flags: SuggestFlags) -> None:
    """Print edges and their padding efficiency."""
    found = suggest_bucket_edges(flags.load(), flags.num_buckets, GOALS[flags.goal], flags.max_length)
    edges = ",".join(map(str, found.edges))
    lines = [f"--bucket-edges {edges} --overflow-max {found.overflow_max}", found.rationale]
    lines.append(f"padding efficiency {found.estimated_efficiency:.1%}")
    if found.num_left_out:
        lines.append(f"{found.num_left_out} samples are longer than --max-length {flags.max_length}")
    show(flags, found.model_dump(mode="json"), "\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class LengthsBuildFlags(TokenizerFlags):
    """Tokenize a dataset and store the length of each row."""

    dataset: Annotated[str, Parameter(alias="-d")]
    """JSONL file with text, messages, instruction and response, or input_ids in every row."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(readable(LengthCache.load_sync))]
    """File to write: .jsonl as text, anything else binary."""
    skip_bad: bool = False
    """Count rows without tokens instead of stopping at the first."""


@dataclass(frozen=True, kw_only=True)
class LengthsStatsFlags(CacheFlags):
    """Show statistics of a length cache."""


def build_lengths(flags: LengthsBuildFlags) -> None:
    """Write the length cache of a data set and report its contents."""
    tokenizer = load_tokenizer(flags.tokenizer)
    samples = JsonlSamples(flags.dataset, tokenizer, skip_bad=flags.skip_bad)

    with progress("tokenizing", len(samples), unit="row") as bar:
        samples.on_read = bar.update
        lengths = samples.lengths()
    samples.close()
    if not lengths:
        raise UsageError(f"{flags.dataset}: no row has any tokens; check its columns")
    with LengthCache.create(flags.output, tokenizer_fingerprint(tokenizer)) as cache:
        cache.dataset_hash = compute_dataset_fingerprint(flags.dataset, cache.tokenizer_hash).fingerprint
        cache.add_many_sync(list(lengths), list(lengths.values()))
    report = {
        "output": flags.output,
        "samples": len(lengths),
        "tokens": sum(lengths.values()),
        "bad_rows": samples.bad_rows,
        "first_errors": samples.first_errors,
        "tokenizer_hash": cache.tokenizer_hash,
    }
    lines = [f"{flags.output}: {len(lengths)} lengths, {report['tokens']} tokens"]
    lines += [f"skipped {samples.bad_rows} rows, first: {samples.first_errors[0]}"] if samples.bad_rows else []
    show(flags, report, "\n".join(lines))


def show_length_stats(flags: LengthsStatsFlags) -> None:
    """Print count, total, extremes, mean and percentiles."""
    cache = flags.load()
    found = compute_length_histogram(cache)
    stats: dict[str, float | int] = {
        "samples": found.total_samples,
        "total": int(cache.lengths.sum(dtype=np.int64)),
        "min": found.min_length,
        "max": found.max_length,
        "mean": round(found.mean_length, 2),
        "median": found.median_length,
    }
    stats |= {f"p{percent}": getattr(found, f"p{percent}") for percent in PERCENTILES}
    head = {"cache": flags.cache, "tokenizer_hash": cache.tokenizer_hash}
    text = {name.upper() if name[0] == "p" else name: f"{value:g}" for name, value in stats.items()}
    text["total"] = str(stats["total"])
    show(flags, {**head, **stats}, rows_of({**head, **text}))


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(BatchPlanFlags, TokenizerFlags):
    """Write the tokens of a plan's batches; rerun the command to resume an interrupted run."""

    dataset: Annotated[str, Parameter(alias="-d")]
    """JSONL file that the plan was built for."""
    output: Annotated[
        str, Parameter(name=("--out", "--output", "-o")), Output(has_batches, is_folder=True, resumes=True)
    ]
    """Folder of the batches."""
    mask_prompt: bool = True
    """Learn answers only; --no-mask-prompt learns the questions too."""
    skip_bad: bool = False
    """Skip rows without tokens; must be as in `qm data lengths build`."""


def generate_batches(flags: GenerateFlags) -> None:
    """Write the batches of a plan after comparing it with data and tokenizer."""
    tokenizer = load_tokenizer(flags.tokenizer)
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    plan = load_batch_plan(flags.plan, tokenizer_hash=tokenizer_hash)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.plan} is the shard of one rank; give the whole plan")
    if plan.meta.dataset_hash:
        check_plan(plan, dataset_hash=compute_dataset_fingerprint(flags.dataset, tokenizer_hash).fingerprint)
    samples = JsonlSamples(flags.dataset, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad)
    writer = BatchWriter(plan, samples, flags.output, pad_id=pad_id_of(tokenizer), tokenizer_hash=tokenizer_hash)
    with progress("writing", len(samples), unit="sample") as bar:
        samples.on_read = bar.update
        files = writer.write_all()
    samples.close()
    size = sum(file.stat().st_size for file in files)
    report = {
        "output": flags.output,
        "files": [file.name for file in files],
        "bytes": size,
        "batches": plan.total_microbatches,
        "epochs": plan.num_epochs,
        "fingerprint": plan.fingerprint,
    }
    show(flags, report, f"{flags.output}: {plan.total_microbatches} batches in {len(files)} files of {size} bytes")
