"""`qm batch`: answer a file of questions, and resume where it was stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter
from filelock import FileLock, Timeout

from query_mutator.apply.batch_files import Ask, BatchRows, answer_file, ask_once, parse_line, read_input, request_of
from query_mutator.bounds import Prose, defaults
from query_mutator.cli.console import note, progress
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import Output, OutputFlags, holding
from query_mutator.commands.policy import RunAndFlags, open_policy, system_settings
from query_mutator.env.scheduling import Flow
from query_mutator.errors import EXIT_FAILURES, TooManyFailuresError, UsageError, disk_errors
from query_mutator.evaluation.comparison import Evaluator, metered, outcome_flow
from query_mutator.llm.store import Store
from query_mutator.session.models import OpenModels, ResolvedModels, open_models
from query_mutator.session.play import greedy
from query_mutator.settings import Sampling
from query_mutator.types import AS_IS, Completion, Question

if TYPE_CHECKING:
    from query_mutator.evaluation.summary import Outcome

Start = Callable[[Ask], Flow]  # returns how a line is answered


@dataclass(frozen=True, kw_only=True)
@defaults(target_max_tokens=1024)
class BatchFlags(RunAndFlags, Sampling, OutputFlags):
    """Answer a file of questions: OpenAI's batch format, or one question per line as in a question set.

    Rows are in the order of the lines. Rerun the command to resume it: no completed call is repeated. Without
    --checkpoint an answer has at most 1024 tokens and temperature 0, unless a flag or its line sets them.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "words", "out", "checkpoint", "ollama_url", "openai_url", "gguf", "backend", "target_model", "batch_size",
        "target_max_tokens", "temperature", "force",
    )  # fmt: skip
    words: Positional[tuple[Prose, ...]] = ()
    """The file of questions, one JSON object per line; before it, optionally, a run folder whose policy answers."""
    out: Annotated[str, Parameter(alias="-o"), Output(holding(b'"response":{', b'"answer":'))]
    """File for the answers; failed lines go to a file next to it, as out.errors.jsonl."""
    checkpoint: str = ""
    """A run folder or a .qm file whose policy rewrites each prompt; by default prompts are sent unchanged."""


def answer(flags: BatchFlags) -> int:
    """Answer the file; return exit code 3 if some lines have no answer."""
    questions, out = Path(flags.words[0]), Path(flags.out)
    errors, path = out.with_suffix(f".errors{out.suffix}"), out.with_name(f"{out.name}.replies.sqlite")
    _check_files(flags, questions, errors, path)
    lines = read_input(questions)
    with ExitStack() as stack:
        stack.enter_context(_alone(path))
        models, start = stack.enter_context(_with_policy(flags) if flags.checkpoint else _plain(flags, lines))
        store = Store(path)
        stack.callback(store.close)
        models.calls.keep(store)
        rows = BatchRows()
        try:
            _answer_all(flags, models, start, rows, lines)
        except (KeyboardInterrupt, TooManyFailuresError):
            note(f"{len(rows.answers)} lines are done; repeat the command to resume it")
            raise
        rows.write(out, errors)
        store.close()
        path.unlink()
    print(f"{out}: {len(rows.answers)} answers")
    if rows.errors:
        note(f"{errors}: lines without an answer: {len(rows.errors)}")
    return EXIT_FAILURES if rows.errors else 0


def _check_files(flags: BatchFlags, questions: Path, errors: Path, store: Path) -> None:
    """Raise a UsageError for files that must not be replaced, and where there are no questions."""
    if not flags.words[0]:
        raise UsageError("no questions are named; write qm batch questions.jsonl --out answers.jsonl")
    if Path(flags.out).exists() and not Path(flags.out).is_file():
        raise UsageError(f"--out {flags.out} is not a file; replies are kept next to it, so name a file")
    for path in (errors, store):
        if path.exists() and questions.exists() and path.samefile(questions):
            raise UsageError(f"{path}, which this command writes, is the input; choose another --out")
    if errors.exists() and not store.exists() and not (flags.force and holding(b'"error":{')(errors)):
        raise UsageError(f"{errors} exists; choose another --out, or replace it with --force if this command wrote it")


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Hold the lock of a store, which ends with the process."""
    path = store.with_name(f"{store.name}.lock")
    with disk_errors(path):  # a lock that cannot be written would be waited for
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        with FileLock(path, timeout=0.2):
            try:
                yield
            finally:
                if not store.exists():
                    path.unlink(missing_ok=True)
    except Timeout:
        raise UsageError(f"{store} is being written by another process; wait for it, or choose another --out") from None


def _answer_all(flags: BatchFlags, models: OpenModels, start: Start, rows: BatchRows, lines: Sequence[bytes]) -> None:
    caller = Evaluator.of(models, max_failure_rate=flags.max_failure_rate)
    began, counted = time.perf_counter(), models.calls.eval_client
    total = sum(map(bool, map(bytes.strip, lines)))
    with progress("answering", total, unit="line") as bar:

        def shown() -> None:
            rate = counted.totals.calls / max(1e-9, time.perf_counter() - began)
            bar.set_postfix({"calls/s": f"{rate:.1f}", "failed": len(rows.errors)}, refresh=False)
            bar.update()

        answer_file(lines, rows, caller, models.encoder, start, shown=shown)


# --- how a line is answered ------------------------------------------------------------------------------------------


@contextmanager
def _plain(flags: BatchFlags, lines: Sequence[bytes]) -> Iterator[tuple[OpenModels, Start]]:
    """Yield models, and how each line is sent as it is."""
    base = ResolvedModels(encoder="hash", cache="off")  # nothing is embedded
    named = flags.target_model or tuple(filter(None, (_first_model(lines),)))
    with open_models(system_settings(flags, base, target_model=named)) as models:

        def start(ask: Ask) -> Flow:
            model = flags.first_model or ask.model or models.target_model
            keeps = not models.calls.eval_client.is_instant
            return ask_once(ask, request_of(ask, model=model, sampling=flags, keeps=keeps))

        yield models, start


def _first_model(lines: Sequence[bytes]) -> str | None:
    """Return the model of the first line that names one, so that a missing model is found before anything starts."""
    for number, line in enumerate(lines, 1):
        with contextlib.suppress(ValueError):
            if (model := parse_line(number, line).model) is not None:
                return model
    return None


@contextmanager
def _with_policy(flags: BatchFlags) -> Iterator[tuple[OpenModels, Start]]:
    """Yield models, and how a policy rewrites the prompt of each line and submits an answer."""
    with open_policy(flags) as rewriter:
        sampling = {one.name for one in fields(Sampling)} & flags.given
        given: dict[str, Any] = {name: getattr(flags, name) for name in sampling}
        task = replace(rewriter.task, calls=replace(rewriter.task.calls, **given))
        player = greedy(rewriter.policy)

        def start(ask: Ask) -> Flow:
            if ask.prompt is None:  # a conversation
                request = request_of(ask, model=task.calls.target_model, sampling=task.calls)
                return ask_once(ask, request, {"operators": [], "rewrite": None, "form": AS_IS, "rejected": []})
            on_line = task.on([Question(id=str(ask.number), text=ask.prompt, context=ask.messages[:-1])])
            return _rewritten(metered(outcome_flow(on_line, 0, player)), model=task.calls.target_model)

        yield rewriter.models, start


def _rewritten(episode: Flow, *, model: str) -> Flow:
    """Yield the needs of an episode; return the Answer that it submitted, with what was done to the prompt."""
    outcome: Outcome = yield from episode
    if outcome.error is not None or outcome.submitted is None:
        return Completion(error=outcome.error), None
    completion = Completion(
        text=outcome.answer,
        model=model,
        prompt_tokens=outcome.tokens - outcome.reply_tokens,
        completion_tokens=outcome.reply_tokens,
        hit_limit=outcome.is_cut,
    )
    rejected = [{"operator": operator, "guard": guard} for operator, guard in outcome.rejected]
    rewrite, form = outcome.asked[outcome.submitted], outcome.forms[outcome.submitted]
    about = {"operators": list(outcome.steps), "rewrite": rewrite, "form": form}
    return completion, {**about, "rejected": rejected}
