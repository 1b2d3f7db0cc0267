"""`qm eval`: compare a trained policy with the baselines, with the models of its training or those that flags name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import closing_on_interrupt, note, progress
from query_mutator.cli.outputs import Output, holding
from query_mutator.commands.eval_models import evaluate_models
from query_mutator.commands.policy_flags import RunFlags, max_failure_rate, system_settings
from query_mutator.data import QuestionSet
from query_mutator.data.bundled import EVALUATION_ONLY
from query_mutator.data.split import target_key
from query_mutator.errors import DatasetError, UsageError
from query_mutator.evaluation.bandit_rival import fitted_bandit
from query_mutator.evaluation.heldout import Rivals, compare, embed_questions
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.outcomes import check_report
from query_mutator.report.table import result_table
from query_mutator.rewriter.loading import acting_task, training_split
from query_mutator.sweep.config import EngineFlags, is_sweep
from query_mutator.training.background import text_digest
from query_mutator.training.config import SEARCH_CALLS
from query_mutator.training.dataset import read_dataset
from query_mutator.training.learners import LEARNERS, load_policy
from query_mutator.training.policy_file import SavedPolicy, read_policy
from query_mutator.training.system import System
from query_mutator.training.truncation import cut_line, long_questions
from query_mutator.types import Question
from rl_query_mutator_env import QueryMutationEnv

if TYPE_CHECKING:
    from query_mutator.env.task import Task

__all__ = ["EvalFlags", "evaluate_policy"]


@dataclass(frozen=True, kw_only=True)
class EvalFlags(RunFlags, JsonFlags, EngineFlags):
    """Compare a trained policy with baselines: the original question, random rewrites, fixed rewrites.

    With several models after --target-model, evaluate each and print a row for each; --engine says where. Rerun the
    command to resume.
    """

    target_model: tuple[str, ...] = ()  # type: ignore[assignment]  # other commands take one
    """The model that answers, or several to compare."""
    out: Annotated[str | None, Output(is_sweep, is_folder=True, resumes=True)] = None
    """Folder of the comparison of several models; by default evaluations/NAME after the policy."""
    local_server_url: str | None = None
    """Address of the model server on each machine that evaluates, as http://127.0.0.1:11434, for --ollama-url."""

    dataset: str | None = None
    """Questions to ask: a file, or second_hand (bundled, by another author); by default the held-out ones. Those whose
    text is in the training set are left out; those about its targets have a column of their own."""
    question_column: str | None = None
    """Column of the question in --dataset."""
    answer_column: str | None = None
    """Column of the answer in --dataset."""
    seed: int = 1
    """Seed of the random baseline."""
    rewriter: str | None = None
    """A model that rewrites in one call, as hf:FOLDER of `qm train sft`: one more method in the table."""
    eval_calls: int | None = None
    """Most model calls, retries aside: a random sample of the questions that fits is asked, the same of all methods."""
    plan_calls: int = SEARCH_CALLS
    """Model calls to search for the best plan on training questions, a row of the table; 0 leaves it out."""
    evaluation: Annotated[str | None, Output(holding(b'{"method":'))] = None
    """File for a JSON row per method and question: steps, answers, which was submitted, calls, tokens, seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        EngineFlags.__post_init__(self)
        if self.local_server_url:
            if self.ollama_url not in ((), (self.local_server_url,)):
                raise ValueError("--ollama-url and --local-server-url both name the servers; give one of them")
            object.__setattr__(self, "ollama_url", (self.local_server_url,))
        if self.evaluation and len(self.target_model) > 1:
            raise ValueError(
                "--evaluation names one file; with several models each has an evaluation.jsonl of its own in --out"
            )
        if self.rewriter is not None and not self.rewriter.startswith("hf:"):
            raise ValueError(f"--rewriter {self.rewriter} must be hf:FOLDER, a model of `qm train sft`")


# --- qm eval ---------------------------------------------------------------------------------------------------------


def evaluate_policy(flags: EvalFlags) -> None:
    """Print the table of all methods, or with several models a row for each, or write the report with --json."""
    saved = read_policy(flags.checkpoint)
    if len(flags.target_model) > 1:
        assert saved.checkpoint.path is not None
        evaluate_models(flags, saved.checkpoint.path)
        return
    saved.checkpoint.load_plugins()
    asked = _asked(flags, saved)
    with _open_policy(flags, saved, asked.train) as policy:
        note(*long_questions(policy.system.calls, policy.task, asked.questions))
        report = compare(
            policy.evaluator,
            policy.system,
            policy.task,
            asked.questions,
            load_policy(saved.checkpoint),
            seed=flags.seed,
            rivals=Rivals(
                rewriter=flags.rewriter,
                search_calls=flags.plan_calls,
                bandit=fitted_bandit(saved.checkpoint.bandit, policy.task),
                is_plan=bool(LEARNERS.get(saved.checkpoint.algo).made_by),
            ),
            most_calls=flags.eval_calls,
            trained_on=asked.trained_targets,
            guard=asked.guard,
            rows_path=Path(flags.evaluation) if flags.evaluation else None,
            show=lambda report: show(flags, report, result_table(report)),
        )
    show(flags, report, result_table(report))
    note(*cut_line(policy.system.calls.eval_counted.totals))
    check_report(report, max_failure_rate=policy.evaluator.max_failure_rate)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The questions of an evaluation, those of the training, with gold, and requests that should be refused."""

    questions: Sequence[Question]
    train: Sequence[Question]
    trained_targets: Collection[str]
    guard: Sequence[Question]


def _asked(flags: EvalFlags, saved: SavedPolicy) -> _Asked:
    """Return the held-out questions of the training set, or those of --dataset whose text training did not have."""
    task = saved.checkpoint.task
    try:
        split = training_split(saved)
    except DatasetError as error:
        return _without_split(flags, saved, error)
    seen = split.train + split.validation
    targets = {target_key(question) for question in seen}
    if flags.dataset is None:
        if not split.test:
            raise UsageError(f"{task.dataset} has no held-out questions; name others with --dataset")
        return _Asked(questions=split.test, train=split.train, trained_targets=targets, guard=split.guard)
    texts = {question.text for question in seen}
    found = _new_questions(flags, saved, lambda question: question.text in texts)
    return _Asked(questions=found.questions, train=split.train, trained_targets=targets, guard=found.guard)


def _without_split(flags: EvalFlags, saved: SavedPolicy, error: DatasetError) -> _Asked:
    """Return the questions of --dataset and the training questions that a run folder keeps; its dataset is gone."""
    background = saved.background
    if flags.dataset is None:
        raise UsageError(
            f"{saved.checkpoint.task.dataset}: the questions of the training are gone, and the held-out ones with "
            "them; name others with --dataset FILE"
        )
    if background is None or not any(question.accept or question.reference for question in background.train):
        raise error
    found = _new_questions(flags, saved, lambda question: text_digest(question.text) in background.trained_texts)
    keys = {target_key(question) for question in found.questions}
    targets = {key for key in keys if text_digest(key) in background.trained_targets}
    return _Asked(questions=found.questions, train=background.train, trained_targets=targets, guard=found.guard)


def _new_questions(flags: EvalFlags, saved: SavedPolicy, was_seen: Callable[[Question], bool]) -> QuestionSet:
    """Return the questions of --dataset without those that the policy was trained on."""
    assert flags.dataset is not None
    settings = replace(
        saved.checkpoint.task,
        dataset=flags.dataset,
        question_column=flags.question_column,
        answer_column=flags.answer_column,
    )
    found = read_dataset(settings, EVALUATION_ONLY)
    questions = found.questions
    left = [question for question in questions if not was_seen(question)]
    if not left:
        raise UsageError(f"{flags.dataset}: the policy was trained on all its questions; use others")
    if len(left) < len(questions):
        note(f"{flags.dataset}: {len(questions) - len(left)} of {len(questions)} questions were trained on, left out")
    return replace(found, questions=left)


# --- its models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """The models of a trained policy."""

    system: System
    task: Task
    evaluator: Evaluator


@contextmanager
def _open_policy(flags: EvalFlags, saved: SavedPolicy, train: Sequence[Question]) -> Iterator[_Policy]:
    """Yield the models of the policy's training, or those that flags name, and the task on training questions."""
    checkpoint = saved.checkpoint
    settings = system_settings(flags, checkpoint.system)
    with System(settings, rewriter=flags.rewriter) as system, closing_on_interrupt(system.calls.close):
        embed_questions(system.encoder, train)
        task = acting_task(saved, system, train=train)
        evaluator = Evaluator(
            QueryMutationEnv,
            client=system.calls.eval_client,
            batch_size=settings.batch_size,
            retry_policy=system.retry_policy,
            max_failure_rate=max_failure_rate(flags, checkpoint),
            progress=progress,
        )
        with contextlib.closing(system.calls):
            yield _Policy(system=system, task=task, evaluator=evaluator)
