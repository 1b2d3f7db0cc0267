"""`qm`: what can be done with a trained policy, with the runs that made it, and with the server that is to answer.

qm eval --checkpoint runs/latest                      compare with what a sceptic would do, on held-out questions
qm rewrite --checkpoint runs/latest "my question"     rewrite a question and show the answer
qm doctor --target-model llama3.2                     look at a model server, and say what would make it faster
qm data ..., qm gym ..., qm train sft, qm bench       the batching toolkit: query_mutator/commands/
qm analyze runs/a runs/b                              compare runs of any trainer
qm sweep --grid lr=1e-3,1e-2 -- python train.py       run a command over settings, find the best
qm size gpt --vram 12GB                               memory of a training step, and the batch that fits a card
qm size workers --dataset pictures --step-ms 120      worker processes that a data loader needs
qm size calls --ollama-url gpu-box                    --batch-size and --num-processes that a server can use
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from query_mutator import __version__
from query_mutator.cli.console import closing_on_interrupt, progress, run_cli
from query_mutator.cli.flags import parse_flags, read_base
from query_mutator.commands import COMMANDS as TOOLKIT
from query_mutator.commands import CarryOut
from query_mutator.commands.analyze import AnalyzeFlags, compare_runs
from query_mutator.commands.doctor import DoctorConfig, doctor
from query_mutator.commands.size import SizeFlags, size
from query_mutator.commands.size_calls import SizeCallsFlags, size_server
from query_mutator.commands.size_real import (
    SizeCalibrateFlags,
    SizeThroughputFlags,
    SizeVerifyFlags,
    calibrate,
    size_throughput,
    verify,
)
from query_mutator.commands.size_workers import SizeWorkersFlags, size_workers
from query_mutator.commands.sweep import SweepFlags, sweep
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.registry import nearest
from query_mutator.sizing.buffers import SizeReplayFlags, size_replay

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.evaluation.methods import Evaluator, Outcome
    from query_mutator.training.checkpoint import Checkpoint
    from query_mutator.training.system import System
    from query_mutator.types import Question

PROG = "qm"

_SYSTEM_FLAGS = (
    "backend", "ollama_url", "openai_url", "target_model", "mutator_model", "batch_size", "timeout_s", "cache",
    "cache_path", "device",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """What every command that uses a trained policy takes; what is left out is as it was in training."""

    checkpoint: str = "runs/latest"
    """A run folder (its newest checkpoint) or a .pt file."""
    backend: Literal["auto", "embedded", "ollama", "openai"] | None = None
    """Who answers; by default whoever answered in training."""
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
    cache: Literal["off", "eval", "all"] | None = None
    """Whether replies are remembered on disk; eval and all mean the same here."""
    cache_path: str | None = None
    """File of remembered replies."""
    device: str | None = None
    """Where the sentence encoder runs, as torch names it."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1; the usual value is 8")


@dataclass(frozen=True, kw_only=True)
class EvalFlags(PolicyFlags):
    """Compare a trained policy with leaving questions alone, with chance, and with simple recipes."""

    dataset: str | None = None
    """Questions to ask, all but those about something the policy was trained on; by default the held-out ones."""
    question_column: str | None = None
    """Column of the question in --dataset."""
    answer_column: str | None = None
    """Column of the answer in --dataset."""
    json: str | None = None
    """File to write the report to."""
    seed: int = 1
    """Seed of the random method."""
    rewriter: str | None = None
    """A model that rewrites in one call, as hf:FOLDER of `qm train sft`: one more method in the table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewriter is not None and not self.rewriter.startswith("hf:"):
            raise ValueError(f"--rewriter {self.rewriter} must be hf:FOLDER, a model of `qm train sft`")


@dataclass(frozen=True, kw_only=True)
class RewriteFlags(PolicyFlags):
    """Rewrite a question as the trained policy would, and show the answer."""

    question: Positional[str]
    """The question; - reads one a line from standard input."""
    json: bool = False
    """Print one JSON object a question: question, rewrites, operators, answer."""


def run() -> None:
    """Run `qm` and end the process."""
    run_cli(main, prog=PROG)


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    command, rest = _command(argv)
    if command is None:
        print(_usage(rest))
        return 0
    flags_class, carry_out = COMMANDS[command]
    base, base_name = _base(flags_class, rest)
    flags = parse_flags(flags_class, rest, prog=f"{PROG} {command}", base=base, base_name=base_name)
    return carry_out(flags) or 0


def _command(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the command and its flags; None and the first words where help on a group of commands is asked for."""
    for count in range(min(len(argv), 3), 0, -1):
        if " ".join(argv[:count]) in COMMANDS:
            return " ".join(argv[:count]), argv[count:]
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    group = words
    while group and not _within(group):
        group = group[:-1]
    if group and group == words:
        if {"-h", "--help"} & set(argv):
            return None, group
        raise UsageError(f"{' '.join(group)} needs a command: {', '.join(_within(group))}")
    typed = " ".join(words[: len(group) + 2]) or argv[0]
    near = nearest(typed, COMMANDS)
    raise UsageError(f"unknown command {typed!r}; " + (f"did you mean {near}?" if near else "see qm --help"))


def _within(group: Sequence[str]) -> list[str]:
    """Return what may follow the words of a group of commands."""
    words = tuple(group)
    parts = (tuple(name.split()) for name in COMMANDS)
    return list(
        dict.fromkeys(part[len(words)] for part in parts if part[: len(words)] == words and len(part) > len(words))
    )


def _base(flags_class: type[Any], argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the flags in the file of --config, or of the run that --resume names, where the command has them."""
    names = {"config", "resume"} & {field.name for field in fields(flags_class)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_known_args(list(argv))[0])
    path = given.get("config")
    if path is None and given.get("resume"):
        resumed = Path(given["resume"])
        if not resumed.exists():
            raise UsageError(f"--resume {resumed}: no such file; give an output folder, or a checkpoint in it")
        path = str((resumed if resumed.is_dir() else resumed.parent.parent) / "config.json")
    return (read_base(path), path) if path else ({}, "")


# --- qm eval ---------------------------------------------------------------------------------------------------------


def evaluate_policy(flags: EvalFlags) -> None:
    """Print the table of all methods; with --json write the report as well."""
    from query_mutator.evaluation.heldout import compare
    from query_mutator.files import finite
    from query_mutator.report.table import result_table

    with _opened(flags, rewriter=flags.rewriter) as policy:
        questions = _questions(flags, policy.checkpoint)
        report = compare(
            policy.evaluator,
            policy.system,
            policy.task,
            questions,
            policy.frozen,
            seed=flags.seed,
            rewriter=flags.rewriter,
        )
    if flags.json:
        with disk_errors(flags.json):
            Path(flags.json).write_text(json.dumps(finite(report), indent=2) + "\n", encoding="utf-8")
    print(result_table(report))


def _questions(flags: EvalFlags, checkpoint: Checkpoint) -> Sequence[Question]:
    """Return the held-out questions of the training set, or those of --dataset that training did not touch."""
    from query_mutator.data.split import target_key
    from query_mutator.training.system import load_dataset, split_dataset

    split = split_dataset(checkpoint.task)
    if flags.dataset is None:
        if not split.test:
            raise UsageError(f"{checkpoint.task.dataset} has no held-out questions; give others with --dataset")
        return split.test
    trained_on = {target_key(question) for question in split.train}
    settings = replace(
        checkpoint.task,
        dataset=flags.dataset,
        question_column=flags.question_column,
        answer_column=flags.answer_column,
    )
    left = [question for question in load_dataset(settings) if target_key(question) not in trained_on]
    if not left:
        raise UsageError(f"{flags.dataset}: the policy was trained on all its targets; give questions about others")
    return left


# --- qm rewrite ------------------------------------------------------------------------------------------------------


def rewrite(flags: RewriteFlags) -> None:
    """Print rewrites, operators and final answer of each question."""
    texts = [line.strip() for line in sys.stdin] if flags.question == "-" else [flags.question.strip()]
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError("the question is empty; give one as an argument, or - and one a line on standard input")
    with _opened(flags, with_gold=False) as policy:
        for text, outcome in zip(texts, _played(policy, texts), strict=True):
            told = _told(text, outcome, policy.task)
            print(json.dumps(told, ensure_ascii=False) if flags.json else _in_words(told), flush=True)


def _played(policy: _Policy, texts: Sequence[str]) -> list[Outcome]:
    from query_mutator.evaluation.heldout import greedy
    from query_mutator.types import Question

    asked = [Question(id=str(number), text=text) for number, text in enumerate(texts)]
    return policy.evaluator.run(policy.task.on(asked), greedy(policy.frozen), name="rewriting")


def _told(text: str, outcome: Outcome, task: Task) -> dict[str, Any]:
    operators = {operator.name for operator in task.operators}
    rewrites = [after for name, after in zip(outcome.actions, outcome.rewrites, strict=True) if name in operators]
    return {"question": text, "rewrites": rewrites, "operators": list(outcome.actions), "answer": outcome.answer}


def _in_words(told: dict[str, Any]) -> str:
    rewrites = iter(told["rewrites"])
    width = max(map(len, (*told["operators"], "question", "answer")))
    lines = [("question", told["question"])]
    lines += [(name, "" if name in ("undo", "submit") else next(rewrites)) for name in told["operators"]]
    lines += [("answer", told["answer"])]
    return "\n".join(f"{name.ljust(width)}  {' '.join(text.split())}".rstrip() for name, text in lines) + "\n"


# --- shared ----------------------------------------------------------------------------------------------------------


class _Policy:
    """A trained policy with the models it needs, ready to play."""

    def __init__(self, checkpoint: Checkpoint, system: System, task: Task, evaluator: Evaluator) -> None:
        from query_mutator.training.learners import load_policy

        self.checkpoint, self.system, self.task, self.evaluator = checkpoint, system, task, evaluator
        self.frozen = load_policy(checkpoint)


@contextmanager
def _opened(flags: PolicyFlags, *, with_gold: bool = True, rewriter: str | None = None) -> Iterator[_Policy]:
    """Yield the policy of --checkpoint against the models it was trained with, or those the flags name.

    Without gold the training questions' reference answers are left out: nothing is scored, and embedding takes time.
    """
    from query_mutator.evaluation.heldout import embed_questions
    from query_mutator.evaluation.methods import Evaluator
    from query_mutator.training.checkpoint import read_checkpoint
    from query_mutator.training.system import System, make_task, split_dataset
    from rl_query_mutator_env import QueryMutationEnv

    checkpoint = read_checkpoint(flags.checkpoint)
    checkpoint.load_plugins()
    train = split_dataset(checkpoint.task).train
    if not with_gold:
        train = tuple(replace(question, reference=None) for question in train)
    settings = _settings(flags, checkpoint)
    with System(settings, rewriter=rewriter) as system, closing_on_interrupt(system.calls.close):
        embed_questions(system.encoder, train)
        settings_of_task = replace(checkpoint.task, operators=",".join(checkpoint.actions[:-2]))
        task = make_task(system, settings_of_task, train, projection=checkpoint.projection)
        checkpoint.check_actions(task.actions)
        evaluator = Evaluator(
            make_env=lambda task: QueryMutationEnv(task, client=system.calls.eval_client),
            client=system.calls.eval_client,
            batch_size=settings.batch_size,
            retry_policy=system.retry_policy,
            progress=progress,
        )
        with contextlib.closing(system.calls):
            yield _Policy(checkpoint, system, task, evaluator)


def _settings(flags: PolicyFlags, checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's system settings with the flags given over them; slowness is not part of an answer."""
    given = {name: getattr(flags, name) for name in _SYSTEM_FLAGS if getattr(flags, name) not in (None, ())}
    settings = replace(checkpoint.system, latency_ms=0.0, latency_sigma=0.0, running_speed=0.0)
    if given.get("backend", settings.backend) != settings.backend:  # another server's address and models mean nothing
        settings = replace(settings, ollama_url=None, openai_url=None, target_model=None, mutator_model=None)
    for address, backend in (("ollama_url", "ollama"), ("openai_url", "openai")):
        if address in given:
            settings = replace(settings, ollama_url=None, openai_url=None)
            given.setdefault("backend", backend)
    return replace(settings, **given)


COMMANDS: dict[str, tuple[type[Any], CarryOut]] = {
    "eval": (EvalFlags, evaluate_policy),
    "rewrite": (RewriteFlags, rewrite),
    "doctor": (DoctorConfig, doctor),
    **TOOLKIT,
    "analyze": (AnalyzeFlags, compare_runs),
    "sweep": (SweepFlags, sweep),
    "size": (SizeFlags, size),
    "size throughput": (SizeThroughputFlags, size_throughput),
    "size verify": (SizeVerifyFlags, verify),
    "size calibrate": (SizeCalibrateFlags, calibrate),
    "size replay": (SizeReplayFlags, size_replay),
    "size workers": (SizeWorkersFlags, size_workers),
    "size calls": (SizeCallsFlags, size_server),
}


def _first_paragraph(flags: type[Any]) -> str:
    """Return what a command does, in a line."""
    return " ".join((inspect.getdoc(flags) or "").partition("\n\n")[0].split())


def _usage(group: Sequence[str] = ()) -> str:
    """Return the commands that begin with the words of `group`, with what they do."""
    shown = {name: flags for name, (flags, _) in COMMANDS.items() if name.split()[: len(group)] == list(group)}
    width = max(map(len, shown))
    commands = [f"  {name.ljust(width)}  {_first_paragraph(flags)}" for name, flags in shown.items()]
    return "\n".join(["usage: qm COMMAND [flags]", "", *commands, "", "qm COMMAND --help shows its flags"])
