"""Checkpoints of training runs: tensors and plain types only, so loading one runs no code from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from query_mutator.bounds import Parallel
from query_mutator.confidence import ConfidenceModel
from query_mutator.env.observation import Projection
from query_mutator.env.task import rewrite_settings
from query_mutator.errors import CheckpointError
from query_mutator.files import disk_errors
from query_mutator.files.run_dir import newest_checkpoint, steps_of
from query_mutator.files.whole import as_type, record_of
from query_mutator.forms import ALL
from query_mutator.learners.learner import tensors
from query_mutator.session.models import ResolvedModels
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.evaluation import FailureRate
from query_mutator.settings.learner import IQNConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run, and the lengths of its row files."""

    env_steps: int = 0
    wall_s: float = 0.0
    llm_calls: int = 0
    invalid_steps: int = 0
    tokens: int = 0
    cut_replies: int = 0
    best_success: float = 0.0  # of the periodic evaluations
    env_episodes: tuple[int, ...] = ()  # finished episodes of each environment
    env_total_steps: tuple[int, ...] = ()  # of each, those of a rollout ahead included
    transcripts_bytes: int = 0
    transcripts_crc: int | None = None
    metrics_bytes: int = 0
    metrics_crc: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One saved state; `learner` is its `state_dict`, with the policy's weights under `policy`."""

    learner: Mapping[str, Any]
    actions: tuple[str, ...]
    task: TaskSettings
    system: ResolvedModels
    projection: Projection
    flags: Mapping[str, Any]
    versions: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)
    envs: Sequence[Mapping[str, Any]] | None = None  # states of the environments between two steps
    confidence: Mapping[str, Any] | None = None  # arrays of the model of P(right), for the rule `learned`
    callbacks: Mapping[str, Any] = field(default_factory=dict)  # states of the plugins' callbacks by name
    plugins: Mapping[str, str] = field(default_factory=dict)  # --plugin -> sha256 of its source
    path: Path | None = None

    def save(self, path: Path) -> Path:
        """Write the checkpoint atomically; DiskError when it cannot be written."""
        return save_state(path, self._state())

    def _state(self) -> dict[str, Any]:
        import torch

        return {
            **self.learner,
            "actions": list(self.actions),
            "task": asdict(self.task),
            "system": asdict(self.system),
            "projection": {
                "mean": torch.from_numpy(self.projection.mean),
                "components": torch.from_numpy(self.projection.components),
            },
            "flags": dict(self.flags),
            "versions": dict(self.versions),
            "progress": asdict(self.progress),
            "envs": self.envs,
            "confidence": self.confidence
            and {name: torch.from_numpy(array.copy()) for name, array in self.confidence.items()},
            "callbacks": dict(self.callbacks),
            "plugins": dict(self.plugins),
        }

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in a `.pt` file; CheckpointError for one that cannot be used."""
        state = load_state(path)
        try:
            return cls(
                learner=_learner(state),
                actions=stored_actions(state["actions"]),
                task=stored_task(state["task"]),
                system=stored_models(state["system"]),
                projection=Projection(**{name: tensor.numpy() for name, tensor in state["projection"].items()}),
                flags=_with_rewrites(stored_flags(state["flags"]), state["actions"]),
                versions=state["versions"],
                progress=Progress(**state["progress"]),
                envs=state["envs"],
                confidence=None if state["confidence"] is None else arrays_of(state["confidence"]),
                callbacks=state["callbacks"],
                plugins=as_type(state["plugins"], Mapping[str, str], "plugins"),
                path=path,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not a checkpoint of query mutator ({str(error)[:200]}); give a run folder"
            ) from error

    @property
    def algo(self) -> str:
        """Return the name of the learner."""
        return str(self.flags.get("algo", "ppo"))

    def confidence_model(self) -> ConfidenceModel | None:
        """Return what the policy submits by, if it was learned; CheckpointError for arrays that hold none."""
        if self.confidence is None:
            return None
        found = ConfidenceModel.from_arrays(self.confidence)
        if found.encoder_source:
            raise CheckpointError("its model of P(right) needs an encoder, which episodes do not give it")
        return found

    def check_actions(self, actions: Sequence[str]) -> None:
        """Raise a CheckpointError with the difference unless the policy has exactly these actions."""
        if tuple(actions) == self.actions:
            return
        missing = [name for name in self.actions if name not in actions]
        extra = [name for name in actions if name not in self.actions]
        difference = "; ".join(
            f"{what}: {', '.join(names)}" for what, names in (("only there", missing), ("only here", extra)) if names
        )
        raise CheckpointError(
            f"{self.path} was made for another operator set ({difference or 'the order differs'}); "
            f"use {self._rewrite_flags()}"
        )

    def _rewrite_flags(self) -> str:
        settings = rewrite_settings(self.actions, self.task.forms)
        return " ".join(f"--{name} {value}" for name, value in settings.items() if value)


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as arrays."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _with_rewrites(flags: Mapping[str, Any], actions: Sequence[str]) -> dict[str, Any]:
    """Return flags that name operators and forms where they stand for all: a later version may have more."""
    forms = str(flags.get("forms", ""))
    stands_for_all = flags.get("operators") == "" or forms == ALL
    return {**flags, **(rewrite_settings(actions, forms) if stands_for_all else {})}


def _learner(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the learner's `state_dict`, which stand next to those of the run."""
    run = {field.name for field in fields(Checkpoint)}
    return {"policy": state["policy"], "updates_done": state["updates_done"]} | {
        key: value for key, value in state.items() if key not in run
    }


def snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a learner's state that later updates do not change."""
    return copy.deepcopy(dict(state))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a `.pt`, or the newest readable one of a run folder; CheckpointError without one."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; give a run folder such as runs/latest, or a .pt")
    return _of_its_name(path) if path.is_file() else newest_checkpoint(path, _of_its_name)


def _of_its_name(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.read(path)
    if (steps := checkpoint.progress.env_steps) != steps_of(path, default=steps):
        raise CheckpointError(f"{path} holds the state after {steps} steps; it was renamed or exchanged")
    return checkpoint


def save_state(path: Path, state: Mapping[str, Any]) -> Path:
    """Write tensors and plain types to a .pt file, atomically; DiskError when it cannot be written."""
    from ppo.checkpoint import save_checkpoint

    with disk_errors(path):
        return save_checkpoint(path, state)


def load_state(path: Path, *, entry: str = "policy") -> dict[str, Any]:
    """Return what `save_state` wrote; CheckpointError for a damaged file, and for one without `entry`."""
    from ppo.checkpoint import load_checkpoint

    try:
        return load_checkpoint(path, entry=entry)
    except ValueError as error:
        reason = str(error)
    except Exception as error:  # damaged bytes fail in many ways
        reason = f"cannot read the checkpoint {path}: {error}"
    raise CheckpointError(f"{reason}; give a run folder or another .pt")


def stored_actions(values: Any) -> tuple[str, ...]:
    """Return the actions of a checkpoint or policy file; ValueError for names that no setting takes."""
    names: tuple[str, ...] = as_type(values, tuple[str, ...], "actions")
    TaskSettings(operators=",".join(names))
    return names


def stored_task(values: Mapping[str, Any]) -> TaskSettings:
    """Return the task of a checkpoint or policy file; ValueError for values of other types."""
    if (rubric := values.get("judge_rubric")) and "\n" not in str(rubric):
        raise ValueError("task.judge_rubric names a file, where its text is expected")
    return record_of(TaskSettings, values, where="task")


def stored_models(values: Mapping[str, Any]) -> ResolvedModels:
    """Return the settings of models of a checkpoint or policy file; ValueError for values of other types."""
    if isinstance(urls := values.get("openai_url"), (list, tuple)):  # as a choice of servers has it
        values = {**values, "openai_url": next(iter(urls), None)}
    return record_of(ResolvedModels, values, where="system")


def stored_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a checkpoint or policy file; ValueError for other types of those that acting reads."""
    record_of(_ActingFlags, values, where="flags")
    return dict(as_type(values, Mapping[str, Any], "flags"))


@dataclass(frozen=True, kw_only=True)
class _ActingFlags(FailureRate):
    """The flags that acting reads."""

    algo: str = "ppo"
    plugin: tuple[str, ...] = ()
    num_eval_quantiles: Parallel = IQNConfig.num_eval_quantiles


def load_or_learn(path: Path, learn: Callable[[], ConfidenceModel]) -> ConfidenceModel:
    """Return the model in a file; without a file, that of `learn`, which is written there."""
    if path.exists():
        return _read(path)
    found = learn()
    models: list[ConfidenceModel] = [found, *found.fold_models]
    arrays = [tensors(model.to_arrays()) for model in models]
    save_state(path, {"models": arrays, "fold_of": dict(found.fold_of)})
    return found


def _read(path: Path) -> ConfidenceModel:
    """Return the model in a file; CheckpointError for one that is damaged or holds none."""
    state = load_state(path, entry="fold_of")
    try:
        first, *folds = (ConfidenceModel.from_arrays(arrays_of(model)) for model in state["models"])
        fold_of: Mapping[str, int] = as_type(state["fold_of"], Mapping[str, int], "fold_of")
        if not {*fold_of.values()} <= {*range(len(folds))}:
            raise ValueError("a target is in a fold that is not there")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model of P(right) ({error}); restore it from a copy") from error
    return replace(first, fold_models=tuple(folds), fold_of=fold_of)
