"""Where the batches of a run come from: a plan, a file read while training, or a gym that is being played.

Each gives, step by step, the microbatches of this rank, and can say where it stands. A step holds G = W * A
microbatches of one bucket and of nearly equal cost; rank r runs every W-th of them from r on, so what a step holds
depends on G alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.generation.rows import TokenRow
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.planning.packing import PackingConfig
from query_mutator.batching.planning.sharding import Segment, ShardSpec, epoch_steps
from query_mutator.batching.streaming.offline_stream import OfflineDatasetStream
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, samples_digest
from query_mutator.batching.streaming.types import StreamSample
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.sft.microbatch import Microbatch

Step = list[Microbatch]


class Source(Protocol):
    """Gives the steps of a run; `steps_left` is None where nobody knows how many there are."""

    @property
    def steps_left(self) -> int | None: ...

    def steps(self) -> Iterator[Step]:
        """Yield this rank's microbatches of each step, from where the source stands."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where the source stands, as plain types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a state of something else is a CheckpointError."""
        ...


class Dealer(NamedTuple):
    """Deals the microbatches of an epoch out to steps and ranks."""

    ranks: DistributedConfig
    accumulation: int

    @property
    def group(self) -> int:
        """Return G, the most microbatches of a step."""
        return self.accumulation * self.ranks.world_size

    def steps(self, epoch: EpochPlan, done: tuple[Segment, ...] = ()) -> NDArray[np.int64]:
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
        return [Microbatch(spec=one, rows=[rows[name] for name in one.samples], packing=packing) for one in specs]


class PlanSource:
    """The microbatches of a plan, epoch by epoch; the state is a few numbers and the plan's fingerprint."""

    def __init__(
        self, plan: BatchPlan, rows: Mapping[str, TokenRow], *, ranks: DistributedConfig, accumulation: int = 1
    ) -> None:
        self.plan = plan
        self._rows = rows
        self._dealer = Dealer(ranks, accumulation)
        self._epoch = next(iter(plan.epochs))
        self._before: tuple[Segment, ...] = ()  # what steps of another size did of the epoch
        self._done = 0  # steps of the epoch since

    @property
    def steps_left(self) -> int:
        """The steps of all epochs from where the source stands."""
        first = len(self._dealer.steps(self.plan.get_epoch(self._epoch), self._before)) - self._done
        later = (epoch for number, epoch in self.plan.epochs.items() if number > self._epoch)
        return first + sum(len(self._dealer.steps(epoch)) for epoch in later)

    def steps(self) -> Iterator[Step]:
        """Yield this rank's microbatches of each step, from where the source stands."""
        for number in [number for number in self.plan.epochs if number >= self._epoch]:
            if number != self._epoch:
                self._epoch, self._before, self._done = number, (), 0
            epoch = self.plan.get_epoch(number)
            for step in self._dealer.steps(epoch, self._before)[self._done :]:
                self._done += 1
                yield self._dealer.mine(epoch, step, self._rows, self.plan.meta.pack_config)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, what is done of it (steps of so many microbatches), and the plan's fingerprint."""
        done = [*self._before, Segment(world_size=self._dealer.group, steps=self._done)]
        pairs = [[one.world_size, one.steps] for one in done]
        return {"epoch": self._epoch, "done": pairs, "fingerprint": self.plan.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken, on any number of ranks; another plan's state is a CheckpointError."""
        if state.get("fingerprint") != self.plan.fingerprint:
            raise CheckpointError(
                f"the checkpoint stands in plan {str(state.get('fingerprint'))[:16]}, "
                f"these data and flags give {self.plan.fingerprint[:16]}"
            )
        self._epoch = int(state["epoch"])
        done = [Segment(world_size=size, steps=steps) for size, steps in state["done"]]
        same = done[-1].world_size == self._dealer.group
        self._done = done.pop().steps if same else 0
        self._before = tuple(done)


class StreamSource:
    """A file read `window` rows at a time: each window is planned and run, then the next is read.

    Every rank reads the whole file and runs its share. Epochs follow one another until nobody asks for more.
    """

    steps_left = None

    def __init__(
        self,
        stream: OfflineDatasetStream,
        config: BatchingConfig,
        packing: PackingConfig | None,
        *,
        window: int,
        ranks: DistributedConfig,
        accumulation: int = 1,
        tokenizer_hash: str = "",
    ) -> None:
        self._stream = stream
        self._config = config
        self._packing = packing
        self._window = window
        self._dealer = Dealer(ranks, accumulation)
        self._tokenizer_hash = tokenizer_hash
        self._number = 0  # of the window
        self._done = 0  # steps of it
        self._begin = stream.state_dict()

    def steps(self) -> Iterator[Step]:
        """Yield this rank's microbatches of each step, from where the source stands."""
        while True:
            self._begin = self._stream.state_dict()
            samples = list(islice(self._stream, self._window))
            if samples:
                yield from self._window_steps({sample.sample_id: sample for sample in samples}, len(samples))
                self._number, self._done = self._number + 1, 0
            elif self._begin["position"] == 0:
                raise UsageError(f"{self._stream.path}: no row gives any tokens")
            if len(samples) < self._window:
                self._stream.set_epoch(self._stream.epoch + 1)

    def _window_steps(self, samples: Mapping[str, StreamSample], count: int) -> Iterator[Step]:
        if len(samples) < count:
            raise UsageError(f"{self._stream.path}: two rows of {count} read together have the same id")
        builder = BatchPlanBuilder(
            {name: sample.length for name, sample in samples.items()},
            self._config.changed(seed=self._config.seed + self._number),
            samples_digest(samples),
            self._tokenizer_hash,
            self._packing,
        )
        epoch = builder.build_sync(1).get_epoch(0)
        rows = token_rows(samples)
        for step in self._dealer.steps(epoch)[self._done :]:
            self._done += 1
            yield self._dealer.mine(epoch, step, rows, self._packing)

    def state_dict(self) -> dict[str, Any]:
        """Return where the window begins in the file, and what is done of it."""
        return {"window": self._number, "done": self._done, "group": self._dealer.group, "begin": self._begin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; another file's state is a CheckpointError."""
        try:
            self._stream.load_state_dict(state["begin"])
        except (UsageError, KeyError) as error:
            raise CheckpointError(f"the checkpoint stands in another stream: {error}") from error
        if state["done"] and state["group"] != self._dealer.group:
            raise CheckpointError(
                f"the checkpoint stands within a window of the stream, at {state['group']} batches a step; "
                f"resume with --gradient-accumulation times ranks = {state['group']}"
            )
        self._number, self._done = int(state["window"]), int(state["done"])


class OnlineSource:
    """Rolling windows over a replay buffer that episodes are played into; one process only."""

    steps_left = None

    def __init__(self, stream: Any, window: RollingBatchPlanWindow, *, accumulation: int = 1) -> None:
        self._stream = stream
        self._window = window
        self._accumulation = accumulation

    def steps(self) -> Iterator[Step]:
        """Yield the microbatches of each step; between windows episodes are played until the next one can be built."""
        while True:
            microbatches = self._window.iter_current_with_samples()
            while chunk := list(islice(microbatches, self._accumulation)):
                yield [
                    Microbatch(spec=spec.changed(starts=None, stops=None), rows=list(token_rows(samples)))
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
            raise UsageError("the gym gave no samples to learn from; see `qm gym run`")

    def state_dict(self) -> dict[str, Any]:
        """Return gym, buffer and window as one JSON text."""
        parts = {"stream": self._stream.state_dict(), "window": self._window.to_dict()}
        return {"online": json.dumps({**parts, "buffer": self._window.buffer.to_dict()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a state of something else is a CheckpointError."""
        if "online" not in state:
            raise CheckpointError("the checkpoint was not made while learning from a gym")
        parts = json.loads(state["online"])
        self._stream.load_state_dict(parts["stream"])
        buffer = type(self._window.buffer).from_dict(parts["buffer"])
        self._window = RollingBatchPlanWindow.from_dict(parts["window"], buffer)


def token_rows(samples: Any) -> Any:
    """Return the token rows of samples: a dict of those by name for a mapping, else a list."""
    if isinstance(samples, Mapping):
        return {name: TokenRow(sample.input_ids, sample.loss_mask) for name, sample in samples.items()}
    return [TokenRow(sample.input_ids, sample.loss_mask) for sample in samples]
