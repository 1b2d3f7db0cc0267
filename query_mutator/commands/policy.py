"""`qm eval` and `qm rewrite`: use a trained policy, with the models of its training or those that flags name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import closing_on_interrupt, note, progress
from query_mutator.cli.flags import JsonTo
from query_mutator.cli.outputs import Output, OutputFlags, holding
from query_mutator.data.bundled import EVALUATION_ONLY
from query_mutator.data.split import Split, target_key
from query_mutator.env.task import operator_names
from query_mutator.errors import UsageError
from query_mutator.evaluation.heldout import compare, embed_questions
from query_mutator.evaluation.methods import Evaluator, greedy
from query_mutator.evaluation.outcomes import check_failures, check_report, failure_kinds
from query_mutator.files import encode, write_text
from query_mutator.llm.backends import backend_for
from query_mutator.report.table import result_table
from query_mutator.training.checkpoint import read_checkpoint
from query_mutator.training.config import SEARCH_CALLS
from query_mutator.training.failure_rate import DEFAULT_MAX_FAILURE_RATE
from query_mutator.training.learners import LEARNERS, load_policy
from query_mutator.training.system import System, SystemSettings, load_dataset, make_task, split_dataset
from query_mutator.training.truncation import cut_line, long_questions
from query_mutator.types import CONTROLS, Question
from rl_query_mutator_env import QueryMutationEnv

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.evaluation.outcomes import Outcome
    from query_mutator.training.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """Flags of every command that uses a trained policy; by default all settings are those of its training."""

    checkpoint: str = "runs/latest"
    """A run folder (its newest checkpoint) or a .pt file."""
    backend: str | None = None
    """Kind of model server: auto, embedded, ollama, openai or a plugin's; by default that of the training."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server."""
    target_model: str | None = None
    """The model that answers."""
    mutator_model: str | None = None
    """The model that carries out rewrites; hf:FOLDER runs one in this process."""
    batch_size: int | None = None
    """Model calls in flight at once."""
    timeout_s: Annotated[float | None, arg(aliases=["--timeout"])] = None
    """Seconds to wait for one reply."""
    wait_for_server_s: Annotated[float | None, arg(aliases=["--wait-for-server"])] = None
    """Seconds to wait for a server that stopped answering; by default as in the training, 0 for no wait."""
    max_reply_mb: float | None = None
    """Longest reply that is read, in MB; a longer one is a failed call."""
    max_retries: int | None = None
    """Retries after transient failures; a timeout is retried once."""
    num_ctx: int | None = None
    """Context length, by default as in the training. Sent to Ollama; other servers have what they were started with."""
    keep_alive: str | None = None
    """How long an Ollama server keeps a model loaded after a call."""
    cache: Literal["off", "eval", "all"] | None = None
    """Whether replies are cached on disk; eval and all mean the same here."""
    cache_path: str | None = None
    """File of the cache."""
    max_failure_rate: float | None = None
    """Exit with code 3 when the calls of more than this share of the questions failed; by default as in training."""
    device: str | None = None
    """Torch device of the sentence encoder."""


@dataclass(frozen=True, kw_only=True)
class EvalFlags(PolicyFlags, JsonFlags):
    """Compare a trained policy with baselines: the original question, random rewrites, fixed rewrites."""

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
        if self.rewriter is not None and not self.rewriter.startswith("hf:"):
            raise ValueError(f"--rewriter {self.rewriter} must be hf:FOLDER, a model of `qm train sft`")


@dataclass(frozen=True, kw_only=True)
class RewriteFlags(PolicyFlags, OutputFlags):
    """Rewrite a question as the trained policy would, and show the answer."""

    question: Positional[str]
    """The question; - reads one per line from standard input."""
    json: Annotated[JsonTo, Output(holding(b'"rewrites":'))] = None
    """Write one JSON object per question (question, rewrites, operators, answer) to FILE; without FILE, print them."""


# --- qm eval ---------------------------------------------------------------------------------------------------------


def evaluate_policy(flags: EvalFlags) -> None:
    """Print the table of all methods, or write the report with --json."""
    with open_policy(flags, rewriter=flags.rewriter) as policy:
        split = split_dataset(policy.checkpoint.task)
        questions = _questions(flags, policy.checkpoint, split)
        note(*long_questions(policy.system.calls, policy.task, questions))
        report = compare(
            policy.evaluator,
            policy.system,
            policy.task,
            questions,
            policy.frozen,
            seed=flags.seed,
            rewriter=flags.rewriter,
            most_calls=flags.eval_calls,
            search_calls=flags.plan_calls,
            is_plan=bool(LEARNERS.get(policy.checkpoint.algo).made_by),
            trained_on={target_key(question) for question in split.train + split.validation},
            rows_path=Path(flags.evaluation) if flags.evaluation else None,
            show=lambda report: show(flags, report, result_table(report)),
        )
    show(flags, report, result_table(report))
    note(*cut_line(policy.system.calls.eval_counted.totals))
    check_report(report, max_failure_rate=policy.evaluator.max_failure_rate)


def _questions(flags: EvalFlags, checkpoint: Checkpoint, split: Split) -> Sequence[Question]:
    """Return the held-out questions of the training set, or those of --dataset whose text training did not have."""
    if flags.dataset is None:
        if not split.test:
            raise UsageError(f"{checkpoint.task.dataset} has no held-out questions; name others with --dataset")
        return split.test
    settings = replace(
        checkpoint.task,
        dataset=flags.dataset,
        question_column=flags.question_column,
        answer_column=flags.answer_column,
    )
    questions = load_dataset(settings, EVALUATION_ONLY)
    trained_on = {question.text for question in split.train + split.validation}
    left = [question for question in questions if question.text not in trained_on]
    if not left:
        raise UsageError(f"{flags.dataset}: the policy was trained on all its questions; use others")
    if len(left) < len(questions):
        note(f"{flags.dataset}: {len(questions) - len(left)} of {len(questions)} questions were trained on, left out")
    return left


# --- qm rewrite ------------------------------------------------------------------------------------------------------


def rewrite(flags: RewriteFlags) -> None:
    """Print rewrites, operators and final answer of each question."""
    texts = [line.strip() for line in sys.stdin] if flags.question == "-" else [flags.question.strip()]
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError("the question is empty; give one as an argument, or - to read lines from standard input")

    questions = [Question(id=str(number), text=text) for number, text in enumerate(texts)]
    with open_policy(flags, with_gold=False) as policy:
        outcomes = policy.evaluator.run(policy.task.on(questions), greedy(policy.frozen), name="rewriting")
        rows = [_row(text, outcome, policy.task) for text, outcome in zip(texts, outcomes, strict=True)]
    lines = "".join(encode(row).decode() + "\n" for row in rows)
    print(lines if flags.json == "-" else "\n".join(map(_in_words, rows)), end="")
    if flags.json not in (None, "-"):
        write_text(flags.json, lines)
    limit = policy.evaluator.max_failure_rate
    check_failures(failure_kinds(outcomes), len(outcomes), max_failure_rate=limit)


def _row(text: str, outcome: Outcome, task: Task) -> dict[str, Any]:
    """Return the row of a question: its rewrites, the operators chosen, the answer; or the error."""
    if outcome.error is not None:
        return {"question": text, "error": str(outcome.error)}
    operators = {operator.name for operator in task.operators}
    rewrites = [after for name, after in zip(outcome.actions, outcome.rewrites, strict=True) if name in operators]
    return {"question": text, "rewrites": rewrites, "operators": list(outcome.actions), "answer": outcome.answer}


def _in_words(row: dict[str, Any]) -> str:
    """Return a row as lines in two columns."""
    rewrites, operators = iter(row.get("rewrites", ())), row.get("operators", ())
    width = max(map(len, (*operators, "question", "answer")))
    lines = [("question", row["question"])]
    lines += [(name, "" if name in CONTROLS else next(rewrites)) for name in operators]
    lines += [("error", row["error"]) if "error" in row else ("answer", row["answer"])]
    return "\n".join(f"{name.ljust(width)}  {' '.join(text.split())}".rstrip() for name, text in lines) + "\n"


# --- shared ----------------------------------------------------------------------------------------------------------


class Policy:
    """A trained policy with the models it needs."""

    def __init__(self, checkpoint: Checkpoint, system: System, task: Task, evaluator: Evaluator) -> None:
        self.checkpoint, self.system, self.task, self.evaluator = checkpoint, system, task, evaluator
        self.frozen = load_policy(checkpoint)


@contextmanager
def open_policy(flags: PolicyFlags, *, with_gold: bool = True, rewriter: str | None = None) -> Iterator[Policy]:
    """Yield the policy of --checkpoint with the models of its training, or those that flags name.

    Without gold the reference answers of the training questions are not embedded, because nothing is scored.
    """
    checkpoint = read_checkpoint(flags.checkpoint)
    checkpoint.load_plugins()
    train = split_dataset(checkpoint.task).train
    if not with_gold:
        train = tuple(replace(question, reference=None) for question in train)
    settings = system_settings(flags, checkpoint.system)
    with System(settings, rewriter=rewriter) as system, closing_on_interrupt(system.calls.close):
        embed_questions(system.encoder, train)
        settings_of_task = replace(checkpoint.task, operators=",".join(operator_names(checkpoint.actions)))
        task = make_task(system, settings_of_task, train, projection=checkpoint.projection)
        checkpoint.check_actions(task.actions)
        evaluator = Evaluator(
            QueryMutationEnv,
            client=system.calls.eval_client,
            batch_size=settings.batch_size,
            retry_policy=system.retry_policy,
            max_failure_rate=_max_failure_rate(flags, checkpoint),
            progress=progress,
        )
        with contextlib.closing(system.calls):
            yield Policy(checkpoint, system, task, evaluator)


def _max_failure_rate(flags: PolicyFlags, checkpoint: Checkpoint) -> float:
    if flags.max_failure_rate is not None:
        return flags.max_failure_rate
    return float(checkpoint.flags.get("max_failure_rate", DEFAULT_MAX_FAILURE_RATE))


def system_settings(flags: PolicyFlags, base: SystemSettings) -> SystemSettings:
    """Return the settings of a checkpoint's system with the given flags applied, without simulated latency."""
    names = {field.name for field in fields(PolicyFlags)} - {"checkpoint", "max_failure_rate"}
    given: dict[str, Any] = {name: getattr(flags, name) for name in names if getattr(flags, name) not in (None, ())}
    settings = replace(base, latency_ms=0.0, latency_sigma=0.0, running_speed=0.0)
    if given.get("backend", settings.backend) != settings.backend:  # addresses and models do not fit another backend
        settings = replace(settings, ollama_url=None, openai_url=None, target_model=None, mutator_model=None)
    for flag in ("ollama_url", "openai_url"):
        if flag in given:
            settings = replace(settings, ollama_url=None, openai_url=None)
            given.setdefault("backend", backend_for(flag, backend=settings.backend))
    return replace(settings, **given)
