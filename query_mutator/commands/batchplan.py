"""`qm data batchplan`: build a plan from lengths and settings, show it, verify it, shard it over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    LengthCache,
    OverlongPolicy,
    PackingConfig,
    PackingMode,
    compute_shard_stats,
    load_batch_plan,
    save_batch_plan,
    verify_batch_plan,
)
from query_mutator.batching.planning.batch_plan import is_batch_plan
from query_mutator.batching.records import settings_errors
from query_mutator.bounds import Count, CountOrNone, Few, FewOrNone, Seed
from query_mutator.cli.outputs import Output, rows_of, show
from query_mutator.commands.batching import BatchPlanFlags, EdgeFlags
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder

if TYPE_CHECKING:
    from query_mutator.batching import BatchPlan, MicrobatchSpec

MISMATCH = 1  # exit code of `verify`
IDS_SHOWN = 8


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
    """Most tokens of a batch, padding included."""
    predictable: Annotated[bool, Parameter(alias="-p")] = False
    """Few fixed shapes: every batch is padded to its bucket."""
    seed: Annotated[Seed, Parameter(alias="-s")] = 42
    """Seed of the order."""
    dataset_hash: str = ""
    """Fingerprint of the data that the lengths should be of; by default the one that they record."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """How to handle samples longer than the budget or --overflow-max."""
    drop_last: bool = False
    """Drop batches that are not full, and count their samples."""
    interleave: bool = True
    """Shuffle the batches; --no-interleave puts the shortest first."""
    pack: bool = False
    """Put several samples into each row."""
    pack_max_len: Count = 2048
    """Tokens in such a row."""
    pack_mode: Literal["first_fit", "best_fit", "greedy"] = "first_fit"
    """Which samples share a row."""


def build_plan(flags: BuildFlags) -> None:
    """Write the plan of a length cache and report how full its batches are."""
    cache = LengthCache.load_sync(flags.lengths)
    with settings_errors():
        config, packing = batching_config(flags), packing_config(flags)
    known = cache.dataset_hash
    if known and flags.dataset_hash not in ("", known):
        raise UsageError(f"{flags.lengths} has the lengths of data set {known}, not of {flags.dataset_hash}")
    builder = BatchPlanBuilder(cache, config, known or flags.dataset_hash, cache.tokenizer_hash, packing)
    plan = builder.build_sync(flags.epochs)
    save_batch_plan(plan, flags.output)
    report = plan_report(plan)
    show(flags, {"output": flags.output, **report}, f"{flags.output}\n{plan_text(report)}")


def batching_config(flags: BuildFlags) -> BatchingConfig:
    """Return the settings of the flags."""
    make = BatchingConfig.predictable if flags.predictable else BatchingConfig.throughput
    return make(
        token_budget=flags.token_budget,
        bucket_edges=flags.edges,
        overflow_max=flags.longest,
        seed=flags.seed,
        drop_last=flags.drop_last,
        interleave_buckets=flags.interleave,
        overlong=OverlongPolicy(flags.overlong),
    )


def packing_config(flags: BuildFlags) -> PackingConfig | None:
    """Return the packing settings, None without --pack."""
    if not flags.pack:
        return None
    return PackingConfig(
        mode=PackingMode(flags.pack_mode), max_length=flags.pack_max_len, overlong=OverlongPolicy(flags.overlong)
    )


def plan_report(plan: BatchPlan) -> dict[str, Any]:
    """Return the inputs of a plan and the fill of its epochs, as plain JSON types."""
    meta = plan.meta
    return {
        "fingerprint": plan.fingerprint,
        "dataset_hash": meta.dataset_hash,
        "tokenizer_hash": meta.tokenizer_hash,
        "samples": meta.num_samples,
        "config": meta.config.model_dump(mode="json"),
        "packing": None if meta.pack_config is None else meta.pack_config.model_dump(mode="json"),
        "overlong": meta.overlong.model_dump(mode="json"),
        "shard": None if meta.shard is None else meta.shard.model_dump(mode="json"),
        "created_at": meta.created_at,
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
    """Length cache that the plan should come from."""


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
        epochs = {number: plan.get_epoch(number) for number in plan.epochs}
        first = {number: list(islice(epoch, flags.show_batches)) for number, epoch in epochs.items()}
        data["batches"] = {str(number): [_batch(one) for one in some] for number, some in first.items()}
        text += [_line(number, one) for number, some in first.items() for one in some]
    show(flags, data, "\n".join(text))


def _batch(batch: MicrobatchSpec) -> dict[str, Any]:
    fields = ("index", "bucket_id", "max_len", "total_tokens", "is_padding")
    return {"samples": list(batch.samples), **{name: getattr(batch, name) for name in fields}}


def _line(epoch: int, batch: MicrobatchSpec) -> str:
    ids = ", ".join(batch.samples[:IDS_SHOWN]) + (", ..." if batch.batch_size > IDS_SHOWN else "")
    shape = f"{batch.num_rows} x {batch.max_len}, {batch.total_tokens} tokens"
    return f"  epoch {epoch}, microbatch {batch.index}: {shape}: {ids}"


def verify_plan(flags: VerifyFlags) -> int:
    """Report whether a plan follows from these lengths; return exit code 1 if not."""
    plan, cache = load_batch_plan(flags.plan), LengthCache.load_sync(flags.lengths)
    same, message = verify_batch_plan(plan, cache)
    if same and cache.tokenizer_hash != plan.meta.tokenizer_hash:
        message = f"the lengths are of tokenizer {cache.tokenizer_hash}, the plan of {plan.meta.tokenizer_hash}"
        same = False
    if same and cache.dataset_hash not in ("", plan.meta.dataset_hash):
        message = f"the lengths are of data set {cache.dataset_hash}, the plan of {plan.meta.dataset_hash or 'none'}"
        same = False
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
