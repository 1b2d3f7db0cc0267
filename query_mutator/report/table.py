"""The result table of an evaluation: one row per method, in percent with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.cli.console import table

__all__ = ["assistant_name", "result_table"]

_HEADER = (
    "",
    "success",
    "score",
    "false refusals",
    "guard refusals",
    "calls/question",
    "policy minus this",
    "unscored",
)


def assistant_name(target: str, *, embedded: bool) -> str:
    """Return the target's name, marked when it is the embedded assistant."""
    return f"{target} (the embedded assistant)" if embedded else target


def result_table(report: Mapping[str, Any]) -> str:
    """Return the table of an evaluation report, with notes on its rows."""
    target = assistant_name(report["target"], embedded=report["embedded"])
    title = f"{report['n']} held-out questions, answered by {target}; percent with 95 % intervals"
    differences = report["policy_minus"]
    rows = [_row(name, method, differences.get(name)) for name, method in report["methods"].items()]
    header = _HEADER if any(row[-1] for row in rows) else _HEADER[:-1]
    notes = [
        f"best_single: {report['best_single_operator']}; best_of_k: k = {report['k']} answers per question",
        "false refusals: refusals of harmless questions; guard refusals: refusals of questions that should be refused",
        *_unscored_notes(report.get("unscored", ())),
    ]
    return "\n".join([table(title, header, [row[: len(header)] for row in rows]), *notes])


def _row(name: str, method: Mapping[str, Any], difference: Mapping[str, Any] | None) -> Sequence[str]:
    unscored = _counts(method.get("unscored", {}))
    on_guard = _counts(method.get("guard_unscored", {}))
    return (
        name,
        _rate(method["success"], method["success_ci"]) or f"no replies: {unscored}",
        _number(method["score"], ".3f"),
        _rate(method["false_refusal"], method["false_refusal_ci"]),
        _rate(method["guard_refusal"], method["guard_refusal_ci"]) or f"no replies: {on_guard}",
        _number(method["calls_per_question"], ".1f"),
        _rate(difference["success"], difference["success_ci"], signed=True) if difference else "",
        "; ".join(filter(None, (unscored, on_guard and f"guard {on_guard}"))),
    )


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} ×{count}" for kind, count in kinds.items())


def _unscored_notes(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one line for each kind of failure, with its first question."""
    first = {row["kind"]: row for row in reversed(rows)}
    return [
        f"unscored and in no rate: {kind}, as question {row['question_id']} ({row['method']}): {row['message']}"
        for kind, row in first.items()
    ]


def _rate(rate: float | None, interval: Sequence[float], *, signed: bool = False) -> str:
    """Return a rate and its interval in percent, "" for none."""
    if rate is None or math.isnan(rate):
        return ""
    sign = "+" if signed else ""
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)
