"""A rollout worker: it collects the steps of its environments with the code of the local engine.

    N environments of the run, n of this worker, T steps of a rollout, O observation, F figures of an episode

`collect` depends only on its arguments: on the policy and the states of the environments, which the learner's process
keeps. So a worker that dies is replaced by a new one with the same arguments. The calls that the dead one
completed are in its journal, a folder in the run folder: all machines must see that folder.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from query_mutator.confidence import ConfidenceModel
from query_mutator.env.observation import Projection
from query_mutator.env.steps import Steps
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.learners.learner import InferencePolicy
from query_mutator.llm.stack import CallTotals
from query_mutator.plugins import load_plugins
from query_mutator.session.failure_rate import WINDOW_STEPS, FailureWindow
from query_mutator.session.journal import Journal, keep_embeddings
from query_mutator.session.models import OpenModels, ResolvedModels, open_models
from query_mutator.session.task import make_task
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.loop import AsyncVectorEnv, OnPolicyLoop
from query_mutator.training.run_log import EPISODE_FIGURES
from query_mutator.types import FloatArray, Question, StepRecord

__all__ = ["Rollout", "RolloutRequest", "RolloutWorker", "WorkerSpec", "WorkerState", "state_of", "with_arrays"]

WRITER_WAIT_S = 120.0  # for the worker before; NFS drops the lock of a dead machine after 90 s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run is made from."""

    run_dir: Path
    folder: Path  # where the run was started: relative paths of flags start there
    plugins: tuple[str, ...]
    task: TaskSettings
    questions: tuple[Question, ...]
    projection: Projection
    confidence: ConfidenceModel | None  # of --answer learned, with the models of its folds
    texts: tuple[str, ...]  # of questions and references, which the learner's process has embedded
    vectors: FloatArray  # [n, D]
    make_env: Callable[..., Any]  # `QueryMutationEnv`
    batch_envs: Callable[..., AsyncVectorEnv]  # `BatchedQueryMutationEnv`
    batches: bool
    num_steps: int
    max_failure_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout of a worker: its part of a `RolloutPolicy`, and the states of its environments [n]."""

    rngs: Sequence[np.random.Generator]  # [n]
    version: int
    states: Sequence[Mapping[str, Any]]
    seed: int | None  # of the first environment: start new episodes
    since: int  # environment steps of the run before this rollout
    keep_since: int  # the oldest ones that a run may resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker uses, to compare it with the learner's process."""

    place: str  # machine and process
    encoder: str  # fingerprint
    digests: Mapping[str, frozenset[str]]  # of each model's weights, as its servers report them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The steps of a worker's environments, the states they end in, and what they cost."""

    steps: Steps  # every column [T, n]
    figures: NDArray[np.float64]  # [T, n, F] of the episodes that ended, NaN elsewhere
    records: tuple[StepRecord, ...]
    states: Sequence[Mapping[str, Any]]  # [n]
    totals: CallTotals
    error_kinds: Mapping[str, int]
    shared_calls: int
    place: str


class RolloutWorker:
    """Owns a client, an encoder and environments, which are made at the first use; Ray makes it an actor."""

    def __init__(self, settings: ResolvedModels, env_ids: range, number: int) -> None:
        self._settings, self._env_ids, self._number = settings, env_ids, number
        self._stack = ExitStack()
        self._models: OpenModels | None = None
        self._journal: Journal | None = None
        self._envs: AsyncVectorEnv  # with the journal
        self._since = -1
        self._records: list[StepRecord] = []

    def prepare(self, spec: WorkerSpec) -> WorkerState:
        """Start what a rollout needs; return what it is. UsageError for what is missing on this machine."""
        return state_of(self._started(spec))

    def collect(self, spec: WorkerSpec, policy: InferencePolicy, request: RolloutRequest) -> Rollout:
        """Return T steps of every environment under `policy`, whose weights may be shared with other workers."""
        calls = self._started(spec).calls
        journal = self._journal_since(spec, request)
        totals, error_kinds, shared_calls = calls.counted.totals, Counter(calls.counted.error_kinds), calls.shared_calls
        found = _Found(policy, request, max_failure_rate=spec.max_failure_rate, num_steps=spec.num_steps)
        first = self._env_ids.start
        obs = self._envs.load_state_dict(request.states)
        loop = OnPolicyLoop(
            self._envs,
            found,
            None if request.seed is not None else obs,
            seed=(request.seed or 0) + first,
            num_steps=spec.num_steps,
            on_steps=found.add_figures,
            journal=journal,
        )
        self._records.clear()
        loop.collect()
        steps, figures = found.columns()
        return Rollout(
            steps=steps._replace(env_ids=steps.env_ids + first),
            figures=figures,
            records=tuple(self._records),
            states=with_arrays(self._envs.state_dict()),
            totals=calls.counted.totals - totals,
            error_kinds=calls.counted.error_kinds - error_kinds,
            shared_calls=calls.shared_calls - shared_calls,
            place=_place(),
        )

    def close(self) -> None:
        """End calls, servers and files; idempotent."""
        self._stack.close()
        self._models = None

    def _folder(self, spec: WorkerSpec) -> Path:
        return spec.run_dir / "journal" / f"worker_{self._number}"

    def _started(self, spec: WorkerSpec) -> OpenModels:
        if self._models is None:
            self._models = self._start(spec)
        return self._models

    def _start(self, spec: WorkerSpec) -> OpenModels:
        """Start servers, encoder and client; the task comes from what the learner's process has embedded."""
        if not spec.run_dir.is_dir():
            raise UsageError(
                f"{spec.run_dir}: no such folder on {socket.gethostname()}, where a rollout worker runs; give a "
                "--save-dir that all machines of the cluster share"
            )
        self._stack.enter_context(_sole_writer(self._folder(spec)))
        torch.set_num_threads(1)  # as in the learner's process: the last bits of a product depend on it
        with contextlib.suppress(OSError):
            os.chdir(spec.folder)
        load_plugins(spec.plugins)
        models = self._stack.enter_context(open_models(self._settings))
        models.encoder.put(spec.texts, spec.vectors)
        self._task = make_task(
            models, spec.task, spec.questions, projection=spec.projection, confidence=spec.confidence
        )
        return models

    def _journal_since(self, spec: WorkerSpec, request: RolloutRequest) -> Journal:
        """Return the journal with the entries of this rollout, if a worker has begun it before."""
        if self._journal is None or request.since <= self._since:
            self._journal = self._reopened(spec, request.since)
        else:
            self._journal.start(request.since)
        self._journal.drop_before(request.keep_since)
        self._since = request.since
        return self._journal

    def _reopened(self, spec: WorkerSpec, since: int) -> Journal:
        """Open the journal and make environments that use it."""
        assert self._models is not None
        models = self._models
        if self._journal is not None:
            self._envs.close()
            self._journal.close()
        journal = Journal.continued(self._folder(spec), since=since, on_replay=models.calls.counted.add)
        self._stack.callback(journal.close)
        keep_embeddings(models.encoder, journal)
        envs = [
            spec.make_env(
                self._task,
                client=models.calls.client,
                retry_policy=models.retry_policy,
                env_id=env_id,
                on_record=self._records.append,
            )
            for env_id in self._env_ids
        ]
        self._envs = spec.batch_envs(envs, self._settings.batch_size if spec.batches else None, journal=journal)
        return journal


class _Found:
    """The part of a learner that a rollout needs: a broadcast policy, and the steps as they arrive."""

    def __init__(
        self, policy: InferencePolicy, request: RolloutRequest, *, max_failure_rate: float, num_steps: int
    ) -> None:
        self.version = request.version
        self._policy, self._rngs = policy, request.rngs
        self._shape = (len(request.states), num_steps)
        size = min(WINDOW_STEPS, len(request.states) * num_steps)
        self._failures = FailureWindow(max_failure_rate, size=size)
        self._steps: list[Steps] = []
        self._figures: list[NDArray[np.float64]] = []

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] as the learner's `act` chooses them."""
        return self._policy.act(obs, [self._rngs[env] for env in env_ids]).actions

    def observe(self, steps: Steps) -> None:
        """Store finished steps."""
        self._steps.append(steps)

    def update(self) -> dict[str, float]:
        """Do nothing: learning is up to the learner's process."""
        return {}

    def add_figures(self, infos: Mapping[str, Any], steps: Steps) -> None:
        """Store the figures of episodes that ended; TooManyFailuresError when too many steps are invalid."""
        figures = np.full((len(steps.env_ids), len(EPISODE_FIGURES)), np.nan)
        if "final_info" in infos:
            figures[:] = np.stack([infos["final_info"][name] for name in EPISODE_FIGURES], axis=1)
        self._figures.append(figures)
        self._failures.add(steps.valid)

    def columns(self) -> tuple[Steps, NDArray[np.float64]]:
        """Return the steps and figures by environment, each column [T, n]."""
        env_ids = np.concatenate([steps.env_ids for steps in self._steps])
        order = (
            np.argsort(env_ids, kind="stable").reshape(self._shape).T
        )  # [T, n]; an environment's steps stay in order
        steps = Steps(*(np.concatenate(column)[order] for column in zip(*self._steps, strict=True)))
        return steps, np.concatenate(self._figures)[order]


@contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Hold the journal of a worker; the system drops the lock of a process that dies, also over NFS.

    After a network failure the worker that Ray has replaced may still be writing.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "writer.lock", timeout=WRITER_WAIT_S):
            yield
    except Timeout:
        raise UsageError(
            f"{folder} is still being written by the worker before this one; end it, then resume the run"
        ) from None


def with_arrays(state: Any) -> Any:
    """Return states with arrays in place of tensors: 0.1 ms an environment to send and receive, not 12 ms."""
    if isinstance(state, dict):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_arrays(value) for value in state]
    return state.numpy() if hasattr(state, "numpy") else state


def state_of(models: OpenModels) -> WorkerState:
    """Return what a process uses."""
    servers = models.calls.servers
    names = (models.target_model, models.mutator_model)
    digests = {name: frozenset(filter(None, (server.digest(name) for server in servers))) for name in names}
    return WorkerState(place=_place(), encoder=models.encoder.fingerprint, digests=digests)


def _place() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"
