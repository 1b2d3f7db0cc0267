"""`qm plan --from-logs`: learn P(right), the order of prompts and when to stop from graded replies, without a call.

The run folder has `confidence.npz`, and where all prompts of the plan are forms, a checkpoint and `policy.qm`. No text
of the log is in them, but the names of prompts.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.bounds import group_of
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import rows_of, show
from query_mutator.commands.plan_run import ALGO, OF_ONE_COMMAND, PlanFlags, remove_without_result
from query_mutator.confidence import ConfidenceModel
from query_mutator.data import Split
from query_mutator.data.logs import log_path, read_logged_replies
from query_mutator.encoder import Encoder, english_words
from query_mutator.env.task import CallSettings, EpisodeRules, build_task
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.evaluation.logged_answers import GradedLog, grade_log
from query_mutator.evaluation.plan_logged import LoggedPlans, logged_plans
from query_mutator.files import atomic_write, file_sha256, write_checked_json
from query_mutator.files.lock import locked
from query_mutator.files.run_dir import CONFIDENCE, RunDir
from query_mutator.forms import ALL, FORMS
from query_mutator.forms import select as select_forms
from query_mutator.learners.plan import Plan
from query_mutator.llm.backends import BACKENDS, choose_backend
from query_mutator.operators import NONE
from query_mutator.plugins import plugin_hashes
from query_mutator.report.page.build import write_report
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.models import ResolvedModels, encoder_of
from query_mutator.session.policy_file import PROBE, SavedPolicy, background_of, findable, write_own_policy
from query_mutator.session.task import NO_DATASET, example_bank, make_reward, split_dataset
from query_mutator.session.trust import remember
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.run_folder import planned
from query_mutator.types import Question

_UNASKED = "unasked"  # the name of the models of a task that is not played
#: In the place of training questions, one of which acting needs: those of a log stay where they are.
_STAND_IN = Question(id="stand-in", text=PROBE)


def plan_from_logs(flags: PlanFlags) -> None:
    """Learn from a log, save what was learned in a run folder, and print it."""
    path = log_path(Path(flags.from_logs or ""))
    settings = _task_settings(flags)
    split = None if settings.dataset == NO_DATASET else split_dataset(settings)
    log = grade_log(
        read_logged_replies(path),
        reward=make_reward(settings),
        split=split,
        forms=_names(flags.forms if "forms" in flags.given else ""),
    )
    note(f"{path}: {log.in_words()}")
    if flags.dry_run:
        print(rows_of({name: f"{count:,} answers" for name, count in log.forms.items()} or {"answers": 0}))
        return
    price = float(np.mean(flags.call_price))
    found = logged_plans(log.answers, budget=flags.budget, price=price, seed=flags.seed)
    missing = _unplayable(found.chosen.plan, settings, split)
    with ExitStack() as stack:
        run_dir = RunDir.create(flags.save_dir, flags.name or ALGO)
        stack.callback(remove_without_result, run_dir.path)
        stack.callback(run_dir.close)
        stack.enter_context(locked(run_dir.path))
        run = _LogRun(flags, settings, run_dir)
        run.write_config(log, path, split)
        run.write_confidence(found.confidence)
        if not missing:
            run.write_policy(found, split)
        run.finish(found, is_playable=not missing)
    result = {"plan": found.chosen.to_json(), **found.to_json(), "run_folder": str(run_dir.path)}
    show(flags, result, _in_words(found, log, run_dir.path, missing))


def _task_settings(flags: PlanFlags) -> TaskSettings:
    """Return the settings of a task in which a plan of forms alone is played."""
    named = {} if "dataset" in flags.given else {"dataset": NO_DATASET}
    of_a_plan: dict[str, Any] = {"ask": "form", "max_episode_steps": 1, "embedding_dims": 1}
    return group_of(TaskSettings, flags, operators=NONE, validation_fold="none", **of_a_plan, **named)


def _names(spec: str) -> tuple[str, ...]:
    """Return the prompts that --forms names; none stands for all of the log."""
    return tuple(name.strip() for name in spec.split(",") if name.strip() not in ("", ALL, NONE))


def _unplayable(plan: Plan, settings: TaskSettings, split: Split | None) -> str:
    """Return why a plan cannot be played, in one line; "" if it can."""
    unknown = [name for name in plan.operators if name not in FORMS]
    has_bank = split is not None or example_bank(settings.dataset) is not None
    showing = [name for name in plan.operators if name in FORMS and FORMS.get(name).uses_examples and not has_bank]
    learned = "P(right) and the order of prompts were learned, but no policy is saved"
    if unknown:
        advice = "add them with --plugin, or name the forms to use with --forms"
        return f"{learned}: {', '.join(unknown)} are not known as forms; {advice}"
    if showing:
        advice = "name the questions to show with --dataset, or other forms with --forms"
        return f"{learned}: {showing[0]} shows examples; {advice}"
    return ""


class _LogRun:
    """The run folder of what a log taught."""

    def __init__(self, flags: PlanFlags, settings: TaskSettings, run_dir: RunDir) -> None:
        self._flags, self._settings, self._run_dir = flags, settings, run_dir
        self._plugins = plugin_hashes(flags.plugin)
        self._kept = {name: value for name, value in asdict(flags).items() if name not in OF_ONE_COMMAND}
        self._kept |= {"algo": ALGO, "dataset": settings.dataset}

    def write_config(self, log: GradedLog, path: Path, split: Split | None) -> None:
        """Describe the run."""
        about = {"log": {"sha256": file_sha256(path), "answers": len(log.answers), "left_out": dict(log.left_out)}}
        digest = {} if split is None else {"dataset_sha256": split.sha256}
        self._run_dir.write_config(describe_run(self._kept, plugins=self._plugins, **about, **digest))

    def write_confidence(self, model: ConfidenceModel) -> None:
        """Write P(right) for programs, which read it with `ConfidenceModel.from_arrays(numpy.load(FILE))`."""
        with atomic_write(self._run_dir.path / CONFIDENCE) as file:
            np.savez(file, **model.to_arrays())  # type: ignore[arg-type]  # mypy: its other keyword is a bool

    def write_policy(self, found: LoggedPlans, split: Split | None) -> None:
        """Write the plan as a checkpoint and a policy file."""
        with closing(encoder_of(self._flags, None, light=True)) as encoder:
            saved = self._policy(found, split or Split(train=(_STAND_IN,)), encoder)
        saved.checkpoint.save(self._run_dir.checkpoint_path(0))
        write_own_policy(self._run_dir.path, saved)

    def _policy(self, found: LoggedPlans, split: Split, encoder: Encoder) -> SavedPolicy:
        flags, plan = self._flags, found.chosen.plan
        embed_questions(encoder, split.train)
        settings = group_of(TaskSettings, self._settings, forms=",".join(plan.operators))
        system = _system(flags)
        remember(asdict(flags), asdict(findable(system)), plugins=self._plugins.values())
        task = build_task(
            split.train,
            calls=group_of(CallSettings, settings, target_model=_UNASKED, mutator_model=_UNASKED),
            encoder=encoder,
            operators=(),
            known_words=english_words(),
            embedding_dims=settings.embedding_dims,
            rules=group_of(EpisodeRules, settings),
            forms=select_forms(settings.forms),
            bank=example_bank(settings.dataset),
        )
        checkpoint = Checkpoint(
            learner={},
            actions=(),
            task=settings,
            system=system,
            projection=task.observer.projection,
            flags={**self._kept, "forms": settings.forms},
            versions=versions(),
            plugins=self._plugins,
        )
        return SavedPolicy(
            checkpoint=planned(checkpoint, plan, task, found.confidence),
            background=background_of(task, split, dataset=settings.dataset),
        )

    def finish(self, found: LoggedPlans, *, is_playable: bool) -> None:
        """Write summary.json and the page."""
        search = found.to_json()
        write_checked_json(self._run_dir.summary_path, {"plan": found.chosen.to_json(), "search": search})
        if is_playable:
            self._run_dir.take_latest()
        write_report(self._run_dir.path)


def _system(flags: PlanFlags) -> ResolvedModels:
    """Return the models that flags name, without asking a server."""
    kind, urls = choose_backend(flags.backend, flags.urls)
    if not urls:
        return group_of(ResolvedModels, flags)
    backend = BACKENDS.get(kind)
    return group_of(ResolvedModels, flags, backend=kind, **{backend.url_flag: tuple(map(backend.address, urls))})


def _in_words(found: LoggedPlans, log: GradedLog, path: Path, missing: str) -> str:
    report, most = found.confidence.report, max(found.rates, key=lambda name: found.rates[name])
    facts = {
        "answers": f"{report.answers:,} to {log.questions:,} questions about {report.targets:,} targets, "
        f"{report.base_rate:.1%} right",
        "P(right), out of fold": f"AUROC {report.auroc:.3f}, Brier {report.brier:.3f}, calibration error (ECE) "
        f"{report.calibration_error:.3f} ({report.scorer})",
        "prompt with the most right answers": f"{most}: {found.rates[most]:.1%}",
        "prompts in their order": ", ".join(found.order),
    }
    if found.not_compared:
        facts["too few answers to compare"] = ", ".join(f"{name} ({n:,})" for name, n in found.not_compared.items())
    after = [missing] if missing else [f'next: qm rewrite {path} "your question"']
    return "\n".join([rows_of(facts), "", _by_calls(found), "", f"run folder: {path}", *after, found.verdict])


def _by_calls(found: LoggedPlans) -> str:
    """Return the table by calls."""
    if not found.by_calls:
        return f"No table by calls: {found.why_alone}."
    rows = [
        (
            f"{row.calls:g}",
            f"{row.learned_calls:.2f}",
            f"{100 * row.learned:.1f}",
            f"{100 * row.vote:.1f}",
            f"{100 * row.single:.1f}",
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in (row.lead, *row.lead_ci))),
        )
        for row in found.by_calls
    ]
    title = f"percent right of {found.questions:,} questions, cross-fitted by target; calls per question"
    columns = ("calls", "made", "by P(right)", "plain vote", "best prompt alone", "P(right) minus vote")
    return table(title, columns, rows)
