"""Train a policy that picks rewrites: parse -> build -> collect -> update -> log -> save.

    N environments, O observation

    python train_query_mutator.py --num-processes 16 --batch-size 8 --num-env-steps 10000

Nothing imported here loads torch, so `--help` is fast.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback

import contextlib
import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from query_mutator.cli.console import note, run_cli
from query_mutator.cluster import connected
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.task import Task
from query_mutator.errors import DiskError, TooFewAnswersError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import (
    NUM_QUESTIONS,
    compare,
    embed_questions,
    fixed_sample,
    price_for_budget,
    rank,
    search_plan,
    write_rows,
)  # fmt: skip
from query_mutator.evaluation.summary import IDENTITY, PLAN, check_report, cost_in_words, cost_of
from query_mutator.files import locked
from query_mutator.learners import Plan
from query_mutator.learners.learner import Steps
from query_mutator.llm.store import Store
from query_mutator.plan.choose import PlanChoice
from query_mutator.plan.table import learn_confidence
from query_mutator.report.build import write_report
from query_mutator.report.table import result_table
from query_mutator.session.models import is_instant, open_models
from query_mutator.session.play import cut_line
from query_mutator.session.task import guard_requests, make_task, split_dataset
from query_mutator.training.callbacks import (
    CallbackList,
    FailureLimit,
    LongPromptReport,
    RunLog,
    RunParts,
    RunView,
    SlotsAdvice,
    Validation,
    server_worked_before,
)
from query_mutator.training.config import (
    PROG,
    TrainConfig,
    check_run,
    comparison_cost,
    estimate,
    parse_config,
    remarks,
    use_device,
)
from query_mutator.training.loop import TrainingLoop, envs_seed, recall
from query_mutator.training.run_folder import (
    Checkpoint,
    Checkpoints,
    Progress,
    check_resumption,
    make_learner,
    open_run_dir,
    read_checkpoint,
    resumed_flags,
    resumed_models,
    write_config,
    write_summary,
)
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

BUDGET_SLACK = 1.05  # the mean calls of some hundred questions are known to about a twentieth


def main(argv: Sequence[str], *, prog: str = PROG) -> int:
    """Train with the flags of `argv`; return the exit code. `prog` is the name of the command in its help."""
    with ExitStack() as stack:
        config, checkpoint = parse(argv, stack, prog=prog)
        if config.dry_run:
            split = split_dataset(config)
            check_run(config, split)
            use_device(config)
            note(*remarks(config))
            print(estimate(config, split, is_live=not is_instant(config)))
            return 0
        try:
            trainer = stack.enter_context(build(config, checkpoint, stack))
        except KeyboardInterrupt:
            note("nothing was trained: give the same command again" + ("" if checkpoint is None else ", with --resume"))
            raise
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
    """Return the flags, and with --resume the checkpoint that provides their defaults; `stack` locks its folder."""
    config = parse_config(argv, prog=prog)
    if config.resume is None:
        return config, None

    if Path(config.resume).is_dir() and not config.dry_run:
        stack.enter_context(locked(Path(config.resume).resolve()))
    checkpoint = read_checkpoint(config.resume)
    config = parse_config(argv, base=lambda _: (resumed_flags(config, checkpoint), str(checkpoint.path)))
    check_resumption(config, checkpoint)
    return config, checkpoint


# --- build -----------------------------------------------------------------------------------------------------------


def build(config: TrainConfig, checkpoint: Checkpoint | None, stack: ExitStack) -> Trainer:
    """Return a ready trainer, closed by `stack`. Settings are checked before a model is loaded."""
    split = split_dataset(config)
    check_run(config, split)
    ray = stack.enter_context(connected(config.ray_address)) if config.engine == "ray" else None
    models = stack.enter_context(open_models(resumed_models(config, checkpoint), dataset=config.dataset))
    use_device(config)  # after the server has answered
    embed_questions(models.encoder, split.train + split.validation)
    must_learn = "answer" in config.given
    projection = checkpoint.projection if checkpoint else None
    task = make_task(models, config, split.train, projection=projection, learns=config.answer == "learned")
    size = estimate(config, split, is_live=not models.calls.backend_class.is_instant)
    config = size.config
    note(*size.decided)
    if config.evaluate:
        embed_questions(models.encoder, fixed_sample(split.test, size.comparison[1]))
    learner = make_learner(config, task, checkpoint)
    run_dir = open_run_dir(config, checkpoint, stack)
    done = checkpoint.progress if checkpoint else Progress()
    models.calls.client.totals = done.totals
    store = stack.enter_context(closing(Store(run_dir.store_path)))
    store.begin(done.env_steps)
    models.calls.keep(store)
    evaluator = Evaluator.of(models, max_failure_rate=config.max_failure_rate)
    if config.answer == "learned":
        known = checkpoint.confidence if checkpoint else None
        config, task, answers = with_confidence(config, task, evaluator, known, must_learn=must_learn)
        recall(learner, task, answers, seed=config.seed)
    common: dict[str, Any] = {"client": models.calls.client, "retry_policy": models.retry_policy}
    env_list = [
        QueryMutationEnv(task, env_id=env_id, on_record=run_dir.add_record, **common)
        for env_id in range(config.num_processes)
    ]
    parts = RunParts(
        config=config,
        models=models,
        task=task,
        split=split,
        learner=learner,
        run_dir=run_dir,
        store=store,
        env_list=env_list,
        envs=BatchedQueryMutationEnv(env_list, config.calls_in_flight),
        evaluator=evaluator,
        runlog=RunLog(models.calls, wall_s=done.wall_s),
    )
    return Trainer(parts, checkpoint, ray=ray)


def with_confidence(
    config: TrainConfig, task: Task, evaluator: Evaluator, known: ConfidenceModel | None, *, must_learn: bool
) -> tuple[TrainConfig, Task, dict[int, QuestionMemory]]:
    """Return the settings, the task with P(right) for --answer learned (`known`, or fitted), and the fit's answers.

    With too few answers to fit, submit by vote; TooFewAnswersError if `must_learn`.
    """
    answers: dict[int, QuestionMemory] = {}
    try:
        if known is None:
            known, answers = learn_confidence(evaluator, task, max_calls=config.answer_calls, seed=config.seed)
    except TooFewAnswersError as error:
        if must_learn:
            raise
        note(f"--answer vote: {error}, as by a larger --answer-calls")
        voting = replace(task.with_rules(answer="vote"), calls=replace(task.calls, logprobs=False))  # as when resumed
        return replace(config, answer="vote"), voting, {}
    note(known.report.in_words)
    return config, replace(task, confidence=known), answers


# --- train -----------------------------------------------------------------------------------------------------------


class Trainer:
    """One run from `begin` to `finish`; saves a checkpoint if it ends early.

    Environments continue from the checkpoint's state; `ray` runs the rollout workers.
    """

    def __init__(self, parts: RunParts, checkpoint: Checkpoint | None, *, ray: ModuleType | None) -> None:
        self.parts, self.config, self.ray = parts, parts.config, ray
        self.obs = parts.envs.load_state_dict(checkpoint.envs) if checkpoint else None
        done = checkpoint.progress if checkpoint else Progress()
        self.run = RunView(
            config=parts.config,
            folder=parts.run_dir.path,
            env_steps=done.env_steps,
            updates_done=parts.learner.updates_done,
            invalid_steps=done.invalid_steps,
            best_success=done.best_success,
            row={**(done.open_row or {})},
            is_row_open=done.open_row is not None,
        )
        self.losses: dict[str, float] = {}
        self.best_plan: tuple[Plan, ConfidenceModel | None, GainModel | None] = Plan(), None, None
        self.pages = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qm-page")
        self.is_page_due = True
        self.preparation = ThreadPoolExecutor(max_workers=2, thread_name_prefix="qm-prepare")
        self.plan_search: Future[PlanChoice | None] | None = None
        self.loop: TrainingLoop | None = None
        self.callbacks = CallbackList([FailureLimit(parts), SlotsAdvice(parts), LongPromptReport(parts)])
        self.validation = Validation(parts, at_once=ray is not None or not parts.config.use_batching)
        self.checkpoints = Checkpoints(parts, self.run, resumed=checkpoint)

    @property
    def updates_left(self) -> int:
        """Return the number of updates left to make."""
        return self.config.num_updates - self.parts.learner.updates_done

    def begin(self) -> None:
        """Print the settings, write config.json and the first checkpoint, and prepare the training loop."""
        parts, models = self.parts, self.parts.models
        note(*remarks(self.config), models.choice.reason, f"encoder: {models.encoder.source}")
        print(f"run folder: {parts.run_dir.path}", flush=True)
        write_config(parts, resumed_at=self.run.env_steps)
        self.checkpoints.write()  # from the first one on, no completed call is lost
        self.callbacks.call("on_training_start", self.run)
        envs = parts.envs
        if self.ray is not None:
            from query_mutator.cluster.rollouts import RemoteEnvs

            envs = RemoteEnvs(self.ray, parts)
        self.loop = TrainingLoop(
            envs,
            parts.learner,
            self.obs,
            seed=envs_seed(self.config.seed),
            num_steps=self.config.num_steps,
            on_steps=self._add_steps,
            store=parts.store,
            max_pending_updates=self.config.max_pending_updates,
        )
        parts.runlog.next_row(parts.learner)
        parts.runlog.open_bar(total_steps=self.config.total_steps, env_steps=self.run.env_steps)
        with server_worked_before():
            self.validation.begin(self.run)
        self._prepare_comparison()

    def _prepare_comparison(self) -> None:
        """Ask what the final comparison asks on training questions in the slots that rollouts and updates leave idle.

        It asks itself with --no-batching, without a server, and where other machines collect.
        """
        config, parts = self.config, self.parts
        at_once = not config.use_batching or self.ray is not None or parts.models.calls.backend_class.is_instant
        if config.evaluate and parts.split.test and not at_once:
            cost = comparison_cost(config, parts.split).within(config.eval_calls)
            search = partial(search_plan, parts.evaluator, parts.task, cost, seed=config.seed, budget=config.budget)
            self.plan_search = self.preparation.submit(search)
            self.preparation.submit(rank, parts.evaluator, parts.models, parts.task, cost.num_ranking)

    def collect(self) -> None:
        """Take `num_steps` steps in every environment."""
        assert self.loop is not None
        with server_worked_before():
            self.loop.collect()
            if self.run.is_row_open:
                self._finish_row()
        self.run.env_steps += self.config.rollout_steps
        self.callbacks.call("on_rollout_end", self.run)

    def update(self) -> None:
        """Learn from the steps taken."""
        assert self.loop is not None
        self.losses = self.loop.update()
        self.run.updates_done = self.parts.learner.updates_done

    def log(self) -> None:
        """Write a row of metrics when one is due; a row with a periodic evaluation waits for the next rollout."""
        run, parts = self.run, self.parts
        run.row = {}
        run.invalid_steps = sum(env.invalid_steps for env in parts.env_list)
        if run.is_last or run.updates_done % self.config.log_interval == 0:
            run.row = {**parts.runlog.row(parts.learner), **self.losses, "llm/invalid_steps": run.invalid_steps}
            run.row["counters/env_steps"] = run.env_steps
            self.callbacks.call("on_log", run)
            parts.runlog.next_row(parts.learner)
        with server_worked_before():
            self.validation.start(run)
            if not run.is_row_open:
                self._finish_row()
        parts.store.begin(run.env_steps)
        self.checkpoints.keep()

    def _finish_row(self) -> None:
        """Write the row of the last update, if it has metrics, with those of the pending evaluation."""
        run, parts = self.run, self.parts
        self.validation.finish(run)
        self.callbacks.call("on_update_end", run)
        if run.row:
            wall_s = run.row.get("counters/training_s", parts.runlog.wall_s)
            parts.run_dir.metrics.write(run.row, step=run.env_steps, wall_s=wall_s)
            self.is_page_due |= "validation/success" in run.row

    def _write_page(self) -> None:
        """Write the page in a thread, if it is due: calls do not wait for it."""
        if self.is_page_due:
            self.is_page_due = False
            self.pages.submit(write_report, self.parts.run_dir.path)

    def save(self) -> None:
        """Write a checkpoint when one is due."""
        if self.run.is_last or self.run.updates_done % self.config.save_interval == 0:
            self.checkpoints.write()

    def finish(self) -> dict[str, Any] | None:
        """Compare with the baselines, write summary.json and the page, print their paths; return the comparison."""
        parts, path, wall_s = self.parts, self.parts.run_dir.path, self.parts.runlog.wall_s
        if self.run.is_row_open:
            self._finish_row()
        self._write_page()
        parts.runlog.close()
        task = self._within_budget()
        report = self._compare(task) if self.config.evaluate and parts.split.test else None
        write_summary(parts, self.run, wall_s=wall_s, report=report)
        if report:
            print(result_table(report))
            budget, policy = self.config.budget, report["methods"]["policy"]
            if budget is not None and cost_of(policy) > BUDGET_SLACK * budget:
                taken = cost_in_words(policy)
                note(f"--budget {budget:g} was met on validation questions; the policy took {taken} on these")
        note(*cut_line(parts.models.calls.client.totals + parts.models.calls.eval_client.totals))
        print(f"run folder:     {path}")
        self.pages.shutdown(wait=True)
        if page := write_report(path):
            print(f"report:         {page}")
        self._keep_best(report)
        self.callbacks.call("on_training_end", self.run)
        # A recording has no reply to the user's own question.
        again = self.checkpoints.named_again
        further = f'; qm rewrite {path} "your question"{again}' if parts.models.choice.recording is None else ""
        print(f"next:           qm show {path}{further}")
        return report

    def _within_budget(self) -> Task:
        """Save the call price at which the policy meets --budget; return the task with that price."""
        parts, config = self.parts, self.config
        if config.budget is None:
            return parts.task
        # A quarter of the calls of training, those from the cache included.
        most = estimate(config, parts.split, is_live=False).calls // (4 * parts.task.max_episode_calls)
        count = max(1, min(NUM_QUESTIONS, most))
        questions = fixed_sample(parts.split.validation or parts.split.train, count)
        with server_worked_before():
            price, paid = price_for_budget(
                parts.evaluator, parts.task.on(questions), parts.learner.frozen, config.budget
            )
        of = "validation" if parts.split.validation else "training"
        unit = "calls" if not parts.task.prices else "in price"
        taken = f"takes {paid:.3g} {unit} on {len(questions)} {of} questions"
        note(f"--budget {config.budget:g}: the policy acts at a price of {price:g} for each call, and {taken}")
        self.checkpoints.set_price(price)
        return parts.task.with_rules(call_price=(price,))

    def _compare(self, task: Task) -> dict[str, Any]:
        config, parts, search = self.config, self.parts, self.plan_search
        with server_worked_before():
            return compare(
                parts.evaluator,
                parts.models,
                task,
                parts.split.test,
                parts.learner.frozen,
                seed=config.seed,
                search_calls=config.plan_calls,
                budget=config.budget,
                max_calls=config.eval_calls,
                guard=guard_requests(parts.split.guard, with_bundled=config.guard),
                search=None if search is None else search.result,
                on_plan=self._keep_plan,
                keep=partial(write_rows, parts.run_dir.evaluation_path),
                show=lambda report: print(result_table(report)),
            )

    def _keep_plan(self, plan: Plan, confidence: ConfidenceModel | None, gains: GainModel | None) -> None:
        self.best_plan = plan, confidence, gains

    def _keep_best(self, report: Mapping[str, Any] | None) -> None:
        """Save what the verdict says to deploy, if there is one, and print its path."""
        chosen = report["verdict"]["deploy"] if report else None
        if chosen is None:
            return
        plan = {IDENTITY: Plan(), PLAN: self.best_plan[0]}.get(chosen)
        path = self.checkpoints.write_best(plan, *self.best_plan[1:])
        what = "the policy" if plan is None else f"the plan {plan}" if plan.steps else str(plan)
        print(f"best:           {path}: {what}, which qm rewrite, qm batch and qm serve use")

    def _add_steps(self, infos: dict[str, Any], steps: Steps) -> None:
        records = self.parts.run_dir.write_records()
        self.parts.runlog.add_steps(infos, steps.terminations | steps.truncations)
        self.validation.check()
        self._write_page()  # now that calls are in flight
        self.callbacks.call("on_step", self.run, steps, records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        parts, error = self.parts, exc_info[1]
        parts.runlog.close()
        if error is not None:
            with contextlib.suppress(DiskError):  # it is being reported already
                self.checkpoints.write()
                again = self.checkpoints.named_again
                note(f"checkpoint: {self.checkpoints.path}; continue with --resume {parts.run_dir.path}{again}")
        parts.models.calls.close()  # first, because the environments wait for calls in flight
        self.pages.shutdown(wait=True, cancel_futures=True)
        self.preparation.shutdown(wait=True, cancel_futures=True)
        self.validation.close()
        parts.envs.close()
        self.callbacks.close(error if isinstance(error, BaseException) else None)


if __name__ == "__main__":
    run_cli(main, prog=PROG)
