"""Sources of batches: a plan, or a gym that is being played.

Each yields, step by step, the microbatches of this rank, and can save and restore its position. A step has G = W * A
microbatches of one bucket and of nearly equal cost; rank r runs every W-th of them from r on, so the content of a step
depends on G alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.generation.io import CollatedBatch, collate_microbatch
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import EpochPlan, MicrobatchSpec
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.sharding import ShardSpec, epoch_steps
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow
from query_mutator.errors import CheckpointError, UsageError

__all__ = ["Dealer", "Microbatch", "OnlineSource", "PlanSource", "Source"]


class Microbatch(NamedTuple):
    """What one rank runs at once: a microbatch of a plan and the whole token rows of its samples, in their order."""

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


class Source(Protocol):
    """Yields the steps of a run; `steps_left` is None if their number is unknown."""

    @property
    def steps_left(self) -> int | None: ...

    def steps(self) -> Iterator[Step]:
        """Yield this rank's microbatches of each step, from the current position."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; CheckpointError for that of another source."""
        ...


class Dealer(NamedTuple):
    """Distributes the microbatches of an epoch over steps and ranks."""

    ranks: DistributedConfig
    accumulation: int

    @property
    def group(self) -> int:
        """Return G, the most microbatches of a step."""
        return self.accumulation * self.ranks.world_size

    def steps(self, epoch: EpochPlan, done: tuple[tuple[int, int], ...] = ()) -> NDArray[np.int64]:
        """Return the microbatches of every step that is not done [S, G], −1 where a step has fewer."""
        spec = ShardSpec(rank=0, world_size=self.group, equal_steps=True, first_epoch=epoch.epoch, done=done)
        steps = epoch_steps(epoch, spec)
        return np.where(steps.padding, -1, steps.batches)

    def mine(
        self, epoch: EpochPlan, step: NDArray[np.int64], rows: Mapping[str, TokenRow], packing: PackingConfig | None
    ) -> Step:
        """Return this rank's microbatches of one step."""
        places = step[self.ranks.rank :: self.ranks.world_size]
        specs = [epoch[place] for place in places[places >= 0].tolist()]
        return [Microbatch(one, [rows[name] for name in one.samples], packing) for one in specs]


class PlanSource:
    """The microbatches of a plan, epoch by epoch; the state is a few numbers and the plan's fingerprint."""

    def __init__(
        self, plan: BatchPlan, rows: Mapping[str, TokenRow], *, ranks: DistributedConfig, accumulation: int = 1
    ) -> None:
        self.plan = plan
        self._rows = rows
        self._dealer = Dealer(ranks, accumulation)
        self._epoch = next(iter(plan.epochs))
        self._before: tuple[tuple[int, int], ...] = ()  # done of the epoch in steps of another size, before a resume
        self._done = 0  # steps of the epoch since

    @property
    def steps_left(self) -> int:
        """Return the steps of all epochs from the current position."""
        first = len(self._dealer.steps(self.plan.get_epoch(self._epoch), self._before)) - self._done
        later = (epoch for number, epoch in self.plan.epochs.items() if number > self._epoch)
        return first + sum(len(self._dealer.steps(epoch)) for epoch in later)

    def steps(self) -> Iterator[Step]:
        """Yield this rank's microbatches of each step, from the current position."""
        for number in [number for number in self.plan.epochs if number >= self._epoch]:
            if number != self._epoch:
                self._epoch, self._before, self._done = number, (), 0
            epoch = self.plan.get_epoch(number)
            for step in self._dealer.steps(epoch, self._before)[self._done :]:
                self._done += 1
                yield self._dealer.mine(epoch, step, self._rows, self.plan.meta.pack_config)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, what of it is done (pairs of group size and steps), and the plan's fingerprint."""
        done = [list(pair) for pair in (*self._before, (self._dealer.group, self._done))]
        return {"epoch": self._epoch, "done": done, "fingerprint": self.plan.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position, on any number of ranks; CheckpointError for that of another plan."""
        if state.get("fingerprint") != self.plan.fingerprint:
            raise CheckpointError(
                f"the checkpoint is of plan {str(state.get('fingerprint'))[:16]}, these data and flags give "
                f"{self.plan.fingerprint[:16]}; resume with the same data and flags"
            )
        self._epoch = int(state["epoch"])
        done = [(int(size), int(steps)) for size, steps in state["done"]]
        self._done = done.pop()[1] if done[-1][0] == self._dealer.group else 0
        self._before = tuple(done)


class OnlineSource:
    """Rolling windows over a replay buffer that played episodes fill; one process only."""

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
