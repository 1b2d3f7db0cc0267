"""`qm data lengths`, `batching`, `batchplan` and `batch`, and `qm train sft`, which learns from batches.

Lengths are tokenized once; a plan is built from lengths and settings, shown, verified, sharded over ranks, written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    BatchWriter,
    BucketSpec,
    JsonlSamples,
    LengthCache,
    OverlongPolicy,
    PackingConfig,
    PackingMode,
    check_plan,
    compute_dataset_fingerprint,
    compute_length_histogram,
    compute_shard_stats,
    create_efficiency_report,
    load_batch_plan,
    load_tokenizer,
    save_batch_plan,
    suggest_bucket_edges,
    tokenizer_fingerprint,
    verify_batch_plan,
)
from query_mutator.batching.analyze.efficiency import PERCENTILES
from query_mutator.batching.generation.io import has_batches
from query_mutator.batching.generation.rows import pad_id_of
from query_mutator.batching.planning.batch_plan import is_batch_plan
from query_mutator.batching.records import settings_errors
from query_mutator.batching.training.config import SftFlags, parse_edges
from query_mutator.bounds import Count, CountOrNone, Few, FewOrNone, Parallel, Seed, Threads
from query_mutator.cli.console import note, progress
from query_mutator.cli.outputs import JsonFlags, JsonTo, Output, readable, rows_of, show
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder

if TYPE_CHECKING:
    from query_mutator.batching import BatchPlan, MicrobatchSpec

OVERFLOW_MAX = 2048
MISMATCH = 1  # exit code of `verify`
IDS_SHOWN = 8

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
    """Maximum length of each bucket, as a,b,c."""
    overflow_max: Count | None = None
    """Maximum length of a sample, by default 2048 or the last edge if that is longer; samples beyond the last edge form
    an additional bucket."""

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
    """Report the cost of buckets, and suggest better ones."""

    json: Annotated[JsonTo, Parameter(alias=("--out", "--output", "-o"))] = None
    """Write the report as JSON to FILE; without FILE, or with -, print it in place of text."""


@dataclass(frozen=True, kw_only=True)
class SuggestFlags(CacheFlags):
    """Suggest bucket edges."""

    num_buckets: Annotated[Parallel, Parameter(alias="-n")] = 4
    """Number of buckets."""
    goal: Annotated[Literal["waste", "balance", "memory"], Parameter(alias="-g")] = "waste"
    """Minimize padding, equalize bucket sizes, or minimize attention scores."""
    max_length: Count = 2048
    """Maximum length that fits a bucket."""


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
    """Count rows without tokens; by default stop at the first."""


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
class BuildFlags(EdgeFlags):
    """Assign samples to batches for every epoch."""

    lengths: Annotated[str, Parameter(alias="-l")]
    """Length cache, as `qm data lengths build` writes it."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(is_batch_plan, is_folder=True)]
    """Folder of the plan."""
    epochs: Annotated[Few, Parameter(alias="-e")] = 1
    """Epochs to plan, each in its own order."""
    token_budget: Annotated[Count, Parameter(alias="-b")] = 4096
    """Maximum tokens of a batch, padding included."""
    predictable: Annotated[bool, Parameter(alias="-p")] = False
    """Use few fixed shapes: pad every batch to its bucket."""
    seed: Annotated[Seed, Parameter(alias="-s")] = 42
    """Seed of the order."""
    dataset_hash: str = ""
    """Expected fingerprint of the data; by default the one recorded with the lengths."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """How to handle samples longer than the budget or --overflow-max."""
    drop_last: bool = False
    """Drop batches that are not full, and count their samples."""
    interleave: bool = True
    """Shuffle the batches; --no-interleave puts the shortest first."""
    pack: bool = False
    """Put several samples into each row."""
    pack_max_len: Count = 2048
    """Maximum tokens in a packed row."""
    pack_mode: Literal["first_fit", "best_fit", "greedy"] = "first_fit"
    """Which samples share a row."""


def build_plan(flags: BuildFlags) -> None:
    """Write the plan of a length cache and report how full its batches are."""
    cache = LengthCache.load_sync(flags.lengths)
    overlong, packing = OverlongPolicy(flags.overlong), None
    with settings_errors():
        config = (BatchingConfig.predictable if flags.predictable else BatchingConfig.throughput)(
            token_budget=flags.token_budget,
            bucket_edges=flags.edges,
            overflow_max=flags.longest,
            seed=flags.seed,
            drop_last=flags.drop_last,
            interleave_buckets=flags.interleave,
            overlong=overlong,
        )
        if flags.pack:
            mode = PackingMode(flags.pack_mode)
            packing = PackingConfig(mode=mode, max_length=flags.pack_max_len, overlong=overlong)
    known = cache.dataset_hash
    if known and flags.dataset_hash not in ("", known):
        raise UsageError(f"{flags.lengths} has the lengths of data set {known}, not of {flags.dataset_hash}")
    builder = BatchPlanBuilder(cache, config, known or flags.dataset_hash, cache.tokenizer_hash, packing)
    plan = builder.build_sync(flags.epochs)
    save_batch_plan(plan, flags.output)
    report = plan_report(plan)
    show(flags, {"output": flags.output, **report}, f"{flags.output}\n{plan_text(report)}")


def plan_report(plan: BatchPlan) -> dict[str, Any]:
    """Return the inputs of a plan and the fill of its epochs, as plain JSON types."""
    return {
        "fingerprint": plan.fingerprint,
        **plan.meta.model_dump(mode="json"),
        "epochs": [
            {
                "epoch": number,
                "microbatches": epoch.num_microbatches,
                "samples": epoch.total_samples,
                "tokens": epoch.total_tokens,
                "padded_tokens": int(epoch.padded_tokens.sum()),
                "efficiency": round(epoch.efficiency, 4),
                "dropped": epoch.num_dropped,
            }
            for number, epoch in plan.epochs.items()
        ],
    }


def plan_text(report: Mapping[str, Any]) -> str:
    """Return a report of `plan_report` as text."""
    about: dict[str, object] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
        if name != "epochs":
            about[name] = "-" if value in (None, "") else value
    epochs = [", ".join(f"{name} {value}" for name, value in one.items()) for one in report["epochs"]]
    return "\n".join([rows_of(about), *epochs])


def _are_shards(path: Path) -> bool:
    """Return whether a folder holds the parts of ranks and nothing else."""
    return all(re.fullmatch(r"rank_\d+", part.name) and is_batch_plan(part) for part in path.iterdir())


@dataclass(frozen=True, kw_only=True)
class InfoFlags(BatchPlanFlags):
    """Show a plan's inputs and how full its batches are."""

    show_batches: Annotated[CountOrNone, Parameter(alias="-n")] = 0
    """Number of microbatches to list for every epoch."""
    rank: Annotated[FewOrNone | None, Parameter(alias="-r")] = None
    """Show this rank's part; needs --world-size."""
    world_size: Annotated[Few | None, Parameter(alias="-w")] = None
    """Number of ranks."""

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("--rank and --world-size go together")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"--rank {self.rank} must be below --world-size {self.world_size}")


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(BatchPlanFlags):
    """Rebuild a plan from its lengths and settings and compare; exit code 1 if it differs."""

    lengths: Annotated[str, Parameter(alias="-l")]
    """Length cache that the plan was built from."""


@dataclass(frozen=True, kw_only=True)
class ShardFlags(BatchPlanFlags):
    """Write the part of a plan that each rank runs, as DIR/rank_0, DIR/rank_1 and so on."""

    world_size: Annotated[Few, Parameter(alias="-w")]
    """Number of ranks."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(_are_shards, is_folder=True)]
    """Folder of the parts."""
    equal_steps: bool = False
    """Give every rank the same number of steps, each of one bucket and nearly equal cost, with fillers at the end."""


def show_plan(flags: InfoFlags) -> None:
    """Print the report of a plan, or of one rank's part of it."""
    plan = load_batch_plan(flags.plan)
    if flags.rank is not None and flags.world_size is not None:
        plan = plan.shard(flags.rank, flags.world_size)
    data = plan_report(plan)
    text = [plan_text(data)]
    if flags.show_batches:
        first = {number: list(islice(epoch, flags.show_batches)) for number, epoch in plan.epochs.items()}
        data["batches"] = {str(number): [one.model_dump(mode="json") for one in some] for number, some in first.items()}
        text += [_line(number, one) for number, some in first.items() for one in some]
    show(flags, data, "\n".join(text))


def _line(epoch: int, batch: MicrobatchSpec) -> str:
    ids = ", ".join(batch.samples[:IDS_SHOWN]) + (", ..." if batch.batch_size > IDS_SHOWN else "")
    shape = f"{batch.num_rows} x {batch.max_len}, {batch.total_tokens} tokens"
    return f"  epoch {epoch}, microbatch {batch.index}: {shape}: {ids}"


def verify_plan(flags: VerifyFlags) -> int:
    """Report whether a plan follows from these lengths; return exit code 1 if not."""
    plan, cache = load_batch_plan(flags.plan), LengthCache.load_sync(flags.lengths)
    same, message = verify_batch_plan(plan, cache)
    try:
        check_plan(plan, dataset_hash=cache.dataset_hash, tokenizer_hash=cache.tokenizer_hash)
    except UsageError as error:
        same, message = False, str(error) if same else message
    show(flags, {"plan": flags.plan, "match": same, "message": message}, f"{flags.plan}: {message}")
    return 0 if same else MISMATCH


def shard_plan(flags: ShardFlags) -> None:
    """Write the part of every rank and report how even the parts are."""
    plan = load_batch_plan(flags.plan)
    fewest = min(epoch.num_microbatches for epoch in plan.epochs.values())
    if not flags.equal_steps and flags.world_size > fewest:
        raise UsageError(
            f"{flags.world_size} ranks cannot share an epoch of {fewest} microbatches; use fewer ranks, a smaller "
            "--token-budget, or --equal-steps"
        )
    with atomic_folder(flags.output) as folder:  # whole, so that no rank of an earlier world size stays
        for rank in range(flags.world_size):
            part = plan.shard(rank, flags.world_size, equal_steps=flags.equal_steps)
            save_batch_plan(part, folder / f"rank_{rank}")
    stats = compute_shard_stats(plan, flags.world_size, equal_steps=flags.equal_steps)
    lines = [f"{flags.output}: rank_0 to rank_{flags.world_size - 1}"]
    lines += [
        f"rank {rank}: {one['num_batches']} steps, {one['num_padding']} of them fillers, {one['total_tokens']} tokens"
        for rank, one in stats.items()
    ]
    data = {"output": flags.output, "ranks": {str(rank): one for rank, one in stats.items()}}
    show(flags, data, "\n".join(lines))


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
    """Only learn answers; --no-mask-prompt also learns the questions."""
    skip_bad: bool = False
    """Skip rows without tokens; must be as in `qm data lengths build`."""


def generate_batches(flags: GenerateFlags) -> None:
    """Write the batches of a plan after comparing it with data and tokenizer."""
    tokenizer = load_tokenizer(flags.tokenizer)
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    plan = load_batch_plan(flags.plan)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.plan} is the shard of one rank; give the whole plan")
    dataset_hash = compute_dataset_fingerprint(flags.dataset, tokenizer_hash).fingerprint
    check_plan(plan, dataset_hash=dataset_hash, tokenizer_hash=tokenizer_hash)
    samples = JsonlSamples(flags.dataset, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad)
    writer = BatchWriter(plan, samples, flags.output, pad_id=pad_id_of(tokenizer))
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


def train_sft(flags: SftFlags) -> None:
    """Train, and print where the model is."""
    from query_mutator.batching.training.trainer import checkpoints_in, train

    try:
        report = train(flags)
    except KeyboardInterrupt:
        if checkpoints_in(Path(flags.output)):
            note(f"resume with --resume {flags.output}")
        raise
    shown = {name: value for name, value in report.items() if name not in ("notes", "output") and value is not None}
    rows = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in shown.items()}
    show(flags, report, rows_of(rows))
