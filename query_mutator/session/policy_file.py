"""A policy in one file, with all that acting needs: `policy.qm` in a run folder, or what `qm export-policy` writes.

A safetensors file: loading one runs no code from it and needs no torch. Its metadata have one entry, `policy`: the
sha256 of all that, and JSON with actions, rules of an episode, models, versions and training questions. Its tensors:

    weights/*               of the policy
    confidence/*            the model of P(right), of a policy that submits by it
    mean, components        the projection of embeddings
    train_vectors, probe    training questions' vectors, for the operators that merge in a similar question

No server, file or code is taken from a policy or a run folder: `trained_with` and `plugins` are for messages, and a
command names again what it uses.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from query_mutator.bounds import Parallel
from query_mutator.confidence import ConfidenceModel
from query_mutator.data import BUNDLED
from query_mutator.data.hub import PREFIX as HUB
from query_mutator.data.split import Split, target_key
from query_mutator.encoder import DEFAULT_ENCODER, Encoder
from query_mutator.env.observation import Projection
from query_mutator.env.task import Task, can_be_shown, rewrite_settings
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import atomic_write, encode, parse_json_object, record_of
from query_mutator.files.gguf_file import PACKAGED
from query_mutator.files.run_dir import CONFIDENCE
from query_mutator.llm.address import server_url
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.recorded import BUNDLED_RECORDINGS
from query_mutator.plugins import absolute
from query_mutator.session.models import ResolvedModels
from query_mutator.session.task import example_bank
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.evaluation import FailureRate
from query_mutator.settings.learner import IQNConfig
from query_mutator.settings.models import ADDRESS_FLAGS
from query_mutator.types import FloatArray, Question

logger = logging.getLogger(__name__)

POLICY_FILE = "policy.qm"
FORMAT = 2
MAX_NEIGHBORS = 10_000  # training questions that are kept, a fixed sample of more
MAX_NEIGHBOR_BYTES = 24 << 20  # of their vectors and texts
MAX_BYTES = 64 << 20
MAX_TENSORS = 1000
MAX_VALUES = 2_000_000  # in the JSON: an object of Python takes 50 times the bytes of `[],`
MAX_DIMS = 4
SHOWN_CHARS = 200
PROBE = "What does this encoder make of a plain sentence?"
_SAME_ENCODER = 1e-3  # largest difference of a row between two machines
_DIGEST_CHARS, _SHA256_CHARS = 16, 64

#: The tensors besides the weights, and their dimensions.
_TENSORS = {"mean": 1, "components": 2, "train_vectors": 2, "probe": 1}
_PLAIN = ("actions", "flags", "versions", "plugins", "trained_with", "env_steps", "updates_done")  # of its JSON
_WEIGHTS = re.compile(r"(weights|confidence)/[\w./-]{1,200}")
#: Flags that acting never reads, besides those in `_IS_OWN`.
_LOCAL_FLAGS = ("from_logs", "name", "config", "resume", "plugin", "force", "json", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The training questions with their vectors [Q, D], and digests of the encoder and of all that was trained on."""

    train: tuple[Question, ...] = ()  # without gold in an exported file
    train_vectors: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    encoder: str = ""  # its fingerprint, the sha256 of weights and tokenizer
    probe: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # [D] its row for PROBE
    shows_examples: bool = False  # whether forms show training questions with their answers
    has_gold: bool = True  # False in an exported file, even if some answers are there to show
    trained_texts: frozenset[str] = frozenset()  # digests of the texts of training and validation
    trained_targets: frozenset[str] = frozenset()


def background_of(task: Task, split: Split, *, dataset: str) -> Background:
    """Return the background of a run."""
    seen, known = (*split.train, *split.validation), task.train_questions
    each_bytes = task.train_vectors[:1].nbytes + sum(len(encode(asdict(one))) for one in known[:100]) / len(known[:100])
    most = min(MAX_NEIGHBORS, int(MAX_NEIGHBOR_BYTES / each_bytes))
    chosen: Sequence[int] = range(len(known))
    if len(chosen) > most:
        chosen = sorted(np.random.default_rng(0).choice(len(chosen), most, replace=False).tolist())
    return Background(
        train=tuple(known[index] for index in chosen),
        train_vectors=task.train_vectors[list(chosen)],
        encoder=task.encoder.fingerprint,
        probe=task.encoder.encode([PROBE])[0],
        shows_examples=task.bank is not None and example_bank(dataset) is None,
        trained_texts=frozenset(text_digest(question.text) for question in seen),
        trained_targets=frozenset(text_digest(target_key(question)) for question in seen),
    )


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]


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
    """A policy with all that acting needs."""

    actions: tuple[str, ...]
    task: TaskSettings
    system: ResolvedModels  # without servers and files
    flags: Mapping[str, Any]  # of the training, without them too
    versions: Mapping[str, str]
    plugins: Mapping[str, str] = field(default_factory=dict)  # --plugin -> sha256 of its source
    trained_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # servers and files, for messages
    env_steps: int = 0
    updates_done: int = 0
    background: Background
    weights: Mapping[str, Any]
    projection: Projection
    confidence: Mapping[str, Any] | None = None  # arrays of the model of P(right), for the rule `learned`
    path: Path | None = None

    @classmethod
    def of(cls, *, system: ResolvedModels, flags: Mapping[str, Any], **others: Any) -> Self:
        """Return a policy; servers and files of the settings are kept for messages alone."""
        bare, used = _without_places(replace(system, cache_path=None))
        flags = {name: value for name, value in flags.items() if name not in (*_LOCAL_FLAGS, *_IS_OWN)}
        return cls(system=bare, trained_with=used, flags=flags, **others)

    @property
    def algo(self) -> str:
        """Return the name of the learner."""
        return str(self.flags.get("algo", "ppo"))

    @property
    def named_again(self) -> str:
        """Return the flags, each after a space, by which a command names servers and code of the policy again."""
        used = {**self.trained_with, **({"plugin": tuple(self.plugins)} if self.plugins else {})}
        return "".join(f" --{name.replace('_', '-')} {shlex.join(texts)}" for name, texts in used.items())

    def confidence_model(self) -> ConfidenceModel | None:
        """Return what the policy submits by, if it was learned; CheckpointError for arrays that hold none."""
        if self.confidence is None:
            return None
        found = ConfidenceModel.from_arrays(self.confidence)
        if found.encoder_source:
            raise CheckpointError("its model of P(right) needs an encoder, which episodes do not give it")
        return found

    def redacted(self) -> Self:
        """Return the policy to give away: without reference answers, but those that forms show, and the data's path."""
        known = self.background
        shown = {one.id: one.accept[:1] for one in known.train if known.shows_examples and can_be_shown(one)}
        train = tuple(Question(id=one.id, text=one.text, accept=shown.get(one.id, ())) for one in known.train)
        task = replace(self.task, dataset=Path(self.task.dataset).name)
        return replace(self, task=task, background=replace(known, train=train, has_gold=False))


def check_actions(known: Sequence[str], actions: Sequence[str], *, forms: str, path: object) -> None:
    """Raise a CheckpointError with the difference unless a policy of actions `known` has exactly these."""
    if tuple(actions) == tuple(known):
        return
    missing, extra = ([one for one in a if one not in b] for a, b in ((known, actions), (actions, known)))
    sides = (("only there", missing), ("only here", extra))
    difference = "; ".join(f"{what}: {', '.join(names)}" for what, names in sides if names)
    use = " ".join(f"--{name} {value}" for name, value in rewrite_settings(known, forms).items() if value)
    raise CheckpointError(f"{path} was made for another operator set ({difference or 'the order differs'}); use {use}")


# --- servers and files, which a command names again -------------------------------------------------------------------


def _is_default(flag: str, url: str) -> bool:
    return _address(url) in {_address(one.default_url) for one in map(BACKENDS.get, BACKENDS) if one.url_flag == flag}


def _address(url: str) -> str:
    """Return an address in its one form; one without a path means `/v1`."""
    try:
        return server_url(url).removesuffix("/v1")
    except UsageError:
        return url


def _is_inside(path: str) -> bool:
    """Return whether a path stays in the current folder, unless that is the root of all."""
    here = Path.cwd()
    return not path.startswith((HUB, "~")) and here != here.parent and Path(path).resolve().is_relative_to(here)


#: Each setting that may reach beyond this process -> whether a value comes with the product or stays in this folder;
#: None: never.
_IS_OWN: Mapping[str, Callable[[str], bool] | None] = {
    "ollama_url": partial(_is_default, "ollama_url"),
    "openai_url": partial(_is_default, "openai_url"),
    "gguf": PACKAGED.__contains__,
    "recording": BUNDLED_RECORDINGS.__contains__,
    "encoder": (DEFAULT_ENCODER, "hash").__contains__,
    "local_server_url": None,
    "ray_address": None,
    "judge_model": None,
    "judge_rubric": lambda text: "\n" in text,  # else a file
    "cache_path": None,
    "dataset": lambda spec: spec in BUNDLED or _is_inside(spec),
    "save_dir": _is_inside,
}


def reaching(settings: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the settings that reach beyond this process, as texts."""
    found = {}
    for name, is_own in _IS_OWN.items():
        value = settings.get(name)
        texts = tuple(str(one) for one in (value if isinstance(value, (tuple, list)) else (value,)) if one)
        if texts and not (is_own and all(map(is_own, texts))):
            found[name] = texts
    return found


def _without_places(system: ResolvedModels) -> tuple[ResolvedModels, dict[str, tuple[str, ...]]]:
    """Return the settings of models without servers and files, and these."""
    used = reaching(asdict(system))
    defaults = {one.name: one.default for one in fields(ResolvedModels)}
    bare: dict[str, Any] = {name: defaults[name] for name in ("ollama_url", "openai_url", *used)}
    return replace(system, **bare), used


def check_named(used: Mapping[str, Sequence[str]], named: Mapping[str, Any], *, source: object) -> None:
    """Raise a UsageError for the first setting of `used` that a command does not name: it is not taken from `source`.

    `named` are the settings of its flags and qm.toml. Another server is enough, or that one in the environment.
    """
    has_server = any(named.get(name) for name in ("backend", *ADDRESS_FLAGS))
    variables = {one.url_flag: one.url_variable for one in map(BACKENDS.get, BACKENDS)}
    for name, texts in used.items():
        own = os.environ.get(variables.get(name, ""), "")
        is_server = name in ADDRESS_FLAGS and (has_server or {*map(_address, texts)} == {_address(own)})
        if not (is_server or named.get(name)):
            flag, shown = f"--{name.replace('_', '-')}", " ".join(texts)[:SHOWN_CHARS]
            raise UsageError(
                f"{source} was made with {flag} {shown}, which is not taken from it: give {flag} {shown} to use it, or "
                "another, as a flag or in qm.toml"
            )


def check_plugins(recorded: Iterable[str], named: Iterable[str], *, source: object) -> None:
    """Raise a UsageError for the first recorded plugin that a command does not name; nothing is imported."""
    places = set(map(absolute, named))
    for spec in recorded:
        if absolute(spec) not in places:
            raise UsageError(
                f"{source} was made with the plugin {spec[:SHOWN_CHARS]}, and no code is taken from it: give --plugin "
                f"{spec[:SHOWN_CHARS]} to run it"
            )


# --- writing ---------------------------------------------------------------------------------------------------------


def write_policy_file(path: str | Path, policy: SavedPolicy) -> None:
    """Write a policy; CheckpointError for one whose weights are not named arrays of numbers."""
    known = policy.background
    tensors = {
        **{f"weights/{name}": _array(name, value) for name, value in policy.weights.items()},
        **{f"confidence/{name}": np.asarray(value) for name, value in (policy.confidence or {}).items()},
        "mean": policy.projection.mean,
        "components": policy.projection.components,
        "train_vectors": known.train_vectors,
        "probe": known.probe,
    }
    background = {one.name: getattr(known, one.name) for one in fields(Background) if one.name not in _TENSORS}
    background |= {name: sorted(texts) for name, texts in background.items() if isinstance(texts, frozenset)}
    about = {name: getattr(policy, name) for name in _PLAIN}
    about |= {"background": {**background, "train": [asdict(question) for question in known.train]}}
    about |= {"task": asdict(policy.task), "system": asdict(policy.system)}
    text = encode({"format": FORMAT, **about}).decode()
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        _checked(text, arrays)
    except ValueError as error:
        raise CheckpointError(f"{path}: no policy file: nothing could read it ({error})") from None
    with atomic_write(path) as file:
        file.write(save(arrays, {"policy": digest_of_content(text, arrays) + text}))


def _array(name: str, value: Any) -> NDArray[Any]:
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value) if not isinstance(value, Mapping) else None
    if array is None or array.dtype.kind not in "fiub":
        raise CheckpointError(f"the policy's {name} is not an array of numbers; a policy file cannot hold it")
    return array


def digest_of_content(text: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 of the JSON and the tensors with their names, types and shapes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_policy(path: str | Path) -> SavedPolicy:
    """Return the policy of a run folder or a `.qm` file; CheckpointError for a missing, damaged or later one."""
    path = Path(path)
    file = path / POLICY_FILE if path.is_dir() else path
    try:
        return _policy(file, *_contents(file))
    except FileNotFoundError:
        raise CheckpointError(_missing(path)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except Exception as error:  # what a stranger wrote fails in many ways
        reason = " ".join(str(error)[:SHOWN_CHARS].split())
        raise CheckpointError(
            f"{file}: not a policy file, or damaged ({reason}); restore or export it again"
        ) from error


def _missing(path: Path) -> str:
    """Return why there is no policy, in one line."""
    if (path / CONFIDENCE).exists():
        return f"{path} has no policy: a log taught it P(right) and an order of prompts that are no forms"
    if (path / "config.json").exists():
        return f"{path} was stopped before its first checkpoint, and has no policy; start again"
    what = f"no {POLICY_FILE} in it" if path.is_dir() else "no such file"
    return f"{path}: {what}; give a run folder such as runs/latest, or a file of `qm export-policy`"


def _contents(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the JSON and the tensors; ValueError for content that does not match its digest, or is not a policy's."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MB")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if stream.read(min(size, MAX_BYTES)).count(b'"dtype"') > MAX_TENSORS:
            raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    with safe_open(file, framework="numpy") as opened:
        policy = (opened.metadata() or {}).get("policy", "")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    digest, text = policy[:_SHA256_CHARS], policy[_SHA256_CHARS:]
    if digest != digest_of_content(text, tensors):
        raise ValueError("its content does not match its digest")
    return _checked(text, tensors), tensors


def _checked(text: str, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the object of the JSON; ValueError for JSON or tensors that no policy has."""
    if sum(map(text.count, (",", "[", "{"))) > MAX_VALUES:
        raise ValueError(f"its JSON has more than {MAX_VALUES:,} values")
    about = parse_json_object(text)
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')!r}, of another version")
    if missing := _TENSORS.keys() - tensors.keys():
        raise ValueError(f"it has no {min(missing)}")
    for name, array in tensors.items():
        is_known = name in _TENSORS
        if not is_known and not _WEIGHTS.fullmatch(name):
            raise ValueError(f"it has a tensor {name!r}")
        dims = _TENSORS.get(name, min(array.ndim, MAX_DIMS))
        if array.dtype.kind not in ("f" if is_known else "fiub") or array.ndim != dims:
            raise ValueError(f"{name} has the shape {array.shape} and the type {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are not finite")
    return about


@dataclass(frozen=True, kw_only=True)
class _ActingFlags(FailureRate):
    """The flags that acting reads."""

    algo: str = "ppo"
    num_eval_quantiles: Parallel = IQNConfig.num_eval_quantiles


def _policy(path: Path, about: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> SavedPolicy:
    """Return the policy of JSON and tensors; ValueError for values of other types, and for sizes that do not match."""
    rubric = about["task"].get("judge_rubric")
    if rubric and "\n" not in str(rubric):  # the settings would read that file
        raise ValueError("task.judge_rubric names a file, where its text is expected")
    weights, confidence = (
        {name.removeprefix(kind): array for name, array in tensors.items() if name.startswith(kind)}
        for kind in ("weights/", "confidence/")
    )
    found: SavedPolicy = record_of(
        SavedPolicy,
        {
            **{name: value for name, value in about.items() if name not in ("path", "projection")},
            "weights": weights,
            "confidence": confidence or None,
            "projection": Projection(mean=tensors["mean"], components=tensors["components"]),
        },
        where="policy",
    )
    known = replace(found.background, train_vectors=tensors["train_vectors"], probe=tensors["probe"])
    dims = {len(tensors[name]) for name in ("mean", "components", "probe")}
    if len(dims) > 1 or known.train_vectors.shape != (len(known.train), *dims):
        raise ValueError("the sizes of its tensors do not match")
    TaskSettings(operators=",".join(found.actions))
    record_of(_ActingFlags, found.flags, where="flags")
    found.confidence_model()
    system, used = _without_places(found.system)
    used |= {name: texts for name, texts in found.trained_with.items() if name in _IS_OWN}
    return replace(found, system=system, trained_with=used, background=known, path=path)
