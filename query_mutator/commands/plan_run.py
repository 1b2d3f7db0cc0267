"""The flags of `qm plan`, and its run folder: replies that a resumed search finds again, the best plan so far.

What a log taught is saved in the same way: its folder has no text of the log, but the names of prompts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Le

from query_mutator.bounds import Count, defaults
from query_mutator.cli.console import note
from query_mutator.cli.outputs import JsonFlags
from query_mutator.confidence import ConfidenceModel
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.files import atomic_write, write_checked_json
from query_mutator.files.lock import locked
from query_mutator.files.run_dir import CONFIDENCE, STORE, SUMMARY, RunDir, check_name
from query_mutator.learners.plan import Plan
from query_mutator.llm.backends import ServerAddressFlags
from query_mutator.llm.store import Store
from query_mutator.plan.choose import PlanChoice, PlanPoint
from query_mutator.plan.race import check_calls
from query_mutator.plugins import plugin_hashes
from query_mutator.report.page.build import write_report
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.session.checkpoint import run_settings, usable_flags
from query_mutator.session.models import ResolvedModels
from query_mutator.session.policy_file import POLICY_FILE, SavedPolicy, background_of, write_policy_file
from query_mutator.settings.episode import CallRules, Operators, TaskSettings
from query_mutator.settings.evaluation import CallBudget, FailureRate
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.output import DryRun, NamedRun, Resume
from query_mutator.settings.questions import Questions, Reward
from query_mutator.training.run_folder import planned

if TYPE_CHECKING:
    from query_mutator.data.split import Split
    from query_mutator.env.task import Task

__all__ = ["PlanFlags", "PlanRun", "plan_run"]

ALGO = "plan"

OF_ONE_COMMAND = ("json", "force", "dry_run", "resume")


@dataclass(frozen=True, kw_only=True)
@defaults(name=ALGO, max_asks=1)
class PlanFlags(
    NamedRun,
    DryRun,
    Resume,
    Questions,
    Operators,
    CallRules,
    Reward,
    ServerAddressFlags,
    ModelSettings,
    Sampling,
    FailureRate,
    CallBudget,
    JsonFlags,
):
    """Find the best plan: operators in a fixed order, where to ask, and which answer to submit.

    Reads training questions only; `qm eval` compares the saved plan with the baselines on held-out questions.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "minutes", "max_calls", "answer", "budget", "from_logs", "dataset", "operators", "ollama_url", "gguf",
        "target_model", "target_max_tokens", "batch_size", "seed", "save_dir", "resume", "dry_run", "json",
    )  # fmt: skip
    IN_FILE: ClassVar[tuple[str, ...]] = (
        "adaptive", "allow_mixed", "call_price", "deadline_s", "deterministic", "device", "domain",
        "judge_form", "keep_alive", "max_reply_mb", "skip_unchanged",
    )  # fmt: skip

    minutes: Annotated[float, Gt(0), Le(10_000)] = 5.0
    """Time without --max-calls, loading included; recorded replies get 20,000 calls instead."""
    max_calls: Count | None = None
    """Maximum model calls of the search; with few, a random sample of the questions is scored."""
    answer: Literal["searched", "learned"] = "searched"
    """Which of several answers is submitted: by the best rule found (searched), or the one that is most likely right
    (learned), asking in form after form until one is likely enough."""
    from_logs: str | None = None
    """Learn from graded replies in this file, without a call; see docs/how-to/learn-from-logs.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_calls is not None:
            check_calls(self.max_calls)
        check_name(self.name or ALGO)
        if self.from_logs is not None and self.resume is not None:
            raise ValueError("--from-logs makes no call, so there is nothing to --resume; leave one of them out")

    @staticmethod
    def resumed_base(resumed: Path, named: PlanFlags) -> Mapping[str, Any]:
        """Return the flags of the search in a run folder; UsageError for another folder, and for a search that is done.

        `named` are the flags of the command and qm.toml, which name servers, files and plugins again.
        """
        path = resumed / "config.json"
        flags, plugins = run_settings(path) if path.is_file() else ({}, {})
        if flags.get("algo") != ALGO:
            raise UsageError(f"--resume {resumed}: not a run of qm plan; give its run folder")
        if (resumed / SUMMARY).exists():
            raise UsageError(f"--resume {resumed}: its search is done; start another with qm plan")
        base = usable_flags(flags, plugins, {name: getattr(named, name) for name in named.given}, source=path)
        base.pop("algo")
        if "minutes" in named.given:  # a new bound on the calls
            base.pop("max_calls", None)
        return base


@dataclass(kw_only=True)
class PlanRun:
    """A run folder while a search writes it."""

    run_dir: RunDir
    store: Store
    flags: Mapping[str, Any] = field(default_factory=dict)
    policy: SavedPolicy | None = None  # of the plan that was saved last; None: no plan of it can be played
    task: Task | None = None
    best: PlanPoint | None = None

    def begin(self, flags: PlanFlags, about: Mapping[str, Any], *, dataset: str) -> None:
        """Write config.json."""
        kept = {name: value for name, value in asdict(flags).items() if name not in OF_ONE_COMMAND}
        self.flags = {**kept, "algo": ALGO, "dataset": dataset}
        self.run_dir.write_config(describe_run(self.flags, **about), resumed_at=len(self.store) if flags.resume else 0)

    def can_play(self, task: Task, system: ResolvedModels, settings: TaskSettings, split: Split) -> None:
        """Save the original question as the first plan."""
        self.task = task
        self.policy = SavedPolicy.of(
            actions=(),
            task=settings,
            system=system,
            flags={**self.flags, "forms": settings.forms},
            versions=versions(),
            plugins=plugin_hashes(self.flags["plugin"]),
            background=background_of(task, split, dataset=settings.dataset),
            weights={},
            projection=task.observer.projection,
        )
        self.save(Plan())

    def keep(self, best: PlanPoint) -> None:
        """Save the best plan so far."""
        self.best = best
        self.save(best.plan)

    def save(self, plan: Plan, confidence: ConfidenceModel | None = None) -> None:
        """Write the policy of a plan with what it submits by."""
        if self.policy is not None and self.task is not None:
            self.policy = planned(self.policy, plan, self.task, confidence)
            write_policy_file(self.run_dir.path / POLICY_FILE, self.policy)

    def finish(self, found: PlanChoice) -> None:
        """Save what was found, P(right) for programs too, and write the run's page.

        They read it with `ConfidenceModel.from_arrays(numpy.load(FILE))`.
        """
        plan, search = found.saved, found.to_json()
        self.save(plan.plan, found.confidence if plan.plan.answer == "learned" or not found.calls else None)
        if found.confidence is not None:
            with atomic_write(self.run_dir.path / CONFIDENCE) as file:
                np.savez(file, **found.confidence.to_arrays())  # type: ignore[arg-type]  # mypy: its other keyword is a bool
        write_checked_json(self.run_dir.summary_path, {"plan": plan.to_json(), "search": search})
        if self.policy is not None:
            self.run_dir.take_latest()
        write_report(self.run_dir.path)

    def note_kept(self) -> None:
        """Say what an interrupted search leaves, and how it continues."""
        self.run_dir.take_latest()
        path, best = self.run_dir.path, self.best
        plan = "the original question, no plan is scored yet"
        if best is not None:
            plan = f"the best plan so far, {best.plan}: {best.success:.1%} of {best.questions} questions right"
        again = self.policy.named_again if self.policy else ""
        note(f"kept in {path}: {plan}; continue with qm plan --resume {path}{again}")


@contextmanager
def plan_run(flags: PlanFlags) -> Iterator[PlanRun]:
    """Lock a new run folder, or the resumed one; the new one is removed again unless it has a reply or a plan."""
    new = None if flags.resume else RunDir.create(flags.save_dir, flags.name or ALGO)
    with ExitStack() as stack:
        if new:
            stack.callback(_remove_without_result, new.path)  # last of all
        path = new.path if new else Path(flags.resume or "").resolve()
        stack.enter_context(locked(path))
        run = PlanRun(run_dir=new or RunDir(path), store=Store(path / STORE))
        stack.callback(run.run_dir.close)
        stack.callback(_close, run.store, run.run_dir)
        try:
            yield run
        except (KeyboardInterrupt, TooManyFailuresError):
            if len(run.store):
                run.note_kept()
            raise


def _close(store: Store, run_dir: RunDir) -> None:
    """Close the replies; without any, the file is removed."""
    is_empty = len(store) == 0
    store.close()
    if is_empty:
        run_dir.store_path.unlink(missing_ok=True)


def _remove_without_result(folder: Path) -> None:
    """Remove a run folder that has neither a reply nor a result."""
    if not (folder / SUMMARY).exists() and not (folder / STORE).exists():
        shutil.rmtree(folder, ignore_errors=True)
