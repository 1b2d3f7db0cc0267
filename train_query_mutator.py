"""Train a policy that picks rewrites: parse -> build -> collect -> update -> log -> save.

    N environments, O observation

    python train_query_mutator.py --num-processes 16 --batch-size 8 --num-env-steps 10000

Nothing imported here loads torch: `--help` answers at once.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from query_mutator import operators
from query_mutator.cli.console import closing_on_interrupt, note, progress, run_cli
from query_mutator.cluster.connection import connected
from query_mutator.data import Split, guard_questions
from query_mutator.env.steps import FloatArray, Steps
from query_mutator.env.task import Task, controls
from query_mutator.errors import BackendError, DiskError, TooManyFailuresError, UsageError
from query_mutator.evaluation.bandit_rival import BanditRival
from query_mutator.evaluation.cost import PLAN_CALLS, EvaluationCost, episode_calls
from query_mutator.evaluation.found_plan import FoundPlan, kept_plan, search_plan
from query_mutator.evaluation.heldout import Rivals, compare, embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.outcomes import check_report
from query_mutator.evaluation.plan_search import check_calls
from query_mutator.evaluation.validation import make_periodic_eval
from query_mutator.files import write_checked_json
from query_mutator.llm.probe import reported_slots, slots_advice, slots_under_load
from query_mutator.llm.stack import CallTotals
from query_mutator.page.build import write_report
from query_mutator.plugins import plugin_hashes
from query_mutator.report.curve import draw_learning_curve, validation_end
from query_mutator.report.table import assistant_name, result_table
from query_mutator.runs.lock import locked
from query_mutator.runs.provenance import describe_run, versions
from query_mutator.runs.run_dir import RunDir, checkpoints_in, steps_of
from query_mutator.runs.run_log import RunLog
from query_mutator.runs.tracking import tracked
from query_mutator.training.background import background_of
from query_mutator.training.checkpoint import Checkpoint, Progress, read_checkpoint, settled, snapshot
from query_mutator.training.config import PROG, TrainConfig, parse_config, remarks
from query_mutator.training.dataset import split_dataset
from query_mutator.training.estimate import Estimate
from query_mutator.training.failure_rate import WINDOW_STEPS, FailureWindow
from query_mutator.training.journal import Journal, keep_embeddings
from query_mutator.training.judge_watch import watch_of
from query_mutator.training.judging import make_reward
from query_mutator.training.learner import Learner
from query_mutator.training.learners import LEARNERS, SEARCH, make_learner, read_teacher, settings_of, teach
from query_mutator.training.loop import TrainingLoop
from query_mutator.training.off_policy import EnvGroups, OffPolicyLoop
from query_mutator.training.on_policy import OnPolicyLoop
from query_mutator.training.policy_file import SavedPolicy, write_own_policy
from query_mutator.training.resume import check_resumption, fold_remarks, resumed_flags
from query_mutator.training.system import System, SystemSettings, TaskSettings, make_task
from query_mutator.training.truncation import LongPrompts, cut_line, long_questions
from query_mutator.training.workers import local_addresses
from query_mutator.types import StepRecord
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

BoolArray = NDArray[np.bool_]

ADVICE_AFTER_CALLS = 6  # per call in flight: by then the server's queue shows

_OF_ONE_COMMAND = ("resume", "break_lock", "config", "dry_run")  # flags that a checkpoint does not keep


def main(argv: Sequence[str], *, prog: str = PROG) -> int:
    """Train with the flags of `argv`; return the exit code. `prog` is the name of the command in its help."""
    with ExitStack() as stack:
        config, checkpoint = parse(argv, stack, prog=prog)
        if config.dry_run:
            print(estimate(config, checkpoint))
            return 0
        trainer = stack.enter_context(build(config, checkpoint, stack))
        gc.freeze()  # loaded objects stay: collecting them again would stop the run for a tenth of a second
        trainer.begin()
        while trainer.updates_left:
            trainer.collect()
            trainer.update()
            trainer.log()
            trainer.save()
        report = trainer.finish()
    if report:
        check_report(report, max_failure_rate=config.max_failure_rate)
    return 0


# --- parse -----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], stack: ExitStack, *, prog: str = PROG) -> tuple[TrainConfig, Checkpoint | None]:
    """Return the flags, and with --resume the checkpoint whose flags are the defaults; `stack` locks its folder."""
    config = parse_config(argv, prog=prog)
    if config.resume is None:
        return config, None

    if Path(config.resume).is_dir() and not config.dry_run:
        stack.enter_context(locked(Path(config.resume).resolve(), break_lock=config.break_lock))
    checkpoint = read_checkpoint(config.resume)
    config = parse_config(argv, base=resumed_flags(checkpoint), base_name=str(checkpoint.path))
    check_resumption(config, checkpoint)
    note(*fold_remarks(config, checkpoint))
    return config, checkpoint


def estimate(config: TrainConfig, checkpoint: Checkpoint | None = None) -> Estimate:
    """Return the size and cost of the run; what a run checks before it starts servers is checked here too."""
    split = split_dataset(settings_of(TaskSettings, config))
    check(config, split, checkpoint)
    num_operators, num_train, num_test = len(operators.select(config.operators)), len(split.train), len(split.test)
    return Estimate(
        config=config,
        num_actions=num_operators + len(controls(config.ask)),
        num_train=num_train,
        num_validation=len(split.validation),
        num_test=num_test,
        asking=make_reward(settings_of(TaskSettings, config)).asking,
        comparison_calls=comparison_cost(config, split).calls if config.evaluate and num_test else 0,
    )


def comparison_cost(config: TrainConfig, split: Split) -> EvaluationCost:
    """Return the cost of the final comparison; UsageError when --eval-calls does not allow one question."""
    cost = EvaluationCost(
        num_test=len(split.test),
        num_guard=len(guard_questions()) + len(split.guard),
        num_train=len(split.train),
        num_operators=len(operators.select(config.operators)),
        episode_calls=episode_calls(config.ask, max_episode_steps=config.max_episode_steps, answer=config.answer),
        asking=make_reward(settings_of(TaskSettings, config)).asking,
        search_calls=0 if config.teacher == SEARCH else config.plan_calls,
        plan_calls=PLAN_CALLS if config.plan_calls else 0,
    )
    return cost.within(config.eval_calls)


# --- build -----------------------------------------------------------------------------------------------------------


def build(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> Trainer:
    """Return a trainer with everything started; `stack` closes it. Settings are checked before a model is loaded."""
    task_settings = settings_of(TaskSettings, config)
    with progress("starting", 3, unit="part", terminal_only=True) as bar:
        split = split_dataset(task_settings)
        bar.update()
        check(config, split, checkpoint)
        bar.update()
        ray = stack.enter_context(connected(config.ray_address)) if config.engine == "ray" else None
        digests = checkpoint.system.file_digests if checkpoint and Path(config.resume or "").is_dir() else ()
        servers = {"batch_size": config.calls_in_flight, "file_digests": digests, **local_addresses(config)}
        system = stack.enter_context(System(settings_of(SystemSettings, config, **servers)))
        stack.enter_context(closing_on_interrupt(system.calls.close))
    embed_questions(system.encoder, split.train + split.validation)
    task = make_task(system, task_settings, split.train, projection=checkpoint.projection if checkpoint else None)
    learner = make_learner(config, task, checkpoint)
    run_dir = open_run_dir(config, checkpoint, stack)
    stack.callback(run_dir.close)
    stack.enter_context(tracked(run_dir.path, config))
    return Trainer(config, system, task_settings, task, split, learner, run_dir, checkpoint, ray=ray)


def check(config: TrainConfig, split: Split, checkpoint: Checkpoint | None) -> None:
    """Raise a UsageError for settings that do not fit the questions, the machine or the checkpoint."""
    import torch

    from ppo.algorithm import usable_device

    if split.validation and not split.train:
        raise UsageError(
            f"{config.dataset}: --validation-fold {config.validation_fold} takes all {len(split.validation)} questions "
            "that are not held out; give another fold, or none"
        )
    if not split.train:
        raise UsageError(f"{config.dataset}: no question is left to train on, all are held out; add more questions")
    make_reward(settings_of(TaskSettings, config))
    comparison_cost(config, split)
    chosen = [operator.name for operator in operators.select(config.operators)]
    if checkpoint is not None:
        checkpoint.check_actions([*chosen, *controls(config.ask)])
    if config.teacher == SEARCH:
        check_calls(config.plan_calls, name="--plan-calls")
    elif config.teacher is not None:
        read_teacher(config.teacher, [*chosen, *controls(config.ask)])
    try:
        usable_device(config.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # A small network gains nothing from more threads, and waiting ones compete with those that make calls.
    torch.set_num_threads(1)


def open_run_dir(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> RunDir:
    """Return a new run folder, locked, or the resumed one with its row files truncated to where its checkpoint was."""
    if checkpoint is None or not Path(config.resume or "").is_dir():
        run_dir = RunDir.create(config.save_dir, config.name or config.algo)
        stack.enter_context(locked(run_dir.path))
        return run_dir
    done = checkpoint.progress
    return RunDir(
        Path(config.resume or "").resolve(),
        first_step=done.env_steps,
        transcripts_bytes=done.transcripts_bytes,
        metrics_bytes=done.metrics_bytes,
    )


# --- train -----------------------------------------------------------------------------------------------------------


class Trainer:
    """One run from `begin` to `finish`; a checkpoint is written when it ends early."""

    def __init__(
        self,
        config: TrainConfig,
        system: System,
        task_settings: TaskSettings,
        task: Task,
        split: Split,
        learner: Learner,
        run_dir: RunDir,
        checkpoint: Checkpoint | None,
        *,
        ray: ModuleType | None = None,
    ) -> None:
        self.ray = ray
        self.config, self.system, self.task_settings = config, system, task_settings
        self.task, self.split, self.learner, self.run_dir = task, split, learner, run_dir
        done = checkpoint.progress if checkpoint else Progress()
        has_same_fold = checkpoint is not None and checkpoint.task.validation_fold == config.validation_fold
        self.env_steps, self.best_success = done.env_steps, done.best_success if has_same_fold else 0.0
        self.counted = system.calls.counted
        self.counted.totals = CallTotals(calls=done.llm_calls, tokens=done.tokens, cut_replies=done.cut_replies)
        self.journal = self._open_journal()
        self.judge_watch = watch_of(task, run_dir.path / "transcripts.jsonl")
        self.env_list = make_envs(config, system, task, on_record=self._add_record)
        self.envs = batch_envs(config, self.env_list, self.journal)
        self.bandit = BanditRival(task)
        self.obs = self._restore_envs(checkpoint, done)
        self.long_prompts = LongPrompts(self.env_list, system.calls.servers[0])
        self.invalid_steps_before = done.invalid_steps - sum(env.invalid_steps for env in self.env_list)
        self.evaluator = make_evaluator(config, system)
        self.runlog = RunLog(system.calls, wall_s=done.wall_s)
        self.failures = FailureWindow(
            config.max_failure_rate, size=min(WINDOW_STEPS, config.rollout_steps), why=self._most_common_failure
        )
        self.plan: FoundPlan | None = None
        # Our server has as many slots as calls in flight; those on the workers' machines are not asked from here.
        self.has_advised = system.choice.kind == "embedded" or bool(config.local_server_url)
        self.losses: dict[str, float] = {}
        self.loop: TrainingLoop | None = None
        self.latest, self.saved = self._snapshot(), checkpoint.path if checkpoint else None
        self.background = background_of(system, task, split, dataset=config.dataset)

    @property
    def updates_left(self) -> int:
        """Return the number of updates left to make."""
        return self.config.num_updates - self.learner.updates_done

    def begin(self) -> None:
        """Print the settings, write config.json and the first checkpoint, and prepare the training loop."""
        config = self.config
        note(*remarks(config), self.system.choice.reason, f"encoder: {self.system.encoder.source}")
        note(*long_questions(self.system.calls, self.task, self.split.train + self.split.validation))
        note(*long_questions(self.system.calls, self.task, self.split.test, send=False))
        print(f"run folder: {self.run_dir.path}", flush=True)
        described = {**self.system.describe(), "plugins": plugin_hashes(config.plugin)}
        described["dataset_sha256"] = self.split.sha256
        if self.split.source:
            described["dataset_source"] = self.split.source
        self.run_dir.write_config(describe_run(dataclasses.asdict(config), **described), resumed_at=self.env_steps)
        self._write_checkpoint()  # from the first one on, no completed call is lost
        if config.teacher == SEARCH:
            self._learn_from_plan()
        self.loop = self._make_loop()
        self.periodic_eval = None
        if config.updates_between_evals:
            self.periodic_eval = make_periodic_eval(
                self.evaluator, self.task, self.split.validation, size=config.eval_questions
            )
        if config.validation_fold != "none" and not self.split.validation:
            note(
                f"--validation-fold {config.validation_fold} holds none of the {len(self.split.train)} questions to "
                "learn from, so there are no periodic evaluations; give another fold"
            )
        if self.periodic_eval and not self.env_steps:
            self.run_dir.metrics.write(self._evaluate(), step=0, wall_s=self.runlog.wall_s)
        self.runlog.next_row(self.learner)
        self.runlog.open_bar(total_steps=config.total_steps, env_steps=self.env_steps)

    def collect(self) -> None:
        """Take `num_steps` steps in every environment."""
        assert self.loop is not None
        with _server_worked_before():
            self.loop.collect()
        self.bandit.settle()
        self.env_steps += self.config.rollout_steps

    def update(self) -> None:
        """Learn from the steps taken."""
        assert self.loop is not None
        self.losses = self.loop.update()

    def log(self) -> None:
        """Write a row of metrics when one is due, with a periodic evaluation when one is due."""
        done, last = self.learner.updates_done, not self.updates_left
        self.runlog.show(self.long_prompts.shown())
        note(*self.long_prompts.news())
        row: dict[str, float] = {}
        if last or done % self.config.log_interval == 0:
            row = {**self.runlog.row(self.learner), **self.losses, "llm/invalid_steps": self.invalid_steps}
            row["counters/env_steps"] = self.env_steps
            row["llm/prompts_too_long"] = self.long_prompts.counts.total()
            if self.judge_watch is not None:
                row |= self.judge_watch.row()
                note(*self.judge_watch.news())
        if self.periodic_eval and (last or done % self.config.updates_between_evals == 0):
            row |= self._evaluate()
        if row:
            self.run_dir.metrics.write(row, step=self.env_steps, wall_s=self.runlog.wall_s)
            self.runlog.next_row(self.learner)
        if self.journal is not None:
            self.journal.start(self.env_steps)
        self.latest = self._snapshot()

    def save(self) -> None:
        """Write a checkpoint when one is due."""
        if not self.updates_left or self.learner.updates_done % self.config.save_interval == 0:
            self._write_checkpoint()

    def finish(self) -> dict[str, Any] | None:
        """Compare with the baselines, draw the curve, write summary.json, print where everything is.

        Return the comparison, None without one.
        """
        config, wall_s, report = self.config, self.runlog.wall_s, None
        self.runlog.close()
        if config.evaluate and self.split.test:
            policy = self.learner.frozen
            with _server_worked_before():
                report = compare(
                    self.evaluator,
                    self.system,
                    self.task,
                    self.split.test,
                    policy,
                    seed=config.seed,
                    rivals=Rivals(bandit=self.bandit.fit(), search_calls=config.plan_calls, plan=self.plan),
                    most_calls=config.eval_calls,
                    guard=self.split.guard,
                    rows_path=self.run_dir.evaluation_path,
                    show=lambda report: print(result_table(report)),
                )
        write_checked_json(self.run_dir.summary_path, self._summary(report, wall_s))
        target = assistant_name(self.system.target_model, embedded=self.system.embedded)
        curve_title = f"{target}, seed {config.seed}"
        draw_learning_curve(self.run_dir.metrics_path, self.run_dir.curve_path, title=curve_title)
        if report:
            print(result_table(report))
        note(*self.long_prompts.lines(), *cut_line(self._all_calls))
        print(f"run folder:     {self.run_dir.path}\nlearning curve: {self.run_dir.curve_path}")
        if page := write_report(self.run_dir.path):
            print(f"report:         {page}")
        print(f'next:           qm show {self.run_dir.path}; qm rewrite {self.run_dir.path} "a question of yours"')
        return report

    def _learn_from_plan(self) -> None:
        """Have the learner imitate the best plan, which a resumed run has in its folder."""
        config, evaluator = self.config, self.evaluator

        def search() -> FoundPlan:
            with _server_worked_before():
                return search_plan(
                    evaluator, self.task, max_calls=config.plan_calls, seed=config.seed, progress=progress
                )

        self.plan = kept_plan(self.run_dir.plan_path, search)
        note(f"teacher: {self.plan.teacher}")
        teach(self.learner, self.plan.teacher, self.task, config)

    def _make_loop(self) -> TrainingLoop:
        config, learner = self.config, self.learner
        common: dict[str, Any] = {
            "seed": envs_seed(config.seed, updates_done=learner.updates_done),
            "num_steps": config.num_steps,
            "on_steps": self._add_steps,
            "journal": self.journal,
        }
        if isinstance(self.envs, EnvGroups):
            groups = self.envs.groups
            return OffPolicyLoop(groups, learner, self.obs, max_pending_updates=config.max_pending_updates, **common)
        if self.ray is not None:
            return self._make_cluster_loop(self.envs, **common)
        return OnPolicyLoop(self.envs, learner, self.obs, max_policy_lag=config.max_policy_lag, **common)

    def _make_cluster_loop(self, envs: BatchedQueryMutationEnv, **common: Any) -> TrainingLoop:
        from query_mutator.cluster.rollouts import ClusterLoop, spec_of, start_workers

        config, system, run = self.config, self.system, self.run_dir.path
        make: dict[str, Any] = {"env": QueryMutationEnv, "envs": BatchedQueryMutationEnv}
        spec = spec_of(config, system, self.task, self.task_settings, run, **make)
        workers = start_workers(self.ray, config, system, spec)
        return ClusterLoop(
            envs,
            self.learner,
            self.obs,
            workers=workers,
            calls=self.system.calls,
            run_dir=self.run_dir,
            on_record=self._add_record,
            env_steps=self.env_steps,
            **common,
        )

    def _evaluate(self) -> dict[str, float]:
        """Return the figures of a periodic evaluation on validation questions."""
        assert self.periodic_eval is not None
        with _server_worked_before():
            row = self.periodic_eval(self.learner.frozen)
        self.best_success = max(self.best_success, row["validation/success"])  # NaN leaves the first
        self.runlog.validated(row["validation/success"])
        return {**row, "validation/best_success": self.best_success}

    def _restore_envs(self, checkpoint: Checkpoint | None, done: Progress) -> FloatArray | None:
        """Restore the environments; return their observations [N, O], None for new episodes.

        A resumed run folder continues in the middle of its episodes; a run from a checkpoint file starts new ones.
        """
        if checkpoint is None:
            return None
        continues = checkpoint.envs is not None and Path(self.config.resume or "").is_dir()
        if checkpoint.bandit is not None:
            self.bandit.load_state_dict(checkpoint.bandit, new_episodes=not continues)
        if checkpoint.envs is not None and continues:
            return self.envs.load_state_dict(checkpoint.envs)
        for env, episodes in zip(self.env_list, done.env_episodes, strict=False):
            env.total_steps, env.total_episodes = self.learner.updates_done * self.config.num_steps, episodes
        return None

    def _add_steps(self, infos: dict[str, Any], steps: Steps) -> None:
        self.run_dir.write_records()
        self.runlog.add_steps(infos, steps.terminations | steps.truncations)
        self.failures.add(steps.valid)
        self.bandit.observe(steps)
        self._advise()

    def _open_journal(self) -> Journal | None:
        """Return the journal of calls; None with a policy lag, as environments run ahead of what could be replayed."""
        if self.config.max_policy_lag:
            return None
        journal = Journal(self.run_dir.journal_path, since=self.env_steps, on_replay=self.counted.add)
        keep_embeddings(self.system.encoder, journal)
        return journal

    def _add_record(self, record: StepRecord) -> None:
        self.run_dir.add_record(record)
        if self.judge_watch is not None:
            self.judge_watch.add(record)

    def _advise(self) -> None:
        """Print once that the server works on fewer calls at a time than it is sent."""
        if self.has_advised:
            return
        in_flight = min(self.config.calls_in_flight, self.config.num_processes)
        calls = self.runlog.calls
        if calls.calls < ADVICE_AFTER_CALLS * in_flight:
            return
        self.has_advised = True
        servers = self.system.calls.servers
        reported = reported_slots(servers, self.system.target_model)
        slots = reported or (slots_under_load(calls, in_flight=in_flight) if servers[0].reports_queue else None)
        advice = slots_advice(slots, in_flight, server=servers[0], is_reported=reported is not None)
        if advice is not None:
            note(advice)

    def _most_common_failure(self) -> str:
        [(kind, _)] = self.counted.error_kinds.most_common(1) or [("", 0)]
        advice = f" ({self.system.calls.servers[0].more_context})" if kind == "prompt_too_long" else ""
        return f", most often {kind!r}{advice}" if kind else ""

    @property
    def invalid_steps(self) -> int:
        """Return the steps of the run that were masked out of learning."""
        return self.invalid_steps_before + sum(env.invalid_steps for env in self.env_list)

    def _snapshot(self) -> Checkpoint:
        """Return the state after the last update, which a checkpoint holds whenever the run ends."""
        flags = dataclasses.asdict(self.config)
        return Checkpoint(
            learner=snapshot(self.learner.state_dict()),
            actions=self.task.actions,
            task=self.task_settings,
            system=settled(self.system),
            projection=self.task.observer.projection,
            flags={name: value for name, value in flags.items() if name not in _OF_ONE_COMMAND},
            versions=versions(),
            plugins=plugin_hashes(self.config.plugin),
            bandit=self.bandit.state_dict(),
            progress=Progress(
                env_steps=self.env_steps,
                wall_s=self.runlog.wall_s,
                llm_calls=self.counted.totals.calls,
                invalid_steps=self.invalid_steps,
                tokens=self.counted.totals.tokens,
                cut_replies=self.counted.totals.cut_replies,
                best_success=self.best_success,
                env_episodes=tuple(env.total_episodes for env in self.env_list),
                transcripts_bytes=self.run_dir.transcripts.size_bytes,
                transcripts_crc=self.run_dir.transcripts.crc,
                metrics_bytes=self.run_dir.metrics.rows.size_bytes,
                metrics_crc=self.run_dir.metrics.rows.crc,
            ),
            envs=None if self.config.max_policy_lag else self.envs.state_dict(),
        )

    def _write_checkpoint(self) -> None:
        path = self.run_dir.checkpoint_path(self.latest.progress.env_steps)
        if path == self.saved:
            return
        self.run_dir.sync()
        self.saved = self.latest.save(path)
        write_own_policy(self.run_dir.path, SavedPolicy(checkpoint=self.latest, background=self.background))
        if self.journal is not None:
            # The calls since the previous checkpoint are kept: it is the fallback if this one is damaged.
            self.journal.drop_before(steps_of(checkpoints_in(self.run_dir.path)[:2][-1]))

    @property
    def _all_calls(self) -> CallTotals:
        """Return the totals of the calls for training and evaluation."""
        return self.counted.totals + self.system.calls.eval_counted.totals

    def _summary(self, report: dict[str, Any] | None, wall_s: float) -> dict[str, Any]:
        return {
            "eval": report,
            "validation": validation_end(self.run_dir.metrics_path, fold=self.config.validation_fold),
            "env_steps": self.env_steps,
            "llm_calls": self.counted.totals.calls,
            "eval_llm_calls": self.system.calls.eval_counted.totals.calls,
            "eval_tokens": self.system.calls.eval_counted.totals.tokens,
            "eval_reply_tokens": self.system.calls.eval_counted.totals.reply_tokens,
            "invalid_steps": self.invalid_steps,
            "prompts_too_long": dict(self.long_prompts.counts),
            "cut_replies": self._all_calls.cut_replies,
            "cut_share": self._all_calls.cut_share,
            "wall_s": round(wall_s, 3),
            "seed": self.config.seed,
            "backend": self.system.choice.kind,
            "embedded": self.system.embedded,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.runlog.close()
        if exc_info[1] is not None:
            with contextlib.suppress(DiskError):  # it is being reported already
                self._write_checkpoint()
                note(f"checkpoint: {self.saved}; continue with --resume {self.run_dir.path}")
        self.system.calls.close()  # first, because the environments wait for calls in flight
        if self.loop is not None:
            self.loop.close()
        self.envs.close()
        if self.journal is not None:
            self.journal.close()


@contextlib.contextmanager
def _server_worked_before() -> Iterator[None]:
    """Turn a server that fails from here on into TooManyFailuresError: the run can be resumed."""
    try:
        yield
    except BackendError as error:
        raise TooManyFailuresError(str(error)) from error


def make_envs(
    config: TrainConfig, system: System, task: Task, *, on_record: Callable[[StepRecord], None]
) -> list[QueryMutationEnv]:
    """Return the environments of a run."""
    return [
        QueryMutationEnv(
            task,
            client=system.calls.client,
            retry_policy=system.retry_policy,
            env_id=env_id,
            on_record=on_record,
        )
        for env_id in range(config.num_processes)
    ]


def make_evaluator(config: TrainConfig, system: System) -> Evaluator:
    """Return what runs evaluations during and after the training."""
    return Evaluator(
        QueryMutationEnv,
        client=system.calls.eval_client,
        batch_size=config.calls_in_flight,
        retry_policy=system.retry_policy,
        max_failure_rate=config.max_failure_rate,
        progress=progress,
    )


def batch_envs(
    config: TrainConfig, envs: Sequence[QueryMutationEnv], journal: Journal | None
) -> BatchedQueryMutationEnv | EnvGroups:
    """Return the environments in one batch; for an off-policy learner in groups, one per collector."""
    batch_size = config.batch_size if config.use_batching else None
    if LEARNERS.get(config.algo).on_policy:
        return BatchedQueryMutationEnv(envs, batch_size, journal=journal)
    groups = EnvGroups.split(envs, min(config.num_collectors, len(envs)))
    return EnvGroups(
        [
            BatchedQueryMutationEnv(group, batch_size and min(batch_size, len(group)), journal=journal)
            for group in groups
        ]
    )


def envs_seed(seed: int, *, updates_done: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    It is not `seed` itself: runs with adjacent seeds would share most environments and not be independent repeats.
    It changes with `updates_done`: repeating the same episodes would teach nothing new.
    """
    return int(np.random.SeedSequence([seed, updates_done]).generate_state(1)[0])


if __name__ == "__main__":
    run_cli(main, prog=PROG)
