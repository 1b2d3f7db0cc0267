"""`qm plan`: find the best plan, by asking within a number of calls, or from a log of graded replies; save it.

A search reads training questions only. With `--from-logs` no call is made, and where all prompts of the plan are forms,
a policy is saved. The run folder has the replies that a resumed search finds again and the best plan so far; that of a
log has no text of the log, but the names of prompts.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ppo.fields import Ge, Gt, Le
from query_mutator.bounds import defaults, group_of
from query_mutator.cli.console import note
from query_mutator.cli.flags import files_read
from query_mutator.cli.outputs import JsonFlags, rows_of, show
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data import Split
from query_mutator.data.readers import read_logged_replies
from query_mutator.encoder import resolve_encoder
from query_mutator.env.episode import EpisodeRules
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import embed_questions, power_in_words
from query_mutator.files import atomic_write, file_sha256, locked, write_checked_json
from query_mutator.files.run_dir import CONFIDENCE, STORE, RunDir, describe_run
from query_mutator.forms import ALL, arm_named
from query_mutator.forms import select as select_forms
from query_mutator.learners import ALGO, Plan
from query_mutator.llm.backends import ServerAddressFlags, choose_backend
from query_mutator.llm.prices import in_words, read_prices
from query_mutator.llm.store import Store
from query_mutator.operators import NONE
from query_mutator.plan.arms import choose_from_log
from query_mutator.plan.choose import PlanChoice, shares_in_words
from query_mutator.plan.race import MAX_CALLS, MIN_CALLS, find_plan, questions_searched
from query_mutator.plan.table import grade_log
from query_mutator.registry import plugin_hashes
from query_mutator.report.build import write_report
from query_mutator.session.models import ResolvedModels, call_time, is_instant, open_models
from query_mutator.session.policy_file import POLICY_FILE, PROBE, ActingFlags, SavedPolicy, write_policy_file
from query_mutator.session.task import (
    NO_DATASET,
    check_gold,
    example_bank,
    make_reward,
    make_task,
    rewrites,
    split_dataset,
)
from query_mutator.settings import (
    CallBudget,
    CallRules,
    FailureRate,
    ModelSettings,
    NamedRun,
    Operators,
    Questions,
    Reward,
    Sampling,
    TaskSettings,
)
from query_mutator.training.config import duration
from query_mutator.training.run_folder import described, planned
from query_mutator.types import Question

_OF_ONE_COMMAND = ("json", "force", "dry_run")
#: A plan reads no embedding, and learns from validation questions too.
_OF_A_PLAN: Mapping[str, Any] = {
    "ask": "form", "max_episode_steps": 1, "embedding_dims": 1, "validation_fold": "none",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
@defaults(name=ALGO, max_asks=1)
class PlanFlags(
    NamedRun,
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
        "target_model", "target_max_tokens", "batch_size", "seed", "save_dir", "dry_run", "json",
    )  # fmt: skip
    IN_FILE: ClassVar[tuple[str, ...]] = (
        "adaptive", "call_price", "deterministic", "device", "domain", "latency_sigma", "mutator_max_tokens",
        "keep_alive", "max_reply_mb", "sample_temperature", "samples", "skip_unchanged",
    )  # fmt: skip

    minutes: Annotated[float, Gt(0), Le(10_000)] = 5.0
    """Time of the search at the speed of earlier calls, without --max-calls; 20,000 calls for recorded replies."""
    max_calls: Annotated[int, Ge(MIN_CALLS), Le(10**9)] | None = None
    """Maximum model calls of the search; with few calls it scores a random sample of the questions."""
    answer: Literal["searched", "learned"] = "searched"
    """Which of several answers is submitted: by the best rule found (searched), or the one that is most likely right
    (learned), asking in form after form until one is likely enough."""
    from_logs: str | None = None
    """Learn from graded replies in this file, without a call; see docs/how-to/find-a-plan.md."""


@dataclass(kw_only=True)
class PlanRun:
    """A run folder while a search writes it; without a policy and its task no plan of it can be played."""

    run_dir: RunDir
    store: Store
    policy: SavedPolicy | None  # of the plan that was saved last
    task: Task | None

    def save(self, plan: Plan, confidence: ConfidenceModel | None = None, gains: GainModel | None = None) -> None:
        """Write the policy of a plan with what it submits and asks by."""
        if self.policy is not None and self.task is not None:
            self.policy = planned(self.policy, plan, self.task, confidence, gains)
            write_policy_file(self.run_dir.path / POLICY_FILE, self.policy)

    def finish(self, found: PlanChoice) -> None:
        """Save what was found, P(right) also for programs, and write the run's page."""
        plan, search = found.saved, found.to_json()
        learned = plan.plan.answer == "learned" or not found.calls
        self.save(plan.plan, found.confidence if learned else None, found.gains)
        if found.confidence is not None:
            with atomic_write(self.run_dir.path / CONFIDENCE) as file:
                np.savez(file, **found.confidence.to_arrays())  # type: ignore[arg-type]  # mypy: its other keyword is a bool
        write_checked_json(self.run_dir.summary_path, {"plan": plan.to_json(), "search": search})
        if self.policy is not None:
            self.run_dir.take_latest()
        write_report(self.run_dir.path)


@contextmanager
def plan_run(
    flags: PlanFlags,
    settings: TaskSettings,
    about: Mapping[str, Any],
    acting: tuple[Task, ResolvedModels, Split] | None,
) -> Iterator[PlanRun]:
    """Lock a new run folder that has the settings and, of a task that can be played, the original question as its plan.

    It is removed again unless it has a reply or a plan.
    """
    kept = {name: value for name, value in asdict(flags).items() if name not in _OF_ONE_COMMAND}
    kept |= {"algo": ALGO, "dataset": settings.dataset}
    task, policy = None, None
    if acting is not None:
        task, system, split = acting
        acts = group_of(ActingFlags, flags, algo=ALGO)
        policy = SavedPolicy.of(task, split, settings=settings, system=system, flags=acts, plugins=flags.plugin)
    run_dir = RunDir.create(flags.save_dir, flags.name or ALGO)
    path = run_dir.path
    with locked(path), closing(run_dir), closing(Store(None if flags.from_logs else path / STORE)) as store:
        run = PlanRun(run_dir=run_dir, store=store, policy=policy, task=task)
        try:
            run_dir.write_config(describe_run(kept, settings_files=files_read(), **about))
            run.save(Plan())
            yield run
        except (KeyboardInterrupt, TooManyFailuresError):
            if len(store):
                run_dir.take_latest()
                note(f"the best plan so far is in {path}; the same command again finds the replies in the cache")
            raise
        finally:
            if not len(store) and not run_dir.summary_path.exists():
                shutil.rmtree(path, ignore_errors=True)


def plan(flags: PlanFlags) -> None:
    """Fill the table, save the found plan in a run folder, and print it with the best plans at other budgets."""
    choose_backend(flags.backend, flags.urls)
    if flags.from_logs is None:
        _search(flags)
    else:
        _read_log(flags, Path(flags.from_logs))


def _search(flags: PlanFlags) -> None:
    """Ask training questions."""
    targets = tuple(flags.targets)
    if len(targets) > 1:  # which of them to ask is learned
        flags = replace(flags, answer="learned")
    if flags.answer == "learned" and "forms" in flags.given and len(rewrites(flags, targets)[1]) < 2:
        raise UsageError("--answer learned chooses among answers in several forms; name two or more with --forms")
    settings = group_of(TaskSettings, flags, **_OF_A_PLAN)
    split = split_dataset(settings)
    train = split.train
    if not train:
        raise UsageError(f"{flags.dataset}: no question is left to search on, all are held out; add more questions")
    check_gold([*train, *split.test], settings)
    if flags.dry_run:
        call_s, source = call_time(flags)
        _, line = _size(flags, len(train), call_s, is_instant=is_instant(flags))
        print("estimate (nothing was started)", line, f"by {source}", power_in_words(split.test), sep="\n")
        return
    with open_models(flags, dataset=flags.dataset) as models:
        embed_questions(models.encoder, train)
        task = make_task(models, settings, train, learns=flags.answer == "learned")
        makes_calls = not models.calls.backend_class.is_instant
        call_s = call_time(flags)[0] if makes_calls else 0.0
        max_calls, line = _size(flags, len(train), call_s, is_instant=not makes_calls)
        note(models.choice.reason, line, power_in_words(split.test))
        about, acting = described(models, split, flags.plugin), (task, models.resolved, split)
        with plan_run(replace(flags, max_calls=max_calls), settings, about, acting) as run:
            models.calls.keep(run.store)
            found = find_plan(
                Evaluator.of(models, max_failure_rate=flags.max_failure_rate),
                task,
                max_calls=max_calls,
                seed=flags.seed,
                budget=flags.budget,
                learned=flags.answer == "learned",
                on_best=lambda best: run.save(best.plan),
            )
            run.finish(found)
    path = run.run_dir.path
    again = run.policy.named_again if run.policy else ""
    after = [f"next: qm eval {path}{again}"] if split.test else []
    _show(flags, found, path, *after, num_questions=len(train))


def _size(flags: PlanFlags, num_train: int, call_s: float, *, is_instant: bool) -> tuple[int, str]:
    """Return the bound on calls, and what the search takes in one line; recorded replies answer within minutes."""
    max_calls = flags.max_calls or MAX_CALLS
    if flags.max_calls is None and not is_instant:
        fitting = min(MAX_CALLS, max(MIN_CALLS, 60 * flags.minutes / call_s))
        unit = 10 ** (math.floor(math.log10(fitting)) - 1)  # two digits, so that a search can be repeated
        max_calls = int(fitting // unit * unit)
    operators, forms = rewrites(flags, tuple(flags.targets))
    arms = len(forms) if len(flags.targets) > 1 and not operators else 0
    count = questions_searched(num_train, max_calls, learned=flags.answer == "learned", arms=arms)
    line = f"{count} of {num_train} questions, at most {max_calls:,} calls"
    if not call_s:
        return max_calls, line
    return max_calls, f"{line}, about {duration(max_calls * call_s)} at {1 / call_s:.3g} calls/s"


def _read_log(flags: PlanFlags, path: Path) -> None:
    """Learn P(right), the order of prompts and when to stop from a log."""
    named = {} if "dataset" in flags.given else {"dataset": NO_DATASET}
    settings = group_of(TaskSettings, flags, operators=NONE, **_OF_A_PLAN, **named)
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
    found = choose_from_log(
        log.answers, budget=flags.budget, price=float(np.mean(flags.call_price)), prices=_prices_of(flags, log.models)
    )
    models = dict.fromkeys(log.models.values())
    missing, acting = _unplayable(found.saved.plan, split, tuple(models)), None
    if not missing:
        settings = replace(settings, forms=",".join(found.saved.plan.operators))
        # Acting needs a training question; those of a log stay where they are.
        known = split or Split(train=(Question(id="stand-in", text=PROBE),))
        system = group_of(ResolvedModels, flags)
        if models:
            prices = in_words(read_prices(flags.price, list(models)))
            system = replace(system, target_model=flags.target_model or tuple(models), price=prices)
        acting = _unasked_task(flags, settings, known, models), system, known
    about: dict[str, Any] = {
        "plugins": plugin_hashes(flags.plugin),
        "log": {"sha256": file_sha256(path), "answers": len(log.answers), "left_out": dict(log.left_out)},
        **({} if split is None else {"dataset_sha256": split.sha256}),
    }
    with plan_run(flags, settings, about, acting) as run:
        run.finish(found)
    folder, again = run.run_dir.path, run.policy.named_again if run.policy else ""
    after = missing or f'next: qm rewrite {folder} "your question"{again}'
    _show(flags, found, folder, after, num_questions=len({answer.question for answer in log.answers}))


def _prices_of(flags: PlanFlags, models: Mapping[str, str]) -> dict[str, float]:
    """Return the price of a call in each arm that names a model, {} where none do."""
    prices = read_prices(flags.price, list(dict.fromkeys(models.values())))
    if any(not price.is_per_call for price in prices.values()):
        raise UsageError("a log has no numbers of tokens; give prices of calls, as --price small=1,large=8")
    return {arm: prices[model].call for arm, model in models.items()}


def _unplayable(plan: Plan, split: Split | None, models: Sequence[str]) -> str:
    """Return why a plan cannot be played, in one line; "" if it can."""
    forms = {name: arm_named(name, models) for name in plan.operators}
    unknown = [name for name, form in forms.items() if form is None]
    showing = [name for name, form in forms.items() if split is None and form is not None and form.uses_examples]
    if not unknown and not showing:
        return ""
    why = "show examples; name the questions to show with --dataset, or other forms with --forms"
    if unknown:
        why = "are not known as forms; add them with --plugin, or name the forms to use with --forms"
    names = ", ".join(unknown or showing)
    return f"P(right) and the order of prompts were learned, but no policy is saved: {names} {why}"


def _unasked_task(flags: PlanFlags, settings: TaskSettings, split: Split, models: Iterable[str]) -> Task:
    """Return a task of forms alone, to save a plan of it without a model."""
    encoder = resolve_encoder(flags.encoder, device=flags.device, deterministic=flags.deterministic)
    embed_questions(encoder, split.train)
    return build_task(
        split.train,
        calls=group_of(CallSettings, settings, target_model="unasked", mutator_model="unasked"),
        encoder=encoder,
        operators=(),
        embedding_dims=settings.embedding_dims,
        rules=group_of(EpisodeRules, settings),
        forms=select_forms(settings.forms, tuple(models)),
        bank=example_bank(settings.dataset),
    )


def _show(flags: PlanFlags, found: PlanChoice, folder: Path, *after: str, num_questions: int) -> None:
    """Print what was found of so many questions, and what to do next."""
    more = {"questions_in_training": num_questions} if found.calls else {}
    report = {"plan": found.saved.to_json(), **found.to_json(), **more, "run_folder": str(folder)}
    saved, bar, source = found.saved, found.bar, "training" if found.calls else "logged"
    prices = any(point.shares for point in found.points)
    rates = [f"{one.success:.1%} [{one.success_ci[0]:.1%}, {one.success_ci[1]:.1%}]" for one in (saved, bar)]
    facts = {
        "plan": saved.plan,
        f"{source} questions": f"{saved.questions:,} of {num_questions:,}",
        "success on them": f"{rates[0]}; cross-fitted {found.cross_fitted:.1%}",
        "original question" if found.calls else "best prompt alone": rates[1],
        ("price" if prices else "calls") + " per question": f"{saved.calls:.2f}",
        **({"share of calls": shares_in_words(saved.shares)} if saved.shares else {}),
        "search": f"{found.calls:,} calls, {found.plans_tried:,} plans, {found.seconds:.0f} s",
    }
    if found.confidence is not None:
        facts["P(right)"] = found.confidence.report.in_words.removeprefix("P(right): ")
        facts["order of prompts"] = ", ".join(found.order)
    if found.not_learned:
        facts["P(right)"] = f"not used: {found.not_learned}"
    if (learned := found.best_learned) is not None and saved.plan.answer != "learned":
        rate = f"{learned.success:.1%} at {learned.calls:.2f} calls, out of fold"
        facts["best plan by P(right)"] = f"{learned.plan}: {rate}; not better"
    title = f"best plan within a {'price' if prices else 'number of calls'} per question, on {source} questions"
    front = [title, f" {'price' if prices else 'calls'}  success  cross-fitted  plain vote  plan"]
    if prices:
        front[1] = " price  success  cross-fitted  at random  plain vote  plan"
    for budget, point in found.front.items():
        rule = point.fitted
        several = f"{'':{35 if prices else 24}}"
        if rule is not None:
            random = "" if rule.random is None else f"  {rule.random:>9.1%}"
            several = f"{rule.success:>12.1%}{random}  {rule.vote:>10.1%}"
        front.append(f"{budget:>6g}  {point.success:>7.1%}  {several}  {point.plan}")
    if saved != bar and saved.success_ci[0] <= bar.success_ci[1]:
        after = (*after, "The intervals overlap: these questions do not separate the two.")
    lines = [rows_of(facts), "", *front, "", f"run folder: {folder}", *after, found.verdict]
    show(flags, report, "\n".join(lines))
