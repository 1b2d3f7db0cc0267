"""What values a flag may have, in one table for every command: bounds of numbers by name, and what a text must not be.

`parse_flags` checks each command line, file and checkpoint against it before the dataclass is made; the configs that
programs make themselves call `check_bounds` in `__post_init__`. A class with other bounds for a name has
`BOUNDS: ClassVar[Bounds]`. Upper bounds are far above what is useful: they catch slips and units.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ABOVE_0", "Bounds", "bounds_of", "check_bounds"]

Bounds = Mapping[str, tuple[float, float]]  # least and largest value by name

ABOVE_0 = math.ulp(0.0)  # the least number above 0
_MANY, _STEPS, _SECONDS = 1e9, 1e12, 1e7  # 1e7 s are 115 days

_TABLE: tuple[tuple[str, float, float], ...] = (
    # the run
    ("num_env_steps total_steps max_steps", 1, _STEPS),
    ("num_processes num_envs num_steps max_episode_steps max_asks steps_per_episode epochs", 1, 1e5),
    ("save_interval log_interval eval_questions eval_calls last_k num_episodes keep_checkpoints", 1, _MANY),
    ("eval_interval rollout_steps show_batches plan_calls teacher_steps", 0, _MANY),
    ("seed first_seed", 0, 2**32 - 1),
    ("torch_threads jobs num_collectors", 1, 1024),
    ("eval_episodes", 1, 1e6),
    # learning
    ("lr learning_rate", ABOVE_0, 10),
    ("gamma gae_lambda target_tau per_alpha per_beta epsilon_start epsilon_end epsilon_fraction", 0, 1),
    ("max_failure_rate warmup_ratio min_lr_ratio faults success_rate difficulty_min difficulty_max", 0, 1),
    ("clip_param target_kl kappa replay_ratio", ABOVE_0, 1e6),
    ("max_grad_norm ridge", ABOVE_0, 1e12),
    ("entropy_coef value_loss_coef weight_decay ucb_alpha call_price", 0, 1e6),
    ("ppo_epoch num_quantiles num_eval_quantiles num_cosines embedding_dims n_step", 1, 1e4),
    ("num_mini_batch train_batch_size replay_size learning_starts", 1, 1e8),
    ("sync_every stream_window buffer_size window", 1, _MANY),
    ("max_pending_updates", 0, _MANY),
    ("hidden_sizes", 1, 16_384),
    ("lora_rank gradient_accumulation", 1, 1e5),
    ("freeze_layers max_policy_lag", 0, 1e4),
    # model calls
    ("batch_size", 1, 1e4),
    ("num_parallel repeats", 1, 4096),
    ("max_tokens mutator_max_tokens target_max_tokens num_ctx", 1, 1e8),
    ("encoder_max_tokens", 8, 1e6),
    ("max_retries retries task_retries", 0, 1e4),
    ("task_cpus task_gpus", 0, 1e4),
    ("temperature", 0, 100),
    (
        "timeout_s deadline_s request_deadline_s request_timeout_s drain_s timeout probe_s seconds window_s time_s "
        "step_ms budget_s",
        ABOVE_0,
        _SECONDS,
    ),
    ("timeout_min", ABOVE_0, 1e6),
    ("wait_for_server_s latency_ms load_ms running_speed", 0, _SECONDS),
    ("latency_sigma", 0, 10),
    ("max_reply_mb max_body_mb", 0.001, 2000),
    ("slots", 0, 1e4),
    ("max_requests max_question_tokens", 1, 1e6),
    ("min_meaning", -1, 1),
    ("shadow", 0, 1),
    ("price_in price_out", 0, 1e6),
    ("max_queue", 0, 1e6),
    ("port gym_port", 0, 65_535),
    ("num_queries", 1, 1e6),
    ("max_calls", 1, _MANY),
    ("budget", 1, 1e4),
    ("width", 1, 1024),
    # batches of tokens
    ("token_budget max_length pack_max_len overflow_max", 1, _MANY),
    ("pad_multiple multiple", 1, 1e6),
    ("max_samples num_samples", 1, _STEPS),
    ("world_size", 1, 1e5),
    ("rank", 0, 1e5),
    ("bins num_buckets", 1, 1e4),
    ("min_gain", -1, 1),
    # memory and workers
    ("batch tokens cameras action_numbers log_batch", 1, 1e7),
    ("capacity parameters", 0, 1e15),
    ("context_mib", 0, 1e7),
    ("num_workers", 0, 1024),
    # sweeps and comparisons
    ("trials seeds", 1, 1e5),
    ("extend confirm", 0, 1e5),
    ("seed_step", 1, _MANY),
    ("interval step_interval", ABOVE_0, _STEPS),
)

NUMBERS: Bounds = {name: (low, high) for names, low, high in _TABLE for name in names.split()}

#: Texts that a person writes as they like: several lines, or empty words of another command.
PROSE = {"question", "command", "domain", "title", "set"}
MOST_CHARACTERS, MOST_PROSE = 4096, 100_000
SHOWN_CHARACTERS = 60
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DEVICE = re.compile(r"[a-z][a-z0-9]{1,12}(:\d{1,3})?")
_DURATION = re.compile(r"-?(\d+|(\d+(\.\d+)?(ms|s|m|h))+)")  # as Ollama reads keep_alive


def bounds_of(cls: type[Any]) -> Bounds:
    """Return the bounds of a dataclass's numbers: its own BOUNDS over the table."""
    own: Bounds = getattr(cls, "BOUNDS", {})
    return {**NUMBERS, **own}


def check_bounds(cls: type[Any], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError for the first field of a dataclass whose value is beyond reason.

    `names` are the flags of the fields, for the message. None passes; each element of a tuple is checked.
    """
    bounds = bounds_of(cls)
    for field in dataclasses.fields(cls):
        value, flag = values[field.name], (names or {}).get(field.name, field.name)
        if value == () and isinstance(field.default, tuple) and isinstance(next(iter(field.default), None), int):
            raise ValueError(f"{flag} needs at least one value")
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (int, float)) and not isinstance(one, bool):
                _check_number(field, one, bounds.get(field.name, (-math.inf, math.inf)), flag)
            elif isinstance(one, (str, Path)) and (fault := _fault(field, str(one))):
                raise ValueError(f"{flag} {_shown(str(one))} {fault}")


def _check_number(field: dataclasses.Field[Any], value: float, bounds: tuple[float, float], flag: str) -> None:
    low, high = bounds
    if low <= value <= high and (isinstance(value, int) or math.isfinite(value)):
        return
    if math.isinf(low) and math.isinf(high):
        wanted = "a finite number"
    elif low >= -1 and high <= 1 and low != ABOVE_0:
        wanted = f"between {low:g} and {high:g}"
    elif value > high:
        wanted = f"at most {_plain(high)}"
    else:
        wanted = "above 0" if low == ABOVE_0 else f"at least {_plain(low)}"
    hint = "" if field.default in (None, dataclasses.MISSING) else f"; the default is {field.default}"
    name = field.name if _same(flag, field.name) else flag
    raise ValueError(f"{name}={_shown(value)} must be {wanted}{hint}")


def _same(flag: str, name: str) -> bool:
    return flag.lstrip("-").replace("-", "_") == name


def _fault(field: dataclasses.Field[Any], text: str) -> str:
    """Return what is wrong with a text, "" if nothing is."""
    if _SURROGATE.search(text):
        return "is not valid UTF-8; write it again"
    if field.name in PROSE:
        if "\0" in text:
            return "has a NUL character; leave it out"
        return f"is longer than {MOST_PROSE} characters" if len(text) > MOST_PROSE else ""
    if not text.strip():
        return "" if field.default == "" and not text else "is empty; give a value, or leave the flag out"
    if _CONTROL.search(text):
        return "has a control character; leave it out"
    if len(text) > MOST_CHARACTERS:
        return f"is longer than {MOST_CHARACTERS} characters"
    if field.name == "device" and not _DEVICE.fullmatch(text):
        return "is not a device of torch; try cpu or cuda:0"
    if field.name == "keep_alive" and not _DURATION.fullmatch(text):
        return "is not a time; try 30m, or -1 to keep the model loaded"
    return ""


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
