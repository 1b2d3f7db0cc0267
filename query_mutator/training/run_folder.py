"""The folder of a training run: opened and locked, described in config.json, its checkpoints, summed up at the end.

A checkpoint is the state after the last update, written when it is due and however the run ends, to `resume.pt`, with
the flags in config.json. It has tensors and plain types only, so loading one runs no code from it. The state before
stays as `resume.previous.pt`, which is read where the newest one is damaged. What continues a run from one takes the
checkpoint, None for a new run.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from query_mutator.bounds import group_of
from query_mutator.cli.flags import files_read
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data import Split
from query_mutator.env.episode import Projection
from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import (
    as_type,
    check_json_lines,
    disk_errors,
    locked,
    read_checked_json,
    sync_folder,
    write_checked_json,
)
from query_mutator.files.run_dir import METRICS_FILE, SUMMARY, RunDir, describe_run, first_readable
from query_mutator.learners import ALGO, LEARNERS, Plan, plan_task
from query_mutator.learners.learner import Learner
from query_mutator.llm.backends import BACKENDS, DEFAULT_BACKEND
from query_mutator.llm.cache import CallTotals
from query_mutator.registry import plugin_hashes, use_plugins
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.session.policy_file import (
    BEST_FILE,
    POLICY_FILE,
    SHOWN_CHARS,
    ActingFlags,
    SavedPolicy,
    check_named,
    reaching,
    write_policy_file,
)
from query_mutator.settings import ADDRESS_FLAGS, AUTO, TaskSettings
from query_mutator.training.config import TrainConfig

if TYPE_CHECKING:
    from query_mutator.training.callbacks import RunParts, RunView


def open_run_dir(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> RunDir:
    """Return a new run folder, locked, or the resumed one with its row files truncated to where its checkpoint was."""
    if checkpoint is None:
        run_dir = RunDir.create(config.save_dir, config.name or config.algo)
        stack.callback(_remove_unbegun, run_dir)
        stack.enter_context(locked(run_dir.path))
    else:
        done = checkpoint.progress
        run_dir = RunDir(
            Path(config.resume or "").resolve(),
            first_step=done.env_steps,
            transcripts_bytes=done.transcripts_bytes,
            metrics_bytes=done.metrics_bytes,
        )
    stack.callback(run_dir.close)
    return run_dir


def _remove_unbegun(run_dir: RunDir) -> None:
    if not run_dir.config_path.exists():
        shutil.rmtree(run_dir.path, ignore_errors=True)


def write_config(parts: RunParts, *, resumed_at: int) -> None:
    """Write config.json, to which a resumed run adds the steps and the command."""
    about = described(parts.models, parts.split, parts.config.plugin)
    config = describe_run(asdict(parts.config), settings_files=files_read(), **about)
    parts.run_dir.write_config(config, resumed_at=resumed_at)


def described(models: OpenModels, split: Split, plugin: Sequence[str]) -> dict[str, Any]:
    """Return who answered, with which plugins, and the questions, for config.json."""
    return {
        "backend": {
            "kind": models.choice.kind,
            "reason": models.choice.reason,
            "url": models.choice.urls[0],
            "target_model": models.target_model,
            "mutator_model": models.mutator_model,
        },
        "encoder": {"name": models.encoder.name, "source": models.encoder.source},
        "plugins": plugin_hashes(plugin),
        "dataset_sha256": split.sha256,
        **({"dataset_source": split.source} if split.source else {}),
    }


def write_summary(
    parts: RunParts,
    run: RunView,
    *,
    wall_s: float,
    report: Mapping[str, Any] | None,
) -> None:
    """Write summary.json: the comparison, and what the run cost."""
    training, evaluation = parts.models.calls.client.totals, parts.models.calls.eval_client.totals
    summary = {
        "eval": report,
        "env_steps": run.env_steps,
        "llm_calls": training.calls,
        "eval_llm_calls": evaluation.calls,
        "eval_tokens": evaluation.tokens,
        "eval_reply_tokens": evaluation.reply_tokens,
        "invalid_steps": run.invalid_steps,
        "prompts_too_long": dict(sum((env.prompts_too_long for env in parts.env_list), Counter())),
        "cut_replies": (training + evaluation).cut_replies,
        "cut_share": (training + evaluation).cut_share,
        "wall_s": round(wall_s, 3),
        "seed": parts.config.seed,
        "backend": parts.models.choice.kind,
    }
    write_checked_json(parts.run_dir.summary_path, summary)


def planned(
    policy: SavedPolicy, plan: Plan, task: Task, confidence: ConfidenceModel | None, gains: GainModel | None = None
) -> SavedPolicy:
    """Return a policy that follows a plan on a task, submits by `confidence` and asks by `gains`."""
    acting = plan_task(plan, task)
    rules = acting.rules
    return replace(
        policy,
        weights={},
        actions=acting.actions,
        task=replace(
            policy.task,
            ask=rules.ask,
            answer=rules.answer,
            max_episode_steps=rules.max_episode_steps,
            max_asks=rules.max_asks,
        ),
        confidence=confidence if rules.answer == "learned" else None,
        gains=None if gains is None or plan.gain_at is None else gains.ordered(plan.operators),
        flags=replace(policy.flags, algo=ALGO, plan=plan),
    )


class Checkpoints:
    """Keeps the state after the last update in memory, and writes it with the policy to the run folder."""

    def __init__(self, parts: RunParts, run: RunView, *, resumed: Checkpoint | None) -> None:
        """Keep the state as it is; `resumed` is the checkpoint that it was restored from."""
        self._parts, self._run = parts, run
        self._policy = SavedPolicy.of(
            parts.task,
            parts.split,
            settings=group_of(TaskSettings, parts.config),
            system=parts.models.resolved,
            flags=group_of(ActingFlags, parts.config),
            plugins=parts.config.plugin,
        )
        self.keep()
        self._saved_steps = None if resumed is None else run.env_steps
        self._is_newest_good = resumed is None or resumed.path is None or resumed.path.name != PREVIOUS

    @property
    def path(self) -> Path:
        """Return the file of the newest state."""
        return self._parts.run_dir.path / RESUME

    @property
    def named_again(self) -> str:
        """Return the flags by which a command names servers and code of the run again."""
        return self._policy.named_again

    def keep(self) -> None:
        """Keep the state after an update, once the row of metrics is written."""
        parts, run, rows = self._parts, self._run, self._parts.run_dir
        learner = copy.deepcopy(parts.learner.state_dict())
        self._latest = Checkpoint(
            learner=learner,
            projection=self._policy.projection,
            file_digests=self._policy.system.file_digests,
            progress=Progress(
                env_steps=run.env_steps,
                wall_s=parts.runlog.wall_s,
                totals=parts.models.calls.client.totals,
                invalid_steps=run.invalid_steps,
                best_success=run.best_success,
                transcripts_bytes=rows.transcripts.size_bytes,
                metrics_bytes=rows.metrics.rows.size_bytes,
                open_row={**run.row} if run.is_row_open else None,
            ),
            envs=parts.envs.state_dict(),
            confidence=self._policy.confidence,
        )
        self._policy = replace(self._policy, env_steps=run.env_steps, weights=learner["policy"])

    def set_price(self, price: float) -> None:
        """Write the last policy with the price of a call at which it acts."""
        self._policy = replace(self._policy, task=replace(self._policy.task, call_price=(price,)))
        write_policy_file(self._parts.run_dir.path / POLICY_FILE, self._policy)

    def write(self) -> None:
        """Write what is kept, with the policy file, unless it was written before."""
        run_dir, steps = self._parts.run_dir, self._latest.progress.env_steps
        if steps == self._saved_steps:
            return
        run_dir.sync()
        self._latest.save(run_dir.path, keep_newest=self._is_newest_good)
        write_policy_file(run_dir.path / POLICY_FILE, self._policy)
        (run_dir.path / BEST_FILE).unlink(missing_ok=True)  # its verdict is on an earlier policy
        self._saved_steps, self._is_newest_good = steps, True

    def write_best(self, plan: Plan | None, confidence: ConfidenceModel | None, gains: GainModel | None) -> Path:
        """Write what won: a plan with what it submits and asks by, or None for the policy; return the file."""
        path, policy = self._parts.run_dir.path / BEST_FILE, self._policy
        if plan is not None:
            policy = planned(policy, plan, self._parts.task, confidence, gains)
        write_policy_file(path, policy)
        return path


_OF_ONE_COMMAND = ("plugin", "resume", "config", "dry_run")
#: Flags about speed, retries and files; all others decide what is learned.
FREE = frozenset(
    {
        *("batch_size", "use_batching", "adaptive", "ollama_url", "openai_url", "gguf", "recording"),
        "keep_alive",
        *("ray_address", "local_server_url"),
        *("timeout_s", "max_reply_mb", "max_retries", "wait_for_server_s", "max_failure_rate"),
        *("cache", "cache_path"),
        *("latency_ms", "latency_sigma", "running_speed"),
        *("save_dir", "name", "save_interval", "log_interval", "eval_interval", "eval_questions", "evaluate"),
        *("max_pending_updates", *_OF_ONE_COMMAND),
    }
)


def resumed_flags(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the flags of the run of a checkpoint, without servers, files and plugins; UsageError for one not named.

    `config` has the flags of the command and qm.toml, which name them again.
    """
    given, flags = {name: getattr(config, name) for name in (*config.given, *ADDRESS_FLAGS)}, {**checkpoint.flags}
    given = {name: value for name, value in given.items() if name in config.given or value}  # an address of a model too
    flags["save_dir"] = str(Path(config.resume or "").resolve().parent)
    used = reaching({**flags, "save_dir": ""})
    check_named(used, given, source=checkpoint.path)
    use_plugins(checkpoint.plugins, given.get("plugin", ()), source=checkpoint.path)
    return {name: value for name, value in flags.items() if name not in (*used, *_OF_ONE_COMMAND)}


def check_resumption(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise a UsageError unless a run can continue with these flags.

    It keeps the flags it was started with, except those that do not change what it learns, and its number of steps.
    """
    run = Path(config.resume or "")
    check_files(run, checkpoint)
    if found := differences(config, checkpoint.flags):
        raise CheckpointError(f"{run} was started with other settings ({'; '.join(found)}); leave them out")
    if checkpoint.learner["updates_done"] >= config.num_updates and (run / SUMMARY).exists():
        steps = checkpoint.progress.env_steps
        raise UsageError(f"{run} has taken its {steps} steps; give a larger --num-env-steps to continue")


def check_files(run: Path, checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError unless the files of a run folder hold what they held when its checkpoint was written."""
    done = checkpoint.progress
    try:
        check_json_lines(run / "transcripts.jsonl", end=done.transcripts_bytes)
        check_json_lines(run / METRICS_FILE, end=done.metrics_bytes)
    except UsageError as error:
        raise CheckpointError(f"{error}; restore the file") from None


def differences(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    """Return the changed settings that decide what is learned, as "name: then x, now y"."""
    return [
        f"{name}: then {before[name]}, now {value}"
        for name, value in asdict(config).items()
        if name not in (*FREE, "num_env_steps")
        and name in before
        and (tuple(value) != tuple(before[name]) if isinstance(value, (list, tuple)) else value != before[name])
    ]


def resumed_models(config: TrainConfig, checkpoint: Checkpoint | None) -> ResolvedModels:
    """Return the settings of the run's models; a resumed run needs the files of models that it was started with."""
    digests = () if checkpoint is None else checkpoint.file_digests
    return group_of(ResolvedModels, config, file_digests=digests, **_local_addresses(config))


def make_learner(config: TrainConfig, task: Task, checkpoint: Checkpoint | None) -> Learner:
    """Return a new learner, or the restored one of a checkpoint; CheckpointError for one of other sizes."""
    observer = task.observer
    make = LEARNERS.get(config.algo).make
    learner = make(observer.size, len(task.actions), config, mask_columns=observer.slices["closed"])
    try:
        if checkpoint is not None:
            learner.load_state_dict(checkpoint.learner)
    except ValueError as error:
        raise CheckpointError(f"{config.resume}: {error}") from error
    return learner


def _local_addresses(flags: TrainConfig) -> Mapping[str, tuple[str, ...]]:
    """Return --local-server-url under the flag of its backend for the evaluations, unless they have other servers."""
    if not flags.local_server_url or flags.ollama_url or flags.openai_url:
        return {}
    kind = BACKENDS.get(DEFAULT_BACKEND if flags.backend == AUTO else flags.backend)
    return {kind.url_flag: (flags.local_server_url,)}


# --- the checkpoint --------------------------------------------------------------------------------------------------

RESUME, PREVIOUS, _NEXT = "resume.pt", "resume.previous.pt", "resume.next.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run, and the lengths of its row files."""

    env_steps: int = 0
    wall_s: float = 0.0
    totals: CallTotals = field(default_factory=CallTotals)  # of calls for training
    invalid_steps: int = 0
    best_success: float = 0.0  # of the periodic evaluations
    transcripts_bytes: int = 0
    metrics_bytes: int = 0
    open_row: Mapping[str, float] | None = None  # of metrics, whose evaluation was being made


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a training between two updates; `learner` is the learner's `state_dict`."""

    learner: Mapping[str, Any]
    projection: Projection
    file_digests: tuple[str, ...] = ()  # of models that are files
    progress: Progress = field(default_factory=Progress)
    envs: Sequence[Mapping[str, Any]] = ()  # states of the environments between two steps
    confidence: ConfidenceModel | None = None  # with the models of its folds, for the rule `learned`
    flags: Mapping[str, Any] = field(default_factory=dict)  # in config.json, not in the file
    plugins: Mapping[str, str] = field(default_factory=dict)  # there too: --plugin -> sha256 of its source
    path: Path | None = None

    def save(self, run: Path, *, keep_newest: bool = True) -> Path:
        """Write the state to a run folder, in which the newest one becomes the previous one; DiskError if it cannot."""
        from ppo.checkpoint import save_checkpoint

        model = self.confidence
        models: list[ConfidenceModel] = [] if model is None else [model, *model.fold_models]
        state = {
            "learner": self.learner,
            "projection": asdict(self.projection),
            "file_digests": list(self.file_digests),
            "progress": asdict(self.progress) | {"totals": self.progress.totals._asdict()},
            "envs": self.envs,
            "confidence": [one.to_arrays() for one in models],
            "fold_of": {} if model is None else dict(model.fold_of),
        }
        newest = run / RESUME
        with disk_errors(newest):
            written = save_checkpoint(run / _NEXT, _with_tensors(state))
            if keep_newest and newest.exists():
                newest.replace(run / PREVIOUS)
            written.replace(newest)
            sync_folder(run)
        return newest


def _with_tensors(value: Any) -> Any:
    """Return plain types with tensors in place of arrays."""
    import torch

    if isinstance(value, Mapping):
        return {key: _with_tensors(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_tensors(one) for one in value]
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


# --- reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(run: str | Path) -> Checkpoint:
    """Return the newest readable state in a run folder; CheckpointError without any."""
    run = Path(run)
    if not (run / "config.json").exists():
        raise CheckpointError(
            f"{run} is not of a run, there is nothing to resume; give a run folder such as runs/latest"
        )
    found = [run / name for name in (RESUME, PREVIOUS) if (run / name).exists()]
    if not found:
        why = "is not trained" if (run / POLICY_FILE).exists() else "was stopped before its first checkpoint"
        raise CheckpointError(f"{run} {why}, there is nothing to resume; start again with qm train or qm plan")
    flags, plugins = run_settings(run / "config.json")
    return first_readable(found, partial(_read, flags=flags, plugins=plugins))


def run_settings(path: Path) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the flags of a run and the digests of its plugins, in its config.json; UsageError for another file."""
    config = read_checked_json(path)
    try:
        flags = as_type(config.get("flags"), Mapping[str, Any], "flags")
        return flags, as_type(config.get("plugins", {}), Mapping[str, str], "plugins")
    except ValueError as error:
        raise UsageError(f"{path}: not the config.json of a run ({error}); restore it") from None


def _read(path: Path, *, flags: Mapping[str, Any], plugins: Mapping[str, str]) -> Checkpoint:
    """Return the state in a file; CheckpointError for one that is damaged, or holds none."""
    from ppo.checkpoint import load_checkpoint

    try:
        state = load_checkpoint(path, entry="learner")
        progress = state["progress"]
        models = [ConfidenceModel.from_arrays(_arrays(one)) for one in state["confidence"]]
        return Checkpoint(
            learner=state["learner"],
            projection=Projection(**_arrays(state["projection"])),
            file_digests=tuple(state["file_digests"]),
            progress=Progress(**progress | {"totals": CallTotals(**progress["totals"])}),
            envs=state["envs"],
            confidence=replace(models[0], fold_models=tuple(models[1:]), fold_of=state["fold_of"]) if models else None,
            flags=flags,
            plugins=plugins,
            path=path,
        )
    except Exception as error:  # damaged bytes fail in many ways
        reason = " ".join(str(error)[:SHOWN_CHARS].split())
        raise CheckpointError(f"{path}: not a checkpoint of query mutator ({reason}); give a run folder") from error


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in values.items()}
