"""`qm plan`: find the best plan, by asking within calls or minutes, or from a log of graded replies; save it.

A search reads training questions only. With `--from-logs` no call is made, and where all prompts of the plan are forms,
a policy is saved.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from query_mutator.bounds import group_of
from query_mutator.cli.console import note, progress, table
from query_mutator.cli.outputs import rows_of, show
from query_mutator.commands.plan_run import PlanFlags, plan_run
from query_mutator.data import Split
from query_mutator.data.logs import read_logged_replies
from query_mutator.env.task import CallSettings, EpisodeRules, build_task
from query_mutator.errors import UsageError
from query_mutator.evaluation.cost import power_in_words
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.outcomes import rejections_in_words
from query_mutator.files import file_sha256
from query_mutator.forms import ALL, FORMS
from query_mutator.forms import select as select_forms
from query_mutator.llm.backends import BACKENDS, choose_backend
from query_mutator.operators import NONE
from query_mutator.operators.english import english_words
from query_mutator.plan.choose import LearnedArms, PlanChoice, choose_from_log
from query_mutator.plan.race import MAX_CALLS, MIN_CALLS, find_plan, questions_searched
from query_mutator.plan.table import grade_log
from query_mutator.plugins import plugin_hashes
from query_mutator.session.models import ResolvedModels, encoder_of, open_models
from query_mutator.session.pace import call_time, is_instant, measure_pace, seen_call_s
from query_mutator.session.policy_file import PROBE
from query_mutator.session.task import (
    NO_DATASET,
    check_gold,
    example_bank,
    make_reward,
    make_task,
    rewrites,
    split_dataset,
)
from query_mutator.settings.episode import TaskSettings
from query_mutator.training.estimate import duration
from query_mutator.training.run_folder import described
from query_mutator.types import ErrorInfo, Question

if TYPE_CHECKING:
    from query_mutator.encoder import Encoder
    from query_mutator.env.task import Task
    from query_mutator.learners.plan import Plan
    from query_mutator.session.models import OpenModels

_UNASKED = "unasked"  # the name of the models of a task that is not played
#: In the place of training questions, one of which acting needs: those of a log stay where they are.
_STAND_IN = Question(id="stand-in", text=PROBE)


def plan(flags: PlanFlags) -> None:
    """Fill the table, save the found plan in a run folder, and print it with the best plans at other budgets."""
    if flags.from_logs is None:
        _search(flags)
    else:
        _read_log(flags, Path(flags.from_logs))


def _search(flags: PlanFlags) -> None:
    """Ask training questions."""
    started = time.perf_counter()
    if flags.answer == "learned" and "forms" in flags.given and len(rewrites(flags)[1]) < 2:
        raise UsageError("--answer learned chooses among answers in several forms; name two or more with --forms")
    # A plan reads no embedding.
    settings = group_of(TaskSettings, flags, ask="form", max_episode_steps=1, embedding_dims=1, validation_fold="none")
    split = split_dataset(settings)
    train = split.train
    if not train:
        raise UsageError(f"{flags.dataset}: no question is left to search on, all are held out; add more questions")
    choose_backend(flags.backend, flags.urls)
    check_gold([*train, *split.test], settings)
    if flags.dry_run:
        call_s, source = call_time(flags)
        _, line = _size(flags, len(train), call_s, is_instant=is_instant(flags))
        print("estimate (nothing was started)", line, f"by {source}", power_in_words(split.test), sep="\n")
        return
    with ExitStack() as stack:
        models = stack.enter_context(open_models(flags, dataset=flags.dataset))
        embed_questions(models.encoder, train)
        task = make_task(models, settings, train, learns=flags.answer == "learned")
        run = stack.enter_context(plan_run(flags))  # a folder that cannot be written costs no calls
        note(models.choice.reason)
        makes_calls = not models.calls.backend_class.is_instant
        call_s = _measured(flags, models, task) if makes_calls else 0.0
        max_calls, line = _size(flags, len(train), call_s, is_instant=not makes_calls)
        run.begin(replace(flags, max_calls=max_calls), described(models, split, flags.plugin), dataset=settings.dataset)
        run.can_play(task, models.resolved, settings, split)
        note(line, power_in_words(split.test))
        models.keep_in(run.store)
        evaluator = Evaluator.of(models, max_failure_rate=flags.max_failure_rate)
        is_bounded = flags.max_calls is not None or not makes_calls
        found = find_plan(
            evaluator,
            task,
            max_calls=max_calls,
            seconds=None if is_bounded else 60 * flags.minutes - (time.perf_counter() - started),
            seed=flags.seed,
            budget=flags.budget,
            learned=flags.answer == "learned",
            progress=progress,
            on_best=run.keep,
        )
        run.finish(found)
        path = run.run_dir.path
    after = [f"on held-out questions: qm eval --checkpoint {path}"] if split.test else []
    _show(flags, found, path, *after, num_questions=len(train))


def _size(flags: PlanFlags, num_train: int, call_s: float, *, is_instant: bool) -> tuple[int, str]:
    """Return the bound on calls, and what the search takes in one line; recorded replies answer within minutes."""
    max_calls = flags.max_calls or (MAX_CALLS if is_instant else _calls_in(60 * flags.minutes, call_s))
    count = questions_searched(num_train, max_calls, learned=flags.answer == "learned")
    line = f"{count} questions, at most {max_calls:,} calls"
    if not call_s:
        return max_calls, line
    return max_calls, f"{line}, about {duration(max_calls * call_s)} at {1 / call_s:.3g} calls/s"


def _calls_in(seconds: float, call_s: float) -> int:
    """Return the calls that fit into some time, rounded to two digits so that a search can be repeated."""
    fitting = min(MAX_CALLS, max(MIN_CALLS, seconds / call_s))
    unit = 10 ** (math.floor(math.log10(fitting)) - 1)
    return int(fitting // unit * unit)


def _measured(flags: PlanFlags, models: OpenModels, task: Task) -> float:
    """Return the seconds of a call over those in flight: as seen, or measured if --max-calls bounds no search."""
    if flags.max_calls is not None or seen_call_s(flags) is not None:
        return call_time(flags)[0]
    client, at_once = models.calls.limit, flags.calls_in_flight
    calling = [one for place, one in enumerate(task.operators) if not task.is_local(place)]
    client.complete(task.calls.target(task.questions[0].text))  # loads the model
    pace = measure_pace(client, task.calls, task.questions, calling, at_once=at_once)
    return call_time(flags)[0] if isinstance(pace, ErrorInfo) else pace.call_s / at_once


def _read_log(flags: PlanFlags, path: Path) -> None:
    """Learn P(right), the order of prompts and when to stop from a log."""
    named = {} if "dataset" in flags.given else {"dataset": NO_DATASET}
    of_a_plan: dict[str, Any] = {"ask": "form", "max_episode_steps": 1, "embedding_dims": 1}
    settings = group_of(TaskSettings, flags, operators=NONE, validation_fold="none", **of_a_plan, **named)
    split = None if settings.dataset == NO_DATASET else split_dataset(settings)
    names = flags.forms.split(",") if "forms" in flags.given else ()
    log = grade_log(
        read_logged_replies(path),
        reward=make_reward(settings),
        split=split,
        forms=[name.strip() for name in names if name.strip() not in ("", ALL, NONE)],
    )
    note(f"{path}: {log.in_words()}")
    if flags.dry_run:
        print(rows_of({name: f"{count:,} answers" for name, count in log.forms.items()} or {"answers": 0}))
        return
    price = float(np.mean(flags.call_price))
    found = choose_from_log(log.answers, budget=flags.budget, price=price, seed=flags.seed)
    missing = _unplayable(found.saved.plan, settings, split)
    about: dict[str, Any] = {
        "plugins": plugin_hashes(flags.plugin),
        "log": {"sha256": file_sha256(path), "answers": len(log.answers), "left_out": dict(log.left_out)},
        **({} if split is None else {"dataset_sha256": split.sha256}),
    }
    with plan_run(flags) as run:
        run.begin(flags, about, dataset=settings.dataset)
        if not missing:
            settings = replace(settings, forms=",".join(found.saved.plan.operators))
            acting = split or Split(train=(_STAND_IN,))
            run.can_play(_unasked_task(settings, acting, encoder_of(flags, None)), _system(flags), settings, acting)
            run.finish(found)
        else:
            run.finish(found)
        folder = run.run_dir.path
    again = run.policy.named_again if run.policy else ""
    after = missing or f'next: qm rewrite {folder} "your question"{again}'
    _show(flags, found, folder, after, num_questions=log.questions)


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


def _unasked_task(settings: TaskSettings, split: Split, encoder: Encoder) -> Task:
    """Return a task of forms alone, to save a plan of it without a model."""
    embed_questions(encoder, split.train)
    return build_task(
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


def _system(flags: PlanFlags) -> ResolvedModels:
    """Return the models that flags name, without asking a server."""
    kind, urls = choose_backend(flags.backend, flags.urls)
    if not urls:
        return group_of(ResolvedModels, flags)
    backend = BACKENDS.get(kind)
    return group_of(ResolvedModels, flags, backend=kind, **{backend.url_flag: tuple(map(backend.address, urls))})


def _show(flags: PlanFlags, found: PlanChoice, folder: Path, *after: str, num_questions: int) -> None:
    """Print what was found of so many questions, and what to do next."""
    more = {"questions_in_training": num_questions} if found.calls else {}
    report = {"plan": found.saved.to_json(), **found.to_json(), **more, "run_folder": str(folder)}
    saved, bar = found.saved, found.bar
    rates = [f"{one.success:.1%} [{one.success_ci[0]:.1%}, {one.success_ci[1]:.1%}]" for one in (saved, bar)]
    facts = {
        "plan": saved.plan,
        f"{found.source} questions": f"{saved.questions:,} of {num_questions:,}",
        "success on them": f"{rates[0]}; cross-fitted {found.cross_fitted:.1%}",
        "original question" if found.calls else "best prompt alone": rates[1],
        "calls per question": f"{saved.calls:.2f}",
        "search": f"{found.calls:,} calls, {found.plans_tried:,} plans, {found.seconds:.0f} s",
    }
    if found.arms is not None:
        facts["P(right)"] = found.arms.confidence.report.in_words.removeprefix("P(right): ")
        facts["order of prompts"] = ", ".join(found.arms.order)
        if few := found.arms.not_compared:
            facts["too few answers to compare"] = ", ".join(f"{name} ({n:,})" for name, n in few.items())
    if found.not_learned:
        facts["P(right)"] = f"not used: {found.not_learned}"
    if (learned := found.best_learned) is not None and saved.plan.answer != "learned":
        rate = f"{learned.success:.1%} at {learned.calls:.2f} calls, out of fold"
        facts["best plan by P(right)"] = f"{learned.plan}: {rate}; not better"
    if rejected := rejections_in_words(found.rewrites):
        facts["rejected rewrites"] = rejected.partition(": ")[2]
    front = [f"{budget:>6g}  {point.success:>7.1%}  {point.plan}" for budget, point in found.front.items()]
    title = f"best plan within a number of calls per question, on {found.source} questions"
    arms = [] if found.arms is None else ["", _by_calls(found.arms)]
    ends = ["", f"run folder: {folder}", *after, found.verdict]
    show(flags, report, "\n".join([rows_of(facts), "", title, " calls  success  plan", *front, *arms, *ends]))


def _by_calls(arms: LearnedArms) -> str:
    """Return the table by calls."""
    if not arms.by_calls:
        return f"No table by calls: {arms.why_alone}."
    rows = [
        (
            f"{row.calls:g}",
            f"{row.learned_calls:.2f}",
            f"{100 * row.learned:.1f}",
            f"{100 * row.vote:.1f}",
            f"{100 * row.single:.1f}",
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in (row.lead, *row.lead_ci))),
        )
        for row in arms.by_calls
    ]
    questions = max(point.questions for point in arms.alone)
    title = f"percent right of {questions:,} questions, cross-fitted by target; calls per question"
    columns = ("calls", "made", "by P(right)", "plain vote", "best prompt alone", "P(right) minus vote")
    return table(title, columns, rows)
