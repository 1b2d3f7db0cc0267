"""Statistics since the last row of metrics (episodes, steps, calls), and the progress bar that shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.cli.console import progress
from query_mutator.learners.learner import Learner
from query_mutator.llm.cache import CallTotals
from query_mutator.llm.stack import ClientStack

if TYPE_CHECKING:
    from query_mutator.cli.console import FiguresBar

#: What `add_steps` reads of an episode's final info -> its metric key.
EPISODE_FIGURES = {
    "episode_return": "charts/episodic_return",
    "episode_length": "charts/episodic_length",
    "success": "charts/success",
    "baseline_success": "charts/baseline_success",
}
_FIGURES = ("valid", "return", "rate", "share", "failed")
_SETTLED_S = 2.0  # after a row, the rates of a shorter time say nothing


class RunLog:
    """Collects statistics between two rows; `wall_s` continues from an earlier part of the run."""

    def __init__(self, calls: ClientStack, *, wall_s: float = 0.0) -> None:
        self._calls = calls
        self._bar: FiguresBar | None = None
        self._shown: dict[str, str] = {}  # the latest figures of the bar
        self._began = time.perf_counter() - wall_s
        self._episodes: list[dict[str, float]] = []
        self._steps = self._learned_then = 0
        self._calls_at_start = calls.client.totals
        self._mark()

    def open_bar(self, *, total_steps: int, env_steps: int) -> None:
        """Show a progress bar from now on."""
        self._bar = progress("training", total_steps, unit="step", initial=env_steps)
        self._bar.figures = self.figures

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
                {key: float(final[name][env]) for name, key in EPISODE_FIGURES.items()} for env in np.flatnonzero(ended)
            ]
        if self._bar is not None:
            self._bar.update(len(ended))

    @property
    def calls(self) -> CallTotals:
        """Return the totals of calls for training since this process started."""
        return self._calls.client.totals - self._calls_at_start

    def validated(self, success: float) -> None:
        """Show the success of a periodic evaluation from now on."""
        if not math.isnan(success):
            self._shown["valid"] = f"valid {100 * success:.0f}%"

    def figures(self) -> list[str]:
        """Return the figures of the progress bar, the most important first; rates of the time since the last row."""
        totals, calls, seconds = self._calls.client.totals, self._calls_since(), self._seconds()
        if (value := self._episode_means().get("charts/episodic_return")) is not None:
            self._shown["return"] = f"return {value:+.2f}"
        if seconds > _SETTLED_S or "rate" not in self._shown:
            share = min(1.0, calls.latency_s / (seconds * self._calls.limit.limit))
            self._shown |= {"rate": f"{calls.calls / seconds:.3g} calls/s", "share": f"limit {100 * share:.0f}%"}
        self._shown["failed"] = f"{totals.failed} failed"
        return [self._shown[name] for name in _FIGURES if name in self._shown]

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
            "counters/llm_calls": self._calls.client.totals.calls,
            "counters/tokens": self._calls.client.totals.tokens,
            "counters/training_s": self.wall_s,
            "llm/calls": self._calls.client.totals.calls,
            "llm/calls_per_s": calls.calls / seconds,
            "llm/failed_calls": self._calls.client.totals.failed,
            "llm/retries": self._calls.client.totals.retries,
            "llm/cut_replies": self._calls.client.totals.cut_replies,
            "llm/latency_s": calls.latency_s / each,
            "llm/queue_wait_s": calls.queue_wait_s / each,
            "llm/tokens_per_call": calls.tokens / each,
            "llm/reply_tokens_per_call": calls.reply_tokens / each,
            "llm/limit": self._calls.limit.limit,
            "llm/shared_calls": self._calls.shared_calls,
            "llm/cache_hits": self._calls.cache_hits,
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
        self._calls_then = self._calls.client.totals

    def _seconds(self) -> float:
        return max(1e-9, time.perf_counter() - self._since)

    def _calls_since(self) -> CallTotals:
        return self._calls.client.totals - self._calls_then

    def _episode_means(self) -> dict[str, float]:
        if not self._episodes:
            return {}
        means = {key: float(np.mean([episode[key] for episode in self._episodes])) for key in self._episodes[0]}
        return {key: value for key, value in means.items() if not math.isnan(value)}  # originals that were not asked
