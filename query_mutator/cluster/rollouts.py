"""Rollouts on Ray: workers step the environments of a run, each with its own client, encoder and store.

    N environments

The loop of the local engine chooses the actions. A step is a call of the actor that has the environment: it gets the
action and the state that the environment was left in, and returns what the step gives and the next state. So Ray
restarts a worker that dies, on another machine if need be, and repeats the steps in flight; the worker's store, in the
run folder, which all machines must see, has the calls that were completed. More than MAX_RESTARTS end the run with a
checkpoint.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from query_mutator.confidence import ConfidenceModel
from query_mutator.env.episode import Projection
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.env.vector import StepResult, VectorStep, gather, reset_as_step, step_and_reset
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.cache import Cache, CallTotals, is_repeatable, request_key
from query_mutator.llm.client import Client
from query_mutator.llm.store import Store
from query_mutator.registry import load_plugins
from query_mutator.session.models import OpenModels, ResolvedModels, open_models
from query_mutator.session.task import make_task
from query_mutator.training.callbacks import RunParts
from query_mutator.training.config import TrainConfig
from query_mutator.types import ChatRequest, Completion, FloatArray, Question, StepRecord

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStep:
    """A step of an environment, the state that it ends in, and what it cost."""

    result: StepResult
    state: Mapping[str, Any]
    records: tuple[StepRecord, ...]
    totals: CallTotals
    paid: Mapping[str, CallTotals]  # of them, those that the store may give again
    error_kinds: Counter[str]
    shared_calls: int


# --- in the process of the learner -----------------------------------------------------------------------------------


class RemoteEnvs:
    """The environments of a run as its loop sends and receives steps; those in `parts` hold the states between them."""

    def __init__(self, ray: Any, parts: RunParts) -> None:
        """Start the workers; UsageError where one lacks what it needs."""
        self._ray, self._parts, self._envs = ray, parts, parts.env_list
        self.num_envs, self.single_observation_space = len(parts.env_list), parts.envs.single_observation_space
        self.step_ids = parts.envs.step_ids
        self._running: dict[Any, int] = {}  # step in flight -> environment
        self._paid: set[tuple[int, str]] = set()  # calls of each worker that were counted
        shares = np.array_split(range(self.num_envs), parts.config.num_workers)
        actors = self._actors(max(map(len, shares)))
        self._workers = [actor for actor, share in zip(actors, shares, strict=True) for _ in share]  # [N]
        self._spec = ray.put(spec_of(parts))
        self._results([actor.prepare.remote(self._spec) for actor in actors])

    def send(self, actions: Iterable[int], env_ids: Iterable[int]) -> None:
        """Start a step in each of `env_ids`."""
        for action, env in zip(actions, env_ids, strict=True):
            self._start(int(env), action=int(action))

    def send_reset(self, *, seed: int) -> None:
        """Start a reset in every environment; the first one gets `seed`, and the others count up."""
        for env in range(self.num_envs):
            self._start(env, seed=seed + env)

    def recv(self, *, max_envs: int, waits: bool = True) -> VectorStep:
        """Return the steps that have finished, at most `max_envs`; wait for the first, unless it `waits` for none."""
        self._ray.wait([*self._running], num_returns=1, timeout=None if waits else 0)
        ready, _ = self._ray.wait([*self._running], num_returns=min(max_envs, len(self._running)), timeout=0)
        found: dict[int, RemoteStep] = {self._running.pop(ref): self._results([ref])[0] for ref in ready}
        client = self._parts.models.calls.client
        for env, step in found.items():
            self._envs[env].load_state_dict(step.state)
            # A worker in place of a dead one finds replies that steps which had ended were counted with.
            calls = {(id(self._workers[env]), key): cost for key, cost in step.paid.items()}
            again = [cost for call, cost in calls.items() if call in self._paid]
            self._paid |= calls.keys()
            client.add(reduce(operator.sub, again, step.totals), step.error_kinds)
            client.shared_calls += step.shared_calls
            for record in step.records:
                self._parts.run_dir.add_record(record)
        return gather({env: step.result for env, step in found.items()}, *self.single_observation_space.shape)

    def _start(self, env: int, **how: int) -> None:
        state, config = self._envs[env].state_dict(), self._parts.config
        since = state["steps"] // config.num_steps * config.rollout_steps  # when the present rollout started
        step = self._workers[env].step.remote(self._spec, state, env_id=env, since=since, **how)
        self._running[step] = env

    def _actors(self, at_once: int) -> list[Any]:
        """Return the workers as actors, dealt out over the machines of the cluster; each takes `at_once` steps."""
        ray = self._ray
        machines = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        actor, affinity = ray.remote(RolloutWorker), ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return [
            actor.options(
                num_cpus=0,  # a worker waits for calls nearly all the time
                max_concurrency=at_once,
                max_restarts=MAX_RESTARTS,
                max_task_retries=-1,
                scheduling_strategy=affinity(machines[number % len(machines)], soft=True),
            ).remote(settings, number)
            for number, settings in enumerate(settings_of_workers(self._parts.config, self._parts.models.resolved))
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


class _StepCalls(Cache):
    """Counts the calls of one step."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.paid: dict[str, CallTotals] = {}

    def _count(self, request: ChatRequest, reply: Completion) -> None:
        before = self.totals
        super()._count(request, reply)
        if reply.ok and is_repeatable(request) and self.totals != before:
            self.paid[request_key(request)] = self.totals - before


class RolloutWorker:
    """Owns models, store and task, which are opened at the first use; Ray makes it an actor with several threads."""

    def __init__(self, settings: ResolvedModels, number: int) -> None:
        self._settings, self._number = settings, number
        self._lock = threading.Lock()  # held while a step opens them, and while a rollout begins
        self._stack = ExitStack()
        self._since = -1
        self._models: OpenModels | None = None  # until the first use
        self._store: Store
        self._task: Task

    def prepare(self, spec: WorkerSpec) -> None:
        """Open models, store and task; UsageError for what this machine lacks.

        A worker that takes the place of another finds its store.
        """
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
        self._models, self._task = models, task

    def step(
        self,
        spec: WorkerSpec,
        state: Mapping[str, Any],
        *,
        env_id: int,
        since: int,
        action: int | None = None,
        seed: int | None = None,
    ) -> RemoteStep:
        """Take a step from a state, and reset where the episode ends; without an action reset with `seed`.

        `since` is the number of steps of the run before this rollout.
        """
        with self._lock:
            if self._models is None:
                self.prepare(spec)
            if since != self._since:
                self._store.begin(since)
                self._since = since
        models, records = self._models, list[StepRecord]()
        assert models is not None
        client = _StepCalls(models.calls.client)
        how: dict[str, Any] = {"client": client, "retry_policy": models.retry_policy}
        env = spec.make_env(self._task, env_id=env_id, on_record=records.append, **how)
        env.load_state_dict(state)
        flow = reset_as_step(env, seed=seed, reset=True) if action is None else step_and_reset(env, action)
        return RemoteStep(
            result=run_flow(flow, encoder=models.encoder, **how),
            state=env.state_dict(),
            records=tuple(records),
            totals=client.totals,
            paid=client.paid,
            error_kinds=client.error_kinds,
            shared_calls=client.shared_calls,
        )


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
