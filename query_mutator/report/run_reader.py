"""Read what the page shows of a run folder, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from query_mutator.errors import HIDDEN, UsageError, hide_credentials
from query_mutator.evaluation.summary import POLICY
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.pairs import EVALUATION
from query_mutator.files.run_dir import CONFIG, SUMMARY, run_state, steps_asked
from query_mutator.report.figures import Figures
from query_mutator.report.questions import Choices, Episodes, Evaluation, TrainingUsage, episodes_of
from query_mutator.report.results import results_of
from query_mutator.types import wire_text

_STEPS = "transcripts.jsonl"
_SHOWN_CHARS = 200  # of an error
_ORIGIN = ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started", "resumed")

_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credential|auth(orization)?)$", re.IGNORECASE)
_MIN_CHARS = 8  # of a secret: shorter values of such variables are words
_PATTERNS = (
    re.compile(r"(?P<name>--[\w-]*(key|token|secret|password|passwd|credential)[= ]+)(?P<secret>('[^']*'|\S+))", re.I),
    re.compile(
        r"(?P<name>\b((proxy-)?authorization|cookie|[\w-]*(api-key|token|secret))\s*:\s*)"
        r"(?P<secret>((bearer|basic|token)\s+)?[^\s'\",;]+)",
        re.I,
    ),
    re.compile(r"(?P<name>)(?P<secret>\bsk-[\w/+-]{16,})"),
)


class RunReader:
    """A run as its files are now; UsageError for a folder that is not one of a run, and for a damaged file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.evaluation, self.figures, self.usage = Evaluation(), Figures(), TrainingUsage()
        self.episodes, self.choices = Episodes(), Choices()
        if not any((self.folder / name).exists() for name in (CONFIG, METRICS_FILE, _STEPS, EVALUATION)):
            raise UsageError(f"{folder}: no run folder; give one such as runs/latest")
        self._reading = CONFIG  # what an error is in
        config = self._json(CONFIG)
        self._secrets = _secrets_of(config)
        try:
            self._read_all(config)
        except UsageError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
            raise UsageError(
                f"{self.folder / self._reading} is not a file of a run ({reason}); restore it or remove it"
            ) from error

    def _read_all(self, config: Mapping[str, Any]) -> None:
        flags, backend = config.get("flags", {}), config.get("backend", {})
        for row in self._rows(METRICS_FILE):
            self.figures.add(row)
        for rows in episodes_of(self._rows(_STEPS)):
            self.figures.add_steps(rows)
            self.usage.add(rows)
            self.episodes.add(rows)
        self.episode_rows = self._clean(self.episodes.shown)
        for row in self._rows(EVALUATION):
            self.evaluation.add(row)
            if (row["method"], row["set"]) == (POLICY, "test"):
                self.choices.add(row["steps"], row["tags"])
                self.choices.episodes += not row["error"]
        self.questions = self._clean([*self.evaluation.shown.values()])
        summary, self._reading = self._json(SUMMARY), f"{SUMMARY} or {CONFIG}"
        self.is_timed = backend.get("kind") != "recorded" or any(
            flags.get(name) for name in ("latency_ms", "running_speed")
        )
        self.results = results_of(summary, self.evaluation, is_timed=self.is_timed)
        self.is_greedy = POLICY in self.evaluation.held_out
        self.choices = self.choices if self.is_greedy else self.usage.choices
        self.gains = self.usage.gains()
        self.operators = sorted({*self.choices.totals, *self.usage.choices.totals})
        self.lines = self.figures.lines(self.results["methods"])
        self.calls = self.figures.calls(is_timed=self.is_timed)
        self.eval_calls = summary.get("eval_llm_calls")
        self.server = ", ".join(map(str, flags.get("ollama_url") or [backend.get("url") or ""]))
        self.origin = {name: self._setting(config.get(name)) for name in _ORIGIN}
        self.state = run_state(self.folder)
        self.written = f"{datetime.now():%H:%M:%S}" if self.state == "running" else None
        self.step, self.steps = self.figures.last.get("step", 0), steps_asked(flags)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_checked_json(path) if path.exists() else {}

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path, self._reading = self.folder / name, name
        return read_json_lines(path) if path.exists() else iter(())

    def _clean(self, value: Any) -> Any:
        """Return data with no secret that is known in its texts, and with what a file in UTF-8 can hold."""
        if isinstance(value, str):
            for secret in self._secrets:
                if secret in value:
                    value = value.replace(secret, HIDDEN)
            return wire_text(value).replace("\0", "\ufffd")
        if isinstance(value, dict):
            return {name: self._clean(item) for name, item in value.items()}
        return [*map(self._clean, value)] if isinstance(value, list) else value

    def _setting(self, value: Any) -> Any:
        """Return a setting, nested ones included, without secrets and without what looks like one."""
        if isinstance(value, str):
            shown = hide_credentials(self._clean(value))
            for pattern in _PATTERNS:
                shown = pattern.sub(lambda match: f"{match['name']}{HIDDEN}", shown)
            return shown
        if isinstance(value, Mapping):
            return {name: HIDDEN if _is_secret(name, item) else self._setting(item) for name, item in value.items()}
        return [*map(self._setting, value)] if isinstance(value, (list, tuple)) else value


def _is_secret(name: object, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(str(name)) is not None


def _secrets_of(config: Mapping[str, Any]) -> list[str]:
    """Return the values of variables of the environment and of settings that are named as secrets, longest first."""
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)} | {*_secrets_in(config)}
    return sorted((value for value in found if len(value) >= _MIN_CHARS), key=len, reverse=True)


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the values of settings that are named as secrets."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from [item] if _is_secret(name, item) else _secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item)
