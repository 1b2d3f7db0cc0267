"""Read what the page shows of a run folder, without secrets; with the comparison of its methods."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from query_mutator.errors import HIDDEN, UsageError, hide_credentials
from query_mutator.evaluation.comparison import BEST_SINGLE
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, warning_of
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.pairs import EVALUATION, pair_rows, paired_json
from query_mutator.files.run_dir import CONFIG, SUMMARY, run_state, steps_asked
from query_mutator.report.figures import Figures
from query_mutator.report.questions import Choices, Episodes, Evaluation, TrainingUsage, episodes_of
from query_mutator.stats import wilson_interval
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


# --- the comparison: methods with their intervals, verdict and warnings, the front, and the policy against each method


_CHOSEN_ON = "Plans were chosen on these questions, so the success of a plan is too high; measure it with qm eval."
_OUT_OF_FOLD = "Figures are out of fold, by target, on the logged questions; on others measure the plan with qm eval."
SHORTEST_CALL_S = 1e-3  # of a model; a lookup in the cache takes less


def results_of(summary: Mapping[str, Any], evaluation: Evaluation, *, is_timed: bool = True) -> dict[str, Any]:
    """Return the comparison of an evaluation, or that of a search for a plan; without either, no method.

    Seconds are left out unless `is_timed`: those of recorded replies mean nothing.
    """
    if report := summary.get("eval"):
        methods, search = report["methods"], report.get("plan_search") or {}
        timed = methods if is_timed else ()
        return {
            **report,
            "seconds": {name: evaluation.mean(name, "seconds", least=SHORTEST_CALL_S) for name in timed},
            "plan": search["best"]["plan"] if search else None,
            "verdict": report["verdict"]["sentence"],
            "warnings": warning_of(report["n"]),
            "of": "held-out question",
            "front": [{**point, "success_ci": methods[point["method"]]["success_ci"]} for point in report["front"]],
            "paired": _paired(report, evaluation),
            "tags": report["by_group"],
            "p_right": _reliability(search),
        }
    if "plan" in summary:
        return _plan_results(summary["plan"], summary["search"])
    return {"methods": {}, "warnings": [], "n": 0, "front": [], "tags": {}}


def _plan_results(plan: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a search for a plan, which read training questions only, or of what a log taught."""
    best, is_log = plan if plan["steps"] else search["best"], not search["calls"]
    in_calls = search["front"].values()  # the best plan within each number of calls per question
    points = {point["plan"]: point for point in (*filter(None, [search.get("original")]), *in_calls)}
    on_front = {point["plan"] for point in in_calls}
    found = {IDENTITY: search.get("original"), BEST_SINGLE: search.get("single"), PLAN: best}
    methods = {name: point for name, point in found.items() if point}
    if len(methods) > 1 and not best["steps"]:
        methods.popitem()
    return {
        "methods": methods,
        "verdict": search.get("verdict"),
        "warnings": [_OUT_OF_FOLD if is_log else _CHOSEN_ON],
        "n": plan["questions"],
        "of": "logged question" if is_log else "training question",
        "front": [{**point, "method": name, "on_front": name in on_front} for name, point in points.items()],
        "tags": {},
        "p_right": _reliability(search),
        "only_plan": True,
    }


def _reliability(search: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how good P(right) is, with an interval for each bin; None where it was not learned."""
    quality = search.get("p_right") or {}
    counted = [(each, each["n"]) for each in quality.get("reliability", ())]
    bins = [{**each, "rate_ci": wilson_interval(round(each["rate"] * n), n)} for each, n in counted]
    return {**quality, "reliability": bins} if bins else None


def _paired(report: Mapping[str, Any], evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the policy against each other method, question by question."""
    rows, ours = [], evaluation.held_out[POLICY]
    for name, difference in report["policy_minus"].items():
        if name in evaluation.held_out:
            found, _ = pair_rows(ours, evaluation.held_out[name], interval=difference["success_ci"])
            rows.append({"method": name, **paired_json(found)})
    return rows
