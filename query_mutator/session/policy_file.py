"""A policy in one file, with all that acting needs: `policy.qm` in a run folder, or what `qm export-policy` writes.

`best.qm` is what the verdict of the run says to deploy: the policy, the best plan, or the original question.

A safetensors file: loading one runs no code from it and needs no torch. Its metadata have one entry, `policy`: the
sha256 of all that, and JSON with actions, rules of an episode, models and training questions. Its tensors:

    weights/*               of the policy
    confidence/*            the model of P(right), of a policy that submits by it
    gains/*                 the regressions of a plan that asks where it gains most
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from ppo.frozen import array_of
from query_mutator.bounds import Parallel
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data import BUNDLED, Split, target_key
from query_mutator.data.hub import PREFIX as HUB
from query_mutator.encoder import DEFAULT_ENCODER, Encoder
from query_mutator.env.episode import Projection
from query_mutator.env.task import Task, can_be_shown, rewrite_settings
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import atomic_write, decode_object, encode, parse_json, record_of
from query_mutator.files.gguf_file import PACKAGED
from query_mutator.files.run_dir import CONFIDENCE
from query_mutator.learners import LEARNERS, Plan, PlanPolicy, Policy
from query_mutator.llm.backends import BACKENDS, backend_for
from query_mutator.llm.client import server_url
from query_mutator.llm.recorded import BUNDLED_RECORDINGS
from query_mutator.registry import check_known, plugin_hashes, use_plugins
from query_mutator.rewards import NoReward
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.session.task import example_bank, make_task
from query_mutator.settings import (
    ADDRESS_FLAGS,
    CallBudget,
    FailureRate,
    IQNConfig,
    TaskSettings,
    first_address,
    split_target,
)
from query_mutator.types import Question

logger = logging.getLogger(__name__)

POLICY_FILE = "policy.qm"
BEST_FILE = "best.qm"
FORMAT = 3
MAX_NEIGHBORS = 10_000  # training questions that are kept, a fixed sample of more
MAX_NEIGHBOR_BYTES = 24 << 20  # of their vectors and texts
MAX_BYTES = 64 << 20
MAX_TENSORS = 1000
MAX_VALUES = 2_000_000  # in the JSON: an object of Python takes 50 times the bytes of `[],`
SHOWN_CHARS = 200
PROBE = "What does this encoder make of a plain sentence?"
_SAME_ENCODER = 1e-3  # largest difference of a row between two machines
_DIGEST_CHARS, _SHA256_CHARS = 16, 64

#: The tensors besides the weights, and their dimensions.
_TENSORS = {"mean": 1, "components": 2, "train_vectors": 2, "probe": 1}
_WEIGHTS = re.compile(r"(weights|confidence|gains)/[\w./-]{1,200}")
#: The fields of a policy that are no JSON.
_NO_JSON: dict[str, Any] = dict.fromkeys(
    ("weights", "projection", "train_vectors", "probe", "confidence", "gains", "path")
)


@dataclass(frozen=True, kw_only=True)
class ActingFlags(FailureRate, CallBudget):
    """The flags of the training that acting reads."""

    algo: str = "ppo"
    num_eval_quantiles: Parallel = IQNConfig.num_eval_quantiles
    plan: Plan | None = None  # of the learner `plan`


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """A policy with all that acting needs; Q training questions, D numbers of an embedding."""

    actions: tuple[str, ...]
    task: TaskSettings
    system: ResolvedModels  # without servers and files
    flags: ActingFlags
    plugins: Mapping[str, str]  # --plugin -> sha256 of its source
    trained_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # servers and files, for messages
    env_steps: int = 0
    train: tuple[Question, ...]  # without gold in an exported file
    has_gold: bool = True  # False in an exported file, even if some answers are there to show
    shows_examples: bool = False  # whether forms show training questions with their answers
    trained_texts: tuple[str, ...] = ()  # digests of the texts of training and validation
    trained_targets: tuple[str, ...] = ()
    encoder: str = ""  # its fingerprint, the sha256 of weights and tokenizer
    weights: Mapping[str, Any]
    projection: Projection
    train_vectors: Any  # [Q, D]
    probe: Any  # [D] the encoder's row for PROBE
    confidence: ConfidenceModel | None = None  # for the rule `learned`
    gains: GainModel | None = None  # for a plan that asks where it gains most, of its arms
    path: Path | None = None

    def __post_init__(self) -> None:
        used = reaching(asdict(self.system))
        defaults = {one.name: one.default for one in fields(ResolvedModels)}
        bare: dict[str, Any] = {name: defaults[name] for name in ("ollama_url", "openai_url", *used)}
        known = {name: texts for name, texts in self.trained_with.items() if name in _IS_OWN}
        object.__setattr__(self, "trained_with", used | known)
        object.__setattr__(self, "system", replace(self.system, **bare | {"target_model": tuple(self.system.targets)}))

    @classmethod
    def of(
        cls, task: Task, split: Split, *, settings: TaskSettings, system: ResolvedModels, flags: ActingFlags,
        plugins: Sequence[str],
    ) -> Self:  # fmt: skip
        """Return the policy of a run before its first step; servers and files of `system` are kept for messages."""
        known, seen = task.train_questions, (*split.train, *split.validation)
        bytes_each = task.train_vectors[:1].nbytes + sum(len(encode(asdict(one))) for one in known[:100]) / len(
            known[:100]
        )
        chosen, most = [*range(len(known))], min(MAX_NEIGHBORS, int(MAX_NEIGHBOR_BYTES / bytes_each))
        if len(chosen) > most:
            chosen = sorted(np.random.default_rng(0).choice(len(chosen), most, replace=False).tolist())
        return cls(
            actions=task.actions,
            task=settings,
            system=replace(system, cache_path=None),
            flags=flags,
            plugins=plugin_hashes(plugins),
            train=tuple(known[index] for index in chosen),
            shows_examples=task.bank is not None and example_bank(settings.dataset) is None,
            trained_texts=tuple(sorted({text_digest(question.text) for question in seen})),
            trained_targets=tuple(sorted({text_digest(target_key(question)) for question in seen})),
            encoder=task.encoder.fingerprint,
            weights={},
            projection=task.projection,
            train_vectors=task.train_vectors[chosen],
            probe=task.encoder.encode([PROBE])[0],
            confidence=task.confidence,
            gains=task.gains,
        )

    @property
    def named_again(self) -> str:
        """Return the flags, each after a space, by which a command names servers and code of the policy again."""
        used = {**self.trained_with, **({"plugin": tuple(self.plugins)} if self.plugins else {})}
        return "".join(f" --{name.replace('_', '-')} {shlex.join(texts)}" for name, texts in used.items())

    def redacted(self) -> Self:
        """Return the policy to give away: without reference answers, but those that forms show, and the data's path."""
        shown = {one.id: one.accept[:1] for one in self.train if self.shows_examples and can_be_shown(one)}
        train = tuple(Question(id=one.id, text=one.text, accept=shown.get(one.id, ())) for one in self.train)
        return replace(self, train=train, has_gold=False, task=replace(self.task, dataset=Path(self.task.dataset).name))

    def check_encoder(self, encoder: Encoder) -> None:
        """Raise a CheckpointError unless the encoder gives the rows of the training's encoder."""
        row = self.probe if encoder.fingerprint == self.encoder else encoder.encode([PROBE])[0]
        if self.probe.shape != (encoder.dim,) or float(np.abs(row - self.probe).max()) > _SAME_ENCODER:
            raise CheckpointError(
                f"{self.path}: its policy was trained with other weights of the encoder (sha256 {self.encoder[:12]}) "
                f"than those found here ({encoder.source}, {encoder.fingerprint[:12]}); use the same ones"
            )


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]


# --- servers, files and code, which a command names again -------------------------------------------------------------


def _address(url: str) -> str:
    """Return an address in its one form; one without a path means `/v1`."""
    try:
        return server_url(url).removesuffix("/v1")
    except UsageError:
        return url


def _is_default(flag: str, url: str) -> bool:
    return _address(url) in {_address(one.default_url) for one in map(BACKENDS.get, BACKENDS) if one.url_flag == flag}


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
    "target_model": lambda text: not split_target(text)[1],
    "price": lambda text: "=" in text or text.startswith("{"),  # else a file
    "judge_model": None,
    "judge_rubric": lambda text: "\n" in text,  # else a file
    "system": lambda text: "\n" in text,
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


# --- the file ---------------------------------------------------------------------------------------------------------


def write_policy_file(path: str | Path, policy: SavedPolicy) -> None:
    """Write a policy; CheckpointError for one whose weights are not named arrays of numbers."""
    learned = {} if policy.confidence is None else policy.confidence.to_arrays()
    gains = {} if policy.gains is None else policy.gains.to_arrays()
    tensors = {
        **{f"weights/{name}": array_of(value) for name, value in policy.weights.items()},
        **{f"confidence/{name}": np.asarray(value) for name, value in learned.items()},
        **{f"gains/{name}": value for name, value in gains.items()},
        "mean": policy.projection.mean,
        "components": policy.projection.components,
        "train_vectors": policy.train_vectors,
        "probe": policy.probe,
    }
    about = asdict(replace(policy, **_NO_JSON))
    text = encode({"format": FORMAT, **{name: about[name] for name in about if name not in _NO_JSON}}).decode()
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        _check(text, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path}: no policy file: nothing could read it ({error})") from None
    with atomic_write(path) as file:
        file.write(save(tensors, {"policy": digest_of_content(text, tensors) + text}))


def digest_of_content(text: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 of the JSON and the tensors with their names, types and shapes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_policy(path: str | Path, *, best: bool = False) -> SavedPolicy:
    """Return the policy of a run folder or a `.qm` file; CheckpointError for a missing, damaged or later one.

    With `best` the one of a folder is what its verdict says to deploy, where there is a verdict.
    """
    path = Path(path)
    file = path
    if path.is_dir():
        file = path / (BEST_FILE if best and (path / BEST_FILE).exists() else POLICY_FILE)
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


def _contents(file: Path) -> tuple[str, dict[str, NDArray[Any]]]:
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
    _check(text, tensors)
    return text, tensors


def _check(text: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Raise a ValueError for JSON too large to read, and for tensors that no policy has."""
    if sum(map(text.count, (",", "[", "{"))) > MAX_VALUES:
        raise ValueError(f"its JSON has more than {MAX_VALUES:,} values")
    if missing := _TENSORS.keys() - tensors.keys():
        raise ValueError(f"it has no {min(missing)}")
    for name, array in tensors.items():
        is_known = name in _TENSORS
        if not is_known and not _WEIGHTS.fullmatch(name):
            raise ValueError(f"it has a tensor {name!r}")
        if array.dtype.kind not in ("f" if is_known else "fiub") or array.ndim != _TENSORS.get(name, array.ndim):
            raise ValueError(f"{name} has the shape {array.shape} and the type {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are not finite")


def _policy(path: Path, text: str, tensors: Mapping[str, NDArray[Any]]) -> SavedPolicy:
    """Return the policy of JSON and tensors; ValueError for values of other types, and for sizes that do not match."""
    about = decode_object(text, parse_json)
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')!r}, of another version")
    for name in ("judge_rubric", "system"):
        written = about["task"].get(name)
        if written and "\n" not in str(written):  # the settings would read that file
            raise ValueError(f"task.{name} names a file, where its text is expected")
    weights, learned, gains = (
        {name.removeprefix(kind): array for name, array in tensors.items() if name.startswith(kind)}
        for kind in ("weights/", "confidence/", "gains/")
    )
    confidence = ConfidenceModel.from_arrays(learned) if learned else None
    if confidence is not None and confidence.encoder_source:
        raise ValueError("its model of P(right) needs an encoder, which episodes do not give it")
    found: SavedPolicy = record_of(
        SavedPolicy,
        {
            **about,
            "weights": weights,
            "confidence": confidence,
            "gains": None,
            "projection": Projection(mean=tensors["mean"], components=tensors["components"]),
            "train_vectors": tensors["train_vectors"],
            "probe": tensors["probe"],
            "path": None,
        },
        where="policy",
    )
    dims = {len(tensors[name]) for name in ("mean", "components", "probe")}
    if len(dims) > 1 or found.train_vectors.shape != (len(found.train), *dims):
        raise ValueError("the sizes of its tensors do not match")
    TaskSettings(operators=",".join(found.actions))
    plan = found.flags.plan
    if gains and plan is not None:
        found = replace(found, gains=GainModel.from_arrays(gains, plan.operators))
    return replace(found, path=path)


# --- from a run folder or a policy file to a task against running models, with the dataset gone ----------------------


def load_saved(path: str | Path, plugins: Sequence[str] = (), *, best: bool = False) -> SavedPolicy:
    """Return the policy of a run folder or a `.qm` file, after loading `plugins`; `best`: what won in the verdict.

    CheckpointError for an unusable file; UsageError for a plugin of its training that is not given.
    """
    saved = read_policy(path, best=best)
    return replace(saved, plugins=use_plugins(saved.plugins, plugins, source=saved.path))


def load_policy(saved: SavedPolicy, task: Task | None = None) -> Policy:
    """Return the policy for inference; CheckpointError for weights of another kind, or another task."""
    flags = {**vars(saved.flags), "deterministic": saved.system.deterministic}
    try:
        policy: Policy = LEARNERS.get(saved.flags.algo).load_policy(saved.weights, flags)
        if isinstance(policy, PlanPolicy):
            for name in policy.plan.steps:
                check_known("action of the plan", name, saved.actions)
            return policy
        if getattr(policy, "num_actions", len(saved.actions)) != len(saved.actions):
            raise ValueError(f"its weights are not for {len(saved.actions)} actions")
        if task is not None:
            policy.act(np.zeros((1, task.observer.size), np.float32), (), greedy=True)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{saved.path}: {error}") from error
    return policy


def acting_settings(
    settings: ResolvedModels, given: Mapping[str, Any], *, saved: SavedPolicy | None = None
) -> ResolvedModels:
    """Return the settings of models with those given in place of them, without simulated latency.

    UsageError for a server or file of the training of `saved` in whose place none is given.
    """
    models = given.get("target_model") or ()
    given = {**first_address((models,) if isinstance(models, str) else models), **given}
    if saved is not None:
        check_named(saved.trained_with, given, source=saved.path)
    settings = replace(settings, latency_ms=0.0, latency_sigma=0.0, running_speed=0.0)
    nowhere: dict[str, Any] = {**dict.fromkeys(ADDRESS_FLAGS), "file_digests": ()}
    if given.get("backend", settings.backend) != settings.backend:  # addresses and models do not fit another backend
        settings = replace(settings, **nowhere, target_model=(), mutator_model=None)
    for flag in ADDRESS_FLAGS:
        if flag in given:
            settings = replace(settings, **nowhere)
            given.setdefault("backend", backend_for(flag, backend=settings.backend))
            if BACKENDS.get(given["backend"]).runs_files:
                settings = replace(settings, target_model=(), mutator_model=None)
    return replace(settings, **given)


def acting_task(saved: SavedPolicy, models: OpenModels, *, train: Sequence[Question] | None = None) -> Task:
    """Return the task of a policy on the training questions, among which are the ones to merge in.

    With `train`, the questions with gold, answers are scored as in training; without, they are not.
    """
    reward, bank = NoReward() if train is None else None, None
    saved.check_encoder(models.encoder)
    models.encoder.put([question.text for question in saved.train], saved.train_vectors)
    if train is None:
        train, bank = [Question(id=one.id, text=one.text) for one in saved.train], saved.train
    settings = replace(saved.task, **rewrite_settings(saved.actions, models.targets))
    task = make_task(
        models,
        settings,
        train,
        projection=saved.projection,
        reward=reward,
        bank=bank,
        confidence=saved.confidence,
        learns=reward is None and len(models.targets) > 1,  # a baseline reads log probabilities
    )
    digests = models.calls.servers[0].file_digests()
    if saved.system.first_model == models.target_model and (saved.system.file_digests or digests) != digests:
        logger.warning("%s is another file than in training; results may differ", models.target_model)
    gains = saved.gains
    if gains is not None and task.prices and all(price.is_per_call for price in task.prices.values()):
        paid = [task.price(task.form_named(arm).model) for arm in gains.arms]
        gains = replace(gains, prices=np.array(paid))  # those given now
    task = replace(task, gains=gains)
    if task.actions != saved.actions:
        raise CheckpointError(f"{saved.path} was made for the actions {', '.join(saved.actions)[:SHOWN_CHARS]}")
    return task
