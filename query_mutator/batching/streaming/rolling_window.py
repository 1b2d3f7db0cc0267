"""Batch plans over the contents of a replay buffer: one window of microbatches at a time, while samples arrive.

A window takes the samples that no earlier window has taken and adds older ones, so that `overlap_fraction` of it was
seen before. What does not fit into `window_microbatches` waits for the next window. A plan is a function of the
samples, the settings and the window's number: equal buffers give equal fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from math import ceil
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from query_mutator.batching.core.buckets import OverlongPolicy
from query_mutator.batching.files import sha256_of
from query_mutator.batching.planning.batch_plan import BatchPlan, MicrobatchSpec
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.predictability import BatchingConfig
from query_mutator.batching.records import Record
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.types import StreamSample, utc_now
from query_mutator.batching.sync import to_async
from query_mutator.errors import UsageError

STREAMING = "streaming"  # the tokenizer hash of a plan of samples that came as tokens


class WindowConfig(Record):
    """Size of a window, and settings of its batches."""

    window_microbatches: int = Field(default=1000, ge=1)  # at most
    min_samples: int = Field(default=100, ge=1)  # of a window, and in the buffer to build one
    overlap_fraction: float = Field(default=0.1, ge=0.0, le=0.5)  # of a window's samples, taken from earlier ones
    token_budget: int = Field(default=4096, ge=1)
    bucket_edges: tuple[int, ...] = (128, 256, 512, 1024)
    overflow_max: int = Field(default=2048, ge=1)
    seed: int = Field(default=42, ge=0)
    overlong: OverlongPolicy = OverlongPolicy.DROP  # samples beyond budget or overflow_max; counted in WindowState

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.to_batching_config(0)
        return self

    def to_batching_config(self, window_seed: int) -> BatchingConfig:
        """Return the settings of one window's plan; each window has a different seed."""
        return BatchingConfig.throughput(
            token_budget=self.token_budget,
            bucket_edges=self.bucket_edges,
            overflow_max=self.overflow_max,
            seed=int(np.random.SeedSequence([self.seed, window_seed]).generate_state(1)[0]),
            overlong=self.overlong,
        )


class WindowState(Record):
    """One window and its progress."""

    window_id: int = Field(ge=1)
    created_at: datetime = Field(default_factory=utc_now)
    snapshot_size: int
    snapshot_total_added: int
    fresh_samples: int  # in no window before
    repeated_samples: int
    overlong_samples: int  # dropped or cut, see `overlong`
    plan_microbatches: int
    plan_fingerprint: str
    microbatches_consumed: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Return whether every microbatch was yielded."""
        return self.microbatches_consumed >= self.plan_microbatches

    @property
    def progress(self) -> float:
        """Share of the microbatches that were yielded."""
        return self.microbatches_consumed / self.plan_microbatches if self.plan_microbatches else 1.0


class _Window(NamedTuple):
    """A plan over samples by key, and the serial of each in the buffer."""

    plan: BatchPlan
    samples: dict[str, StreamSample]
    serials: dict[str, int]


class RollingBatchPlanWindow:
    """Build windows over a buffer, one after another, and yield each microbatch once."""

    def __init__(self, buffer: ReplayBuffer, config: WindowConfig | None = None) -> None:
        self.buffer = buffer
        self.config = config or WindowConfig()
        self.total_windows = 0
        self.total_microbatches = 0  # yielded
        self._seen: set[int] = set()  # serials that a window has taken
        self._window: _Window | None = None
        self._state: WindowState | None = None

    # --- state -----------------------------------------------------------------------------------------------------

    @property
    def has_window(self) -> bool:
        """Return whether there is a current window."""
        return self._window is not None

    @property
    def current_state(self) -> WindowState | None:
        """The current window and its progress."""
        return self._state

    @property
    def can_build_window(self) -> bool:
        """Return whether the buffer holds `min_samples`."""
        return self.buffer.size >= self.config.min_samples

    @property
    def should_build_next(self) -> bool:
        """Return whether the current window is exhausted (or there is none) and another can be built."""
        return (self._state is None or self._state.is_exhausted) and self.can_build_window

    def get_remaining_microbatches(self) -> int:
        """Return how many microbatches of the current window are left."""
        return 0 if self._state is None else self._state.plan_microbatches - self._state.microbatches_consumed

    # --- building --------------------------------------------------------------------------------------------------

    def build_next_window_sync(self) -> WindowState:
        """Build the next window from the buffer; raise UsageError if it holds too few samples."""
        if not self.can_build_window:
            raise UsageError(f"the buffer holds {self.buffer.size} samples; a window needs {self.config.min_samples}")
        # 1. choose samples
        snapshot = self.buffer.snapshot()
        window_id = self.total_windows + 1
        self._seen &= set(snapshot.serials)
        places = self._choose(snapshot.serials, window_id)
        samples = {snapshot.keys[place]: snapshot.samples[place] for place in places}
        serials = {snapshot.keys[place]: snapshot.serials[place] for place in places}
        # 2. plan their batches
        window = _Window(self._plan(samples, window_id), samples, serials)
        # 3. count what the window's microbatches contain, and mark it as seen; the rest waits for the next window
        first = list(islice(window.plan.iter_epoch(0), self.config.window_microbatches))
        taken = {key for microbatch in first for key in microbatch.samples}
        waiting = {key for microbatch in window.plan.iter_epoch(0) for key in microbatch.samples} - taken
        repeated = sum(serials[key] in self._seen for key in taken)
        self._state = WindowState(
            window_id=window_id,
            snapshot_size=snapshot.size,
            snapshot_total_added=snapshot.total_added,
            fresh_samples=len(taken) - repeated,
            repeated_samples=repeated,
            overlong_samples=window.plan.meta.overlong.num_overlong,
            plan_microbatches=min(self.config.window_microbatches, window.plan.total_microbatches),
            plan_fingerprint=window.plan.fingerprint,
        )
        self._seen |= {serial for key, serial in serials.items() if key not in waiting}
        self._window, self.total_windows = window, window_id
        return self._state

    build_next_window = to_async(build_next_window_sync)

    def _choose(self, serials: Sequence[int], window_id: int) -> list[int]:
        """Return the positions of all unseen samples, and of seen ones up to the required overlap and minimum."""
        fresh = [place for place, serial in enumerate(serials) if serial not in self._seen]
        others = [place for place, serial in enumerate(serials) if serial in self._seen]
        if not fresh:
            return others  # nothing new: use all samples again
        overlap = self.config.overlap_fraction
        wanted = max(ceil(len(fresh) * overlap / (1 - overlap)), self.config.min_samples - len(fresh))
        rng = np.random.default_rng([self.config.seed, window_id])
        repeated = rng.choice(others, size=min(wanted, len(others)), replace=False).tolist() if others else []
        return sorted(fresh + repeated)

    def _plan(self, samples: Mapping[str, StreamSample], window_id: int) -> BatchPlan:
        builder = BatchPlanBuilder(
            lengths={key: sample.length for key, sample in samples.items()},
            batching_config=self.config.to_batching_config(window_id),
            dataset_hash=samples_digest(samples),
            tokenizer_hash=STREAMING,
        )
        return builder.build_sync(num_epochs=1)

    # --- iteration -------------------------------------------------------------------------------------------------

    def iter_current(self) -> Iterator[MicrobatchSpec]:
        """Yield the remaining microbatches of the current window; each is yielded once."""
        window = self._window
        while window is not None and self._window is window and self._state is not None:
            place = self._state.microbatches_consumed
            if place >= self._state.plan_microbatches:
                return
            self._state = self._state.model_copy(update={"microbatches_consumed": place + 1})
            self.total_microbatches += 1
            yield window.plan.get_epoch(0)[place]

    def iter_current_with_samples(self) -> Iterator[tuple[MicrobatchSpec, list[StreamSample]]]:
        """Yield the microbatches of `iter_current` with their samples, cut as the plan cuts them."""
        window = self._window
        for microbatch in self.iter_current():
            assert window is not None
            yield microbatch, [window.samples[key].cut(microbatch.max_len) for key in microbatch.samples]

    def discard_current(self) -> None:
        """Drop the current window; its samples count as seen."""
        self._window, self._state = None, None

    # --- files -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types, with the current window's samples: the buffer may evict them."""
        samples, serials = (self._window.samples, self._window.serials) if self._window else ({}, {})
        return {
            "config": self.config.model_dump(mode="json"),
            "total_windows": self.total_windows,
            "total_microbatches": self.total_microbatches,
            "seen": sorted(self._seen),
            "state": None if self._state is None else self._state.model_dump(mode="json"),
            "samples": {key: one.model_dump(mode="json") for key, one in samples.items()},
            "serials": serials,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], buffer: ReplayBuffer) -> Self:
        """Return the window of `to_dict` with its progress; raise UsageError if its plan differs."""
        window = cls(buffer, WindowConfig.model_validate(data["config"]))
        window.total_windows = int(data["total_windows"])
        window.total_microbatches = int(data["total_microbatches"])
        window._seen = set(data["seen"])
        if data["state"] is None:
            return window
        samples = {key: StreamSample.model_validate(fields) for key, fields in data["samples"].items()}
        window._state = WindowState.model_validate(data["state"])
        plan = window._plan(samples, window._state.window_id)
        window._window = _Window(plan, samples, dict(data["serials"]))
        # a fingerprint does not include `created_at`, so equal ones mean equal batches
        if plan.fingerprint != window._state.plan_fingerprint:
            raise UsageError("the saved window does not match its plan; it was edited, build a new one")
        return window


def samples_digest(samples: Mapping[str, StreamSample]) -> str:
    """Return the sha256 of keys, tokens and masks, which does not depend on the order of the samples."""
    parts: list[Any] = []
    for key in sorted(samples):
        sample = samples[key]
        parts += [f"\n{key} {sample.length} ".encode("utf-8", "surrogatepass"), sample.input_ids, sample.loss_mask]
    return sha256_of(parts)
