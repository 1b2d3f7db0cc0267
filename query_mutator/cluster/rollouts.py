"""Training with rollout workers: Ray actors that collect, and the loop that merges and learns.

    T steps of a rollout, N environments, F figures of an episode

Once per update the policy is put into the object store and every worker is given the states of its environments. It
returns columns [T, n] and the new states. The loop has the learner choose the same actions again, step by step: its
random streams, log-probabilities and values are those of the local engine, and it needs no other method.

A worker that dies is restarted by Ray, on another machine if need be, and given the same arguments; its journal has
the calls that were completed. More than MAX_RESTARTS end the run with a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from query_mutator.bounds import group_of
from query_mutator.cli.console import note
from query_mutator.cluster.worker import (
    Rollout,
    RolloutRequest,
    RolloutWorker,
    WorkerSpec,
    WorkerState,
    state_of,
    with_arrays,
)
from query_mutator.env.steps import Steps
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.files.run_dir import RunDir, checkpoints_in, steps_of
from query_mutator.learners.learner import OnPolicyLearner, RolloutLearner
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.stack import ClientStack
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.config import TrainConfig
from query_mutator.training.loop import AsyncVectorEnv, OnPolicyLoop, OnSteps
from query_mutator.training.parts import RunParts, loop_settings
from query_mutator.training.run_log import EPISODE_FIGURES
from query_mutator.types import FloatArray

__all__ = ["ClusterLoop", "RolloutWorkers", "check_states", "cluster_loop", "dealt_out", "shares", "spec_of"]

T = TypeVar("T")

MAX_RESTARTS = 100  # of each worker: machines that come and go, not a worker that cannot run


class RolloutWorkers:
    """The workers of a run as Ray actors, dealt out over the machines of the cluster."""

    def __init__(self, ray: Any, spec: WorkerSpec, each: Sequence[ResolvedModels], env_ids: Sequence[range]) -> None:
        self._ray, self._env_ids = ray, env_ids
        machines = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        actor, self._spec = ray.remote(RolloutWorker), ray.put(spec)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._actors = [
            actor.options(
                num_cpus=0,  # a worker waits for calls nearly all the time
                max_restarts=MAX_RESTARTS,
                max_task_retries=-1,
                scheduling_strategy=affinity(machines[number % len(machines)], soft=True),
            ).remote(settings, ids, number)
            for number, (settings, ids) in enumerate(zip(each, env_ids, strict=True))
        ]
        self._places: list[str] = []

    def prepare(self) -> list[WorkerState]:
        """Start the workers' servers and encoders; return what they are."""
        states: list[WorkerState] = self._results([actor.prepare.remote(self._spec) for actor in self._actors])
        self._places = [state.place for state in states]
        return states

    def collect(self, learner: OnPolicyLearner, states: Sequence[Mapping[str, Any]], **request: Any) -> list[Rollout]:
        """Return a rollout of every worker; `request` are the further fields of `RolloutRequest`."""
        chosen = learner.rollout_policy
        policy = self._ray.put(chosen.policy)
        rollouts: list[Rollout] = self._results(
            [
                actor.collect.remote(
                    self._spec,
                    policy,
                    RolloutRequest(
                        rngs=chosen.rngs[ids.start : ids.stop],
                        states=states[ids.start : ids.stop],
                        version=chosen.version,
                        **request,
                    ),
                )
                for actor, ids in zip(self._actors, self._env_ids, strict=True)
            ]
        )
        places = [rollout.place for rollout in rollouts]
        for number, (before, now) in enumerate(zip(self._places, places, strict=True)):
            if before != now:
                note(f"rollout worker {number} ({before}) died and was restarted ({now})")
        self._places = places
        return rollouts

    def _results(self, refs: Sequence[Any]) -> list[Any]:
        errors = self._ray.exceptions
        try:
            results: list[Any] = self._ray.get(refs)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise TooManyFailuresError(f"a rollout worker was lost: {str(error).strip().splitlines()[0]}") from error
        return results


class ClusterLoop(OnPolicyLoop):
    """The on-policy loop with workers that collect; `envs` hold the states of their environments between rollouts."""

    def __init__(
        self,
        envs: AsyncVectorEnv,
        learner: RolloutLearner,
        obs: FloatArray | None,
        *,
        workers: RolloutWorkers,
        calls: ClientStack,
        run_dir: RunDir,
        env_steps: int,
        **settings: Any,
    ) -> None:
        super().__init__(envs, learner, obs, **settings)
        self._workers, self._calls, self._run_dir, self._env_steps = workers, calls, run_dir, env_steps

    def collect(self) -> None:
        """Have the workers take `num_steps` steps in every environment, and the learner observe them."""
        started = time.perf_counter()
        assert isinstance(self._learner, OnPolicyLearner)
        rollouts = self._workers.collect(
            self._learner,
            with_arrays(self._envs.state_dict()),
            seed=self._reset_seed,
            since=self._env_steps,
            keep_since=steps_of(checkpoints_in(self._run_dir.path)[:2][-1]),
        )
        self._reset_seed = None
        self._merge(rollouts)
        self._waited_s = time.perf_counter() - started

    def _merge(self, rollouts: Sequence[Rollout]) -> None:
        """Observe the steps of all environments, step by step, and take over the states they end in."""
        for rollout in rollouts:
            self._calls.counted.add_all(rollout.totals, rollout.error_kinds)
            self._calls.coalesced[0].shared += rollout.shared_calls
            for record in rollout.records:
                self._run_dir.add_record(record)
        self._envs.load_state_dict([state for rollout in rollouts for state in rollout.states])
        columns = Steps(*(np.concatenate(column, axis=1) for column in zip(*(r.steps for r in rollouts), strict=True)))
        figures = np.concatenate([rollout.figures for rollout in rollouts], axis=1)  # [T, N, F]
        for row in range(self._num_steps):
            steps = Steps(*(column[row] for column in columns))
            self._learner.act(steps.obs, steps.env_ids.tolist())
            self._learner.observe(steps)
            final = dict(zip(EPISODE_FIGURES, figures[row].T, strict=True))
            self._on_steps({"final_info": final}, steps)
        self._env_steps += self._num_steps * self._envs.num_envs

    def close(self) -> None:
        """Do nothing: the workers end with the connection to Ray, calls in flight included."""


def cluster_loop(
    ray: Any,
    parts: RunParts,
    obs: FloatArray | None,
    on_steps: OnSteps,
    *,
    env_steps: int,
    make_env: Callable[..., Any],
    batch_envs: Callable[..., AsyncVectorEnv],
) -> ClusterLoop:
    """Return the loop of a run with its workers, ready for the first rollout; `env_steps` were taken before.

    UsageError where a worker lacks what the run needs.
    """
    spec = spec_of(parts.config, parts.models, parts.task, parts.run_dir.path, make_env=make_env, batch_envs=batch_envs)
    return ClusterLoop(
        parts.envs,
        parts.learner,
        obs,
        workers=start_workers(ray, parts.config, parts.models, spec),
        calls=parts.models.calls,
        run_dir=parts.run_dir,
        env_steps=env_steps,
        **loop_settings(parts, on_steps),
    )


def start_workers(ray: Any, config: TrainConfig, models: OpenModels, spec: WorkerSpec) -> RolloutWorkers:
    """Return the workers of a run, ready for its first rollout; UsageError where one lacks what the run needs."""
    ends = np.cumsum([0, *shares(config.num_processes, config.num_workers)]).tolist()
    env_ids = [range(first, end) for first, end in pairwise(ends)]
    workers = RolloutWorkers(ray, spec, settings_of_workers(config, models.resolved), env_ids)
    check_states(workers.prepare(), state_of(models), allow_mixed=config.allow_mixed)
    return workers


def spec_of(
    config: TrainConfig,
    models: OpenModels,
    task: Task,
    run: Path,
    *,
    make_env: Callable[..., Any],
    batch_envs: Callable[..., AsyncVectorEnv],
) -> WorkerSpec:
    """Return what every worker of the run in folder `run` is made from."""
    questions = task.train_questions
    texts = [question.text for question in questions] + [q.reference for q in questions if q.reference]
    return WorkerSpec(
        run_dir=run.resolve(),
        folder=Path.cwd(),
        plugins=config.plugin,
        task=group_of(TaskSettings, config),
        questions=questions,
        projection=task.observer.projection,
        confidence=task.confidence,
        texts=tuple(texts),
        vectors=models.encoder.encode(texts),
        make_env=make_env,
        batch_envs=batch_envs,
        batches=config.use_batching,
        num_steps=config.num_steps,
        max_failure_rate=config.max_failure_rate,
    )


def settings_of_workers(config: TrainConfig, resolved: ResolvedModels) -> list[ResolvedModels]:
    """Return the settings of each worker: its share of the calls in flight, and its servers."""
    num = config.num_workers
    sizes = shares(resolved.batch_size, num)
    cache = resolved.cache if resolved.cache == "all" else "off"  # evaluations are not theirs
    each = [replace(resolved, batch_size=size, cache=cache) for size in sizes]
    if config.local_server_url:
        address: dict[str, Any] = {BACKENDS.get(resolved.backend).url_flag: (config.local_server_url,)}
        return [replace(one, **address) for one in each]
    dealt = dealt_out(resolved.ollama_url, num)
    return [replace(one, ollama_url=given) for one, given in zip(each, dealt, strict=True)]


def check_states(states: Sequence[WorkerState], own: WorkerState, *, allow_mixed: bool) -> None:
    """Raise a UsageError for a worker whose encoder or models are not those of the learner's process."""
    for state in states:
        if state.encoder != own.encoder:
            raise UsageError(
                f"the sentence encoder on {state.place} has other weights ({state.encoder[:12]}) than here "
                f"({own.encoder[:12]}); install the same ones on every machine"
            )
        for model, digests in state.digests.items():
            known = own.digests[model] | digests
            if not allow_mixed and len(known) > 1:
                raise UsageError(
                    f"{model} is not the same on the servers of {state.place} and here "
                    f"({', '.join(sorted(digest[:12] for digest in known))}): install the same weights on each, or "
                    "give --allow-mixed"
                )


def shares(total: int, parts: int) -> list[int]:
    """Return `total` in nearly equal parts, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def dealt_out(items: Sequence[T], parts: int) -> list[tuple[T, ...]]:
    """Return the items of each part, dealt out in turn; with fewer items than parts several parts share one."""
    if len(items) < parts:
        return [(items[part % len(items)],) if items else () for part in range(parts)]
    return [tuple(items[part::parts]) for part in range(parts)]
