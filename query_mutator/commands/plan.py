"""`qm plan`: find the best plan on training questions, with the calls that fit, and save it as a checkpoint."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from query_mutator.bounds import group_of
from query_mutator.cli.console import note, progress
from query_mutator.cli.flags import rows_of, show
from query_mutator.commands.plan_logs import plan_from_logs
from query_mutator.commands.plan_run import PlanFlags, plan_run
from query_mutator.errors import UsageError
from query_mutator.evaluation.cost import power_in_words
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.outcomes import rejections_in_words
from query_mutator.evaluation.plan_search import MAX_CALLS, MIN_CALLS, find_plan, is_wide, questions_searched
from query_mutator.evaluation.plan_trials import PlanSearch
from query_mutator.llm.backends import choose_backend
from query_mutator.session.models import open_models
from query_mutator.session.pace import keep_pace, kept_pace, measure_pace
from query_mutator.session.task import check_gold, make_task, rewrites, split_dataset
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.estimate import call_time, duration, encoding_time, text_time
from query_mutator.types import ErrorInfo

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.session.models import OpenModels


@dataclass(frozen=True, slots=True)
class CallBudget:
    """A bound on calls, and the seconds that one takes while others are in flight, None where it is unknown."""

    max_calls: int
    call_s: float | None
    learned: bool  # whether some of them go to P(right)

    def announced(self, task: Task) -> str:
        """Return what a search will take, in one line."""
        wide = is_wide(task, self.max_calls)
        count = questions_searched(len(task.questions), self.max_calls, is_wide=wide, learned=self.learned)
        line = f"{count} questions, at most {self.max_calls:,} calls"
        if self.call_s is None:
            return f"{line} (qm doctor measures how long they take)"
        return f"{line}, about {duration(self.max_calls * self.call_s)} at {1 / self.call_s:.3g} calls/s"


def calls_in(seconds: float, call_s: float) -> int:
    """Return the calls that fit into some time, rounded to two digits so that a search can be repeated."""
    fitting = min(MAX_CALLS, max(MIN_CALLS, seconds / call_s))
    unit = 10 ** (math.floor(math.log10(fitting)) - 1)
    return int(fitting // unit * unit)


def measured_budget(flags: PlanFlags, models: OpenModels, task: Task) -> CallBudget:
    """Return the bound on the calls of a search; without --max-calls the speed of the models is measured.

    Recorded replies answer MAX_CALLS calls within minutes.
    """
    learned = flags.answer == "learned"
    is_instant = models.calls.backend_class.is_instant
    pace = None if is_instant else kept_pace(flags, flags, mutator=flags.mutator_model)
    if not is_instant and pace is None and flags.max_calls is not None:
        return CallBudget(flags.max_calls, None, learned)
    if not is_instant and pace is None:
        client, at_once = models.calls.limit, flags.calls_in_flight
        calling = [one for place, one in enumerate(task.operators) if not task.is_local(place)]
        client.complete(task.calls.target(task.questions[0].text))  # loads the model
        measured = measure_pace(client, task.calls, task.questions, calling, at_once=at_once)
        if not isinstance(measured, ErrorInfo):
            keep_pace(measured, flags, flags, mutator=flags.mutator_model)
    call_s = text_time(models.encoder) + call_time(flags, flags, operators=flags.operators)[0]
    fitting = MAX_CALLS if is_instant else calls_in(60 * flags.minutes, call_s)
    return CallBudget(flags.max_calls or fitting, call_s, learned)


def plan(flags: PlanFlags) -> None:
    """Search, save the found plan in a run folder, and print it with the best plans at other budgets."""
    if flags.from_logs is not None:
        plan_from_logs(flags)
        return
    started = time.perf_counter()
    if flags.answer == "learned" and "forms" in flags.given and len(rewrites(flags)[1]) < 2:
        raise UsageError("--answer learned chooses among answers in several forms; name two or more with --forms")
    split = split_dataset(_task_settings(flags))
    train = split.train
    if not train:
        raise UsageError(f"{flags.dataset}: no question is left to search on, all are held out; add more questions")
    choose_backend(flags.backend, flags.urls)
    check_gold([*train, *split.test], _task_settings(flags))
    if flags.dry_run:
        print(_estimate(flags, len(train)), power_in_words(split.test, flags), sep="\n")
        return
    with ExitStack() as stack:
        models = stack.enter_context(open_models(flags, dataset=flags.dataset))
        settings = _task_settings(flags)
        embed_questions(models.encoder, train)
        task = make_task(models, settings, train, learns=flags.answer == "learned")
        run = stack.enter_context(plan_run(flags, models, task))  # a folder that cannot be written costs no calls
        note(models.choice.reason)
        calls = measured_budget(flags, models, task)
        run.begin(replace(flags, max_calls=calls.max_calls), settings, split)
        note(calls.announced(task), power_in_words(split.test, flags))
        evaluator = Evaluator.of(models, max_failure_rate=flags.max_failure_rate)
        evaluator.client = run.client(evaluator.client)
        is_bounded = flags.max_calls is not None or models.calls.backend_class.is_instant
        search = find_plan(
            evaluator,
            task,
            max_calls=calls.max_calls,
            seconds=None if is_bounded else 60 * flags.minutes - (time.perf_counter() - started),
            seed=flags.seed,
            budget=flags.budget,
            learned=flags.answer == "learned",
            progress=progress,
            on_best=run.keep,
        )
        run.finish(search)
        path = str(run.run_dir.path)
    about = {"questions_in_training": len(train), "run_folder": path}
    report = {"plan": search.saved.to_json(), **search.to_json(), **about}
    show(flags, report, _in_words(search, path, num_train=len(train), has_test=bool(split.test)))


def _task_settings(flags: PlanFlags) -> TaskSettings:
    """Return the settings of a search's task; a plan reads no embedding."""
    return group_of(TaskSettings, flags, ask="form", max_episode_steps=1, embedding_dims=1, validation_fold="none")


def _estimate(flags: PlanFlags, num_train: int) -> str:
    """Return the size of the search, without asking a server."""
    text_s, (call_s, known) = encoding_time(flags), call_time(flags, flags, operators=flags.operators)
    max_calls = flags.max_calls or (calls_in(60 * flags.minutes, text_s + call_s) if known else MAX_CALLS)
    learned = flags.answer == "learned"
    count = questions_searched(num_train, max_calls, is_wide=not known, learned=learned)
    facts = {
        "questions to search on": f"{count} of {num_train}",
        "operators": sum(map(len, rewrites(flags))),
        "model calls, at most": f"{max_calls:,}",
        "calls in flight": flags.calls_in_flight,
        "time, at most about": duration(max_calls * (text_s + call_s)),
    }
    source = f"by {1000 * text_s:.3g} ms to embed a text, timed just now{known}"
    return "\n".join(["estimate (nothing was started)", rows_of(facts), source])


def _in_words(search: PlanSearch, path: str, *, num_train: int, has_test: bool) -> str:
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
    if search.confidence is not None:
        facts["P(right)"] = search.confidence.report.in_words.removeprefix("P(right): ")
    if search.not_learned:
        facts["P(right)"] = f"not used: {search.not_learned}"
    if (learned := search.best_learned) is not None and saved.plan.answer != "learned":
        rate = f"{learned.success:.1%} at {learned.calls:.2f} calls, out of fold"
        facts["best plan by P(right)"] = f"{learned.plan}: {rate}; not better"
    if rejected := rejections_in_words(search.rewrites):
        facts["rejected rewrites"] = rejected.partition(": ")[2]
    front = [f"{budget:>6}  {point.success:>7.1%}  {point.plan}" for budget, point in search.front.items()]
    title = "best plan within a number of calls per question, on training questions"
    after = [f"run folder: {path}", *([f"on held-out questions: qm eval --checkpoint {path}"] if has_test else [])]
    return "\n".join([rows_of(facts), "", title, " calls  success  plan", *front, "", *after, search.verdict])
