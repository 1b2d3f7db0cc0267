"""What continues a run: which flags may change, and its models, counts of calls, store, learner and environments.

Functions that restore something take the checkpoint, None for a new run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from query_mutator.bounds import group_of
from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files.json_lines import check_json_lines
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.run_dir import SUMMARY
from query_mutator.learners.learner import Learner
from query_mutator.learners.named import LEARNERS
from query_mutator.llm.backends import BACKENDS, DEFAULT_BACKEND
from query_mutator.session.checkpoint import Checkpoint, Progress, usable_flags
from query_mutator.session.models import ResolvedModels
from query_mutator.settings.models import AUTO
from query_mutator.training.callbacks import RunView
from query_mutator.training.config import TrainConfig
from query_mutator.training.parts import RunParts
from query_mutator.types import FloatArray

#: Flags about speed, retries and files; all others decide what is learned.
FREE = frozenset(
    {
        *("batch_size", "use_batching", "adaptive", "ollama_url", "openai_url", "gguf", "recording"),
        *("allow_mixed", "keep_alive"),
        *("ray_address", "local_server_url"),
        *("timeout_s", "max_reply_mb", "deadline_s", "max_retries", "wait_for_server_s", "max_failure_rate"),
        *("cache", "cache_path"),
        *("latency_ms", "latency_sigma", "running_speed"),
        *("save_dir", "name", "save_interval", "log_interval", "eval_interval", "eval_questions", "evaluate"),
        *("max_pending_updates", "plugin", "resume", "break_lock", "config", "dry_run"),
    }
)


def resumed_flags(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the flags of the run that wrote a checkpoint; UsageError for a server, file or plugin not in `config`.

    `config` are the flags of the command and qm.toml.
    """
    given, flags = {name: getattr(config, name) for name in config.given}, dict(checkpoint.flags)
    folder = {"save_dir": str(Path(config.resume or "").resolve().parent)} if config.resumes_folder else {}
    if folder:
        del flags["save_dir"]
    return usable_flags(flags, checkpoint.plugins, given, source=checkpoint.path) | folder


def check_resumption(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise a UsageError unless a run can resume from its checkpoint with these flags.

    In its folder a run keeps the flags it was started with, except those that do not change what it learns. A
    checkpoint file starts a new folder, with any flags.
    """
    in_folder = config.resumes_folder
    if in_folder:
        check_files(Path(config.resume or ""), checkpoint)
    if in_folder and (found := differences(config, checkpoint.flags)):
        raise CheckpointError(
            f"{config.resume} was started with other settings ({'; '.join(found)}); leave them out, "
            f"or start a new folder from its checkpoint with --resume {checkpoint.path}"
        )
    if checkpoint.learner["updates_done"] < config.num_updates:
        return
    if in_folder and not (Path(config.resume or "") / SUMMARY).exists():
        return  # it was stopped after its last step, before its results were written
    steps, longer = checkpoint.progress.env_steps, "give a larger --num-env-steps to continue"
    if in_folder and config.use_linear_lr_decay:
        longer = f"give a larger --num-env-steps and, as the step size has fallen to 0, --resume {checkpoint.path}"
    raise UsageError(f"{checkpoint.path} has taken its {steps} steps; {longer}")


def check_files(run: Path, checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError unless the files of a run folder hold what they held when its checkpoint was written."""
    done = checkpoint.progress
    try:
        check_json_lines(run / "transcripts.jsonl", end=done.transcripts_bytes)
        check_json_lines(run / METRICS_FILE, end=done.metrics_bytes)
    except UsageError as error:
        raise CheckpointError(
            f"{error}; restore the file, or start a new folder from the checkpoint with --resume {checkpoint.path}"
        ) from None


def differences(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    """Return the changed settings that decide what is learned, as "name: then x, now y"."""
    now = dataclasses.asdict(config)
    found = [
        f"{name}: then {before[name]}, now {value}"
        for name, value in now.items()
        if name not in FREE
        and name != "num_env_steps"
        and name in before
        and (tuple(value) != tuple(before[name]) if isinstance(value, (list, tuple)) else value != before[name])
    ]
    steps = before.get("num_env_steps", config.num_env_steps)
    updates = -(-steps // config.rollout_steps)
    if updates != config.num_updates and config.use_linear_lr_decay:
        found.append(
            f"num_env_steps: then {steps}, now {config.num_env_steps}, towards which the step size falls unless "
            "a run is started with --no-use-linear-lr-decay"
        )
    return found


def resumed_models(config: TrainConfig, checkpoint: Checkpoint | None) -> ResolvedModels:
    """Return the settings of the run's models; a resumed folder needs the files of models that it was started with."""
    digests = checkpoint.file_digests if checkpoint is not None and config.resumes_folder else ()
    return group_of(ResolvedModels, config, file_digests=digests, **_local_addresses(config))


def restore_envs(parts: RunParts, checkpoint: Checkpoint | None) -> FloatArray | None:
    """Restore environments; return the observations [N, O], None for new episodes.

    A resumed run folder continues in the middle of its episodes; a run from a checkpoint file starts new ones.
    """
    if checkpoint is None:
        return None
    if checkpoint.envs is not None and parts.config.resumes_folder:
        obs: FloatArray | None = parts.envs.load_state_dict(checkpoint.envs)
        return obs
    done = checkpoint.progress
    for env, steps, episodes in zip(parts.env_list, done.env_total_steps, done.env_episodes, strict=False):
        env.total_steps, env.total_episodes = steps, episodes
    return None


def resumed_view(parts: RunParts, checkpoint: Checkpoint | None) -> RunView:
    """Return the run as callbacks see it; the best success counts on while the validation questions are the same."""
    done = checkpoint.progress if checkpoint else Progress()
    has_same_fold = checkpoint is not None and checkpoint.flags["validation_fold"] == parts.config.validation_fold
    return RunView(
        config=parts.config,
        folder=parts.run_dir.path,
        env_steps=done.env_steps,
        updates_done=parts.learner.updates_done,
        invalid_steps=done.invalid_steps,
        best_success=done.best_success if has_same_fold else 0.0,
    )


def make_learner(config: TrainConfig, task: Task, checkpoint: Checkpoint | None) -> Learner:
    """Return a new learner, or the restored one of a checkpoint; CheckpointError for that of another algorithm."""
    observer = task.observer
    make = LEARNERS.get(config.algo).make
    learner = make(observer.size, len(task.actions), config, mask_columns=observer.slices["closed"])
    if checkpoint is None:
        return learner
    if (algo := checkpoint.flags["algo"]) != config.algo:
        raise CheckpointError(f"{checkpoint.path} was made with --algo {algo}; leave out --algo {config.algo}")
    try:
        learner.load_state_dict(checkpoint.learner)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return learner


def _local_addresses(flags: TrainConfig) -> Mapping[str, tuple[str, ...]]:
    """Return --local-server-url under the flag of its backend for the evaluations, unless they have other servers."""
    if not flags.local_server_url or flags.ollama_url or flags.openai_url:
        return {}
    kind = BACKENDS.get(DEFAULT_BACKEND if flags.backend == AUTO else flags.backend)
    return {kind.url_flag: (flags.local_server_url,)}
