"""A run folder as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.run_dir import run_state
from query_mutator.report.page.figures import Figures, Price, cost_of, learning_of
from query_mutator.report.page.messages import Message, Redactor, TextTable, chunks, origin_of, section
from query_mutator.report.page.questions import Evaluation
from query_mutator.report.page.results import results_of
from query_mutator.report.page.usage import TrainingUsage, choices_of_policy
from query_mutator.runs.listing import steps_asked
from query_mutator.types import AS_IS

_CONFIG, _SUMMARY = "config.json", "summary.json"
_METRICS, _STEPS, _OUTCOMES = "metrics.jsonl", "transcripts.jsonl", "evaluation.jsonl"
_COLUMNS = ("env", "step", "episode", "baseline_score", "score", "reward", "calls", "valid")
_TEXTS = {"id": "question_id", "q": "question", "op": "operator", "rewrite": "rewrite"}
_DIGITS = 4  # of scores: they are shown with three
_SHOWN_CHARS = 200  # of an error


class RunReader:
    """The files of a run as they are now; `run` is its number on the page.

    Raises a UsageError for a folder that is not one of a run, and for a damaged file.
    """

    def __init__(self, folder: str | Path, *, run: int = 0, price: Price | None = None) -> None:
        self.folder, self.run, self._price = Path(folder), run, price
        self._reading = _CONFIG  # what an error is in
        if not any((self.folder / name).exists() for name in (_CONFIG, _METRICS, _STEPS, _OUTCOMES)):
            raise UsageError(f"{folder}: no run folder; give one such as runs/latest")
        self._config = self._json(_CONFIG)
        self.redactor = Redactor(self._config)
        self.texts = TextTable(run, self.redactor.text)
        self.evaluation, self.figures, self.usage = Evaluation(self.texts), Figures(), TrainingUsage()

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.folder.resolve().name

    def messages(self) -> Iterator[Message]:
        """Yield the messages on the run, once: rows first, then the sections on them."""
        try:
            yield from self._messages()
        except UsageError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
            raise UsageError(
                f"{self.folder / self._reading} is not a file of a run ({reason}); restore it or remove it"
            ) from error

    def _messages(self) -> Iterator[Message]:
        if metrics := list(self._rows(_METRICS)):
            yield self.figures.metrics(self.run, metrics)
        yield from self._transcripts()
        for row in self._rows(_OUTCOMES):
            self.evaluation.add(row)
        yield from self.texts.take()
        yield from self.evaluation.messages(self.run)
        yield from [section(self.run, name, data) for name, data in self._sections()]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_checked_json(path) if path.exists() else {}

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path, self._reading = self.folder / name, name
        return read_json_lines(path) if path.exists() else iter(())

    def _transcripts(self) -> Iterator[Message]:
        for rows in chunks(self._rows(_STEPS)):
            for row in rows:
                self.figures.add_step(row)
                self.usage.add(row)
            columns = self._columns(rows)
            yield from self.texts.take()
            yield {"kind": "transcripts", "run": self.run, "columns": columns}

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

    # --- sections ----------------------------------------------------------------------------------------------------

    def _sections(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        config, summary, self._reading = self._config, self._json(_SUMMARY), f"{_SUMMARY} or {_CONFIG}"
        report = summary.get("eval") or (self.evaluation.report() if self.evaluation else None)
        for name, data in results_of(report, summary, self.evaluation).items():
            yield name, {**self._about(), **data} if name == "answer" else data
        yield "policy", self._policy()
        yield "learning", learning_of(self.figures, report)
        cost = None
        if self._price is not None:
            cost = cost_of(self._price, training=self.figures.tokens, summary=summary, evaluation=self.evaluation)
        yield "calls", {**self.figures.calls(server=_server(config), summary=summary), "price": cost}
        yield "reproduce", origin_of(config, self.redactor)

    def _about(self) -> dict[str, Any]:
        config, state = self._config, run_state(self.folder)
        return {
            "state": state,
            "written": f"{datetime.now():%H:%M:%S}" if state == "running" else None,
            "name": self.name,
            "folder": str(self.folder),
            "started": config.get("started"),
            "step": self.figures.last.get("step", 0),
            "steps": steps_asked(config.get("flags", {})),
        }

    def _policy(self) -> dict[str, Any]:
        is_greedy = self.evaluation.has_policy
        policy_asks = self._config.get("flags", {}).get("ask", "every_step") != "every_step"
        choices = choices_of_policy(self.evaluation, policy_asks=policy_asks) if is_greedy else self.usage.choices
        first = self.usage.first_shares()
        names = dict.fromkeys([*(name for _, name in choices.by_step), *first["shares"]])
        return {
            "source": "held-out questions, greedy policy" if is_greedy else "training",
            **choices.data(sorted(names)),
            **self.usage.gains(),
            "first": first,
        }


def _server(config: Mapping[str, Any]) -> str:
    """Return where the calls of a run went."""
    urls = config.get("flags", {}).get("ollama_url") or [config.get("backend", {}).get("url") or ""]
    return ", ".join(map(str, urls))


def _error(error: Mapping[str, Any] | None) -> str | None:
    return f"{error['kind']}: {error['message']}" if error else None


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value
