"""Statistics since the last row of metrics (episodes, steps, calls), and the progress bar that shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.cli.console import progress
from query_mutator.llm.stack import CallTotals, ClientStack

if TYPE_CHECKING:
    from tqdm import tqdm


class Learner(Protocol):
    """Counts its work over the whole run."""

    @property
    def gradient_steps(self) -> int:
        """Return the gradient steps taken."""

    @property
    def samples_learned(self) -> int:
        """Return the steps learned from, counted once per use."""


class RunLog:
    """Collects statistics between two rows; `wall_s` continues from an earlier part of the run."""

    def __init__(self, calls: ClientStack, *, wall_s: float = 0.0) -> None:
        self._calls = calls
        self._bar: tqdm[Any] | None = None
        self._began = time.perf_counter() - wall_s
        self._episodes: list[dict[str, float]] = []
        self._steps = self._learned_then = 0
        self._calls_at_start = calls.counted.totals
        self._mark()

    def open_bar(self, *, total_steps: int, env_steps: int) -> None:
        """Show a progress bar from now on."""
        self._bar = progress("training", total_steps, unit="step")
        self._bar.update(env_steps)

    @property
    def wall_s(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._began

    def add_steps(self, infos: Mapping[str, Any], ended: NDArray[np.bool_]) -> None:
        """Count finished steps; episodes of those that `ended` [n] are in `infos["final_info"]`."""
        self._steps += len(ended)
        if ended.any():
            final = infos["final_info"]
            self._episodes += [
                {
                    "charts/episodic_return": float(final["episode_return"][env]),
                    "charts/episodic_length": float(final["episode_length"][env]),
                    "charts/success": float(final["success"][env]),
                    "charts/baseline_success": float(final["baseline_success"][env]),
                }
                for env in np.flatnonzero(ended)
            ]
        if self._bar is not None:
            self._bar.update(len(ended))

    @property
    def calls(self) -> CallTotals:
        """Return the totals of calls for training since this process started."""
        return self._calls.counted.totals - self._calls_at_start

    def show(self, more: Mapping[str, str] | None = None) -> None:
        """Update the figures of the progress bar; `more` are others."""
        if self._bar is None:
            return
        episodes, calls = self._episode_means(), self._calls_since()
        shown = {"calls/s": f"{calls.calls / self._seconds():.0f}"}
        if episodes:
            shown |= {
                "return": f"{episodes['charts/episodic_return']:+.3f}",
                "success": f"{100 * episodes['charts/success']:.0f}%",
            }
        self._bar.set_postfix({**shown, **(more or {})}, refresh=False)

    def row(self, learner: Learner) -> dict[str, float]:
        """Return the figures since the last row, under their metric keys."""
        seconds, calls = self._seconds(), self._calls_since()
        each = max(1, calls.calls)
        return {
            **self._episode_means(),
            "charts/SPS": self._steps / seconds,
            "perf/transitions_learned_per_second": (learner.samples_learned - self._learned_then) / seconds,
            "counters/updates": learner.gradient_steps,
            "counters/samples_learned": learner.samples_learned,
            "counters/llm_calls": self._calls.counted.totals.calls,
            "counters/tokens": self._calls.counted.totals.tokens,
            "counters/training_s": self.wall_s,
            "llm/calls": self._calls.counted.totals.calls,
            "llm/calls_per_s": calls.calls / seconds,
            "llm/failed_calls": self._calls.counted.totals.failed,
            "llm/cut_replies": self._calls.counted.totals.cut_replies,
            "llm/latency_s": calls.latency_s / each,
            "llm/queue_wait_s": calls.queue_wait_s / each,
            "llm/tokens_per_call": calls.tokens / each,
            "llm/reply_tokens_per_call": calls.reply_tokens / each,
            "llm/limit": self._calls.limit.limit,
            "llm/shared_calls": self._calls.shared_calls,
            "llm/cache_hits": self._calls.cache_hits,
            "llm/tokens_saved": self._calls.tokens_saved,
        }

    def next_row(self, learner: Learner) -> None:
        """Start the next row."""
        self._episodes, self._steps, self._learned_then = [], 0, learner.samples_learned
        self._mark()

    def close(self) -> None:
        """Close the bar; idempotent."""
        if self._bar is not None:
            self._bar.close()

    def _mark(self) -> None:
        self._since = time.perf_counter()
        self._calls_then = self._calls.counted.totals

    def _seconds(self) -> float:
        return max(1e-9, time.perf_counter() - self._since)

    def _calls_since(self) -> CallTotals:
        return self._calls.counted.totals - self._calls_then

    def _episode_means(self) -> dict[str, float]:
        if not self._episodes:
            return {}
        means = {key: float(np.mean([episode[key] for episode in self._episodes])) for key in self._episodes[0]}
        return {key: value for key, value in means.items() if not math.isnan(value)}  # originals that were not asked
