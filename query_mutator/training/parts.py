"""What a training run is made of, in one record that the trainer shares with its callbacks and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from query_mutator.data import Split
from query_mutator.env.task import Task
from query_mutator.errors import BackendError, TooManyFailuresError
from query_mutator.evaluation.methods import Evaluator
from query_mutator.files.run_dir import RunDir
from query_mutator.learners.learner import Learner
from query_mutator.learners.named import LEARNERS
from query_mutator.llm.cache import CallTotals
from query_mutator.llm.store import Store
from query_mutator.session.models import OpenModels
from query_mutator.training.config import TrainConfig
from query_mutator.training.loop import OffPolicyLoop, OnSteps, TrainingLoop
from query_mutator.training.run_log import RunLog
from query_mutator.types import FloatArray


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Settings, models, task, environments, learner and run folder of a run."""

    config: TrainConfig
    models: OpenModels
    task: Task
    split: Split
    learner: Learner
    run_dir: RunDir
    store: Store
    env_list: Sequence[Any]  # of QueryMutationEnv
    envs: Any  # `env_list` in one BatchedQueryMutationEnv
    evaluator: Evaluator
    runlog: RunLog

    @property
    def training_calls(self) -> CallTotals:
        """Return the totals of the run's calls for training."""
        return self.models.calls.client.totals

    @property
    def evaluation_calls(self) -> CallTotals:
        """Return the totals of the calls for evaluation since this process started."""
        return self.models.calls.eval_client.totals


def make_loop(parts: RunParts, obs: FloatArray | None, on_steps: OnSteps) -> TrainingLoop:
    """Return the loop of the learner's kind; it continues from observations [N, O], None for new episodes."""
    config, common = parts.config, loop_settings(parts, on_steps)
    if LEARNERS.get(config.algo).on_policy:
        return TrainingLoop(parts.envs, parts.learner, obs, **common)
    return OffPolicyLoop(parts.envs, parts.learner, obs, max_pending_updates=config.max_pending_updates, **common)


def loop_settings(parts: RunParts, on_steps: OnSteps) -> dict[str, Any]:
    """Return what every kind of loop takes."""
    return {
        "seed": envs_seed(parts.config.seed),
        "num_steps": parts.config.num_steps,
        "on_steps": on_steps,
        "store": parts.store,
    }


def envs_seed(seed: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    It is not `seed` itself: runs with adjacent seeds would share most environments and not be independent repeats.
    """
    return int(np.random.SeedSequence([seed, 0]).generate_state(1)[0])


@contextlib.contextmanager
def server_worked_before() -> Iterator[None]:
    """Turn a server that fails from here on into TooManyFailuresError: the run can be resumed."""
    try:
        yield
    except BackendError as error:
        raise TooManyFailuresError(str(error)) from error
