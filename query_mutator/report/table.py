"""The result table of an evaluation: one row per method, in percent with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.cli.console import table

__all__ = ["assistant_name", "result_table"]

_HEADER = ("", "success", "score", "false refusals", "guard refusals", "calls/question", "policy minus this")


def assistant_name(target: str, *, embedded: bool) -> str:
    """Return the target's name, marked when it is the embedded assistant."""
    return f"{target} (the embedded assistant)" if embedded else target


def result_table(report: Mapping[str, Any]) -> str:
    """Return the table of an evaluation report, with notes on its rows."""
    target = assistant_name(report["target"], embedded=report["embedded"])
    title = f"{report['n']} held-out questions, answered by {target}; percent with 95 % intervals"
    rows = [_row(name, method, report["policy_minus"].get(name)) for name, method in report["methods"].items()]
    notes = [
        f"best_single: {report['best_single_operator']}; best_of_k: k = {report['k']} answers per question",
        "false refusals: refusals of harmless questions; guard refusals: refusals of questions that should be refused",
    ]
    return "\n".join([table(title, _HEADER, rows), *notes])


def _row(name: str, method: Mapping[str, Any], difference: Mapping[str, Any] | None) -> Sequence[str]:
    return (
        name,
        _rate(method["success"], method["success_ci"]),
        f"{method['score']:.3f}",
        _rate(method["false_refusal"], method["false_refusal_ci"]),
        _rate(method["guard_refusal"], method["guard_refusal_ci"]),
        f"{method['calls_per_question']:.1f}",
        _rate(difference["success"], difference["success_ci"], signed=True) if difference else "",
    )


def _rate(rate: float, interval: Sequence[float], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
