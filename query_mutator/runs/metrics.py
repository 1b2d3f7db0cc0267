"""Every number a run logs, and the writer that puts them into `metrics.jsonl` and TensorBoard.

Keys are two words, as the field writes them; docs/metrics.md has a row for each.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.files import JsonLines, disk_errors

Direction = Literal["up", "down", "-"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number: unit, where better lies ("up", "down", "-" for neither), meaning, what to watch for."""

    key: str
    unit: str
    better: Direction
    meaning: str
    watch: str = ""


_ALL = (
    Metric(
        "charts/episodic_return",
        "score",
        "up",
        "final score - baseline score - costs, mean over finished episodes",
        "flat from the start: nothing is learned",
    ),
    Metric(
        "charts/episodic_length",
        "steps",
        "-",
        "mean length of the finished episodes",
        "1: everything is submitted as it stands",
    ),
    Metric(
        "charts/success",
        "share",
        "up",
        "finished episodes whose submitted answer was right",
        "below charts/baseline_success",
    ),
    Metric("charts/baseline_success", "share", "-", "the same episodes, had the question been left as it stood"),
    Metric("charts/learning_rate", "1", "-", "Adam's step size in this update"),
    Metric(
        "charts/SPS",
        "steps/s",
        "up",
        "environment steps a second since the last row, updates included",
        "falls: the server or the learner is slower",
    ),
    Metric("losses/policy_loss", "1", "-", "clipped surrogate loss"),
    Metric("losses/value_loss", "score²", "down", "half the mean squared error of the critic", "grows without end"),
    Metric(
        "losses/td_loss",
        "score",
        "down",
        "quantile Huber loss of IQN, squared error of the bandit; mean per sample",
        "a spike of 100 times",
    ),
    Metric(
        "losses/entropy",
        "nat",
        "-",
        "entropy of the policy: log(actions) when undecided, 0 when certain",
        "near 0 early: it has stopped exploring",
    ),
    Metric(
        "losses/approx_kl",
        "nat",
        "-",
        "estimated divergence of the updated policy from the one that acted",
        "above 0.05: the step size is too large",
    ),
    Metric("losses/old_approx_kl", "nat", "-", "the simpler, noisier estimate of the same"),
    Metric("losses/clipfrac", "share", "-", "steps whose probability ratio was clipped", "above 0.3"),
    Metric(
        "losses/explained_variance",
        "share",
        "up",
        "share of the returns' variance that the critic explains",
        "below 0: worse than a constant",
    ),
    Metric("losses/grad_norm", "1", "-", "norm of the gradient before clipping"),
    Metric(
        "losses/policy_lag", "updates", "-", "age of the policy that took the steps, mean; 0 without --max-policy-lag"
    ),
    Metric(
        "losses/importance_weight",
        "1",
        "-",
        "mean weight of the steps, at most 1; with --max-policy-lag alone",
        "well below 1: the steps are too old",
    ),
    Metric(
        "grads/norm_before_clip_median",
        "1",
        "-",
        "norm of the gradient as the loss gave it, median over gradient steps since the last update",
        "far above --max-grad-norm: all steps are cut",
    ),
    Metric("grads/norm_before_clip_max", "1", "-", "the same, the largest", "above 100: explosion"),
    Metric(
        "grads/norm_after_clip_max",
        "1",
        "-",
        "norm of the gradient as Adam got it, measured after clipping, the largest",
        "above --max-grad-norm: clipping does not work",
    ),
    Metric(
        "rl/avg_value",
        "score",
        "-",
        "mean value of the states learned from: PPO's critic, IQN's best action, the bandit's chosen one",
        "far above any score: overestimation",
    ),
    Metric(
        "rl/action_gap",
        "score",
        "up",
        "IQN: mean distance of the best action's value from the second best",
        "stays 0: no action stands out",
    ),
    Metric("rl/epsilon", "share", "-", "IQN: actions drawn at random now"),
    Metric(
        "perf/transitions_learned_per_second",
        "1/s",
        "up",
        "transitions in gradient steps a second since the last row, each use counted",
    ),
    Metric(
        "perf/learner_share_training",
        "share",
        "up",
        "share of the learner's time in gradient steps since the last update; wall time, not GPU utilisation",
        "below 0.5: calls or collectors are the limit",
    ),
    Metric(
        "perf/learner_share_waiting",
        "share",
        "down",
        "share in which it waited for steps",
        "above 0.2: more calls in flight would pay",
    ),
    Metric("perf/replay_ratio_requested", "1", "-", "--replay-ratio: uses of a transition asked for"),
    Metric(
        "perf/replay_ratio_achieved",
        "1",
        "-",
        "samples learned over transitions gathered, since the run began",
        "below the one asked for: the learner is behind",
    ),
    Metric(
        "perf/updates_per_sample",
        "1",
        "-",
        "gradient steps over transitions gathered, since the run began",
        "moves with --train-batch-size: compare runs at equal values",
    ),
    Metric(
        "perf/weight_sync_age",
        "updates",
        "down",
        "gradient steps by which the weights that chose were behind when their step came back, mean",
        "grows: collectors act on old weights",
    ),
    Metric("buffer/size", "transitions", "-", "transitions in the replay"),
    Metric("buffer/largest_priority", "score", "-", "largest error a transition was given its priority by"),
    Metric(
        "eval/success",
        "share",
        "up",
        "greedy policy on the fixed sample of held-out questions: right answers",
        "below eval/identity_success",
    ),
    Metric(
        "eval/best_success",
        "share",
        "up",
        "the best eval/success of the run so far",
        "picked from several looks, so higher than a fresh one would be",
    ),
    Metric("eval/score", "score", "up", "the same sample: mean score of the submitted answer"),
    Metric("eval/refusals", "share", "down", "the same sample (all harmless): submitted answers that refuse"),
    Metric("eval/calls_per_question", "calls", "down", "the same sample: model calls a question took"),
    Metric("eval/identity_success", "share", "-", "the same sample, every question left as it stands"),
    Metric("llm/calls", "calls", "-", "model calls for training steps since the run began, every attempt counted"),
    Metric("llm/calls_per_s", "calls/s", "up", "model calls a second since the last row, updates included"),
    Metric("llm/failed_calls", "calls", "down", "of llm/calls, those without an answer", "any"),
    Metric("llm/invalid_steps", "steps", "down", "steps left out of learning because a call failed for good", "any"),
    Metric("llm/latency_s", "s", "down", "mean time a call took since the last row, seen from here"),
    Metric(
        "llm/queue_wait_s",
        "s",
        "down",
        "of that, mean time the server held a call back",
        "near llm/latency_s: the server has fewer slots than calls in flight",
    ),
    Metric("llm/tokens_per_call", "tokens", "-", "prompt and reply together, mean since the last row"),
    Metric("llm/limit", "calls", "-", "bound on calls in flight; --adaptive moves it"),
    Metric("llm/shared_calls", "calls", "up", "replies that were those of an equal request in flight"),
    Metric("llm/cache_hits", "calls", "up", "replies that were remembered on disk"),
    Metric("llm/tokens_saved", "tokens", "up", "estimate of what --early-stop kept from being written"),
    Metric("counters/env_steps", "steps", "-", "environment steps since the run began"),
    Metric("counters/updates", "updates", "-", "gradient steps since the run began"),
    Metric("counters/target_updates", "updates", "-", "IQN: moves of the target network since the run began"),
    Metric(
        "counters/samples_learned",
        "transitions",
        "-",
        "transitions in gradient steps since the run began, each use counted",
    ),
    Metric("counters/llm_calls", "calls", "-", "the same as llm/calls"),
    Metric("counters/tokens", "tokens", "-", "prompts and replies of those calls"),
    Metric(
        "counters/training_s", "s", "-", "seconds of training; pauses between the parts of a resumed run are left out"
    ),
    Metric("sft/loss", "nat", "down", "fine-tuning: mean loss of a learned token since the last row"),
    Metric(
        "sft/eval_loss",
        "nat",
        "down",
        "the same on --eval-data, without learning",
        "rises while sft/loss falls: known by heart",
    ),
    Metric("sft/grad_norm", "1", "-", "norm of the gradient of a step before clipping", "above 100: explosion"),
    Metric("sft/loss_tokens", "tokens", "-", "learned tokens of a step, mean since the last row"),
    Metric("sft/tokens_per_s", "tokens/s", "up", "tokens a second since the last row, padding and all ranks included"),
)

METRICS: Mapping[str, Metric] = {metric.key: metric for metric in _ALL}


class MetricsWriter:
    """Appends rows `{"step", "wall_s", "<key>": number}` to `metrics.jsonl`, and their numbers to `tensorboard/`.

    A key that is not in METRICS is a KeyError; a number that is not finite is left out of its row.
    """

    def __init__(self, folder: Path, *, cut_at: int | None = None, first_step: int = 0) -> None:
        self.rows = JsonLines(folder / "metrics.jsonl", cut_at=cut_at)
        self._events = EventFile(folder / "tensorboard", first_step=first_step)

    def write(self, values: Mapping[str, float], *, step: int, wall_s: float) -> None:
        """Write one row; DiskError when it cannot be written."""
        numbers = {METRICS[key].key: float(value) for key, value in values.items() if math.isfinite(value)}
        self.rows.append({"step": step, "wall_s": round(wall_s, 3), **numbers})
        self._events.write(numbers, step=step)

    def close(self) -> None:
        """Close the files; idempotent."""
        self.rows.close()
        self._events.close()


class EventFile:
    """TensorBoard's own file of scalars, written in the calling thread, so that a full disk is noticed at once."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        with disk_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:  # TensorBoard forgets what earlier files say from this step on
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the scalars of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: Any) -> None:
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()
