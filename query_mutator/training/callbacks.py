"""The hooks of a training run: what hangs on the loop without being part of it, ours and those of `--plugin`.

    from query_mutator.training.callbacks import CALLBACKS, Callback

    @CALLBACKS.register("progress")
    class Progress(Callback):
        def on_rollout_end(self, run):
            print(run.env_steps, "steps")

Every callback that a plugin registers, or an installed distribution (entry points `query_mutator.callbacks`), is used
in the run, built without arguments. `RunLog` has statistics since the last row of metrics (episodes, steps, calls), and
the progress bar that shows them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.cli.console import note, progress
from query_mutator.data import Split
from query_mutator.env.task import Task
from query_mutator.errors import BackendError, QueryMutatorError, TooManyFailuresError, UsageError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import fixed_sample, validation_figures
from query_mutator.files.run_dir import RunDir
from query_mutator.learners.learner import Learner, Steps
from query_mutator.llm.cache import CallTotals
from query_mutator.llm.probe import reported_slots, slots_advice, slots_under_load
from query_mutator.llm.stack import ClientStack
from query_mutator.llm.store import Store
from query_mutator.registry import Registry
from query_mutator.session.models import OpenModels
from query_mutator.session.play import WINDOW_STEPS, FailureWindow
from query_mutator.training.config import TrainConfig
from query_mutator.types import StepRecord

if TYPE_CHECKING:
    from query_mutator.cli.console import FiguresBar

ADVICE_AFTER_CALLS = 6  # per call in flight: by then the server's queue shows
SHOWN_QUESTIONS = 5  # whose prompt was too long, by name


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


@dataclass(slots=True, kw_only=True)
class RunView:
    """A run as its callbacks see it."""

    config: TrainConfig
    folder: Path
    env_steps: int = 0  # of the run so far, in all environments
    updates_done: int = 0
    invalid_steps: int = 0  # masked out of learning, up to the last update
    best_success: float = 0.0  # of the periodic evaluations
    row: dict[str, float] = field(default_factory=dict)  # in `on_log`: the metrics about to be written; add `custom/x`
    is_row_open: bool = False  # the row is written when an evaluation that is being made has its figures

    @property
    def is_last(self) -> bool:
        """Return whether the run has made its last update."""
        return self.updates_done >= self.config.num_updates


class Callback:
    """Base of a callback: override the hooks you need."""

    def on_training_start(self, run: RunView) -> None:
        """Prepare for a new or resumed run, whose folder and first checkpoint exist."""

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Take finished steps, and the rows of transcripts.jsonl that were written since the previous call."""

    def on_rollout_end(self, run: RunView) -> None:
        """Act between a rollout and the update that learns from it."""

    def on_log(self, run: RunView) -> None:
        """Add figures to `run.row`, which is written after this."""

    def on_update_end(self, run: RunView) -> None:
        """Act after an update and `on_log`; `run.row` is empty when no row was due, and written if it is not.

        Where the policy is evaluated after the update, this is called at the end of the next rollout; for the
        evaluation before training likewise.
        """

    def on_training_end(self, run: RunView) -> None:
        """Act after the last update and the comparison; not called for a run that ends early."""

    def close(self, error: BaseException | None) -> None:
        """Release resources; called once however a run ends that was started, with what ended it early."""


CALLBACKS: Registry[Callable[[], Callback]] = Registry("callback", group="query_mutator.callbacks")


class CallbackList:
    """The callbacks of a run in order: ours, then those of plugins by name.

    An error in a plugin's callback is a UsageError that names it. One that was not started is not closed.
    """

    def __init__(self, own: Sequence[Callback]) -> None:
        self._all: list[tuple[str, Callback]] = [("", one) for one in own]
        self._started: list[tuple[str, Callback]] = []
        for name in CALLBACKS:
            with _named_errors(name, "__init__"):
                self._all.append((name, CALLBACKS.get(name)()))

    def call(self, hook: str, run: RunView, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for name, callback in self._all:
            if hook == "on_training_start":
                self._started.append((name, callback))
            with _named_errors(name, hook):
                getattr(callback, hook)(run, *args)

    def close(self, error: BaseException | None) -> None:
        """Close every callback that was started."""
        for name, callback in self._started:
            with _named_errors(name, "close"):
                callback.close(error)


@contextmanager
def _named_errors(name: str, hook: str) -> Iterator[None]:
    try:
        yield
    except QueryMutatorError:
        raise
    except Exception as error:  # user code fails in every way there is
        if not name:
            raise
        raise UsageError(f"callback {name!r} failed in {hook}: {type(error).__name__}: {error}") from error


@contextmanager
def server_worked_before() -> Iterator[None]:
    """Turn a server that fails from here on into TooManyFailuresError: the run can be resumed."""
    try:
        yield
    except BackendError as error:
        raise TooManyFailuresError(str(error)) from error


# --- ours -------------------------------------------------------------------------------------------------------------


class SlotsAdvice(Callback):
    """Print once that the server works on fewer calls at a time than it is sent."""

    def __init__(self, parts: RunParts) -> None:
        self._models, self._runlog = parts.models, parts.runlog
        self._has_advised = bool(parts.config.local_server_url)  # servers on the workers' machines are not asked here

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Print the advice when enough calls were made."""
        if self._has_advised:
            return
        in_flight = min(run.config.calls_in_flight, run.config.num_processes)
        calls = self._runlog.calls
        if calls.calls < ADVICE_AFTER_CALLS * in_flight:
            return
        self._has_advised = True
        stack = self._models.calls
        reported = reported_slots(stack.servers, self._models.target_model)
        is_measured = stack.backend_class.reports_queue
        slots = reported or (slots_under_load(calls, in_flight=in_flight) if is_measured else None)
        advice = slots_advice(slots, in_flight, server=stack.backend_class, is_reported=reported is not None)
        if advice is not None:
            note(advice)


class FailureLimit(Callback):
    """Raise TooManyFailuresError when more than `--max-failure-rate` of the recent steps failed."""

    def __init__(self, parts: RunParts) -> None:
        self._calls = parts.models.calls
        size = min(WINDOW_STEPS, parts.config.rollout_steps)
        self._window = FailureWindow(parts.config.max_failure_rate, size=size, why=self._most_common_failure)

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Count the steps."""
        self._window.add(steps.valid)

    def _most_common_failure(self) -> str:
        [(kind, _)] = self._calls.client.error_kinds.most_common(1) or [("", 0)]
        advice = f" ({self._calls.backend_class.more_context})" if kind == "prompt_too_long" else ""
        return f", most often {kind!r}{advice}" if kind else ""


class LongPromptReport(Callback):
    """Report prompts that were too long: the first few questions when they are asked, their number in each row."""

    def __init__(self, parts: RunParts) -> None:
        self._envs, self._reported = parts.env_list, set[str]()
        self._advice = parts.models.calls.backend_class.more_context

    @property
    def _counts(self) -> Counter[str]:
        """Return how often a prompt did not fit, by the question's id."""
        return sum((env.prompts_too_long for env in self._envs), Counter())

    def on_rollout_end(self, run: RunView) -> None:
        """Print a line for each new question."""
        for question in self._counts:
            if question not in self._reported and len(self._reported) < SHOWN_QUESTIONS:
                note(f"question {question}: its prompt does not fit the model's context, not scored; {self._advice}")
                self._reported.add(question)

    def on_log(self, run: RunView) -> None:
        """Add the number to the row."""
        run.row["llm/prompts_too_long"] = self._counts.total()

    def on_training_end(self, run: RunView) -> None:
        """Print the sum."""
        if counts := self._counts:
            what = f"{counts.total()} prompts of {len(counts)} question{'s' * (len(counts) > 1)}"
            note(f"{what} did not fit the model's context and were not scored; {self._advice}")


class Validation:
    """Evaluates the policy before the first update, every `updates_between_evals` updates, and after the last.

    It is evaluated while the next rollout is collected, whose calls keep the slots busy that its last episodes leave
    idle; at once with --no-batching, and where other machines collect.
    """

    def __init__(self, parts: RunParts, *, at_once: bool) -> None:
        self._parts, self._task = parts, parts.task
        self._is_wanted = bool(parts.config.updates_between_evals and parts.split.validation)
        if self._is_wanted:
            self._task = parts.task.on(fixed_sample(parts.split.validation, parts.config.eval_questions))
        self._thread = None if at_once else ThreadPoolExecutor(max_workers=1, thread_name_prefix="qm-validation")
        self._figures: Future[dict[str, float]] | None = None  # of the evaluation that was started
        self._identity: dict[str, float] = {}  # the figure of the original questions, once it is known

    def begin(self, run: RunView) -> None:
        """Start the evaluation before the first update, or the one that was being made when the run was interrupted."""
        config, parts = run.config, self._parts
        if config.validation_fold != "none" and not parts.split.validation:
            note(
                f"--validation-fold {config.validation_fold} holds none of the {len(parts.split.train)} questions to "
                "learn from, so there are no periodic evaluations; give another fold"
            )
        if self._is_wanted and (not run.env_steps or run.is_row_open):
            self._start(run)

    def start(self, run: RunView) -> None:
        """Start an evaluation of the policy after an update, when one is due."""
        if self._is_wanted and (run.is_last or run.updates_done % run.config.updates_between_evals == 0):
            self._start(run)

    def finish(self, run: RunView) -> None:
        """Add the figures of the evaluation that was started to the row; wait for them."""
        figures, self._figures, run.is_row_open = self._figures, None, False
        if figures is None:
            return
        row = figures.result()
        self._identity = self._identity or {key: row[key] for key in ("validation/identity_success",)}
        run.best_success = max(run.best_success, row["validation/success"])  # NaN leaves the first
        self._parts.runlog.validated(row["validation/success"])
        run.row |= {**row, **self._identity, "validation/best_success": run.best_success}

    def check(self) -> None:
        """Raise what ended the evaluation early."""
        if self._figures is not None and self._figures.done():
            self._figures.result()

    def close(self) -> None:
        """Stop the thread; its calls must have been cancelled. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, run: RunView) -> None:
        run.is_row_open = True
        evaluate = partial(
            validation_figures,
            self._parts.evaluator,
            self._task,
            self._parts.learner.frozen,
            with_identity=not self._identity,
        )
        if self._thread is not None:
            self._figures = self._thread.submit(evaluate)
        else:
            self._figures = Future()
            self._figures.set_result(evaluate())


# --- rows of metrics, and the progress bar ---------------------------------------------------------------------------

#: What `add_steps` reads of an episode's final info -> its metric key.
EPISODE_FIGURES = {
    "episode_return": "charts/episodic_return",
    "episode_length": "charts/episodic_length",
    "success": "charts/success",
    "baseline_success": "charts/baseline_success",
}
_FIGURES = ("valid", "return", "rate", "share", "failed")
_SETTLED_S = 2.0  # after a row, the rates of a shorter time say nothing


class RunLog:
    """Collects statistics between two rows; `wall_s` continues from an earlier part of the run."""

    def __init__(self, calls: ClientStack, *, wall_s: float = 0.0) -> None:
        self._calls = calls
        self._bar: FiguresBar | None = None
        self._shown: dict[str, str] = {}  # the latest figures of the bar
        self._began = time.perf_counter() - wall_s
        self._episodes: list[dict[str, float]] = []
        self._steps = self._learned_then = 0
        self._calls_at_start = calls.client.totals
        self._mark()

    def open_bar(self, *, total_steps: int, env_steps: int) -> None:
        """Show a progress bar from now on."""
        self._bar = progress("training", total_steps, unit="step", initial=env_steps)
        self._bar.figures = self.figures

    @property
    def wall_s(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._began

    def add_steps(self, infos: Mapping[str, Any], ended: NDArray[np.bool_]) -> None:
        """Count finished steps; episodes of those that `ended` [n] are in `infos["final_info"]`."""
        self._steps += len(ended)
        if ended.any():
            final = infos["final_info"]
            self._episodes += [
                {key: float(final[name][env]) for name, key in EPISODE_FIGURES.items()} for env in np.flatnonzero(ended)
            ]
        if self._bar is not None:
            self._bar.update(len(ended))

    @property
    def calls(self) -> CallTotals:
        """Return the totals of calls for training since this process started."""
        return self._calls.client.totals - self._calls_at_start

    def validated(self, success: float) -> None:
        """Show the success of a periodic evaluation from now on."""
        if not math.isnan(success):
            self._shown["valid"] = f"valid {100 * success:.0f}%"

    def figures(self) -> list[str]:
        """Return the figures of the progress bar, the most important first; rates of the time since the last row."""
        totals, calls, seconds = self._calls.client.totals, self._calls_since(), self._seconds()
        if (value := self._episode_means().get("charts/episodic_return")) is not None:
            self._shown["return"] = f"return {value:+.2f}"
        if seconds > _SETTLED_S or "rate" not in self._shown:
            share = min(1.0, calls.latency_s / (seconds * self._calls.limit.limit))
            self._shown |= {"rate": f"{calls.calls / seconds:.3g} calls/s", "share": f"limit {100 * share:.0f}%"}
        self._shown["failed"] = f"{totals.failed} failed"
        return [self._shown[name] for name in _FIGURES if name in self._shown]

    def row(self, learner: Learner) -> dict[str, float]:
        """Return the figures since the last row, under their metric keys."""
        seconds, calls = self._seconds(), self._calls_since()
        each = max(1, calls.calls)
        return {
            **self._episode_means(),
            "charts/SPS": self._steps / seconds,
            "perf/transitions_learned_per_second": (learner.samples_learned - self._learned_then) / seconds,
            "counters/updates": learner.gradient_steps,
            "counters/samples_learned": learner.samples_learned,
            "counters/llm_calls": self._calls.client.totals.calls,
            "counters/tokens": self._calls.client.totals.tokens,
            "counters/training_s": self.wall_s,
            "llm/calls": self._calls.client.totals.calls,
            "llm/calls_per_s": calls.calls / seconds,
            "llm/failed_calls": self._calls.client.totals.failed,
            "llm/retries": self._calls.client.totals.retries,
            "llm/cut_replies": self._calls.client.totals.cut_replies,
            "llm/latency_s": calls.latency_s / each,
            "llm/queue_wait_s": calls.queue_wait_s / each,
            "llm/tokens_per_call": calls.tokens / each,
            "llm/reply_tokens_per_call": calls.reply_tokens / each,
            "llm/limit": self._calls.limit.limit,
            "llm/shared_calls": self._calls.shared_calls,
            "llm/cache_hits": self._calls.cache_hits,
        }

    def next_row(self, learner: Learner) -> None:
        """Start the next row."""
        self._episodes, self._steps, self._learned_then = [], 0, learner.samples_learned
        self._mark()

    def close(self) -> None:
        """Close the bar; idempotent."""
        if self._bar is not None:
            self._bar.close()

    def _mark(self) -> None:
        self._since = time.perf_counter()
        self._calls_then = self._calls.client.totals

    def _seconds(self) -> float:
        return max(1e-9, time.perf_counter() - self._since)

    def _calls_since(self) -> CallTotals:
        return self._calls.client.totals - self._calls_then

    def _episode_means(self) -> dict[str, float]:
        if not self._episodes:
            return {}
        means = {key: float(np.mean([episode[key] for episode in self._episodes])) for key in self._episodes[0]}
        return {key: value for key, value in means.items() if not math.isnan(value)}  # originals that were not asked
