"""The folder of a training run: opened and locked, described in config.json, its checkpoints, summed up at the end.

A checkpoint is the state after the last update, written when it is due and however the run ends.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from query_mutator.bounds import group_of
from query_mutator.confidence import ConfidenceModel
from query_mutator.data import Split
from query_mutator.env.task import Task
from query_mutator.files import write_checked_json
from query_mutator.files.lock import locked
from query_mutator.files.run_dir import RunDir
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.plugins import plugin_hashes
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.session.checkpoint import PREVIOUS, RESUME, Checkpoint, Progress, snapshot
from query_mutator.session.models import OpenModels
from query_mutator.session.policy_file import POLICY_FILE, SavedPolicy, background_of, write_policy_file
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.callbacks import CallbackList, RunView
from query_mutator.training.config import TrainConfig
from query_mutator.training.parts import RunParts


def open_run_dir(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> RunDir:
    """Return a new run folder, locked, or the resumed one with its row files truncated to where its checkpoint was."""
    if checkpoint is None or not config.resumes_folder:
        run_dir = RunDir.create(config.save_dir, config.name or config.algo)
        stack.callback(_remove_unbegun, run_dir)
        stack.enter_context(locked(run_dir.path))
    else:
        done = checkpoint.progress
        run_dir = RunDir(
            Path(config.resume or "").resolve(),
            first_step=done.env_steps,
            transcripts_bytes=done.transcripts_bytes,
            metrics_bytes=done.metrics_bytes,
        )
    stack.callback(run_dir.close)
    return run_dir


def _remove_unbegun(run_dir: RunDir) -> None:
    if not run_dir.config_path.exists():
        shutil.rmtree(run_dir.path, ignore_errors=True)


def write_config(parts: RunParts, *, resumed_at: int) -> None:
    """Write config.json, to which a resumed run adds the steps and the command."""
    config = describe_run(asdict(parts.config), **described(parts.models, parts.split, parts.config.plugin))
    parts.run_dir.write_config(config, resumed_at=resumed_at)


def described(models: OpenModels, split: Split, plugin: Sequence[str]) -> dict[str, Any]:
    """Return who answered, with which plugins, and the questions, for config.json."""
    found = {**models.describe(), "plugins": plugin_hashes(plugin), "dataset_sha256": split.sha256}
    return {**found, "dataset_source": split.source} if split.source else found


def write_summary(
    parts: RunParts,
    run: RunView,
    *,
    wall_s: float,
    report: Mapping[str, Any] | None,
    validation: Mapping[str, Any] | None,
) -> None:
    """Write summary.json: the comparison, the last periodic evaluation, and what the run cost."""
    training, evaluation = parts.training_calls, parts.evaluation_calls
    summary = {
        "eval": report,
        "validation": validation,
        "env_steps": run.env_steps,
        "llm_calls": training.calls,
        "eval_llm_calls": evaluation.calls,
        "eval_tokens": evaluation.tokens,
        "eval_reply_tokens": evaluation.reply_tokens,
        "invalid_steps": run.invalid_steps,
        "prompts_too_long": dict(sum((env.prompts_too_long for env in parts.env_list), Counter())),
        "cut_replies": (training + evaluation).cut_replies,
        "cut_share": (training + evaluation).cut_share,
        "wall_s": round(wall_s, 3),
        "seed": parts.config.seed,
        "backend": parts.models.choice.kind,
    }
    write_checked_json(parts.run_dir.summary_path, summary)


def planned(policy: SavedPolicy, plan: Plan, task: Task, confidence: ConfidenceModel | None) -> SavedPolicy:
    """Return a policy that follows a plan on a task, and submits by `confidence`."""
    acting = plan_task(plan, task)
    rules = acting.rules
    return replace(
        policy,
        weights=dict(plan_policy(plan, task).weights),
        updates_done=0,
        actions=acting.actions,
        task=replace(
            policy.task, answer=rules.answer, max_episode_steps=rules.max_episode_steps, max_asks=rules.max_asks
        ),
        confidence=None if confidence is None else confidence.to_arrays(),
        flags={**policy.flags, "plan": str(plan)},
    )


class Checkpoints:
    """Keeps the state after the last update in memory, and writes it with the policy to the run folder."""

    def __init__(self, parts: RunParts, run: RunView, callbacks: CallbackList, *, resumed: Checkpoint | None) -> None:
        """Keep the state as it is; `resumed` is the checkpoint that it was restored from."""
        self._parts, self._run, self._callbacks = parts, run, callbacks
        self._background = background_of(parts.task, parts.split, dataset=parts.config.dataset)
        self._price: float | None = None
        self.keep()
        in_folder = resumed is not None and parts.config.resumes_folder
        self._saved_steps = run.env_steps if in_folder else None
        self._is_newest_good = resumed is None or resumed.path is None or resumed.path.name != PREVIOUS

    @property
    def path(self) -> Path:
        """Return the file of the newest state."""
        return self._parts.run_dir.path / RESUME

    @property
    def named_again(self) -> str:
        """Return the flags by which a command names servers and code of the run again."""
        return self._policy.named_again

    def keep(self) -> None:
        """Keep the state after an update, once the row of metrics is written."""
        self._latest, self._policy = self._state()

    def set_price(self, price: float) -> None:
        """Write the last policy with the price of a call at which it acts."""
        self._price = price
        self._policy = replace(self._policy, task=replace(self._policy.task, call_price=(price,)))
        write_policy_file(self._parts.run_dir.path / POLICY_FILE, self._policy)

    def write(self) -> None:
        """Write what is kept, with the policy file, unless it was written before."""
        run_dir, steps = self._parts.run_dir, self._latest.progress.env_steps
        if steps == self._saved_steps:
            return
        run_dir.sync()
        self._latest.save(run_dir.path, keep_newest=self._is_newest_good)
        write_policy_file(run_dir.path / POLICY_FILE, self._policy)
        self._saved_steps, self._is_newest_good = steps, True

    def write_plan(self, plan: Plan) -> Path:
        """Write a policy file of a plan in the run folder; return its path."""
        path = self._parts.run_dir.path / "best_plan.qm"
        write_policy_file(path, planned(self._policy, plan, self._parts.task, None))
        return path

    def _state(self) -> tuple[Checkpoint, SavedPolicy]:
        parts, config = self._parts, self._parts.config
        learner, task = snapshot(parts.learner.state_dict()), parts.task
        system = parts.models.resolved
        price = {} if self._price is None else {"call_price": (self._price,)}
        checkpoint = Checkpoint(
            learner=learner,
            actions=task.actions,
            projection=task.observer.projection,
            file_digests=system.file_digests,
            progress=self._progress(),
            envs=parts.envs.state_dict(),
            confidence=task.confidence,
            callbacks=snapshot(self._callbacks.state_dict()),
        )
        policy = SavedPolicy.of(
            actions=task.actions,
            task=group_of(TaskSettings, config, **price),
            system=system,
            flags=asdict(config),
            versions=versions(),
            plugins=plugin_hashes(config.plugin),
            env_steps=self._run.env_steps,
            updates_done=learner["updates_done"],
            background=self._background,
            weights=learner["policy"],
            projection=task.observer.projection,
            confidence=None if task.confidence is None else task.confidence.to_arrays(),
        )
        return checkpoint, policy

    def _progress(self) -> Progress:
        parts, totals, rows = self._parts, self._parts.training_calls, self._parts.run_dir
        return Progress(
            env_steps=self._run.env_steps,
            wall_s=parts.runlog.wall_s,
            llm_calls=totals.calls,
            invalid_steps=self._run.invalid_steps,
            tokens=totals.tokens,
            cut_replies=totals.cut_replies,
            best_success=self._run.best_success,
            env_episodes=tuple(env.total_episodes for env in parts.env_list),
            env_total_steps=tuple(env.total_steps for env in parts.env_list),
            transcripts_bytes=rows.transcripts.size_bytes,
            metrics_bytes=rows.metrics.rows.size_bytes,
        )
