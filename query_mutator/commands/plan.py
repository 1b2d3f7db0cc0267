"""`qm plan`: find the best plan on training questions and save it as a checkpoint for `qm eval` and `qm rewrite`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le

from query_mutator.bounds import Count, defaults, group_of
from query_mutator.cli.common import JsonFlags, rows_of, show
from query_mutator.cli.console import note, progress
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.plan_result import PlanSearch
from query_mutator.evaluation.plan_search import CALLS_PER_QUESTION, MAX_CALLS, check_calls, find_plan
from query_mutator.evaluation.rejections import rejections_in_words
from query_mutator.files import write_checked_json
from query_mutator.files.lock import locked
from query_mutator.files.run_dir import RunDir, check_name
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.llm.flags import ServerAddressFlags
from query_mutator.plugins import plugin_hashes
from query_mutator.report.page.build import write_report
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.session.background import background_of
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import OpenModels, open_models
from query_mutator.session.policy_file import SavedPolicy, write_own_policy
from query_mutator.session.task import make_task, rewrites
from query_mutator.settings.episode import CallRules, Operators, TaskSettings
from query_mutator.settings.evaluation import FailureRate
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.output import DryRun, NamedRun
from query_mutator.settings.questions import Questions, Reward
from query_mutator.training.estimate import duration
from query_mutator.training.run_folder import described, remember_run
from query_mutator.training.timing import call_time, encoding_time

if TYPE_CHECKING:
    from query_mutator.data.split import Split
    from query_mutator.env.task import Task

__all__ = ["PlanFlags", "plan"]

ALGO = "plan"


@dataclass(frozen=True, kw_only=True)
@defaults(name=ALGO)
class PlanFlags(
    NamedRun,
    DryRun,
    Questions,
    Operators,
    CallRules,
    Reward,
    ServerAddressFlags,
    ModelSettings,
    Sampling,
    FailureRate,
    JsonFlags,
):
    """Find the best plan: operators in a fixed order, where to ask, and which answer to submit.

    Reads training questions only; `qm eval` compares the saved plan with the baselines on held-out questions.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "max_calls", "budget", "dataset", "operators", "ollama_url", "gguf", "target_model", "mutator_model",
        "target_max_tokens", "batch_size", "seed", "save_dir", "dry_run", "json",
    )  # fmt: skip

    max_calls: Count = MAX_CALLS
    """Maximum model calls of the search; fewer than 20 for each question score a random sample of the questions."""
    budget: Annotated[float, Ge(1), Le(10000)] | None = None
    """Save the plan that is right most often with at most this many calls per question on average, in place of the one
    with the best score minus --call-price per call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_calls(self.max_calls)
        check_name(self.name or ALGO)


def plan(flags: PlanFlags) -> None:
    """Search, save the found plan in a new run folder, and print it with the best plans at other budgets."""
    settings = group_of(
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
    if flags.dry_run:
        print(_estimate(flags, len(train)))
        return
    with ExitStack() as stack:
        models = stack.enter_context(open_models(flags))
        embed_questions(models.encoder, train)
        task = make_task(models, settings, train)
        run_dir = _open_run_dir(flags, models, split, stack)  # a folder that cannot be written costs no calls
        note(models.choice.reason)
        evaluator = Evaluator.of(models, max_failure_rate=flags.max_failure_rate)
        with _noting_cached_calls(models):
            search = find_plan(
                evaluator, task, max_calls=flags.max_calls, seed=flags.seed, budget=flags.budget, progress=progress
            )
        _save(flags, run_dir, models, task, settings, split, search.saved.plan)
        write_checked_json(run_dir.summary_path, {"plan": search.saved.to_json(), "search": search.to_json()})
        run_dir.take_latest()
        write_report(run_dir.path)
    path = str(run_dir.path)
    about = {"questions_in_training": len(train), "run_folder": path}
    report = {"plan": search.saved.to_json(), **search.to_json(), **about}
    show(flags, report, _in_words(search, path, num_train=len(train)))


def _estimate(flags: PlanFlags, num_train: int) -> str:
    """Return the size of the search, without asking a server."""
    text_s, (call_s, known) = encoding_time(flags), call_time(flags, flags)
    searched = min(num_train, flags.max_calls // CALLS_PER_QUESTION)
    facts = {
        "questions to search on": f"{searched} of {num_train}",
        "operators": sum(map(len, rewrites(flags))),
        "model calls, at most": f"{flags.max_calls:,}",
        "calls in flight": flags.calls_in_flight,
        "time, at most about": duration(flags.max_calls * (text_s + call_s)),
    }
    source = f"by {1000 * text_s:.3g} ms to embed a text, timed just now{known}"
    return "\n".join(["estimate (nothing was started)", rows_of(facts), source])


def _open_run_dir(flags: PlanFlags, models: OpenModels, split: Split, stack: ExitStack) -> RunDir:
    """Return a new run folder with its config.json, locked; it is removed again unless a plan is found."""
    run_dir = RunDir.create(flags.save_dir, flags.name or ALGO)
    stack.callback(_remove_without_plan, run_dir)
    stack.callback(run_dir.close)
    stack.enter_context(locked(run_dir.path))
    run_dir.write_config(describe_run(_kept(flags), **described(models, split, flags.plugin)))
    remember_run(asdict(flags), models)
    return run_dir


def _remove_without_plan(run_dir: RunDir) -> None:
    if not run_dir.summary_path.exists():
        shutil.rmtree(run_dir.path, ignore_errors=True)


@contextmanager
def _noting_cached_calls(models: OpenModels) -> Iterator[None]:
    """Say where the replies are if the search ends early."""
    try:
        yield
    except (KeyboardInterrupt, TooManyFailuresError):
        if models.calls.store is not None:
            note(f"the replies so far are in {models.calls.store.path}; the same command starts from them")
        raise


def _save(
    flags: PlanFlags,
    run_dir: RunDir,
    models: OpenModels,
    task: Task,
    settings: TaskSettings,
    split: Split,
    plan: Plan,
) -> None:
    """Write the checkpoint of the found plan, and the file with all that acting needs."""
    acting = plan_task(plan, task)
    checkpoint = Checkpoint(
        learner=plan_policy(plan, task).state_dict(),
        actions=acting.actions,
        task=replace(settings, answer=acting.rules.answer, max_episode_steps=acting.rules.max_episode_steps),
        system=models.resolved,
        projection=task.observer.projection,
        flags={**_kept(flags), "plan": str(plan)},
        versions=versions(),
        plugins=plugin_hashes(flags.plugin),
    )
    checkpoint.save(run_dir.checkpoint_path(0))
    background = background_of(models, task, split, dataset=flags.dataset)
    write_own_policy(run_dir.path, SavedPolicy(checkpoint=checkpoint, background=background))


def _kept(flags: PlanFlags) -> dict[str, Any]:
    """Return the flags without those of the command's output, and the name of the learner."""
    return {name: value for name, value in asdict(flags).items() if name not in ("json", "force", "dry_run")} | {
        "algo": ALGO
    }


def _in_words(search: PlanSearch, path: str, *, num_train: int) -> str:
    saved, original = search.saved, search.original
    low, high = saved.success_ci
    facts = {
        "plan": saved.plan,
        "training questions": f"{saved.questions} of {num_train}",
        "success on them": f"{saved.success:.1%} [{low:.1%}, {high:.1%}]; cross-fitted {search.cross_fitted:.1%}",
        "original question": f"{original.success:.1%} [{original.success_ci[0]:.1%}, {original.success_ci[1]:.1%}]",
        "calls per question": f"{saved.calls:.2f}",
        "search": f"{search.calls:,} calls, {search.plans_tried:,} plans, {search.seconds:.0f} s",
    }
    if rejected := rejections_in_words(search.rewrites):
        facts["rejected rewrites"] = rejected.partition(": ")[2]
    front = [f"{budget:>6}  {point.success:>7.1%}  {point.plan}" for budget, point in search.front.items()]
    title = "best plan within a number of calls per question, on training questions"
    after = [f"run folder: {path}", f"on held-out questions: qm eval --checkpoint {path}", search.verdict]
    return "\n".join([rows_of(facts), "", title, " calls  success  plan", *front, "", *after])
