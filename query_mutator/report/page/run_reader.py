"""A run folder as messages: `poll` returns what is new in its files since the last poll."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import encode
from query_mutator.files.state import run_state
from query_mutator.report.page.cost import Price, cost_of
from query_mutator.report.page.figures import Figures, learning_of
from query_mutator.report.page.messages import Message, TextTable, chunks, section
from query_mutator.report.page.origin import Redactor, origin_of
from query_mutator.report.page.questions import Evaluation
from query_mutator.report.page.results import results_of
from query_mutator.report.page.rows import check_metrics, check_outcomes, check_steps
from query_mutator.report.page.tail import FollowedJson, FollowedRows
from query_mutator.report.page.traffic import Traffic
from query_mutator.report.page.usage import TrainingUsage, choices_of_policy
from query_mutator.runs.listing import steps_asked
from query_mutator.runs.shadow import SHADOW
from query_mutator.types import AS_IS

__all__ = ["RunReader"]

POLL_ROWS = 6000  # of a file at a time, which bounds the memory of a poll
_COLUMNS = ("env", "step", "episode", "baseline_score", "score", "reward", "calls", "valid")
_TEXTS = {"id": "question_id", "q": "question", "op": "operator", "rewrite": "rewrite"}
_DIGITS = 4  # of scores: they are shown with three


class RunReader:
    """The files of a run, read as they grow; `run` is its number on the page.

    Raises a UsageError for a folder that is not one of a run, and for a damaged file.
    """

    def __init__(self, folder: str | Path, *, run: int = 0, price: Price | None = None) -> None:
        self.folder, self.run, self._price = Path(folder), run, price
        self._config, self._summary = (FollowedJson(self.folder / f"{name}.json") for name in ("config", "summary"))
        names = ("metrics", "transcripts", "evaluation")
        if not any((self.folder / name).exists() for name in ("config.json", *(f"{name}.jsonl" for name in names))):
            raise UsageError(f"{folder}: no run folder; give one such as runs/latest")
        self._metrics, self._steps, self._rows = (FollowedRows(self.folder / f"{name}.jsonl") for name in names)
        self._config.read()
        self.redactor = Redactor(self._config.value)
        self.texts = TextTable(run, self.redactor.text)
        self.evaluation, self.figures, self.usage = Evaluation(self.texts), Figures(), TrainingUsage()
        self.traffic = Traffic(self.folder / SHADOW, self.texts)
        self._report: Mapping[str, Any] | None = None
        self._results: Mapping[str, Mapping[str, Any]] | None = None  # sections; None where the rows changed
        self._state = ""
        self._is_due = True  # sections are to be made although nothing is new in the files
        self._sent: dict[str, bytes] = {}  # sections, as they were sent last

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.folder.resolve().name

    def poll(self) -> tuple[Message, ...]:
        """Return the messages on what is new, in order; none if nothing is. Call it until it returns none.

        Many rows come in several calls.
        """
        is_changed = self._config.read()
        if self._summary.read():
            is_changed, self._results = True, None
        messages = self._poll_rows()
        while not messages and self.has_more:  # rows of an evaluation are sent together
            messages = self._poll_rows()
        state = run_state(self.folder)
        if messages or is_changed or state != self._state or self._is_due:
            self._state, self._is_due = state, self.has_more
            if not self.has_more:
                messages = [*self._sections(), *messages]
        return tuple(messages)

    @property
    def has_more(self) -> bool:
        """Return whether a file has rows that the last poll left for the next."""
        return any(each.has_more for each in (self._metrics, self._steps, self._rows, self.traffic))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _poll_rows(self) -> list[Message]:
        return [*self._poll_metrics(), *self._poll_steps(), *self._poll_evaluation(), *self._poll_traffic()]

    def _poll_metrics(self) -> Iterator[Message]:
        rows, is_reset = self._metrics.read(limit=POLL_ROWS)
        check_metrics(rows, self._metrics.path)
        if is_reset:
            self.figures.clear_metrics()
        if rows or is_reset:
            yield self.figures.metrics(self.run, rows, reset=is_reset)

    def _poll_steps(self) -> Iterator[Message]:
        rows, is_reset = self._steps.read(limit=POLL_ROWS)
        check_steps(rows, self._steps.path)
        if is_reset:
            self.figures.clear_steps()
            self.usage = TrainingUsage()
        for row in rows:
            self.figures.add_step(row)
            self.usage.add(row)
        if not (rows or is_reset):
            return
        for part in chunks(rows):
            columns = self._columns(part)
            yield from self.texts.take()
            yield {"kind": "transcripts", "run": self.run, "reset": is_reset, "columns": columns}
            is_reset = False

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [_short(row.get(name)) for row in rows] for name in _COLUMNS}
        columns["baseline"] = columns.pop("baseline_score")
        for name, field in _TEXTS.items():
            columns[name] = [self.texts.number(row[field]) for row in rows]
        columns["answer"] = [self.texts.number(row["answer"] or None) for row in rows]
        columns["form"] = [self.texts.number(row.get("form", AS_IS)) for row in rows]
        columns["error"] = [self.texts.number(_error(row["error"])) for row in rows]
        columns["parts"] = [
            {name: _short(value) for name, value in row["parts"].items()} if row["parts"] else None for row in rows
        ]
        return columns

    def _poll_evaluation(self) -> Iterator[Message]:
        rows, is_reset = self._rows.read(limit=POLL_ROWS)
        check_outcomes(rows, self._rows.path)
        if is_reset:
            self.evaluation.clear()
        for row in rows:
            self.evaluation.add(row)
        if rows or is_reset:
            self._results = None
            yield from self.texts.take()
        if (rows or is_reset) and not self._rows.has_more:
            yield from self.evaluation.messages(self.run)
            self.traffic.again()

    def _poll_traffic(self) -> Iterator[Message]:
        if self.traffic.read(limit=POLL_ROWS):
            yield from self.evaluation.messages(self.run)  # which removes the questions of before
        yield from self.traffic.messages(self.run)

    # --- sections ----------------------------------------------------------------------------------------------------

    def _sections(self) -> Iterator[Message]:
        """Yield the sections that changed."""
        try:
            sections = list(self._all_sections())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{self.folder}: summary.json or config.json is not that of a run ({reason}); restore it or remove it"
            ) from error
        for name, data in sections:
            message = section(self.run, name, data)
            encoded = encode(message)
            if self._sent.get(name) != encoded:
                self._sent[name] = encoded
                yield message

    def _all_sections(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        config, summary = self._config.value, self._summary.value
        if self._results is None:
            self._report = summary.get("eval") or (self.evaluation.report() if self.evaluation else None)
            self._results = results_of(self._report, summary, self.evaluation)
        for name, data in self._results.items():
            yield name, {**self._about(), **data} if name == "answer" else data
        yield "policy", self._policy()
        yield "learning", learning_of(self.figures, self._report)
        yield "calls", {**self.figures.calls(server=_server(config), summary=summary), "price": self._cost()}
        yield "reproduce", origin_of(config, self.redactor)
        if self.traffic:
            yield "traffic", self.traffic.section()

    def _about(self) -> dict[str, Any]:
        config = self._config.value
        return {
            "state": self._state,
            "name": self.name,
            "folder": str(self.folder),
            "started": config.get("started"),
            "step": self.figures.last.get("step", 0),
            "steps": steps_asked(config.get("flags", {})),
        }

    def _cost(self) -> dict[str, float | str] | None:
        if self._price is None:
            return None
        summary = self._summary.value
        return cost_of(self._price, training=self.figures.tokens, summary=summary, evaluation=self.evaluation)

    def _policy(self) -> dict[str, Any]:
        is_greedy = self.evaluation.has_policy
        policy_asks = (self._config.value or {}).get("flags", {}).get("ask", "every_step") != "every_step"
        choices = choices_of_policy(self.evaluation, policy_asks=policy_asks) if is_greedy else self.usage.choices
        first = self.usage.first_shares()
        names = dict.fromkeys([*(name for _, name in choices.by_step), *first["shares"]])
        return {
            "source": "held-out questions, greedy policy" if is_greedy else "training",
            **choices.data(sorted(names)),
            **self.usage.gains(learned_from=_teacher(self._config.value)),
            "first": first,
        }


def _server(config: Mapping[str, Any]) -> str:
    """Return where the calls of a run went."""
    urls = config.get("flags", {}).get("ollama_url") or [config.get("backend", {}).get("url") or ""]
    return ", ".join(map(str, urls))


def _teacher(config: Mapping[str, Any]) -> str:
    return "the teacher" if config.get("flags", {}).get("teacher") else ""


def _error(error: Mapping[str, Any] | None) -> str | None:
    return f"{error['kind']}: {error['message']}" if error else None


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value
