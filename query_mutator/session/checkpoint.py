"""The checkpoint of a training: `resume.pt` in its run folder, with the flags in config.json.

Tensors and plain types only, so loading one runs no code from it. The state before stays as `resume.previous.pt`, which
is read where the newest one is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.confidence import ConfidenceModel
from query_mutator.env.observation import Projection
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import as_type, disk_errors, read_checked_json, sync_folder
from query_mutator.files.run_dir import first_readable
from query_mutator.llm.cache import CallTotals
from query_mutator.session.policy_file import POLICY_FILE, SHOWN_CHARS

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
