"""How long an environment step takes on this machine: as in the last run with the same settings, else by a probe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator import operators as operator_registry
from query_mutator.encoder import Encoder
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.run_dir import earlier_runs
from query_mutator.llm.backends import AUTO, BACKENDS
from query_mutator.session.models import encoder_of
from query_mutator.session.pace import kept_pace
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.training.config import TrainConfig
from query_mutator.types import FloatArray

__all__ = ["Timing", "call_time", "encoding_time", "is_instant", "text_time", "time_of"]

MODEL_CALL_S = 2.0  # a model of about 3 B parameters on a desktop GPU
STEP_S = 0.003  # scoring, policy and update, for one environment step
TEXTS_PER_STEP = 1.0  # new to the encoder
PROBE_TEXTS = 24
#: Flags that decide how long a step takes; a run with others says nothing.
DECISIVE = (
    "algo", "backend", "ollama_url", "openai_url", "gguf", "recording", "target_model", "mutator_model", "encoder",
    "device", "deterministic", "batch_size", "use_batching", "num_processes", "latency_ms", "latency_sigma",
    "running_speed", "early_stop", "target_max_tokens", "mutator_max_tokens", "max_episode_steps", "num_ctx",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one environment step with all its calls, and in words where the number comes from."""

    step_s: float
    source: str
    is_measured: bool  # with everything a run does; False for a sum of parts


def time_of(config: TrainConfig, *, calls_per_step: float) -> Timing:
    """Return the time of a step; that of the last run with these settings, else the encoder is timed now.

    A run whose replies came from the cache, so that it made few calls, says nothing if another one made them.
    """
    found = list(_measured(config))
    most = max((calls for calls, _ in found), default=0.0)
    measured = next((timing for calls, timing in found if calls >= most / 2), None)
    return measured or _probed(config, calls_per_step=calls_per_step)


def _measured(config: TrainConfig) -> Iterator[tuple[float, Timing]]:
    """Yield calls per step and time of earlier runs with these settings, the newest first."""
    for run in earlier_runs(config.save_dir, {name: getattr(config, name) for name in DECISIVE}):
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            last = _last_row(run / "metrics.jsonl")
            steps, seconds = int(last["counters/env_steps"]), float(last["counters/training_s"])
            if steps > 0 and seconds > 0:
                source = f"{1000 * seconds / steps:.3g} ms a step, as in {run} ({steps} steps)"
                yield last["llm/calls"] / steps, Timing(step_s=seconds / steps, source=source, is_measured=True)


def _last_row(path: Path) -> Mapping[str, Any]:
    rows = [row for row in read_json_lines(path) if "counters/training_s" in row]
    return rows[-1]


def _probed(config: TrainConfig, *, calls_per_step: float) -> Timing:
    text_s = encoding_time(config)
    call_s, known = call_time(config, config, operators=config.operators)
    step_s = calls_per_step * call_s + TEXTS_PER_STEP * text_s + STEP_S
    source = f"{1000 * text_s:.3g} ms to embed a text, timed just now{known}; a first run makes this exact"
    return Timing(step_s=step_s, source=source, is_measured=False)


def encoding_time(config: ModelSettings) -> float:
    """Return the seconds to embed one text on this machine as it is now; next to none for an encoder on a server."""
    with contextlib.closing(encoder_of(config, _no_server)) as encoder:
        return text_time(encoder)


def text_time(encoder: Encoder) -> float:
    """Return the seconds that an encoder takes for one text."""
    texts = [f"How do I sort a list of {number} numbers by their last digit?" for number in range(PROBE_TEXTS + 8)]
    encoder.encode(texts[:8])
    began = time.perf_counter()
    for start in range(8, len(texts), 8):
        encoder.encode(texts[start : start + 8])
    return (time.perf_counter() - began) / PROBE_TEXTS


def _no_server(_model: str, texts: Sequence[str], *_: object) -> FloatArray:
    return np.ones((len(texts), 1), dtype=np.float32)


def is_instant(settings: ModelSettings) -> bool:
    """Return whether calls take next to no time, as those to recorded replies do."""
    instant = {name: BACKENDS.get(name).url_flag for name in BACKENDS if BACKENDS.get(name).is_instant}
    if settings.backend == AUTO:
        return any(settings.urls.get(flag) for flag in instant.values())
    return settings.backend in instant


def call_time(settings: ModelSettings, limits: Sampling, *, operators: str) -> tuple[float, str]:
    """Return the seconds of a call, divided by the calls in flight, and the words for where they come from."""
    in_flight = settings.calls_in_flight
    if is_instant(settings):
        return settings.simulated_s / in_flight, ""
    pace = kept_pace(settings, limits, mutator=settings.mutator_model)
    if pace is None:
        return MODEL_CALL_S / in_flight, f", and {MODEL_CALL_S:g} s a call, assumed (qm doctor measures it)"
    at_once, call_s = min(pace.at_once, in_flight), pace.call_s_with(operator_registry.select(operators))
    return call_s / at_once, f", and {call_s:.3g} s a call with {at_once} in flight, as qm doctor measured"
