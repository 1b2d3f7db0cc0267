"""Answer the lines of a file with `batch_size` calls in flight: every line is a flow, every answer is journaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from query_mutator.apply.files.journal import FileJournal
from query_mutator.apply.files.lines import Ask, InputFile, parse_line, read_again
from query_mutator.apply.files.rows import answer_row, bad_line_row, error_row
from query_mutator.env.flow import Call, CallSite, Flow, Need, map_needs
from query_mutator.env.scheduling import Scheduler
from query_mutator.session.failure_rate import FailureWindow
from query_mutator.types import ChatRequest, Completion

__all__ = ["Answer", "answer_file", "ask_once", "metered", "request_of"]

AHEAD = 4  # lines in progress for each call in flight: some of them wait before a retry

#: The completion of a line, and what a policy did with its prompt.
Answer = tuple[Completion, dict[str, object] | None]


class Shown(Protocol):
    """A progress bar."""

    def update(self) -> object:
        """Count a line."""


def request_of(ask: Ask, *, model: str, max_tokens: int, temperature: float) -> ChatRequest:
    """Return the request of a line; what it leaves open is as given."""
    return ChatRequest(
        model=model,
        messages=ask.messages,
        max_tokens=max_tokens if ask.max_tokens is None else ask.max_tokens,
        temperature=temperature if ask.temperature is None else ask.temperature,
        seed=ask.seed,
        options=ask.options,
    )


def ask_once(ask: Ask, request: ChatRequest, more: dict[str, object] | None = None) -> Flow:
    """Yield the one call of a line; return its Answer."""
    completion = yield Call(request, CallSite(ask.number, 0, "answer"))
    return completion, more


def metered(flow: Flow, tokens: Counter[str]) -> Flow:
    """Yield the needs of a flow and return its result; count the tokens of its calls."""

    def count(need: Need) -> Flow:
        result = yield need
        if isinstance(need, Call):
            tokens.update(prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens)
        return result

    return map_needs(flow, count)


def answer_file(
    known: InputFile,
    journal: FileJournal,
    scheduler: Scheduler,
    start: Callable[[Ask], Flow],
    *,
    failures: FailureWindow,
    shown: Shown,
    on_bad_line: Callable[[int, str], None],
) -> None:
    """Answer all lines of a file that the journal does not have; `start` returns the flow of a line, with its Answer.

    Raises TooManyFailuresError when calls fail too often, and UsageError when the file changes; the command can be
    resumed.
    """
    asks = _asks(known, journal, on_bad_line, shown)
    in_progress: dict[int, Ask] = {}
    while True:
        while len(in_progress) < AHEAD * scheduler.batch_size and (ask := next(asks, None)) is not None:
            in_progress[ask.number] = ask
            scheduler.start(ask.number, start(ask), done=ask.number)
        if not in_progress:
            return
        number, (completion, more) = scheduler.finished()
        assert isinstance(number, int)
        _finish(journal, in_progress.pop(number), completion, more)
        failures.add(np.array([completion.ok]))
        shown.update()


def _finish(journal: FileJournal, ask: Ask, completion: Completion, more: dict[str, object] | None) -> None:
    error = completion.error
    if error is None:
        journal.add(ask.number, answer_row(ask, completion, more))
    elif error.kind != "cancelled":
        journal.add(ask.number, error_row(ask, error), error.kind)


def _asks(
    known: InputFile, journal: FileJournal, on_bad_line: Callable[[int, str], None], shown: Shown
) -> Iterator[Ask]:
    """Yield what the lines ask that are not done; lines that ask nothing are done at once."""
    for number, line in read_again(known):
        if not line.strip() or journal.is_done(number):
            continue
        try:
            ask = parse_line(number, line)
        except ValueError as error:
            on_bad_line(number, str(error))
            journal.add(number, bad_line_row(number, str(error)), "invalid_line")
            shown.update()
            continue
        yield ask
