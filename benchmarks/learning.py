"""Compare settings of learners on memoised calls: a training of 5,000 calls costs seconds.

    python benchmarks/learning.py                                    the candidates below, 8 seeds, 5 folds
    python benchmarks/learning.py --only asks,blind --seeds 4 --folds 0,1
    python benchmarks/learning.py --add "wide:--ask form --hidden-sizes 256 256"
    python benchmarks/learning.py --prove                            one seed equals the real run over HTTP

Environment, learners, training loop and evaluation are those of `train_query_mutator.py`; only replies and embeddings
come from files (`benchmarks/memoised.py`). A seed trains once for each fold, on the training questions of the other
folds, and is scored on the fold's; its success is over all training questions, none of which it was trained on. The
column "low-plan" is the lowest of all single trainings, minus the best chain on the same fold. Held-out questions
are not read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.memoised import memoised_system
from ppo.frozen import InferencePolicy
from query_mutator.bounds import group_of
from query_mutator.env.task import Task
from query_mutator.errors import TooFewAnswersError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.summary import Outcome
from query_mutator.files import user_cache_folder
from query_mutator.llm.client import Client
from query_mutator.plan.table import learn_confidence
from query_mutator.session.models import OpenModels
from query_mutator.session.play import Player, greedy, script
from query_mutator.session.policy_file import load_policy, read_policy
from query_mutator.session.task import make_task, split_dataset
from query_mutator.settings import ModelSettings, TaskSettings, ValidationFold
from query_mutator.training.config import TrainConfig, parse_config
from query_mutator.training.loop import TrainingLoop, envs_seed
from query_mutator.training.run_folder import make_learner
from query_mutator.types import SUBMIT, StepRecord
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv
from train_query_mutator import main as train_main

FOLDS: tuple[ValidationFold, ...] = (0, 1, 2, 3, 4)
MAX_CALLS = 5_000
COMMON = "--backend recorded --batch-size 16 --num-env-steps 6000"
_ASKS = "--ask form --max-episode-steps 7"
_BLIND = f"{_ASKS} --max-asks 1"
CANDIDATES: Mapping[str, str] = {
    "every-step": "--ask every_step",
    "every-step-g1": "--ask every_step --gamma 1",
    "asks": _ASKS,
    "asks-g1": f"{_ASKS} --gamma 1",
    "blind": _BLIND,
    "blind-g1": f"{_BLIND} --gamma 1",
}
#: Chains with one answer, at the end.
CHAINS = (
    "",
    "expand neutral",
    "spelling slang expand neutral",
    "grammar slang spelling expand neutral",
    "grammar spelling slang expand terms neutral",
    "grammar spelling neutral slang expand how_to",
    "grammar spelling neutral slang expand terms emphasize",
)


class Trained(NamedTuple):
    """A policy, the task that it acts on, and what it cost."""

    policy: InferencePolicy
    task: Task
    calls: int
    records: list[StepRecord]
    answer_calls: int = 0  # before training, for P(right)


class Scored(NamedTuple):
    """A policy on the questions of a fold."""

    success: float
    calls: float
    training_calls: int
    questions: int


class World:
    """The memoised system, and the task of each validation fold."""

    def __init__(self, settings: ModelSettings, folder: Path) -> None:
        self.system = memoised_system(settings, folder)
        self.evaluator = make_evaluator(self.system.calls.client)
        self.task_of = lru_cache(maxsize=None)(self._task_of)

    def _task_of(self, settings: TaskSettings) -> Task:
        """Return the task on the questions that a run with these settings trains on."""
        return make_task(self.system, settings, split_dataset(settings).train, learns=settings.answer == "learned")

    def validate(self, settings: TaskSettings, player: Player, **rules: Any) -> list[Outcome]:
        """Return the outcomes of choosers on the validation questions; `rules` are fields of the task."""
        task = self.task_of(settings).on(split_dataset(settings).validation)
        return self.evaluator.run(task.with_rules(**rules), player)


def make_evaluator(client: Client) -> Evaluator:
    """Return what runs policies greedily."""
    return Evaluator(client=client, batch_size=8)


def train(
    system: OpenModels,
    task: Task,
    config: TrainConfig,
    *,
    max_calls: int | None = None,
    make_env: Callable[..., QueryMutationEnv] = QueryMutationEnv,
    on_rollout: Callable[[InferencePolicy, Task, int], Any] = lambda policy, task, calls: None,
) -> Trained:
    """Train as `train_query_mutator.Trainer` does, until the end of the rollout in which `max_calls` are made.

    `on_rollout` is called after each with the policy, its task and the calls so far.
    """
    records: list[StepRecord] = []
    envs = [
        make_env(task, client=system.calls.client, env_id=env_id, on_record=records.append)
        for env_id in range(config.num_processes)
    ]
    learner = make_learner(config, task, None)
    batch = BatchedQueryMutationEnv(envs, config.calls_in_flight)
    seed, num_steps = envs_seed(config.seed), config.num_steps
    loop = TrainingLoop(batch, learner, None, seed=seed, num_steps=num_steps, on_steps=lambda infos, steps: None)
    calls = 0
    while learner.updates_done < config.num_updates and calls < (max_calls or sys.maxsize):
        loop.collect()
        loop.update()
        calls = calls_of(records, envs, task)
        on_rollout(learner.frozen, task, calls)
    batch.close()
    return Trained(learner.frozen, task, calls, records)


def calls_of(records: Iterable[StepRecord], envs: Sequence[QueryMutationEnv], task: Task) -> int:
    """Return the calls of a training: those of the steps, and the first answers where a reset asks."""
    resets = sum(env.total_episodes + 1 for env in envs) if not task.rules.policy_asks else 0
    return resets + sum(record.calls for record in records)


# --- table -----------------------------------------------------------------------------------------------------------


def run_candidate(
    world: World, flags: str, *, seeds: Sequence[int], folds: Sequence[ValidationFold], max_calls: int
) -> dict[int, dict[ValidationFold, Scored]]:
    """Return what every seed reached on every fold."""
    found: dict[int, dict[ValidationFold, Scored]] = {}
    for seed in seeds:
        found[seed] = {}
        for fold in folds:
            argv = [*COMMON.split(), *flags.split(), "--seed", str(seed), "--validation-fold", str(fold)]
            found[seed][fold] = run_one(world, argv, max_calls=max_calls)
    return found


def run_one(world: World, argv: Sequence[str], *, max_calls: int) -> Scored:
    """Return what one training reached on its validation fold."""
    config = parse_config(argv)
    trained = train_seed(world, config, max_calls=max_calls)
    outcomes = world.validate(task_settings(config), greedy(trained.policy))
    return summary(outcomes, trained.answer_calls + trained.calls)


def train_seed(
    world: World,
    config: TrainConfig,
    *,
    max_calls: int,
    on_rollout: Callable[[InferencePolicy, Task, int], Any] = lambda policy, task, calls: None,
) -> Trained:
    """Return a trained policy. `on_rollout` is called with all calls so far."""
    task, spent = world.task_of(task_settings(config)), 0
    if config.answer == "learned":
        spent = config.answer_calls
        try:
            confidence, _ = learn_confidence(world.evaluator, task, max_calls=spent, seed=config.seed)
            task = replace(task, confidence=confidence)
        except TooFewAnswersError:  # as a run does
            task = task.with_rules(answer="vote")
    trained = train(
        world.system,
        task,
        config,
        max_calls=max_calls - spent,
        on_rollout=lambda policy, acting, calls: on_rollout(policy, acting, spent + calls),
    )
    return trained._replace(answer_calls=spent)


def task_settings(config: TrainConfig) -> TaskSettings:
    """Return the settings of a run's task; all seeds share the seed of the calls, and so their replies."""
    return group_of(TaskSettings, config, seed=0)


def summary(outcomes: Sequence[Outcome], training_calls: int = 0) -> Scored:
    """Return success and calls per question."""
    return Scored(
        success=100 * float(np.mean([outcome.success for outcome in outcomes])),
        calls=float(np.mean([outcome.calls for outcome in outcomes])),
        training_calls=training_calls,
        questions=len(outcomes),
    )


def run_chain(
    world: World, chain: str, folds: Sequence[ValidationFold], *, skip_unchanged: bool = True
) -> dict[ValidationFold, Scored]:
    """Return what a chain of operators with one answer at its end reaches on each fold."""
    names = [*chain.split(), SUBMIT]
    found = {}
    for fold in folds:
        settings = TaskSettings(
            ask="form", validation_fold=fold, max_episode_steps=len(names), skip_unchanged=skip_unchanged
        )
        actions = [world.task_of(settings).actions.index(name) for name in names]
        found[fold] = summary(world.validate(settings, script(actions)))
    return found


def over_folds(scores: Mapping[ValidationFold, Scored], name: str) -> float:
    """Return the mean of a field over all questions of the folds."""
    return float(
        np.average([getattr(s, name) for s in scores.values()], weights=[s.questions for s in scores.values()])
    )


def print_chain(name: str, scores: Mapping[ValidationFold, Scored]) -> None:
    """Print the row of a method without training."""
    print(f"{name:<48}{over_folds(scores, 'success'):>8.1f}{'':>32}{over_folds(scores, 'calls'):>8.2f}", flush=True)


def print_candidate(
    name: str,
    found: Mapping[int, Mapping[ValidationFold, Scored]],
    plan: Mapping[ValidationFold, Scored],
    wall_s: float,
) -> None:
    """Print the row of a candidate: mean, spread over seeds, lowest training against the best chain."""
    rates = [over_folds(scores, "success") for scores in found.values()]
    behind = min(score.success - plan[fold].success for scores in found.values() for fold, score in scores.items())
    calls = np.mean([over_folds(scores, "calls") for scores in found.values()])
    training = np.mean([over_folds(scores, "training_calls") for scores in found.values()])
    spread = (
        f"{np.std(rates, ddof=1) if len(rates) > 1 else 0.0:>6.1f}{min(rates):>7.1f}{max(rates):>7.1f}{behind:>+11.1f}"
    )
    print(f"{name:<48}{np.mean(rates):>8.1f}{spread}{calls:>8.2f}{training:>9.0f}{wall_s:>8.1f}", flush=True)


def print_table(world: World, candidates: Mapping[str, str], arguments: argparse.Namespace) -> None:
    """Print chains and candidates, one row each as soon as it is there."""
    folds = [fold for fold in FOLDS if str(fold) in arguments.folds.split(",")]
    print(
        f"{'method':<48}{'success':>8}{'sd':>6}{'lowest':>7}{'highest':>8}{'low-plan':>11}{'calls':>8}{'training':>9}"
        f"{'s/seed':>8}"
    )
    chains = {chain: run_chain(world, chain, folds, skip_unchanged=not arguments.no_skip) for chain in CHAINS}
    for chain, scores in chains.items():
        print_chain(chain.replace(" ", ">") or "identity", scores)
    best = max(chains.values(), key=lambda scores: over_folds(scores, "success"))
    for name, flags in candidates.items():
        started = time.perf_counter()
        seeds = range(1, arguments.seeds + 1)
        found = run_candidate(world, flags, seeds=seeds, folds=folds, max_calls=arguments.max_calls)
        print_candidate(name, found, best, (time.perf_counter() - started) / arguments.seeds)


# --- proof -----------------------------------------------------------------------------------------------------------

PROOF = "--backend recorded --deterministic --num-env-steps 512 --cache off --no-evaluate --eval-interval 0"
PROOF_QUESTIONS = 100


def prove(flags: str) -> None:
    """Run the trainer over HTTP and the memoised training twice; transcripts and outcomes must be equal."""
    argv = [*PROOF.split(), *flags.split()]
    with tempfile.TemporaryDirectory() as folder:
        train_main([*argv, "--save-dir", f"{folder}/runs"])
        run = Path(folder) / "runs" / "latest"
        rows = [json.loads(line) for line in (run / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()]
        config = parse_config(argv)
        real = load_policy(read_policy(run))
        first_outcomes = None
        for name in ("empty store", "full store"):
            world = World(group_of(ModelSettings, config), Path(folder) / "store")
            with world.system:
                task = world.task_of(group_of(TaskSettings, config))
                trained = train(world.system, task, config)
                ours = [json.loads(json.dumps(record.to_json())) for record in trained.records]
                check(f"{name}: {len(rows)} steps of the transcript", by_place(rows), by_place(ours))
                some = task.on(task.questions[:PROOF_QUESTIONS])
                outcomes = timeless(make_evaluator(world.system.calls.client).run(some, greedy(trained.policy)))
                others = timeless(make_evaluator(world.system.calls.limit).run(some, greedy(real)))
                check(f"{name}: outcomes of {len(outcomes)} questions, calls over HTTP", others, outcomes)
                first_outcomes = first_outcomes or outcomes
        check("both stores: outcomes", first_outcomes, outcomes)


UNLIKE = ("timing", "crc")  # of a row: depends on the clock, and on the rows before


def timeless(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return outcomes without what depends on the clock."""
    return [dataclasses.replace(outcome, seconds=0.0) for outcome in outcomes]


def by_place(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return transcript rows by environment and step, without what depends on the clock."""
    return {(row["env"], row["step"]): {key: row[key] for key in row if key not in UNLIKE} for row in rows}


def check(what: str, one: object, other: object) -> None:
    """Print that two values are equal, or stop."""
    if one != other:
        sys.exit(f"{what}: DIFFERENT")
    print(f"{what}: equal", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or prove that memoised calls change nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--folds", default="0,1,2,3,4", help="with commas")
    parser.add_argument("--max-calls", type=int, default=MAX_CALLS, help="calls after which a training ends")
    parser.add_argument("--no-skip", action="store_true", help="chains request rewrites that change nothing as well")
    parser.add_argument("--only", default="", help="names of candidates, with commas")
    parser.add_argument("--add", action="append", default=[], metavar="NAME:FLAGS", help="one more candidate")
    parser.add_argument(
        "--store", type=Path, default=user_cache_folder() / "learning", help="folder of replies and embeddings"
    )
    parser.add_argument("--prove", nargs="?", const="--ask form", metavar="FLAGS")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.prove is not None:
        prove(arguments.prove)
        return
    added = dict(item.split(":", 1) for item in arguments.add)
    names = [name for name in arguments.only.split(",") if name]
    candidates = {name: flags for name, flags in CANDIDATES.items() if not (names or added) or name in names} | added
    world = World(ModelSettings(backend="recorded"), arguments.store)
    with world.system:
        print_table(world, candidates, arguments)


if __name__ == "__main__":
    main()
