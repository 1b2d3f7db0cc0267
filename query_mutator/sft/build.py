"""From flags to the parts of a run: device, tokenizer, data, source of batches, eval batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.core.overlong import OverlongPolicy
from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.generation.rows import JsonlIndex, parse_row, prompt_template
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.packing import PackingConfig, PackingMode
from query_mutator.batching.planning.plan_files import check_plan, load_batch_plan
from query_mutator.batching.records import settings_errors
from query_mutator.cli.common import parse_edges, with_bar
from query_mutator.errors import DatasetError, UsageError
from query_mutator.sft.config import SftFlags
from query_mutator.sft.data import TokenData, read_tokens
from query_mutator.sft.microbatch import Microbatch
from query_mutator.sft.sources import OnlineSource, PlanSource, Source, StreamSource

LONGEST = 2**31 - 1


def pick_device(flags: SftFlags, local_rank: int) -> torch.device:
    """Return where to train; --device that cannot be used is a UsageError."""
    name = flags.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.device_count() > 1:
        name = f"cuda:{local_rank}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device {flags.device} cannot be used ({reason}); try --device cpu") from None
    return torch.device(name)


def uses_bf16(flags: SftFlags, device: torch.device) -> bool:
    """Return whether the model computes in bfloat16."""
    if flags.dtype != "auto":
        return flags.dtype == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def batching_config(flags: SftFlags) -> BatchingConfig:
    """Return how batches are formed without a plan of one's own."""
    edges = parse_edges(flags.bucket_edges) if flags.bucket_edges else (flags.row_length,)
    make = BatchingConfig.predictable if flags.bucket_edges else BatchingConfig.throughput
    longest = max(flags.row_length, edges[-1])
    with settings_errors():
        return make(
            token_budget=flags.token_budget or flags.batch_size * longest,
            max_samples=None if flags.token_budget else flags.batch_size,
            bucket_edges=edges,
            overflow_max=longest,
            seed=flags.seed,
            overlong=OverlongPolicy(flags.overlong),
        )


def packing_config(flags: SftFlags) -> PackingConfig | None:
    """Return how rows are packed, None without --pack."""
    if not flags.pack:
        return None
    return PackingConfig(
        mode=PackingMode(flags.pack_mode),
        max_length=flags.row_length,
        overlong=OverlongPolicy(flags.overlong),
        pad_to_max=False,
    )


def read_data(flags: SftFlags, path: str, tokenizer: Any, *, quiet: bool) -> TokenData:
    """Tokenise a file under a progress bar."""

    def read(done: Callable[[], object] | None) -> TokenData:
        return read_tokens(path, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad, on_row=done)

    return read(None) if quiet else with_bar("tokenising", len(JsonlIndex(path)), read)


def plan_for(flags: SftFlags, data: TokenData) -> BatchPlan:
    """Return the plan of --batchplan after comparing it with the data, or one made from the flags."""
    if flags.batchplan is None:
        builder = BatchPlanBuilder(
            data.lengths,
            batching_config(flags),
            data.dataset_hash,
            data.tokenizer_hash,
            packing_config(flags),
            loss_lengths=data.loss_lengths,
        )
        return builder.build_lazy(flags.epochs or 3)
    plan = load_batch_plan(flags.batchplan, tokenizer_hash=data.tokenizer_hash)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.batchplan} is the part of one rank; give the whole plan, every rank takes its share")
    check_plan(plan, dataset_hash=data.dataset_hash if plan.meta.dataset_hash else None, lengths=data.lengths)
    if flags.epochs not in (None, plan.num_epochs):
        raise UsageError(
            f"--epochs {flags.epochs}: the plan has {plan.num_epochs}; leave it out, or build another plan"
        )
    return plan


def most_positions(plan: BatchPlan, data: TokenData) -> int:
    """Return how many positions the longest sample takes, as far as the plan keeps it; in packs each begins at 0."""
    if plan.meta.pack_config is not None:
        return min(max(data.lengths.values()), plan.meta.pack_config.max_length)
    return max((int(epoch.max_len.max()) for epoch in plan.epochs.values() if epoch.num_microbatches), default=0)


def first_prompt(path: str, tokenizer: Any) -> str | None:
    """Return how the first readable row of a file puts what is asked."""
    index = JsonlIndex(path)
    for number, line in index.rows():
        with suppress(DatasetError):
            return prompt_template(parse_row(line, index.where(number)), tokenizer)
    return None


def stream_source(flags: SftFlags, tokenizer: Any, tokenizer_hash: str, ranks: DistributedConfig) -> Source:
    """Return the source that reads --data while training."""
    from query_mutator.batching.streaming.offline_stream import OfflineDatasetStream

    assert flags.data is not None
    stream = OfflineDatasetStream(
        flags.data,
        max_length=LONGEST,
        shuffle=True,
        seed=flags.seed,
        tokenizer=tokenizer,
        skip_bad=flags.skip_bad,
        mask_prompt=flags.mask_prompt,
    )
    return StreamSource(
        stream,
        batching_config(flags),
        packing_config(flags),
        window=flags.stream_window,
        ranks=ranks,
        accumulation=flags.gradient_accumulation,
        tokenizer_hash=tokenizer_hash,
    )


def online_source(flags: SftFlags, tokenizer: Any, ranks: DistributedConfig) -> Source:
    """Return the source that plays a gym."""
    from query_mutator.batching.streaming.gym_stream import GymEpisodeStream
    from query_mutator.batching.streaming.gym_types import GymConfig, GymTransport
    from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
    from query_mutator.batching.streaming.replay_types import ReplayBufferConfig
    from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig

    if ranks.is_distributed:
        raise UsageError("--online trains in one process: every rank would play episodes of its own")
    with settings_errors():
        gym = GymConfig(
            host=flags.gym_host, port=flags.gym_port, transport=GymTransport(flags.gym_transport), seed=flags.seed
        )
        batching = batching_config(flags)
        window = WindowConfig(
            min_samples=4 * flags.batch_size,
            token_budget=batching.token_budget,
            bucket_edges=batching.bucket_edges,
            overflow_max=batching.overflow_max,
            seed=flags.seed,
            overlong=OverlongPolicy("drop" if flags.overlong == "error" else flags.overlong),
        )
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=flags.buffer_size, seed=flags.seed))
    return OnlineSource(
        GymEpisodeStream(gym, tokenizer),
        RollingBatchPlanWindow(buffer, window),
        accumulation=flags.gradient_accumulation,
    )


def eval_microbatches(flags: SftFlags, tokenizer: Any, ranks: DistributedConfig) -> list[Microbatch]:
    """Return this rank's share of the batches of --eval-data, shortest first."""
    if flags.eval_data is None:
        return []
    data = read_data(flags, flags.eval_data, tokenizer, quiet=not ranks.is_main)
    config = batching_config(flags).changed(interleave_buckets=False)
    plan = BatchPlanBuilder(data.lengths, config, data.dataset_hash, data.tokenizer_hash).build_sync(1)
    source = PlanSource(plan, data.rows, ranks=ranks)
    return [one for step in source.steps() for one in step]
