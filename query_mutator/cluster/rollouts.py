"""Training with rollout workers: Ray actors that collect, and the loop that merges what they return and learns.

    T steps of a rollout, N environments of the run, n of a worker, F figures of an episode

Once per update the policy is put into the object store and every worker is given the states of its environments. It
takes its steps with the code of the local engine, and returns columns [T, n] and the new states. The loop has the
learner choose the same actions again, step by step: its random streams, log-probabilities and values are those of the
local engine, and it needs no other method.

A rollout depends on what its worker is given alone. So Ray restarts a worker that dies, on another machine if need be,
with the same arguments; its store, in the run folder, which all machines must see, has the calls that were completed.
More than MAX_RESTARTS end the run with a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppo.frozen import InferencePolicy
from query_mutator.confidence import ConfidenceModel
from query_mutator.env.observation import Projection
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.learners.learner import Learner, Steps
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.cache import CallTotals
from query_mutator.llm.stack import ClientStack
from query_mutator.llm.store import Store
from query_mutator.plugins import load_plugins
from query_mutator.session.models import OpenModels, ResolvedModels, open_models
from query_mutator.session.task import make_task
from query_mutator.training.callbacks import RunParts
from query_mutator.training.config import TrainConfig
from query_mutator.training.loop import OnSteps, TrainingLoop, envs_seed
from query_mutator.training.run_log import EPISODE_FIGURES
from query_mutator.types import FloatArray, Question, StepRecord

MAX_RESTARTS = 100  # of each worker: machines that come and go, not a worker that cannot run
ENCODER = "the sentence encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Specification from which every worker of a run is made."""

    config: TrainConfig
    run_dir: Path
    folder: Path  # where the run was started: relative paths of flags start there
    questions: tuple[Question, ...]
    projection: Projection
    confidence: ConfidenceModel | None  # of --answer learned, with the models of its folds
    texts: tuple[str, ...]  # of questions and references, which the learner's process has embedded
    vectors: FloatArray  # [n, D]
    weights: Mapping[str, frozenset[str]]  # digests of encoder and models
    make_env: Callable[..., Any]  # `QueryMutationEnv`
    batch_envs: Callable[..., Any]  # `BatchedQueryMutationEnv`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout of a worker: its part of the random streams, and the states of its environments [n]."""

    rngs: Sequence[np.random.Generator]  # [n]
    version: int
    states: Sequence[Mapping[str, Any]]
    seed: int | None  # of the first environment: start new episodes
    since: int  # environment steps of the run before this rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The steps of a worker's environments, the states they end in, and what they cost."""

    steps: Steps  # every column [T, n]
    figures: NDArray[np.float64]  # [T, n, F] of the episodes that ended, NaN elsewhere
    records: tuple[StepRecord, ...]
    states: Sequence[Mapping[str, Any]]  # [n]
    usage: tuple[CallTotals, Counter[str], int]  # errors by kind, and calls that shared a reply


# --- in the process of the learner -----------------------------------------------------------------------------------


class ClusterLoop(TrainingLoop):
    """The on-policy loop with workers that collect; its environments hold their states between rollouts."""

    def __init__(self, ray: Any, parts: RunParts, obs: FloatArray | None, on_steps: OnSteps, *, env_steps: int) -> None:
        """Start the workers of a run in which `env_steps` were taken; UsageError where one lacks what it needs."""
        seed, num_steps = envs_seed(parts.config.seed), parts.config.num_steps
        super().__init__(parts.envs, parts.learner, obs, seed=seed, num_steps=num_steps, on_steps=on_steps)
        self._ray, self._parts, self._env_steps = ray, parts, env_steps
        env_ids = range(parts.config.num_processes)
        self._env_ids = [range(ids[0], ids[-1] + 1) for ids in np.array_split(env_ids, parts.config.num_workers)]
        self._spec, self._actors = ray.put(spec_of(parts)), self._started()
        self._results([actor.prepare.remote(self._spec) for actor in self._actors])

    def collect(self) -> None:
        """Have the workers take `num_steps` steps in every environment, and the learner observe them."""
        started = time.perf_counter()
        learner, states = self._learner, with_arrays(self._envs.state_dict())
        requests = [
            RolloutRequest(
                rngs=learner.rngs[ids.start : ids.stop],
                version=learner.version,
                states=states[ids.start : ids.stop],
                seed=None if self._reset_seed is None else self._reset_seed + ids.start,
                since=self._env_steps,
            )
            for ids in self._env_ids
        ]
        self._reset_seed = None
        policy, pairs = self._ray.put(learner.frozen), zip(self._actors, requests, strict=True)
        self._merge(self._results([actor.collect.remote(self._spec, policy, request) for actor, request in pairs]))
        self._waited_s = time.perf_counter() - started

    def close(self) -> None:
        """Do nothing: the workers end with the connection to Ray, calls in flight included."""

    def _started(self) -> list[Any]:
        """Return the workers as actors, dealt out over the machines of the cluster."""
        ray = self._ray
        machines = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        actor, affinity = ray.remote(RolloutWorker), ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        each = settings_of_workers(self._parts.config, self._parts.models.resolved)
        return [
            actor.options(
                num_cpus=0,  # a worker waits for calls nearly all the time
                max_restarts=MAX_RESTARTS,
                max_task_retries=-1,
                scheduling_strategy=affinity(machines[number % len(machines)], soft=True),
            ).remote(settings, ids, number)
            for number, (settings, ids) in enumerate(zip(each, self._env_ids, strict=True))
        ]

    def _results(self, refs: Sequence[Any]) -> list[Any]:
        errors = self._ray.exceptions
        try:
            results: list[Any] = self._ray.get(refs)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise TooManyFailuresError(f"a rollout worker was lost: {str(error).strip().splitlines()[0]}") from error
        return results

    def _merge(self, rollouts: Sequence[Rollout]) -> None:
        """Observe the steps of all environments, step by step, and take over the states they end in."""
        calls, run_dir = self._parts.models.calls, self._parts.run_dir
        for rollout in rollouts:
            totals, error_kinds, shared_calls = rollout.usage
            calls.client.add(totals, error_kinds)
            calls.client.shared_calls += shared_calls
            for record in rollout.records:
                run_dir.add_record(record)
        self._envs.load_state_dict([state for rollout in rollouts for state in rollout.states])
        columns = Steps(*(np.concatenate(column, axis=1) for column in zip(*(r.steps for r in rollouts), strict=True)))
        figures = np.concatenate([rollout.figures for rollout in rollouts], axis=1)  # [T, N, F]
        for row in range(self._num_steps):
            steps = Steps(*(column[row] for column in columns))
            self._learner.act(steps.obs, steps.env_ids.tolist())
            self._learner.observe(steps)
            self._on_steps({"final_info": dict(zip(EPISODE_FIGURES, figures[row].T, strict=True))}, steps)
        self._env_steps += self._num_steps * self._envs.num_envs


def spec_of(parts: RunParts) -> WorkerSpec:
    """Return what every worker of a run is made from."""
    task, encoder = parts.task, parts.models.encoder
    questions = task.train_questions
    texts = [question.text for question in questions] + [q.reference for q in questions if q.reference]
    return WorkerSpec(
        config=parts.config,
        run_dir=parts.run_dir.path.resolve(),
        folder=Path.cwd(),
        questions=questions,
        projection=task.projection,
        confidence=task.confidence,
        texts=tuple(texts),
        vectors=encoder.encode(texts),
        weights=weights_of(parts.models),
        make_env=type(parts.env_list[0]),
        batch_envs=type(parts.envs),
    )


def settings_of_workers(config: TrainConfig, resolved: ResolvedModels) -> list[ResolvedModels]:
    """Return the settings of each worker: its share of the calls in flight, and of the servers, dealt out in turn."""
    count, urls = config.num_workers, resolved.ollama_url
    cache = resolved.cache if resolved.cache == "all" else "off"  # evaluations are not theirs
    each = []
    for number, part in enumerate(np.array_split(range(resolved.batch_size), count)):
        address: dict[str, Any] = {"ollama_url": urls[number::count] or urls[-1:]}
        if config.local_server_url:
            address = {BACKENDS.get(resolved.backend).url_flag: (config.local_server_url,)}
        each.append(replace(resolved, batch_size=len(part), cache=cache, **address))
    return each


# --- in a worker -----------------------------------------------------------------------------------------------------


class RolloutWorker:
    """Owns a client, an encoder, a store and environments, which are made at the first use; Ray makes it an actor."""

    def __init__(self, settings: ResolvedModels, env_ids: range, number: int) -> None:
        self._settings, self._env_ids, self._number = settings, env_ids, number
        self._stack = ExitStack()
        self._records: list[StepRecord] = []
        self._calls: ClientStack | None = None  # until the first use
        self._store: Store
        self._envs: Any

    def prepare(self, spec: WorkerSpec) -> None:
        """Make all of it, unless it is there; UsageError for what this machine lacks.

        A worker that takes the place of another finds its store.
        """
        if self._calls is not None:
            return
        if not spec.run_dir.is_dir():
            raise UsageError(
                f"{spec.run_dir}: no such folder on {socket.gethostname()}, where a rollout worker runs; give a "
                "--save-dir that all machines of the cluster share"
            )
        config = spec.config
        torch.set_num_threads(1)  # as in the learner's process: the last bits of a product depend on it
        with contextlib.suppress(OSError):
            os.chdir(spec.folder)
        load_plugins(config.plugin)
        models = self._stack.enter_context(open_models(self._settings))
        require_same_weights(spec, weights_of(models))
        models.encoder.put(spec.texts, spec.vectors)
        task = make_task(models, config, spec.questions, projection=spec.projection, confidence=spec.confidence)
        self._store = Store(spec.run_dir / f"replies.worker_{self._number}.sqlite", has_wal=False)
        self._stack.callback(self._store.close)
        models.calls.keep(self._store)
        fields = {"client": models.calls.client, "retry_policy": models.retry_policy, "on_record": self._records.append}
        envs = [spec.make_env(task, env_id=env_id, **fields) for env_id in self._env_ids]
        self._envs = spec.batch_envs(envs, self._settings.batch_size if config.use_batching else None)
        self._calls = models.calls

    def collect(self, spec: WorkerSpec, policy: InferencePolicy, request: RolloutRequest) -> Rollout:
        """Return T steps of every environment under `policy`, whose weights may be shared with other workers."""
        self.prepare(spec)
        calls, num_steps = self._calls, spec.config.num_steps
        assert calls is not None
        self._store.begin(request.since)
        before = _usage(calls)
        acting = _Acting(policy, request)
        obs = self._envs.load_state_dict(request.states)
        loop = TrainingLoop(
            self._envs,
            acting,
            None if request.seed is not None else obs,
            seed=request.seed or 0,
            num_steps=num_steps,
            on_steps=acting.add,
            store=self._store,
        )
        self._records.clear()
        loop.collect()
        steps, figures = acting.columns(num_steps)
        totals, error_kinds, shared_calls = _usage(calls)
        return Rollout(
            steps=steps._replace(env_ids=steps.env_ids + self._env_ids.start),
            figures=figures,
            records=tuple(self._records),
            states=with_arrays(self._envs.state_dict()),
            usage=(totals - before[0], error_kinds - before[1], shared_calls - before[2]),
        )


def _usage(calls: ClientStack) -> tuple[CallTotals, Counter[str], int]:
    return calls.client.totals, Counter(calls.client.error_kinds), calls.shared_calls


class _Acting(Learner):
    """What a rollout needs of a learner: a broadcast policy; it gathers the steps and the figures of episodes."""

    def __init__(self, policy: InferencePolicy, request: RolloutRequest) -> None:
        self.version = request.version
        self._policy, self._rngs = policy, request.rngs
        self._found: list[tuple[Steps, NDArray[np.float64]]] = []

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] as the learner's `act` chooses them."""
        return self._policy.act(obs, [self._rngs[env] for env in env_ids]).actions

    def observe(self, steps: Steps) -> None:
        """Wait for `add`."""

    def add(self, infos: Mapping[str, Any], steps: Steps) -> None:
        """Store finished steps with the figures of episodes that ended."""
        figures = np.full((len(steps.env_ids), len(EPISODE_FIGURES)), np.nan)
        if "final_info" in infos:
            figures[:] = np.stack([infos["final_info"][name] for name in EPISODE_FIGURES], axis=1)
        self._found.append((steps, figures))

    def columns(self, num_steps: int) -> tuple[Steps, NDArray[np.float64]]:
        """Return the steps and figures by environment, each column [T, n]."""
        all_steps, figures = zip(*self._found, strict=True)
        env_ids = np.concatenate([steps.env_ids for steps in all_steps])
        order = np.argsort(env_ids, kind="stable").reshape(-1, num_steps).T  # an environment's steps stay in order
        columns = [np.concatenate(column)[order] for column in zip(*all_steps, strict=True)]
        return Steps(*columns), np.concatenate(figures)[order]


def weights_of(models: OpenModels) -> dict[str, frozenset[str]]:
    """Return the digests of the encoder, and of each model as its servers report them."""
    names, servers = (models.target_model, models.mutator_model), models.calls.servers
    digests = {name: frozenset(filter(None, (server.digest(name) for server in servers))) for name in names}
    return digests | {ENCODER: frozenset([models.encoder.fingerprint])}


def require_same_weights(spec: WorkerSpec, weights: Mapping[str, frozenset[str]]) -> None:
    """Raise a UsageError on a machine whose encoder or models are not those of the learner's process."""
    for name, found in weights.items():
        known = spec.weights[name] | found
        if len(known) > 1:
            raise UsageError(
                f"{name} is not the same on {socket.gethostname()}, where a rollout worker runs, and here "
                f"({', '.join(sorted(digest[:12] for digest in known))}): install the same weights on each"
            )


def with_arrays(state: Any) -> Any:
    """Return states with arrays in place of tensors: 0.1 ms an environment to send and receive, not 12 ms."""
    if isinstance(state, dict):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_arrays(value) for value in state]
    return state.numpy() if hasattr(state, "numpy") else state
