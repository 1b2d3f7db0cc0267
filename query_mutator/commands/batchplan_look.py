"""`qm data batchplan info|verify|shard`: show a plan, verify it, shard it over ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from query_mutator.batching import (
    LengthCache,
    compute_dataset_fingerprint,
    load_batch_plan,
    report_shards,
    save_batch_plan,
    verify_batch_plan,
)
from query_mutator.batching.planning.plan_files import is_batch_plan
from query_mutator.bounds import CountOrNone, Few, FewOrNone
from query_mutator.cli.common import show
from query_mutator.cli.outputs import Output
from query_mutator.commands.batchplan_build import plan_report, plan_text
from query_mutator.commands.data_flags import BatchPlanFlags
from query_mutator.errors import UsageError
from query_mutator.files import atomic_folder

if TYPE_CHECKING:
    from query_mutator.batching import BatchPlan, MicrobatchSpec

MISMATCH = 1  # exit code of `verify`
IDS_SHOWN = 8


def _are_shards(path: Path) -> bool:
    """Return whether a folder holds the parts of ranks and nothing else."""
    return all(re.fullmatch(r"rank_\d+", part.name) and is_batch_plan(part) for part in path.iterdir())


@dataclass(frozen=True, kw_only=True)
class InfoFlags(BatchPlanFlags):
    """Show a plan's inputs and how full its batches are."""

    show_batches: Annotated[CountOrNone, arg(aliases=["-n"])] = 0
    """Number of microbatches to list for every epoch."""
    rank: Annotated[FewOrNone | None, arg(aliases=["-r"])] = None
    """Show this rank's part; needs --world-size."""
    world_size: Annotated[Few | None, arg(aliases=["-w"])] = None
    """Number of ranks."""

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("--rank and --world-size go together")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"--rank {self.rank} must be below --world-size {self.world_size}")


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(BatchPlanFlags):
    """Rebuild a plan from its lengths and settings and compare; exit code 1 if it differs."""

    lengths: Annotated[str, arg(aliases=["-l"])]
    """Length cache that the plan should come from."""
    dataset: Annotated[str | None, arg(aliases=["-d"])] = None
    """JSONL file that the plan should come from; its hash is compared too."""


@dataclass(frozen=True, kw_only=True)
class ShardFlags(BatchPlanFlags):
    """Write the part of a plan that each rank runs, as DIR/rank_0, DIR/rank_1 and so on."""

    world_size: Annotated[Few, arg(aliases=["-w"])]
    """Number of ranks."""
    output: Annotated[str, arg(name="out", aliases=["--output", "-o"]), Output(_are_shards, is_folder=True)]
    """Folder of the parts."""
    equal_steps: bool = False
    """Give every rank the same number of steps, each of one bucket and nearly equal cost."""
    uneven: Literal["pad", "drop", "wrap"] = "pad"
    """How --equal-steps evens out the steps: pad with filler steps, drop or repeat batches."""


def show_plan(flags: InfoFlags) -> None:
    """Print the report of a plan, or of one rank's part of it."""
    plan = load_batch_plan(flags.plan)
    if flags.rank is not None and flags.world_size is not None:
        plan = plan.shard(flags.rank, flags.world_size)
    data = plan_report(plan)
    text = [plan_text(data)]
    if flags.show_batches:
        first = {number: _first(plan, number, flags.show_batches) for number in plan.epochs}
        data["batches"] = {str(number): [_batch(one) for one in some] for number, some in first.items()}
        text += [_line(number, one) for number, some in first.items() for one in some]
    show(flags, data, "\n".join(text))


def _first(plan: BatchPlan, number: int, count: int) -> list[MicrobatchSpec]:
    epoch = plan.get_epoch(number)
    return [epoch[place] for place in range(min(count, epoch.num_microbatches))]


def _batch(batch: MicrobatchSpec) -> dict[str, Any]:
    fields = ("index", "bucket_id", "max_len", "total_tokens", "loss_tokens", "is_padding")
    return {"samples": list(batch.samples), **{name: getattr(batch, name) for name in fields}}


def _line(epoch: int, batch: MicrobatchSpec) -> str:
    ids = ", ".join(batch.samples[:IDS_SHOWN]) + (", ..." if batch.batch_size > IDS_SHOWN else "")
    shape = f"{batch.num_rows} x {batch.max_len}, {batch.total_tokens} tokens"
    return f"  epoch {epoch}, microbatch {batch.index}: {shape}: {ids}"


def verify_plan(flags: VerifyFlags) -> int:
    """Report whether a plan follows from these lengths; return exit code 1 if not."""
    plan, cache = load_batch_plan(flags.plan, verify_all=True), LengthCache.load_sync(flags.lengths)
    same, message = verify_batch_plan(plan, cache)
    if same and cache.tokenizer_hash != plan.meta.tokenizer_hash:
        message = f"the lengths are of tokenizer {cache.tokenizer_hash}, the plan of {plan.meta.tokenizer_hash}"
        same = False
    if same and flags.dataset is not None:
        found = compute_dataset_fingerprint(flags.dataset, cache.tokenizer_hash).fingerprint
        if found != plan.meta.dataset_hash:
            same, message = False, f"the data set is {found}, the plan was made for {plan.meta.dataset_hash or 'none'}"
    show(flags, {"plan": flags.plan, "match": same, "message": message}, f"{flags.plan}: {message}")
    return 0 if same else MISMATCH


def shard_plan(flags: ShardFlags) -> None:
    """Write the part of every rank and report how even the parts are."""
    plan = load_batch_plan(flags.plan, verify_all=True)
    fewest = min(epoch.num_microbatches for epoch in plan.epochs.values())
    if not flags.equal_steps and flags.world_size > fewest:
        raise UsageError(
            f"{flags.world_size} ranks cannot share an epoch of {fewest} microbatches; use fewer ranks, a smaller "
            "--token-budget, or --equal-steps"
        )
    with atomic_folder(flags.output) as folder:  # whole, so that no rank of an earlier world size stays
        for rank in range(flags.world_size):
            part = plan.shard(rank, flags.world_size, equal_steps=flags.equal_steps, uneven=flags.uneven)
            save_batch_plan(part, folder / f"rank_{rank}")
    report = report_shards(plan, flags.world_size, equal_steps=flags.equal_steps, uneven=flags.uneven)
    data = {"output": flags.output, "epochs": {str(number): one.model_dump() for number, one in report.items()}}
    lines = [f"{flags.output}: rank_0 to rank_{flags.world_size - 1}"]
    lines += [
        f"epoch {number}: {one.steps} steps, {one.num_padding} fillers, {one.num_dropped} dropped, {one.num_wrapped} "
        f"repeated; tokens {min(one.tokens_per_rank)} to {max(one.tokens_per_rank)} per rank"
        for number, one in report.items()
    ]
    show(flags, data, "\n".join(lines))
