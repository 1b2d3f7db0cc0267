"""Build the parts of a run from its flags: device, data, the source of batches, evaluation batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ppo.algorithm import usable_device
from query_mutator.batching.core.buckets import OverlongPolicy
from query_mutator.batching.generation.rows import JsonlIndex, JsonlSamples, TokenRow, tokenizer_fingerprint
from query_mutator.batching.planning.batch_plan import BatchPlan, check_plan, load_batch_plan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.packing import PackingConfig, PackingMode
from query_mutator.batching.planning.predictability import BatchingConfig
from query_mutator.batching.records import settings_errors
from query_mutator.batching.samples import compute_dataset_fingerprint
from query_mutator.batching.streaming.gym_stream import GymEpisodeStream
from query_mutator.batching.streaming.gym_types import GymConfig, GymTransport
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer, ReplayBufferConfig
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig
from query_mutator.batching.training.config import SftFlags, parse_edges
from query_mutator.batching.training.sources import Microbatch, OnlineSource, PlanSource, Source
from query_mutator.cli.console import progress
from query_mutator.errors import UsageError

__all__ = ["eval_microbatches", "make_source", "pick_device", "read_tokens", "uses_bf16"]


def pick_device(flags: SftFlags) -> torch.device:
    """Return the device to train on; UsageError for a --device that cannot be used."""
    name = flags.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        usable_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return torch.device(name)


def uses_bf16(flags: SftFlags, device: torch.device) -> bool:
    """Return whether the model computes in bfloat16."""
    if flags.dtype != "auto":
        return flags.dtype == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


class Inputs(NamedTuple):
    """A source of batches, what the model is checked against, and what the run reports about its data."""

    source: Source
    longest_row: int
    largest_id: int
    notes: tuple[str, ...] = ()


def make_source(flags: SftFlags, tokenizer: Any) -> Inputs:
    """Return the source of batches: a gym, or a plan over the rows in memory."""
    largest_id = len(tokenizer) - 1  # rows are not known before the run
    if flags.online:
        return Inputs(_online_source(flags, tokenizer), flags.row_length, largest_id)
    assert flags.data is not None
    data = _read_data(flags, flags.data, tokenizer)
    notes = [f"skipped {data.bad_rows} rows, first: {data.first_errors[0]}"] if data.bad_rows else []
    plan = _plan(flags, data)
    overlong = plan.meta.overlong
    if overlong.num_overlong:
        lost = f"{overlong.tokens_lost} tokens lost"
        notes.append(f"{overlong.num_overlong} samples are longer than allowed ({overlong.policy}): {lost}")
    source = PlanSource(plan, data.rows, accumulation=flags.gradient_accumulation)
    return Inputs(source, _longest_row(plan, data), data.largest_id, tuple(notes))


def eval_microbatches(flags: SftFlags, tokenizer: Any) -> list[Microbatch]:
    """Return the batches of --eval-dataset, shortest first."""
    if flags.eval_data is None:
        return []
    data = _read_data(flags, flags.eval_data, tokenizer)
    config = _batching(flags).changed(interleave_buckets=False)
    plan = BatchPlanBuilder(data.lengths, config, data.dataset_hash, data.tokenizer_hash).build_sync(1)
    return [one for step in PlanSource(plan, data.rows).steps() for one in step]


def _batching(flags: SftFlags) -> BatchingConfig:
    """Return how batches are formed without --batchplan."""
    edges = parse_edges(flags.bucket_edges) if flags.bucket_edges else (flags.row_length,)
    make = BatchingConfig.predictable if flags.bucket_edges else BatchingConfig.throughput
    with settings_errors():
        return make(
            token_budget=flags.token_budget or flags.batch_size * flags.row_length,
            max_samples=None if flags.token_budget else flags.batch_size,
            bucket_edges=edges,
            overflow_max=flags.row_length,
            seed=flags.seed,
            overlong=OverlongPolicy(flags.overlong),
        )


def _packing(flags: SftFlags) -> PackingConfig | None:
    """Return how rows are packed, None without --pack."""
    if not flags.pack:
        return None
    return PackingConfig(
        mode=PackingMode(flags.pack_mode),
        max_length=flags.row_length,
        overlong=OverlongPolicy(flags.overlong),
        pad_to_max=False,
    )


def _read_data(flags: SftFlags, path: str, tokenizer: Any) -> TokenData:
    """Tokenize a file and show a progress bar."""
    with progress("tokenizing", len(JsonlIndex(path)), unit="row") as bar:
        return read_tokens(path, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad, on_row=bar.update)


def _plan(flags: SftFlags, data: TokenData) -> BatchPlan:
    """Return the plan of --batchplan, checked against the data, or one made from the flags."""
    if flags.batchplan is None:
        builder = BatchPlanBuilder(
            data.lengths,
            _batching(flags),
            data.dataset_hash,
            data.tokenizer_hash,
            _packing(flags),
        )
        return builder.build_sync(flags.epochs or 3)
    plan = load_batch_plan(flags.batchplan, tokenizer_hash=data.tokenizer_hash)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.batchplan} is the part of one rank; give the whole plan")
    check_plan(plan, dataset_hash=data.dataset_hash if plan.meta.dataset_hash else None, lengths=data.lengths)
    if flags.epochs not in (None, plan.num_epochs):
        raise UsageError(
            f"--epochs {flags.epochs}: the plan has {plan.num_epochs}; leave it out, or build another plan"
        )
    return plan


def _longest_row(plan: BatchPlan, data: TokenData) -> int:
    """Return the positions that the plan's longest sample needs; in packs each sample starts at 0."""
    if plan.meta.pack_config is not None:
        return min(max(data.lengths.values()), plan.meta.pack_config.max_length)
    return max((int(epoch.max_len.max()) for epoch in plan.epochs.values() if epoch.num_microbatches), default=0)


def _online_source(flags: SftFlags, tokenizer: Any) -> Source:
    """Return the source that plays episodes of a gym."""
    with settings_errors():
        gym = GymConfig(
            host=flags.gym_host, port=flags.gym_port, transport=GymTransport(flags.gym_transport), seed=flags.seed
        )
        batching = _batching(flags)
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


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """Token rows by sample id, and the hashes of data and tokenizer."""

    rows: dict[str, TokenRow]
    dataset_hash: str
    tokenizer_hash: str
    bad_rows: int = 0
    first_errors: list[str] = field(default_factory=list)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Return the tokens of every sample."""
        return {name: row.length for name, row in self.rows.items()}

    @property
    def largest_id(self) -> int:
        """Return the largest token id."""
        return max(int(row.input_ids.max()) for row in self.rows.values())


def read_tokens(
    path: str,
    tokenizer: Any,
    *,
    mask_prompt: bool,
    skip_bad: bool = False,
    on_row: Callable[[], object] | None = None,
) -> TokenData:
    """Tokenize a JSONL file; a row without tokens is a DatasetError, or counted with `skip_bad`."""
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    with closing(JsonlSamples(path, tokenizer, mask_prompt=mask_prompt, skip_bad=skip_bad)) as samples:
        samples.on_read = on_row
        rows = dict(samples.tokenized())
        if not rows:
            raise UsageError(f"{path}: no row has any tokens; give rows with instruction and response, or text")
        return TokenData(
            rows=rows,
            dataset_hash=compute_dataset_fingerprint(path, tokenizer_hash).fingerprint,
            tokenizer_hash=tokenizer_hash,
            bad_rows=samples.bad_rows,
            first_errors=samples.first_errors,
        )
