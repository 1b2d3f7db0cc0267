"""Flags of the commands that use a trained policy and its models; `qm eval`, which compares it with the baselines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from query_mutator.apply import Rewriter
from query_mutator.bounds import Device, Prose, Seed
from query_mutator.cli.console import note
from query_mutator.cli.flags import AlsoPositional, Positional
from query_mutator.cli.outputs import JsonFlags, Output, holding, show
from query_mutator.data import BUNDLED, QuestionSet, target_key
from query_mutator.errors import UsageError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import compare, embed_questions, write_rows
from query_mutator.evaluation.summary import Results, check_report
from query_mutator.learners import LEARNERS
from query_mutator.registry import absolute
from query_mutator.report.table import result_table
from query_mutator.rewards import WeightedReward
from query_mutator.session.models import OpenModels, ResolvedModels, open_models
from query_mutator.session.play import cut_line
from query_mutator.session.policy_file import (
    SavedPolicy,
    acting_settings,
    acting_task,
    check_named,
    load_policy,
    load_saved,
    reaching,
    text_digest,
)
from query_mutator.session.task import NO_DATASET, check_gold, guard_requests, make_reward, read_dataset
from query_mutator.settings import ADDRESS_FLAGS, AUTO, Calls, Columns, Comparison, FailureRate, Models, Plugins, Reward
from query_mutator.training.run_folder import run_settings
from query_mutator.types import Question

LATEST = "runs/latest"


@dataclass(frozen=True, kw_only=True)
class PolicyFlags(Models, Calls, FailureRate, Plugins):
    """Flags of commands that use a trained policy; settings default to those of its training."""

    STORED: ClassVar[str] = "as in training"
    FIXED: ClassVar[Mapping[str, Any]] = {}  # settings that replace those of the training

    checkpoint: str = LATEST
    """A run folder, or a .qm file of `qm export-policy`."""
    device: Device = "cpu"
    """Torch device of the sentence encoder."""
    encoder: str | None = None
    """Sentence encoder; its vectors must equal those of the training's encoder, which is the default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunAndFlags(PolicyFlags):
    """Flags of commands with another last argument, which the policy may precede."""

    words: Positional[tuple[Prose, ...]] = ()

    def __post_init__(self) -> None:
        *run, last = self.words or ("",)
        if len(run) > 1:
            raise ValueError(f"{len(self.words)} arguments; put quotes around {' '.join(self.words[1:])[:200]!r}")
        if run and self.checkpoint != type(self).checkpoint:
            raise ValueError(f"--checkpoint {self.checkpoint} and {run[0]} both name a policy; leave one of them out")
        object.__setattr__(self, "words", (last,))
        object.__setattr__(self, "checkpoint", next(iter(run), self.checkpoint))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunFlags(PolicyFlags):
    """Flags of commands that also take the policy as an argument."""

    checkpoint: AlsoPositional[str] = LATEST
    """A run folder, or a .qm file of `qm export-policy`."""


@contextmanager
def open_policy(flags: PolicyFlags) -> Iterator[Rewriter]:
    """Yield the policy of --checkpoint with the models of its training, or those that flags name."""
    saved = load_saved(flags.checkpoint, flags.plugin, best=True)
    settings = system_settings(flags, replace(saved.system, **flags.FIXED), saved)
    with open_models(settings) as models:
        if settings.backend == AUTO:  # no model is known from training, as after --from-logs
            note(models.choice.reason)
        with Rewriter(saved, models) as rewriter:
            yield rewriter


def system_settings(
    flags: PolicyFlags, base: ResolvedModels, saved: SavedPolicy | None = None, **others: Any
) -> ResolvedModels:
    """Return the settings of models with the given flags, and `others`, in place of those in training."""
    names = {field.name for field in fields(ResolvedModels)} & {*flags.given, *ADDRESS_FLAGS}
    given = {name: getattr(flags, name) for name in names} | others
    given = {name: value for name, value in given.items() if value not in (None, ())}
    if "batch_size" in given:
        given.setdefault("use_batching", True)
    return acting_settings(base, given, saved=saved)


def max_failure_rate(flags: PolicyFlags, saved: SavedPolicy) -> float:
    """Return the flag, by default that of the training."""
    return (flags if "max_failure_rate" in flags.given else saved.flags).max_failure_rate


# --- qm eval ---------------------------------------------------------------------------------------------------------


_REWARD = {one.name for one in fields(Reward)}
_NONE_LEFT = "it has no held-out questions"
_ALL_TRAINED = "the policy was trained on all its questions"


@dataclass(frozen=True, kw_only=True)
class EvalFlags(RunFlags, Comparison, Columns, Reward, JsonFlags):
    """Compare a trained policy with baselines: the original question, random actions, fixed actions.

    Answers are scored as in training, or by --reward.
    """

    dataset: str | None = None
    """Questions to ask: a file, or the name of a bundled dataset; by default the run's held-out questions. Training
    questions are left out; other questions about their targets get a separate column."""
    seed: Seed = 1
    """Seed of the random baseline."""
    evaluation: Annotated[str | None, Output(holding(b'{"method":'))] = None
    """File for a JSON row per method and question: steps, answers, which was submitted, calls, tokens, seconds."""


def evaluate_policy(flags: EvalFlags) -> None:
    """Print the table of all methods, or write the report with --json."""
    saved = _judged(flags, load_saved(flags.checkpoint, flags.plugin))
    settings = system_settings(flags, saved.system, saved)
    asked, failures = _asked(flags, saved), max_failure_rate(flags, saved)
    with open_models(settings) as models:
        report = _compared(flags, saved, asked, models, max_failure_rate=failures)
    show(flags, report, result_table(report))
    note(*cut_line(models.calls.eval_client.totals))
    check_report(report, max_failure_rate=failures)


def _judged(flags: EvalFlags, saved: SavedPolicy) -> SavedPolicy:
    """Return the policy with the reward and judge of the flags; UsageError for a judge that only its file names."""
    given = {name: getattr(flags, name) for name in _REWARD & flags.given}
    if given.get("reward") and "judge" not in WeightedReward.parse(given["reward"]).weights:
        given = {"judge_model": None, **given}
    task = replace(saved.task, **given)
    make_reward(task)
    check_named(reaching({"judge_model": task.judge_model}), given, source=saved.path)
    return replace(saved, task=task)


#: Questions to ask and requests to refuse; the questions of the training, with gold, and what they are about; the
#: dataset that was named, None for the held-out questions of the training.
_Asked = tuple[QuestionSet, Sequence[Question], Collection[str], str | None]


def _compared(
    flags: EvalFlags, saved: SavedPolicy, asked: _Asked, models: OpenModels, *, max_failure_rate: float
) -> dict[str, Any]:
    """Return the report on the policy and the baselines; after an interruption show that on what was finished."""
    found, train, trained_targets, dataset = asked
    embed_questions(models.encoder, train)
    task = acting_task(saved, models, train=train)

    def keep(results: Results) -> None:
        if flags.evaluation:
            write_rows(Path(flags.evaluation).resolve(), results)

    return compare(
        Evaluator.of(models, max_failure_rate=max_failure_rate),
        models,
        task,
        found.questions,
        load_policy(saved, task),
        seed=flags.seed,
        search_calls=flags.plan_calls,
        budget=saved.flags.budget,
        is_plan=bool(LEARNERS.get(saved.flags.algo).made_by),
        max_calls=flags.eval_calls,
        trained_on=trained_targets,
        guard=guard_requests(found.guard, with_bundled=flags.guard),
        dataset=dataset,
        keep=keep,
        show=lambda report: show(flags, report, result_table(report)),
    )


# --- its questions ---------------------------------------------------------------------------------------------------


def _asked(flags: EvalFlags, saved: SavedPolicy) -> _Asked:
    """Return the questions of --dataset, by default of the bundled set of the training, without those trained on."""
    task, trained_texts = saved.task, {*saved.trained_texts}
    if task.dataset == NO_DATASET:
        raise UsageError(
            f"{saved.path}: learned from a log without --dataset, so no question is known to be held out; learn again "
            "with the --dataset whose held-out questions are to be asked"
        )
    dataset = flags.dataset or _own_dataset(flags.checkpoint, saved)
    columns = task if Path(dataset).name == Path(task.dataset).name else flags
    columns = flags if flags.question_column or flags.answer_column else columns
    settings = replace(
        task, dataset=dataset, question_column=columns.question_column, answer_column=columns.answer_column
    )
    found = read_dataset(settings, for_training=False)
    texts = [text_digest(question.text) for question in found.questions]
    left = [one for one, digest in zip(found.questions, texts, strict=True) if digest not in trained_texts]
    is_own = trained_texts <= {*texts}
    if not left:
        raise UsageError(f"{dataset}: {_NONE_LEFT if is_own else _ALL_TRAINED}; name other questions with --dataset")
    if flags.dataset is not None and len(left) < len(texts):
        note(f"{dataset}: {len(texts) - len(left)} of {len(texts)} questions were trained on, left out")
    check_gold(left, settings)
    keys = {target_key(question) for question in left}
    targets = {key for key in keys if text_digest(key) in saved.trained_targets}
    return replace(found, questions=left), _train(saved, found.questions), targets, None if is_own else dataset


def _own_dataset(run: str, saved: SavedPolicy) -> str:
    """Return the bundled set of the training, or the file in this folder that config.json of a run has; UsageError."""
    dataset, config = saved.task.dataset, Path(run) / "config.json"
    if dataset in BUNDLED:
        return dataset
    used: dict[str, tuple[str, ...]] = {"dataset": (dataset,)}
    if config.exists():
        dataset = str(run_settings(config)[0].get("dataset"))
        used = reaching({"dataset": dataset})
    check_named(used, {}, source=saved.path)
    return dataset


def _train(saved: SavedPolicy, questions: Sequence[Question]) -> Sequence[Question]:
    """Return the training questions with gold: those of the policy, else of `questions` or of its bundled set."""
    task = saved.task
    if saved.has_gold:
        return saved.train
    more = BUNDLED[task.dataset]() if task.dataset in BUNDLED else ()
    gold = {question.text: question for question in (*more, *questions)}
    found = [gold[question.text] for question in saved.train if question.text in gold]
    if not found:
        raise UsageError(
            f"{saved.path} has no reference answers, which baselines learn from: give --dataset {task.dataset}, the "
            "questions of its training, to ask the held-out ones"
        )
    return found
