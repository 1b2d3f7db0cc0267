"""Sources of batches: a plan, or a gym that is being played.

Each yields the microbatches of each step, and can save and restore its position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from query_mutator.batching.distributed.sharding import CheckpointPosition
from query_mutator.batching.generation.io import CollatedBatch, collate_microbatch
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow
from query_mutator.errors import CheckpointError, UsageError

__all__ = ["Microbatch", "OnlineSource", "PlanSource", "Source"]


class Microbatch(NamedTuple):
    """A microbatch of a plan and the whole token rows of its samples, in their order."""

    spec: MicrobatchSpec
    rows: list[TokenRow]
    packing: PackingConfig | None = None

    @property
    def padded_tokens(self) -> int:
        """Return the tokens of the batch, padding included."""
        return self.spec.num_rows * self.spec.max_len

    def collated(self, pad_id: int) -> CollatedBatch:
        """Return the batch as arrays."""
        return collate_microbatch(self.spec, self.rows, pad_id=pad_id, pack_config=self.packing)


Step = list[Microbatch]


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

    def steps(self) -> Iterator[Step]:
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

    def steps(self) -> Iterator[Step]:
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
