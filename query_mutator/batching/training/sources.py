"""Sources of a run's batches: rows in memory with a plan, or a gym.

A source yields the microbatches of each step, and can save and restore its position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from query_mutator.batching.core.buckets import OverlongPolicy
from query_mutator.batching.distributed import CheckpointPosition
from query_mutator.batching.generation.io import CollatedBatch, collate_microbatch
from query_mutator.batching.generation.rows import JsonlSamples, TokenRow, tokenizer_fingerprint
from query_mutator.batching.planning.batch_plan import BatchPlan, MicrobatchSpec, check_plan, load_batch_plan
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
from query_mutator.cli.console import progress
from query_mutator.errors import CheckpointError, UsageError


class Microbatch(NamedTuple):
    """A microbatch of a plan and the whole token rows of its samples, in their order."""

    spec: MicrobatchSpec
    rows: list[TokenRow]
    packing: PackingConfig | None = None

    def collated(self, pad_id: int) -> CollatedBatch:
        """Return the batch as arrays."""
        return collate_microbatch(self.spec, self.rows, pad_id=pad_id, pack_config=self.packing)


class PlanSource:
    """The microbatches of a plan, epoch by epoch."""

    def __init__(self, plan: BatchPlan, rows: Mapping[str, TokenRow], *, accumulation: int = 1) -> None:
        self.plan = plan
        self._rows = rows
        self._accumulation = accumulation
        self._epoch = next(iter(plan.epochs))
        self._place = 0  # microbatches of the epoch that were run

    @property
    def steps_left(self) -> int:
        """Return the steps of all epochs from the current position."""
        left = (len(epoch) for number, epoch in self.plan.epochs.items() if number > self._epoch)
        here = len(self.plan.get_epoch(self._epoch)) - self._place
        return sum(-(-count // self._accumulation) for count in (here, *left))

    def steps(self) -> Iterator[list[Microbatch]]:
        """Yield the microbatches of each step, from the current position."""
        for number in [number for number in self.plan.epochs if number >= self._epoch]:
            if number != self._epoch:
                self._epoch, self._place = number, 0
            epoch = self.plan.get_epoch(number)
            while self._place < len(epoch):
                places = range(self._place, min(self._place + self._accumulation, len(epoch)))
                self._place = places.stop
                yield [self._microbatch(epoch[place]) for place in places]

    def _microbatch(self, spec: MicrobatchSpec) -> Microbatch:
        return Microbatch(spec, [self._rows[name] for name in spec.samples], self.plan.meta.pack_config)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the plan."""
        return CheckpointPosition.at(self.plan, self._epoch, self._place).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; CheckpointError for that of another plan."""
        position = CheckpointPosition.from_dict(state)
        if position.plan_fingerprint != self.plan.fingerprint:
            raise CheckpointError(
                f"the checkpoint is of plan {str(position.plan_fingerprint)[:16]}, these data and flags give "
                f"{self.plan.fingerprint[:16]}; resume with the same data and flags"
            )
        self._epoch, self._place = position.epoch, position.microbatch_idx


class OnlineSource:
    """Rolling windows over a replay buffer that played episodes fill."""

    steps_left = None

    def __init__(self, stream: Any, window: RollingBatchPlanWindow, *, accumulation: int = 1) -> None:
        self._stream = stream
        self._window = window
        self._accumulation = accumulation

    def steps(self) -> Iterator[list[Microbatch]]:
        """Yield the microbatches of each step; play episodes between windows until the next one can be built."""
        while True:
            microbatches = self._window.iter_current_with_samples()
            while chunk := list(islice(microbatches, self._accumulation)):
                yield [
                    Microbatch(spec, [TokenRow(one.input_ids, one.loss_mask) for one in samples])
                    for spec, samples in chunk
                ]
            self._play()
            self._window.build_next_window_sync()

    def _play(self) -> None:
        """Play whole episodes until the buffer has enough new samples for a window."""
        buffer, config = self._window.buffer, self._window.config
        wanted = buffer.total_added + config.min_samples
        for sample in self._stream:
            buffer.add(sample)
            ends = sample.step_index == (sample.total_steps or 1) - 1
            if ends and buffer.total_added >= wanted:
                return
        if not self._window.can_build_window or buffer.total_added == wanted - config.min_samples:
            raise UsageError("the gym gave no samples to learn from; check it with `qm gym run`")

    def state_dict(self) -> dict[str, Any]:
        """Return gym, buffer and window as one JSON text."""
        parts = {"stream": self._stream.state_dict(), "window": self._window.to_dict()}
        return {"online": json.dumps({**parts, "buffer": self._window.buffer.to_dict()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; CheckpointError for that of another kind of source."""
        if "online" not in state:
            raise CheckpointError("the checkpoint is not of a run with --online; resume with its own flags")
        parts = json.loads(state["online"])
        self._stream.load_state_dict(parts["stream"])
        buffer = type(self._window.buffer).from_dict(parts["buffer"])
        self._window = RollingBatchPlanWindow.from_dict(parts["window"], buffer)


#: Yields the steps of a run; `steps_left` is None if their number is unknown.
Source = PlanSource | OnlineSource


# --- rows in memory --------------------------------------------------------------------------------------------------


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


def read_tokens(path: str, tokenizer: Any, *, mask_prompt: bool, skip_bad: bool = False) -> TokenData:
    """Tokenize a JSONL file behind a bar; a row without tokens is a DatasetError, or counted with `skip_bad`."""
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    with closing(JsonlSamples(path, tokenizer, mask_prompt=mask_prompt, skip_bad=skip_bad)) as samples:
        with progress("tokenizing", len(samples), unit="row") as bar:
            samples.on_read = bar.update
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


# --- from the flags --------------------------------------------------------------------------------------------------


def make_source(flags: SftFlags, tokenizer: Any) -> tuple[Source, int, int, list[str]]:
    """Return a gym, or a plan over the rows in memory; the longest row, the largest id, and notes about the data."""
    largest_id = len(tokenizer) - 1  # rows are not known before the run
    if flags.online:
        return _online_source(flags, tokenizer), flags.row_length, largest_id, []
    assert flags.data is not None
    data = read_tokens(flags.data, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad)
    notes = [f"skipped {data.bad_rows} rows, first: {data.first_errors[0]}"] if data.bad_rows else []
    plan = _plan(flags, data)
    overlong = plan.meta.overlong
    if overlong.num_overlong:
        lost = f"{overlong.tokens_lost} tokens lost"
        notes.append(f"{overlong.num_overlong} samples are longer than allowed ({overlong.policy}): {lost}")
    source = PlanSource(plan, data.rows, accumulation=flags.gradient_accumulation)
    return source, _longest_row(plan, data), data.largest_id, notes


def eval_microbatches(flags: SftFlags, tokenizer: Any) -> list[Microbatch]:
    """Return the batches of --eval-dataset, shortest first."""
    if flags.eval_data is None:
        return []
    data = read_tokens(flags.eval_data, tokenizer, mask_prompt=flags.mask_prompt, skip_bad=flags.skip_bad)
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


def _plan(flags: SftFlags, data: TokenData) -> BatchPlan:
    """Return the plan of --batchplan, checked against the data, or one made from the flags."""
    if flags.batchplan is None:
        config, packing = _batching(flags), None
        if flags.pack:
            mode = PackingMode(flags.pack_mode)
            packing = PackingConfig(mode=mode, max_length=flags.row_length, overlong=config.overlong, pad_to_max=False)
        builder = BatchPlanBuilder(data.lengths, config, data.dataset_hash, data.tokenizer_hash, packing)
        return builder.build_sync(flags.epochs or 3)
    plan = load_batch_plan(flags.batchplan)
    if plan.meta.shard is not None:
        raise UsageError(f"{flags.batchplan} is the part of one rank; give the whole plan")
    check_plan(plan, dataset_hash=data.dataset_hash, tokenizer_hash=data.tokenizer_hash, lengths=data.lengths)
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
