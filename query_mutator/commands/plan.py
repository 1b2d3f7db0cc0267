"""`qm plan`: find the best plan on training questions and save it as a checkpoint for `qm eval` and `qm rewrite`."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from query_mutator.cli.common import JsonFlags, rows_of, show
from query_mutator.cli.console import closing_on_interrupt, note, progress
from query_mutator.errors import UsageError
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.plan_search import MAX_CALLS, PlanPoint, PlanSearch, check_calls, find_plan
from query_mutator.files import write_checked_json
from query_mutator.llm.backends import check_backend
from query_mutator.page.build import write_report
from query_mutator.plugins import absolute, load_plugins, plugin_hashes
from query_mutator.runs.lock import locked
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.runs.run_dir import RunDir, check_name
from query_mutator.training.background import background_of
from query_mutator.training.checkpoint import Checkpoint, settled
from query_mutator.training.config import CallFlags, ModelFlags, QuestionFlags
from query_mutator.training.dataset import split_dataset
from query_mutator.training.failure_rate import DEFAULT_MAX_FAILURE_RATE
from query_mutator.training.learners import settings_of
from query_mutator.training.plans import Plan, plan_policy, plan_task
from query_mutator.training.policy_file import SavedPolicy, write_own_policy
from query_mutator.training.system import System, SystemSettings, TaskSettings, make_task
from rl_query_mutator_env import QueryMutationEnv

if TYPE_CHECKING:
    from query_mutator.data.split import Split
    from query_mutator.env.task import Task

__all__ = ["PlanFlags", "plan"]

ALGO = "plan"


@dataclass(frozen=True, kw_only=True)
class PlanFlags(QuestionFlags, ModelFlags, CallFlags, JsonFlags):
    """Find the best plan: operators in a fixed order, where to ask, and which answer to submit.

    Reads training questions only; `qm eval` compares the saved plan with the baselines on held-out questions.
    """

    max_calls: int = MAX_CALLS
    """Most model calls of the search; fewer than 20 for each question score a random sample of the questions."""
    budget: float | None = None
    """Save the plan that is right most often with at most this many calls per question on average, in place of the one
    with the best score minus --call-price per call."""
    seed: int = 1
    """Seed of the order of the questions, and of the calls."""
    save_dir: Annotated[str, arg(aliases=["--out"])] = "runs"
    """Folder of the run folders."""
    name: str = ALGO
    """Last part of the run folder's name."""
    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register operators, reward parts or backends of yours."""
    max_failure_rate: float = DEFAULT_MAX_FAILURE_RATE
    """Exit with code 3 when the calls of more than this share of the questions failed for good."""
    device: str = "cpu"
    """Torch device of the sentence encoder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        load_plugins(self.plugin)  # first: they may register what other flags name
        self.keep_rubric()
        check_backend(self.backend)
        check_calls(self.max_calls)
        check_name(self.name)


def plan(flags: PlanFlags) -> None:
    """Search, save the found plan in a new run folder, and print it with the best plans at other budgets."""
    settings = settings_of(
        TaskSettings,
        flags,
        ask="policy",
        answer="last",
        max_episode_steps=1,
        embedding_dims=1,  # a plan reads none
        validation_fold="none",
    )
    split = split_dataset(settings)
    train = split.train
    if not train:
        raise UsageError(f"{flags.dataset}: no question is left to search on, all are held out; add more questions")
    system_settings = settings_of(SystemSettings, flags, batch_size=flags.calls_in_flight, deterministic=False)
    with ExitStack() as stack:
        system = stack.enter_context(System(system_settings))
        stack.enter_context(closing_on_interrupt(system.calls.close))
        embed_questions(system.encoder, train)
        task = make_task(system, settings, train)
        run_dir = _open_run_dir(flags, system, split, stack)  # a folder that cannot be written costs no calls
        note(system.choice.reason)
        stack.enter_context(contextlib.closing(system.calls))
        evaluator = _evaluator(flags, system)
        search = find_plan(evaluator, task, max_calls=flags.max_calls, seed=flags.seed, progress=progress)
        found = search.best if flags.budget is None else search.best_plan_at(flags.budget)
        _save(flags, run_dir, system, task, settings, split, found.plan)
        write_checked_json(run_dir.summary_path, {"plan": found.to_json(), "search": search.to_json()})
        write_report(run_dir.path)
    path = str(run_dir.path)
    report = {"plan": found.to_json(), **search.to_json(), "questions_in_training": len(train), "run_folder": path}
    show(flags, report, _in_words(search, found, path, num_train=len(train)))


def _evaluator(flags: PlanFlags, system: System) -> Evaluator:
    return Evaluator(
        QueryMutationEnv,
        client=system.calls.eval_client,
        batch_size=flags.calls_in_flight,
        retry_policy=system.retry_policy,
        max_failure_rate=flags.max_failure_rate,
        progress=progress,
    )


def _open_run_dir(flags: PlanFlags, system: System, split: Split, stack: ExitStack) -> RunDir:
    """Return a new run folder with its config.json, locked."""
    run_dir = RunDir.create(flags.save_dir, flags.name)
    stack.callback(run_dir.close)
    stack.enter_context(locked(run_dir.path))
    described = {**system.describe(), "plugins": plugin_hashes(flags.plugin), "dataset_sha256": split.sha256}
    if split.source:
        described["dataset_source"] = split.source
    run_dir.write_config(describe_run(_kept(flags), **described))
    return run_dir


def _save(
    flags: PlanFlags,
    run_dir: RunDir,
    system: System,
    task: Task,
    settings: TaskSettings,
    split: Split,
    plan: Plan,
) -> None:
    """Write the checkpoint of the found plan, and the file with all that acting needs."""
    rules = plan_task(plan, task)
    checkpoint = Checkpoint(
        learner=plan_policy(plan, task).state_dict(),
        actions=rules.actions,
        task=replace(settings, answer=rules.answer, max_episode_steps=rules.max_episode_steps),
        system=settled(system),
        projection=task.observer.projection,
        flags={**_kept(flags), "plan": str(plan)},
        versions=versions(),
        plugins=plugin_hashes(flags.plugin),
    )
    checkpoint.save(run_dir.checkpoint_path(0))
    background = background_of(system, task, split, dataset=flags.dataset)
    write_own_policy(run_dir.path, SavedPolicy(checkpoint=checkpoint, background=background))


def _kept(flags: PlanFlags) -> dict[str, Any]:
    """Return the flags without those of the command's output, and the name of the learner."""
    return {name: value for name, value in asdict(flags).items() if name not in ("json", "force")} | {"algo": ALGO}


def _in_words(search: PlanSearch, found: PlanPoint, path: str, *, num_train: int) -> str:
    low, high = found.success_ci
    facts = {
        "plan": found.plan,
        "training questions": f"{found.questions} of {num_train}",
        "success on them": f"{found.success:.1%} [{low:.1%}, {high:.1%}]; cross-fitted {search.cross_fitted:.1%}",
        "calls per question": f"{found.calls:.2f}",
        "search": f"{search.calls:,} calls, {search.plans_tried:,} plans, {search.seconds:.0f} s",
    }
    front = [f"{budget:>6}  {point.success:>7.1%}  {point.plan}" for budget, point in search.front.items()]
    title = "best plan within a number of calls per question, on training questions"
    after = [f"run folder: {path}", f"on held-out questions: qm eval --checkpoint {path}"]
    return "\n".join([rows_of(facts), "", title, " calls  success  plan", *front, "", *after])
