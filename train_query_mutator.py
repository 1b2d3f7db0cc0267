"""Train a policy that picks rewrites: parse -> build -> collect -> update -> log -> save.

    N environments, O observation

    python train_query_mutator.py --num-processes 16 --batch-size 8 --num-env-steps 10000

What is heavy is imported where it is used, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from query_mutator.cli.console import closing_on_interrupt, note, progress, run_cli
from query_mutator.errors import BackendError, DiskError, TooManyFailuresError, UsageError
from query_mutator.training.config import PROG, TrainConfig, parse_config, remarks, settings_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from query_mutator.data import Split
    from query_mutator.encoder.sentence import Encoder
    from query_mutator.env.task import Task
    from query_mutator.runs.run_dir import RunDir
    from query_mutator.training.checkpoint import Checkpoint, Progress
    from query_mutator.training.estimate import Plan
    from query_mutator.training.journal import Journal
    from query_mutator.training.learners import AnyLearner
    from query_mutator.training.loop import Rounds
    from query_mutator.training.off_policy import EnvGroups
    from query_mutator.training.system import System, TaskSettings
    from rl_query_mutator_env import BatchedQueryMutationEnv

    FloatArray = NDArray[np.float32]
    BoolArray = NDArray[np.bool_]

ADVICE_AFTER_CALLS = 6  # for each that may be in flight: by then the server's queue shows

_OF_ONE_COMMAND = ("resume", "config", "dry_run")  # flags that a checkpoint does not hand on


def main(argv: Sequence[str]) -> int:
    """Train as the command line says; return the exit code."""
    config, checkpoint = parse(argv)
    if config.dry_run:
        print(plan(config))
        return 0
    with ExitStack() as stack:
        trainer = stack.enter_context(build(config, checkpoint, stack))
        gc.freeze()  # what was loaded stays: looking through it again would stop the run for a tenth of a second
        trainer.begin()
        while trainer.updates_left:
            trainer.collect()
            trainer.update()
            trainer.log()
            trainer.save()
        trainer.finish()
    return 0


# --- parse -----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[TrainConfig, Checkpoint | None]:
    """Return the flags, and with --resume the checkpoint whose flags are their defaults."""
    config = parse_config(argv)
    if config.resume is None:
        return config, None
    from query_mutator.training.checkpoint import read_checkpoint
    from query_mutator.training.resume import check_resumption

    checkpoint = read_checkpoint(config.resume)
    config = parse_config(argv, base=checkpoint.flags, base_name=str(checkpoint.path))
    check_resumption(config, checkpoint)
    return config, checkpoint


def plan(config: TrainConfig) -> Plan:
    """Return what the run would cost; only the questions and operators are looked at."""
    from query_mutator import operators
    from query_mutator.training.estimate import Plan
    from query_mutator.training.system import TaskSettings, split_dataset

    split = split_dataset(settings_of(TaskSettings, config))
    num_actions = len(operators.select(config.operators)) + 2
    return Plan(config=config, num_actions=num_actions, num_train=len(split.train), num_test=len(split.test))


# --- build -----------------------------------------------------------------------------------------------------------


def build(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> Trainer:
    """Return a trainer with everything started; `stack` ends it. What cannot work is found before a model is loaded."""
    from query_mutator.evaluation.heldout import embed_questions
    from query_mutator.training.learners import make_learner
    from query_mutator.training.system import System, SystemSettings, TaskSettings, make_task, split_dataset

    task_settings = settings_of(TaskSettings, config)
    with progress("starting", 3, unit="part", terminal_only=True) as bar:
        split = split_dataset(task_settings)
        bar.update()
        check(config, split, checkpoint)
        bar.update()
        system = stack.enter_context(System(settings_of(SystemSettings, config, batch_size=config.calls_in_flight)))
        stack.enter_context(closing_on_interrupt(system.calls.close))
    embed_questions(system.encoder, split.train)
    task = make_task(system, task_settings, split.train, projection=checkpoint.projection if checkpoint else None)
    learner = make_learner(config, task, checkpoint)
    run_dir = open_run_dir(config, checkpoint)
    stack.callback(run_dir.close)
    return Trainer(config, system, task_settings, task, split, learner, run_dir, checkpoint)


def check(config: TrainConfig, split: Split, checkpoint: Checkpoint | None) -> None:
    """Raise a UsageError for settings that fit neither each other, the machine nor the checkpoint."""
    import torch

    from query_mutator import operators
    from query_mutator.env.task import SUBMIT, UNDO

    if not split.train:
        raise UsageError(f"{config.dataset}: no question is left to learn from, all are held out; add more")
    chosen = [operator.name for operator in operators.select(config.operators)]
    if checkpoint is not None:
        checkpoint.check_actions([*chosen, UNDO, SUBMIT])
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device {config.device} cannot be used ({reason}); try --device cpu") from error
    # A small network gains nothing from more, and threads that wait spin against those that carry calls.
    torch.set_num_threads(1)


def open_run_dir(config: TrainConfig, checkpoint: Checkpoint | None) -> RunDir:
    """Return a new run folder, or the one to go on in, cut back to where its checkpoint was made."""
    from query_mutator.runs.run_dir import RunDir

    if checkpoint is None or not Path(config.resume or "").is_dir():
        return RunDir.create(config.save_dir, config.name or config.algo)
    done = checkpoint.progress
    return RunDir(
        Path(config.resume or "").resolve(),
        first_step=done.env_steps,
        transcripts_bytes=done.transcripts_bytes,
        metrics_bytes=done.metrics_bytes,
    )


# --- train -----------------------------------------------------------------------------------------------------------


class Trainer:
    """One run from `begin` to `finish`; leaving it early leaves a checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        system: System,
        task_settings: TaskSettings,
        task: Task,
        split: Split,
        learner: AnyLearner,
        run_dir: RunDir,
        checkpoint: Checkpoint | None,
    ) -> None:
        from query_mutator.evaluation.methods import Evaluator
        from query_mutator.llm.counted import CallTotals
        from query_mutator.runs.run_log import RunLog
        from query_mutator.training.checkpoint import Progress
        from query_mutator.training.failure_rate import WINDOW_STEPS, FailureWindow
        from query_mutator.training.journal import Journal

        self.config, self.system, self.task_settings = config, system, task_settings
        self.task, self.split, self.learner, self.run_dir = task, split, learner, run_dir
        done = checkpoint.progress if checkpoint else Progress()
        self.env_steps = done.env_steps
        self.counted = system.calls.counted
        self.counted.go_on_from(CallTotals(calls=done.llm_calls, tokens=done.tokens))
        self.best_success = done.best_success
        self.journal = None
        if not config.max_policy_lag:  # with one, environments run ahead of what could be replayed
            self.journal = Journal(run_dir.journal_path, since=self.env_steps, on_replay=self.counted.add)
            keep_embeddings(system.encoder, self.journal)
        self.envs = make_envs(config, system, task, run_dir, self.journal)
        self.obs = self._go_on(checkpoint, done)
        self.invalid_steps_before = done.invalid_steps - sum(env.invalid_steps for env in self.envs.envs)
        self.evaluator = Evaluator(
            client=system.calls.eval_client,
            batch_size=config.calls_in_flight,
            retry_policy=system.retry_policy,
            progress=progress,
        )
        self.runlog = RunLog(system.calls, wall_s=done.wall_s)
        self.failures = FailureWindow(
            config.max_failure_rate, size=min(WINDOW_STEPS, config.rollout_steps), why=self._commonest_failure
        )
        self.has_advised = system.choice.kind == "embedded"  # our own server has as many slots as calls are made
        self.losses: dict[str, float] = {}
        self.rounds: Rounds | None = None
        self.latest = self._snapshot()
        self.saved: Path | None = checkpoint.path if checkpoint else None

    @property
    def updates_left(self) -> int:
        """Return how many updates are still to be made."""
        return self.config.num_updates - self.learner.updates_done

    def begin(self) -> None:
        """Say what is about to happen, write config.json, and put the first questions."""
        from query_mutator.evaluation.heldout import make_looks
        from query_mutator.runs.provenance import describe_run

        config = self.config
        note(*remarks(config), self.system.choice.reason, f"encoder: {self.system.encoder.source}")
        print(f"run folder: {self.run_dir.path}", flush=True)
        self.run_dir.write_config(describe_run(dataclasses.asdict(config), self.system), resumed_at=self.env_steps)
        self._write_checkpoint()  # the first one too: from it on no call is lost
        self.rounds = self._make_rounds()
        self.looks = None
        if config.updates_between_looks:
            self.looks = make_looks(self.evaluator, self.task, self.split.test, size=config.eval_questions)
        if self.looks and not self.env_steps:
            self.run_dir.metrics.write(self._look(), step=0, wall_s=self.runlog.wall_s)
        self.runlog.next_row(self.learner)
        self.runlog.open_bar(total_steps=config.total_steps, env_steps=self.env_steps)

    def collect(self) -> None:
        """Let every environment take its `num_steps`."""
        assert self.rounds is not None
        try:
            self.rounds.collect()
        except BackendError as error:  # it served the run until now
            raise TooManyFailuresError(str(error)) from error
        self.env_steps += self.config.rollout_steps

    def update(self) -> None:
        """Learn from them."""
        assert self.rounds is not None
        self.losses = self.rounds.update()

    def log(self) -> None:
        """Write a row of metrics when one is due, with a look at held-out questions when one is due."""
        done, last = self.learner.updates_done, not self.updates_left
        self.runlog.show()
        row: dict[str, float] = {}
        if last or done % self.config.log_interval == 0:
            row = {**self.runlog.row(self.learner), **self.losses, "llm/invalid_steps": self.invalid_steps}
            row["counters/env_steps"] = self.env_steps
        if self.looks and (last or done % self.config.updates_between_looks == 0):
            row |= self._look()
        if row:
            self.run_dir.metrics.write(row, step=self.env_steps, wall_s=self.runlog.wall_s)
            self.runlog.next_row(self.learner)
        if self.journal is not None:
            self.journal.begin(self.env_steps)
        self.latest = self._snapshot()

    def save(self) -> None:
        """Write a checkpoint when one is due."""
        if not self.updates_left or self.learner.updates_done % self.config.save_interval == 0:
            self._write_checkpoint()

    def finish(self) -> None:
        """Compare with what a sceptic would do, draw the curve, write summary.json, and say where everything is."""
        from query_mutator.evaluation.heldout import compare
        from query_mutator.files import read_json_lines
        from query_mutator.report.curve import draw_learning_curve
        from query_mutator.report.table import assistant_name, result_table

        config, wall_s, report = self.config, self.runlog.wall_s, None
        self.runlog.close()
        if config.evaluate and self.split.test:
            report = compare(
                self.evaluator, self.system, self.task, self.split.test, self.learner.frozen, seed=config.seed
            )
        self.run_dir.write_json(self.run_dir.summary_path, self._summary(report, wall_s))
        rows = list(read_json_lines(self.run_dir.metrics_path))
        target = assistant_name(self.system.target_model, embedded=self.system.embedded)
        draw_learning_curve(rows, self.run_dir.curve_path, title=f"{target}, seed {config.seed}")
        if report:
            print(result_table(report))
        print(f"run folder:     {self.run_dir.path}\nlearning curve: {self.run_dir.curve_path}")

    def _make_rounds(self) -> Rounds:
        from query_mutator.training.loop import make_rounds

        return make_rounds(
            self.config,
            self.envs,
            self.learner,
            self.obs,
            seed=envs_seed(self.config.seed, updates_done=self.learner.updates_done),
            on_steps=self._add_steps,
            journal=self.journal,
        )

    def _look(self) -> dict[str, float]:
        """Return the figures of a look at held-out questions."""
        assert self.looks is not None
        row = self.looks.look(self.learner.frozen)
        self.best_success = max(self.best_success, row["eval/success"])
        return {**row, "eval/best_success": self.best_success}

    def _go_on(self, checkpoint: Checkpoint | None, done: Progress) -> FloatArray | None:
        """Put the environments where the checkpoint left them; return their observations [N, O], None for new episodes.

        In the run's own folder they go on in the middle of their episodes, from a file they begin new ones.
        """
        if checkpoint is None:
            return None
        if checkpoint.envs is not None and Path(self.config.resume or "").is_dir():
            return self.envs.load_state_dict(checkpoint.envs)
        for env, episodes in zip(self.envs.envs, done.env_episodes, strict=False):
            env.total_steps, env.total_episodes = self.learner.updates_done * self.config.num_steps, episodes
        return None

    def _add_steps(self, infos: dict[str, Any], ended: BoolArray, valid: BoolArray) -> None:
        self.run_dir.write_records()
        self.runlog.add_steps(infos, ended)
        self.failures.add(valid)
        self._advise()

    def _advise(self) -> None:
        """Say once when the server works on fewer calls at once than it is sent."""
        from query_mutator.llm.probe import slots_advice, slots_under_load

        if self.has_advised:
            return
        in_flight = min(self.config.calls_in_flight, self.config.num_processes)
        calls = self.runlog.calls
        if calls.calls < ADVICE_AFTER_CALLS * in_flight:
            return
        self.has_advised = True
        kind = self.system.choice.kind
        advice = slots_advice(slots_under_load(calls, in_flight=in_flight), in_flight, kind=kind)
        if advice is not None:
            note(advice)

    def _commonest_failure(self) -> str:
        return "".join(f", most often {kind!r}" for kind, _ in self.counted.error_kinds.most_common(1))

    @property
    def invalid_steps(self) -> int:
        """Return the steps of the run that were left out of learning."""
        return self.invalid_steps_before + sum(env.invalid_steps for env in self.envs.envs)

    def _snapshot(self) -> Checkpoint:
        """Return the state after the last whole update: what a checkpoint holds whenever the run ends."""
        from query_mutator.runs.provenance import versions
        from query_mutator.training.checkpoint import Checkpoint, Progress, settled, snapshot

        flags = dataclasses.asdict(self.config)
        return Checkpoint(
            learner=snapshot(self.learner.state_dict()),
            actions=self.task.actions,
            task=self.task_settings,
            system=settled(self.system),
            projection=self.task.observer.projection,
            flags={name: value for name, value in flags.items() if name not in _OF_ONE_COMMAND},
            versions=versions(),
            progress=Progress(
                env_steps=self.env_steps,
                wall_s=self.runlog.wall_s,
                llm_calls=self.counted.totals.calls,
                invalid_steps=self.invalid_steps,
                tokens=self.counted.totals.tokens,
                best_success=self.best_success,
                env_episodes=tuple(env.total_episodes for env in self.envs.envs),
                transcripts_bytes=self.run_dir.transcripts.size_bytes,
                metrics_bytes=self.run_dir.metrics.rows.size_bytes,
            ),
            envs=None if self.config.max_policy_lag else self.envs.state_dict(),
        )

    def _write_checkpoint(self) -> None:
        from query_mutator.runs.run_dir import checkpoints_in, steps_of

        path = self.run_dir.checkpoint_path(self.latest.progress.env_steps)
        if path == self.saved:
            return
        self.run_dir.sync()
        self.saved = self.latest.save(path)
        if self.journal is not None:
            # The calls since the checkpoint before are kept: it is gone on from should this one be damaged.
            self.journal.drop_before(steps_of(checkpoints_in(self.run_dir.path)[:2][-1]))

    def _summary(self, report: dict[str, Any] | None, wall_s: float) -> dict[str, Any]:
        return {
            "eval": report,
            "env_steps": self.env_steps,
            "llm_calls": self.counted.totals.calls,
            "eval_llm_calls": self.system.calls.eval_counted.totals.calls,
            "invalid_steps": self.invalid_steps,
            "wall_s": round(wall_s, 3),
            "seed": self.config.seed,
            "backend": self.system.choice.kind,
            "embedded": self.system.embedded,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runlog.close()
        if error is not None:
            with contextlib.suppress(DiskError):  # which then is the error already
                self._write_checkpoint()
                note(f"checkpoint: {self.saved}; go on with --resume {self.run_dir.path}")
        self.system.calls.close()  # first, because the environments wait for calls in flight
        if self.rounds is not None:
            self.rounds.close()
        self.envs.close()
        if self.journal is not None:
            self.journal.close()


def make_envs(
    config: TrainConfig, system: System, task: Task, run_dir: RunDir, journal: Journal | None
) -> BatchedQueryMutationEnv | EnvGroups:
    """Return the environments of a run, for an off-policy learner in groups for its collectors."""
    from query_mutator.training.off_policy import EnvGroups
    from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

    envs = [
        QueryMutationEnv(
            task,
            client=system.calls.client,
            retry_policy=system.retry_policy,
            env_id=env,
            on_record=run_dir.add_record,
        )
        for env in range(config.num_processes)
    ]
    batch_size = config.batch_size if config.use_batching else None
    if config.algo != "ppo":
        return EnvGroups(envs, batch_size, num_groups=min(config.num_collectors, len(envs)), journal=journal)
    return BatchedQueryMutationEnv(envs, batch_size, journal=journal)


def keep_embeddings(encoder: Encoder, journal: Journal) -> None:
    """Have embeddings that a server makes written down before they are used, and take those found there."""
    import numpy as np

    from query_mutator.encoder.sentence import Remember

    if isinstance(encoder, Remember) and encoder.is_remote:
        if journal.vectors:
            encoder.remember(list(journal.vectors), np.stack(list(journal.vectors.values())))
        encoder.on_learn = journal.write_vectors


def envs_seed(seed: int, *, updates_done: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    Were it `seed` itself, runs with seeds next to each other would share most environments and be no independent
    repeats. After some updates it is another one: the same episodes again would teach nothing new.
    """
    import numpy as np

    return int(np.random.SeedSequence([seed, updates_done]).generate_state(1)[0])


if __name__ == "__main__":
    run_cli(main, prog=PROG)
