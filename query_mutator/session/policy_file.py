"""A policy in one file, with all that acting needs: `policy.qm` in a run folder, or what `qm export-policy` writes.

    policy.json        actions, rules of an episode, models, versions, plugins, digests of operators and encoder
    weights/*.npy      the policy's arrays
    confidence/*.npy   the model of P(right), of a policy that submits by it
    *.npy              projection; training questions' vectors, for the operators that merge in a similar question

A zip archive of JSON and plain arrays, so loading one runs no code from it and needs no torch. The archive's comment is
the sha256 of all bytes before it.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import math
import os
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.data.split import Split, target_key
from query_mutator.encoder import Encoder, sha256_of
from query_mutator.env.observation import Projection
from query_mutator.env.task import Task, can_be_shown
from query_mutator.errors import CheckpointError
from query_mutator.files import atomic_write, encode, parse_json_object
from query_mutator.files.run_dir import checkpoints_in, steps_of
from query_mutator.files.whole import as_type, record_of
from query_mutator.forms import Example, Form, FormContext
from query_mutator.operators import LocalOperator, Operator, PromptOperator
from query_mutator.session.checkpoint import (
    Checkpoint,
    Progress,
    read_checkpoint,
    stored_actions,
    stored_flags,
    stored_models,
    stored_task,
)
from query_mutator.session.models import ResolvedModels
from query_mutator.session.task import example_bank
from query_mutator.types import FloatArray, Question

logger = logging.getLogger(__name__)


MAX_NEIGHBORS = 10_000  # training questions that are kept, a fixed sample of more: 15 MB of vectors
PROBE = "What does this encoder make of a plain sentence?"
FORM_PROBE, REPLY_PROBE = f"Hello. {PROBE} Thanks!", "One step.\nAnswer: two\nthree"
_SAME_ENCODER = 1e-3  # largest difference of a row between two machines
_DIGEST_CHARS = 16


POLICY_FILE = "policy.qm"
FORMAT = 1
MAX_BYTES = 128 << 20
MAX_DIRECTORY_BYTES = 256 << 10  # of the list of entries: 2,000 or so
MAX_VALUES = 2_000_000  # in policy.json: an object of Python takes 50 times the bytes of `[],`
MAX_DIMS = 4
SHOWN_CHARS = 200
#: The arrays besides the weights, and their dimensions.
_ARRAYS = {"mean": 1, "components": 2, "train_vectors": 2, "probe": 1}
_WEIGHTS = re.compile(r"(weights|confidence)/[\w./-]{1,200}\.npy")
#: What policy.json has of the background, besides the questions.
_BACKGROUND: Mapping[str, Any] = {
    **dict.fromkeys(("trained_texts", "trained_targets"), frozenset[str]),
    "operators": Mapping[str, str],
    "encoder": str,
    **dict.fromkeys(("shows_examples", "has_gold"), bool),
    "dataset": str | None,
}
_NAN_WEIGHTS = ("weights/stop",)  # of a plan that never stops early
_LABEL = b"sha256 "  # the comment: this and the digest in hexadecimal
_COMMENT_BYTES = len(_LABEL) + 64
_END = struct.Struct("<4s4H2LH")  # of a zip archive: signature, disks, entries, bytes and place of their list
_DATE = (1980, 1, 1, 0, 0, 0)  # of every entry: equal policies are equal files
#: Flags that acting never reads, and that name files of the machine that trained.
_LOCAL_FLAGS = (
    "dataset",
    "from_logs",
    "save_dir",
    "name",
    "config",
    "resume",
    "cache_path",
    "plugin",
    "force",
    "json",
    "run",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The training questions with their vectors [Q, D], and digests that tell whether acting uses the same parts."""

    train: tuple[Question, ...] = ()  # without gold in an exported file
    train_vectors: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    operators: Mapping[str, str] = field(default_factory=dict)  # name -> digest; forms too
    encoder: str = ""  # its fingerprint, the sha256 of weights and tokenizer
    probe: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # [D] its row for PROBE
    shows_examples: bool = False  # whether forms show training questions with their answers
    has_gold: bool = True  # False in an exported file, even if some answers are there to show
    trained_texts: frozenset[str] = frozenset()  # digests of the texts of training and validation
    trained_targets: frozenset[str] = frozenset()
    dataset: str | None = None  # absolute path of the file of the questions


def background_of(task: Task, split: Split, *, dataset: str) -> Background:
    """Return the background of a run: its questions, and digests of operators and encoder."""
    seen = (*split.train, *split.validation)
    chosen: Sequence[int] = range(len(task.train_questions))
    if len(chosen) > MAX_NEIGHBORS:
        chosen = sorted(np.random.default_rng(0).choice(len(chosen), MAX_NEIGHBORS, replace=False).tolist())
    return Background(
        train=tuple(task.train_questions[index] for index in chosen),
        train_vectors=task.train_vectors[list(chosen)],
        operators=_digests([*task.operators, *task.forms]),
        encoder=task.encoder.fingerprint,
        probe=task.encoder.encode([PROBE])[0],
        shows_examples=task.bank is not None and example_bank(dataset) is None,
        trained_texts=frozenset(text_digest(question.text) for question in seen),
        trained_targets=frozenset(text_digest(target_key(question)) for question in seen),
        dataset=str(Path(dataset).resolve()) if os.path.isfile(dataset) else None,
    )


def _digests(rewrites: Sequence[Operator | Form]) -> dict[str, str]:
    return {one.name: digest_of(one) for one in rewrites}


def without_gold(background: Background) -> Background:
    """Return the background without reference answers and the dataset's path, for a file to give away.

    Of questions that forms show as examples the accepted answer that they show stays.
    """
    bare = tuple(
        Question(id=question.id, text=question.text, accept=question.accept[: _is_shown(background, question)])
        for question in background.train
    )
    return replace(background, train=bare, has_gold=False, dataset=None)


def _is_shown(background: Background, question: Question) -> bool:
    return background.shows_examples and can_be_shown(question)


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return sha256_of(text)[:_DIGEST_CHARS]


def digest_of(one: Operator | Form) -> str:
    """Return a digest of an operator's prompt or code ("" for unreadable code), or of what a form makes of a probe."""
    if isinstance(one, Form):
        framed = one.frame(FORM_PROBE, context=FormContext(examples=(Example("Which?", "That."),)))
        return text_digest(f"{framed} {one.read(REPLY_PROBE)}")
    if isinstance(one, PromptOperator):
        return text_digest(one.template)
    made_of: Any = one.function if isinstance(one, LocalOperator) else type(one)
    try:
        return text_digest(inspect.getsource(made_of))
    except (OSError, TypeError):
        return ""


def warn_of_rewrites(background: Background, rewrites: Sequence[Operator | Form]) -> None:
    """Log a warning for each operator or form whose prompt, code or request differs from the one in training."""
    for one in rewrites:
        if background.operators.get(one.name, "") not in ("", digest_of(one)):
            what = "form" if isinstance(one, Form) else "operator"
            logger.warning("%s %s has changed since the training; results may differ", what, one.name)


def check_encoder(background: Background, encoder: Encoder, *, path: object) -> None:
    """Raise a CheckpointError unless the encoder gives the rows of the training's encoder."""
    row = background.probe if encoder.fingerprint == background.encoder else encoder.encode([PROBE])[0]
    if background.probe.shape != (encoder.dim,) or float(np.abs(row - background.probe).max()) > _SAME_ENCODER:
        raise CheckpointError(
            f"{path}: its policy was trained with other weights of the encoder (sha256 {background.encoder[:12]}) than "
            f"those found here ({encoder.source}, {encoder.fingerprint[:12]}); use the same ones"
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
    arrays |= {f"confidence/{name}": array for name, array in (checkpoint.confidence or {}).items()}
    archive = _archive(_about(checkpoint, background), arrays)
    try:
        _contents(archive)
    except ValueError as error:
        raise CheckpointError(f"{path}: no policy file: nothing could read it ({error})") from None
    with atomic_write(path) as file:
        file.write(archive)


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
        "system": {**asdict(findable(checkpoint.system)), "cache_path": None},
        "flags": flags,
        "versions": dict(checkpoint.versions),
        "plugins": dict(checkpoint.plugins),
        "env_steps": checkpoint.progress.env_steps,
        "updates_done": checkpoint.learner["updates_done"],
        "background": {name: _plain(getattr(background, name)) for name in sorted(kept)},
        "train": [asdict(question) for question in background.train],
    }


def redacted(policy: SavedPolicy) -> SavedPolicy:
    """Return a policy without reference answers, but those that forms show, and without the path of the dataset."""
    task = policy.checkpoint.task
    checkpoint = replace(policy.checkpoint, task=replace(task, dataset=Path(task.dataset).name))
    background = policy.background and without_gold(policy.background)
    return SavedPolicy(checkpoint=checkpoint, background=background)


def findable(system: ResolvedModels) -> ResolvedModels:
    """Return settings whose folder of the encoder is found from any working directory."""
    encoder = str(Path(system.encoder).resolve()) if Path(system.encoder).is_dir() else system.encoder
    return replace(system, encoder=encoder)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """What policy.json holds."""

    actions: tuple[str, ...]
    task: Mapping[str, Any]
    system: Mapping[str, Any]
    flags: Mapping[str, Any]
    versions: Mapping[str, str]
    plugins: Mapping[str, str]
    env_steps: int
    updates_done: int
    background: Mapping[str, Any]
    train: tuple[Question, ...]


def read_policy_file(path: str | Path) -> SavedPolicy:
    """Return the policy in a file; CheckpointError for a missing, damaged or later one."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        about, arrays = _contents(data)
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, of another version")
        return _policy(path, record_of(_About, about, where="policy.json"), arrays)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a run folder, or a file of `qm export-policy`") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # what a stranger wrote fails in many ways
        reason = " ".join(str(error)[:SHOWN_CHARS].split())
        raise CheckpointError(f"{path}: not a policy file, or damaged ({reason}); export it again") from error


def _contents(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return policy.json and the arrays; ValueError for content that does not match its digest, or is not theirs."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MB")
    archived = memoryview(data)[:-_COMMENT_BYTES]
    if data[len(archived) :] != _LABEL + hashlib.sha256(archived).hexdigest().encode():
        raise ValueError("its content does not match its digest")
    end = len(archived) - _END.size
    *_, directory_bytes, _, _ = _END.unpack_from(archived, end)
    is_zip64 = bytes(archived[end - 20 : end - 16]) == b"PK\6\7"
    # zipfile reads the last record of an end that it finds, also one inside of another.
    if data.rfind(b"PK\5\6") != end or is_zip64 or directory_bytes > MAX_DIRECTORY_BYTES:
        raise ValueError("its list of entries is not that of a policy")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        _check_entries(entries, archive.infolist(), len(data))
        text = archive.read("policy.json")
        arrays = {name.removesuffix(".npy"): archive.read(name) for name in entries if name != "policy.json"}
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"policy.json has more than {MAX_VALUES:,} values")
    return parse_json_object(text), {name: _array_in(name, content) for name, content in arrays.items()}


def _check_entries(entries: Mapping[str, zipfile.ZipInfo], listed: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Raise a ValueError for entries that a policy lacks, or that could take more memory than the file is long."""
    known = {"policy.json", *(f"{name}.npy" for name in _ARRAYS)}
    if unknown := [name for name in entries if name not in known and not _WEIGHTS.fullmatch(name)]:
        raise ValueError(f"it has an entry {unknown[0]!r}")
    if missing := known - entries.keys():
        raise ValueError(f"it has no {min(missing)}")
    if len(entries) < len(listed):
        raise ValueError("two of its entries have one name")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in listed) or sum(e.file_size for e in listed) > size:
        raise ValueError("its entries are compressed, or longer than the file")


def _array_in(name: str, content: bytes) -> NDArray[Any]:
    """Return the array of finite numbers in a .npy file; ValueError for another content."""
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{name} has another format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    values = memoryview(content)[stream.tell() :]
    dims = _ARRAYS.get(name, len(shape))
    if dtype.kind not in ("f" if name in _ARRAYS else "fiub") or is_fortran or len(shape) != dims or dims > MAX_DIMS:
        raise ValueError(f"{name} has the shape {shape} and the type {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{name} has the shape {shape}, which its {len(values)} bytes do not")
    array = np.frombuffer(values, dtype).reshape(shape).copy()
    if dtype.kind == "f" and name not in _NAN_WEIGHTS and not np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are not finite")
    return array


def _policy(path: Path, about: _About, arrays: Mapping[str, NDArray[Any]]) -> SavedPolicy:
    dims = {len(arrays[name]) for name in ("mean", "components", "probe")}
    if len(dims) > 1 or arrays["train_vectors"].shape != (len(about.train), *dims):
        raise ValueError("the sizes of its arrays do not match")
    others: dict[str, Any] = {
        name: as_type(value, _BACKGROUND[name], f"background.{name}")
        for name, value in about.background.items()
        if name in _BACKGROUND
    }
    others |= {name: arrays[name] for name in ("train_vectors", "probe")}
    weights = {name.removeprefix("weights/"): value for name, value in arrays.items() if name.startswith("weights/")}
    confidence = {
        name.removeprefix("confidence/"): value for name, value in arrays.items() if name.startswith("confidence/")
    }
    checkpoint = Checkpoint(
        learner={"policy": weights, "updates_done": about.updates_done},
        actions=stored_actions(about.actions),
        task=stored_task(about.task),
        system=stored_models(about.system),
        projection=Projection(mean=arrays["mean"], components=arrays["components"]),
        flags=stored_flags(about.flags),
        versions=about.versions,
        progress=Progress(env_steps=about.env_steps),
        plugins=about.plugins,
        confidence=confidence or None,
        path=path,
    )
    checkpoint.confidence_model()
    return SavedPolicy(checkpoint=checkpoint, background=Background(train=about.train, **others))
