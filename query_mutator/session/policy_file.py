"""A policy in one file, with all that acting needs: `policy.qm` in a run folder, or what `qm export-policy` writes.

    policy.json        actions, rules of an episode, models, versions, plugins, digests of operators and encoder
    weights/*.npy      the policy's arrays
    *.npy              projection; training questions' vectors, for the operators that merge in a similar question;
                       coefficients of the bandit in the result table

A zip archive of JSON and plain arrays, so loading one runs no code from it and needs no torch. The archive's comment is
the sha256 of all bytes before it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.observation import Projection
from query_mutator.errors import CheckpointError
from query_mutator.files import atomic_write, decode_object, encode
from query_mutator.files.run_dir import checkpoints_in, steps_of
from query_mutator.llm.hf import PREFIX, is_local
from query_mutator.session.background import Background, without_gold
from query_mutator.session.checkpoint import EARLIER_MODELS, EARLIER_TASK, Checkpoint, Progress, read_checkpoint
from query_mutator.session.models import ResolvedModels
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import Question

__all__ = [
    "POLICY_FILE",
    "SavedPolicy",
    "read_policy",
    "read_policy_file",
    "redacted",
    "write_own_policy",
    "write_policy_file",
]

logger = logging.getLogger(__name__)

S = TypeVar("S")

POLICY_FILE = "policy.qm"
FORMAT = 1
_LABEL = b"sha256 "  # the comment: this and the digest in hexadecimal
_COMMENT_BYTES = len(_LABEL) + 64
_DATE = (1980, 1, 1, 0, 0, 0)  # of every entry: equal policies are equal files
#: Flags that acting never reads, and that name files of the machine that trained.
_LOCAL_FLAGS = (
    "dataset",
    "save_dir",
    "name",
    "config",
    "resume",
    "cache_path",
    "plugin",
    "teacher",
    "force",
    "json",
    "run",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """A policy and what acting needs in addition; without a background that is read from the dataset."""

    checkpoint: Checkpoint
    background: Background | None = None


def read_policy(path: str | Path) -> SavedPolicy:
    """Return the policy of a run folder (of its newest checkpoint), a `.pt` file or a `.qm` file; CheckpointError."""
    path = Path(path)
    if path.is_file() and path.suffix != ".pt":
        return read_policy_file(path)
    folder = path if path.is_dir() else path.parent.parent
    own = _readable(folder / POLICY_FILE)
    if path.is_dir() and own is not None and _is_newest(own, path):
        return own
    return SavedPolicy(checkpoint=read_checkpoint(path), background=own.background if own else None)


def _readable(path: Path) -> SavedPolicy | None:
    """Return the policy in a run folder's own file; None for a missing one, and with a warning for a damaged one."""
    if not path.is_file():
        return None
    try:
        return read_policy_file(path)
    except CheckpointError as error:
        logger.warning("%s; using the checkpoints and the dataset", error)
        return None


def _is_newest(policy: SavedPolicy, run: Path) -> bool:
    """Return whether a run folder has no later checkpoint than its policy's."""
    newest = checkpoints_in(run)
    return not newest or steps_of(newest[0]) == policy.checkpoint.progress.env_steps


# --- writing ---------------------------------------------------------------------------------------------------------


def write_policy_file(path: str | Path, policy: SavedPolicy) -> None:
    """Write a policy; CheckpointError for one whose weights are not named arrays, or that has no background."""
    checkpoint, background = policy.checkpoint, policy.background
    if background is None:
        raise CheckpointError(f"{checkpoint.path}: what acting needs is not known; read it from the dataset first")
    weights = checkpoint.learner["policy"]
    arrays: dict[str, NDArray[Any]] = {f"weights/{name}": _array(name, value) for name, value in weights.items()}
    arrays |= {"mean": checkpoint.projection.mean, "components": checkpoint.projection.components}
    arrays |= {"train_vectors": background.train_vectors, "probe": background.probe}
    if checkpoint.bandit is not None:
        arrays["bandit"] = _array("bandit", checkpoint.bandit["theta"])
    with atomic_write(path) as file:
        file.write(_archive(_about(checkpoint, background), arrays))


def write_own_policy(run: Path, policy: SavedPolicy) -> None:
    """Write a run folder's own policy file; a learner's state that is not named arrays is only in its checkpoints."""
    try:
        write_policy_file(run / POLICY_FILE, policy)
    except CheckpointError as error:
        logger.info("%s", error)


def _about(checkpoint: Checkpoint, background: Background) -> dict[str, Any]:
    """Return what policy.json holds."""
    flags = {name: value for name, value in checkpoint.flags.items() if name not in _LOCAL_FLAGS}
    kept = {field.name for field in fields(Background)} - {"train", "train_vectors", "probe"}
    return {
        "format": FORMAT,
        "actions": list(checkpoint.actions),
        "task": asdict(checkpoint.task),
        "system": {**asdict(_findable(checkpoint.system)), "cache_path": None},
        "flags": flags,
        "versions": dict(checkpoint.versions),
        "plugins": dict(checkpoint.plugins),
        "env_steps": checkpoint.progress.env_steps,
        "updates_done": checkpoint.learner["updates_done"],
        "background": {name: _plain(getattr(background, name)) for name in sorted(kept)},
        "train": [asdict(question) for question in background.train],
    }


def redacted(policy: SavedPolicy) -> SavedPolicy:
    """Return a policy without reference answers and without the path of the dataset."""
    task = policy.checkpoint.task
    checkpoint = replace(policy.checkpoint, task=replace(task, dataset=Path(task.dataset).name))
    background = policy.background and without_gold(policy.background)
    return SavedPolicy(checkpoint=checkpoint, background=background)


def _findable(system: ResolvedModels) -> ResolvedModels:
    """Return settings whose folders of models are found from any working directory."""
    mutator = system.mutator_model
    if mutator is not None and is_local(mutator) and (folder := Path(mutator.removeprefix(PREFIX))).is_dir():
        mutator = f"{PREFIX}{folder.resolve()}"
    encoder = str(Path(system.encoder).resolve()) if Path(system.encoder).is_dir() else system.encoder
    return replace(system, encoder=encoder, mutator_model=mutator)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _array(name: str, value: Any) -> NDArray[Any]:
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value) if not isinstance(value, Mapping) else None
    if array is None or array.dtype.kind not in "fiub":
        raise CheckpointError(f"the policy's {name} is not an array of numbers; a policy file cannot hold it")
    return array


def _archive(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the bytes of the archive, with its digest as the comment."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("policy.json", _DATE), encode(about))
        for name, array in arrays.items():
            npy = io.BytesIO()
            np.lib.format.write_array(npy, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _DATE), npy.getvalue())
        archive.comment = b" " * _COMMENT_BYTES
    data = content.getvalue()[:-_COMMENT_BYTES]
    return data + _LABEL + hashlib.sha256(data).hexdigest().encode()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_policy_file(path: str | Path) -> SavedPolicy:
    """Return the policy in a file; CheckpointError for a missing, damaged or later one."""
    path = Path(path)
    try:
        about, arrays = _contents(path.read_bytes())
        if about["format"] != FORMAT:
            raise CheckpointError(f"{path}: its format is {about['format']}, of another version; export it again")
        return _policy(path, about, arrays)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a run folder, or a file of `qm export-policy`") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: not a policy file, or damaged ({error}); export it again") from error


def _contents(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return policy.json and the arrays; ValueError for content that does not match its digest."""
    archived, comment = data[:-_COMMENT_BYTES], data[-_COMMENT_BYTES:]
    if comment != _LABEL + hashlib.sha256(archived).hexdigest().encode():
        raise ValueError("its content does not match its digest")
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        about = decode_object(archive.read("policy.json"))
        for name in archive.namelist():
            if name.endswith(".npy"):
                content = io.BytesIO(archive.read(name))
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(content, allow_pickle=False)
    return about, arrays


def _policy(path: Path, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> SavedPolicy:
    weights = {name.removeprefix("weights/"): value for name, value in arrays.items() if name.startswith("weights/")}
    train = tuple(_record(Question, row) for row in about["train"])
    background = replace(
        _record(Background, about["background"]),
        train=train,
        train_vectors=arrays["train_vectors"],
        probe=arrays["probe"],
        vocabulary=frozenset(about["background"]["vocabulary"]),
        trained_texts=frozenset(about["background"]["trained_texts"]),
        trained_targets=frozenset(about["background"]["trained_targets"]),
    )
    checkpoint = Checkpoint(
        learner={"policy": weights, "updates_done": about["updates_done"]},
        actions=tuple(about["actions"]),
        task=_record(TaskSettings, {**EARLIER_TASK, **about["task"]}),
        system=_record(ResolvedModels, {**EARLIER_MODELS, **about["system"]}),
        projection=Projection(mean=arrays["mean"], components=arrays["components"]),
        flags=about["flags"],
        versions=about["versions"],
        progress=Progress(env_steps=about["env_steps"]),
        plugins=about["plugins"],
        bandit={"theta": arrays["bandit"]} if "bandit" in arrays else None,
        path=path,
    )
    return SavedPolicy(checkpoint=checkpoint, background=background)


def _record(cls: type[S], values: Mapping[str, Any]) -> S:
    """Return a record of plain JSON; fields of later versions are dropped."""
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: _tuple(value) for name, value in values.items() if name in known})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
