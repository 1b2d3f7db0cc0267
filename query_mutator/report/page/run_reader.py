"""A run folder as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ppo.fields import shown
from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.run_dir import run_state
from query_mutator.report.page.figures import Figures, Price, cost_of, learning_of
from query_mutator.report.page.messages import Message, Redactor, TextTable, chunks, origin_of, section
from query_mutator.report.page.questions import Evaluation
from query_mutator.report.page.results import results_of
from query_mutator.report.page.traffic import Traffic
from query_mutator.report.page.usage import TrainingUsage, choices_of_policy
from query_mutator.runs.listing import steps_asked
from query_mutator.runs.shadow import SHADOW, read_shadow
from query_mutator.types import AS_IS

_CONFIG, _SUMMARY = "config.json", "summary.json"
_METRICS, _STEPS, _OUTCOMES = "metrics.jsonl", "transcripts.jsonl", "evaluation.jsonl"
_COLUMNS = ("env", "step", "episode", "baseline_score", "score", "reward", "calls", "valid")
_TEXTS = {"id": "question_id", "q": "question", "op": "operator", "rewrite": "rewrite"}
_DIGITS = 4  # of scores: they are shown with three

Row = Mapping[str, Any]


class RunReader:
    """The files of a run as they are now; `run` is its number on the page.

    Raises a UsageError for a folder that is not one of a run, and for a damaged file.
    """

    def __init__(self, folder: str | Path, *, run: int = 0, price: Price | None = None) -> None:
        self.folder, self.run, self._price = Path(folder), run, price
        if not any((self.folder / name).exists() for name in (_CONFIG, _METRICS, _STEPS, _OUTCOMES)):
            raise UsageError(f"{folder}: no run folder; give one such as runs/latest")
        self._config = self._json(_CONFIG)
        self.redactor = Redactor(self._config)
        self.texts = TextTable(run, self.redactor.text)
        self.evaluation, self.figures, self.usage = Evaluation(self.texts), Figures(), TrainingUsage()
        shadow = self.folder / SHADOW
        self.traffic = Traffic(read_shadow(shadow) if shadow.exists() and shadow.stat().st_size else [], self.texts)

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.folder.resolve().name

    def messages(self) -> Iterator[Message]:
        """Yield the messages on the run, once: rows first, then the sections on them."""
        metrics = list(self._rows(_METRICS))
        _check_metrics(metrics, self.folder / _METRICS)
        if metrics:
            yield self.figures.metrics(self.run, metrics)
        yield from self._transcripts()
        for rows in chunks(self._rows(_OUTCOMES)):
            _check_outcomes(rows, self.folder / _OUTCOMES)
            for row in rows:
                self.evaluation.add(row)
        yield from self.texts.take()
        yield from self.evaluation.messages(self.run)
        yield from self.traffic.messages(self.run)
        yield from self._sections()

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_checked_json(path) if path.exists() else {}

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / name
        return read_json_lines(path) if path.exists() else iter(())

    def _transcripts(self) -> Iterator[Message]:
        for rows in chunks(self._rows(_STEPS)):
            for row in rows:
                _check(row, _STEP, self.folder / _STEPS)
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

    def _sections(self) -> list[Message]:
        """Return the sections."""
        try:
            return [section(self.run, name, data) for name, data in self._all_sections()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{self.folder}: summary.json or config.json is not that of a run ({reason}); restore it or remove it"
            ) from error

    def _all_sections(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        config, summary = self._config, self._json(_SUMMARY)
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
        if self.traffic:
            yield "traffic", self.traffic.section()

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


_NUMBER, _NULL = (int, float), type(None)
#: The type of each field of a row: one or several, those of the items of a list in a list, numbers by name as a dict.
_STEP: Mapping[str, Any] = {
    **dict.fromkeys(("env", "step", "episode", "calls"), int),
    **dict.fromkeys(("question_id", "question", "operator", "rewrite", "answer"), str),
    **dict.fromkeys(("score", "reward"), _NUMBER),
    **dict.fromkeys(("guard", "form", "first_answer"), (str, _NULL)),
    "baseline_score": (*_NUMBER, _NULL),
    "parts": {},
    "valid": bool,
    "cut": (dict, _NULL),
    "submitted": (int, _NULL),
    "error": (dict, _NULL),
}
_OUTCOME: Mapping[str, Any] = {
    **dict.fromkeys(("method", "set", "question_id", "question", "target", "why"), str),
    **{name: [str] for name in ("steps", "rewrites", "asked", "forms", "answers", "tags", "accepted")},
    **dict.fromkeys(("calls", "tokens", "seconds"), _NUMBER),
    **dict.fromkeys(("success", "score", "reply_tokens"), (*_NUMBER, _NULL)),
    "scores": [_NUMBER],
    "fits": [_NUMBER],
    "guards": [(str, _NULL)],
    "parts": [{}],
    "refused": (bool, _NULL),
    "submitted": (int, _NULL),
    "error": (dict, _NULL),
}


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(value, list) and all(_fits(item, wanted[0]) for item in value)
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_fits(item, _NUMBER) for item in value.values())
    return isinstance(value, wanted)


def _check_outcomes(rows: Sequence[Row], path: Path) -> None:
    """Raise a UsageError for a row that is not one of evaluation.jsonl."""
    for row in rows:
        _check(row, _OUTCOME, path)
        answers, is_scored = len(row["answers"]), row.get("error") is None
        lengths = [row["asked"], *(row[name] for name in ("forms", "parts", "scores", "fits") if row.get(name))]
        if any(len(each) != answers for each in lengths) or len(row["steps"]) != len(row["rewrites"]):
            raise _wrong(path, "steps and rewrites, or answers and their scores", "lists of different lengths")
        if is_scored and not (row.get("success") is not None and 0 <= (row.get("submitted") or 0) < answers):
            raise _wrong(path, "submitted", row.get("submitted"))


def _check_metrics(rows: Sequence[Row], path: Path) -> None:
    """Raise a UsageError for a row that is not one of metrics.jsonl."""
    for row in rows:
        _check(row, {"step": _NUMBER}, path)
        for name, value in row.items():
            if not (value is None or isinstance(value, (int, float)) or name == "crc"):
                raise _wrong(path, name, value)


def _check(row: Row, shape: Mapping[str, Any], path: Path) -> None:
    for name, wanted in shape.items():
        if not _fits(row.get(name), wanted):
            raise _wrong(path, name, row.get(name, "missing"))
    error = row.get("error")
    if error is not None and not {"kind", "message"} <= error.keys():
        raise _wrong(path, "error", error)


def _wrong(path: Path, name: str, value: object) -> UsageError:
    return UsageError(f"{path}: not a file of a run, in a row `{name}` is {shown(value)}; restore it, or take it away")
