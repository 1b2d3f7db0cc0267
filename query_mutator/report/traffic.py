"""Questions of real traffic answered both ways, as a table and one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.cli.console import table

__all__ = ["traffic_text"]

_PERCENT = ("refused", "not_sure")
_NAMES = {"refused": "refused, %", "not_sure": "not sure, %", "chars": "characters"}


def traffic_text(result: Mapping[str, Any]) -> str:
    """Return what `runs.shadow.shadow_result` found as text."""
    left = f"{result['unchanged']} left as they were"
    title = f"{result['pairs']} questions of real traffic answered both ways, {left}; 95 % intervals, McNemar's exact p"
    parts = []
    for found in result["comparisons"]:
        header = ("", "original", found["ours"], "difference", "more", "less", "p", "verdict")
        parts.append(table(title, header, [_row(row) for row in found["rows"]]))
        parts += _judge_lines(found["judge"])
    return "\n".join([*parts, result["sentence"]])


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    scale, digits = (100.0, 1) if row["metric"] in _PERCENT else (1.0, 3 if row["metric"] == "fit" else 2)

    def shown(value: float | None, sign: str = "") -> str:
        return "-" if value is None or not math.isfinite(value) else f"{scale * value:{sign}.{digits}f}"

    low, high = (shown(value, "+") for value in row["ci"])
    return (
        _NAMES.get(row["metric"], row["metric"]),
        shown(row["theirs"]),
        shown(row["ours"]),
        f"{shown(row['difference'], '+')} [{low}, {high}]",
        str(row["more"]),
        str(row["less"]),
        "" if row["p"] is None else f"{row['p']:.3f}",
        row["verdict"],
    )


def _judge_lines(judge: Mapping[str, Any] | None) -> list[str]:
    if judge is None:
        return []
    counts = f"{judge['wins']} won, {judge['losses']} lost, {judge['ties']} tied"
    return [f"judge {', '.join(judge['models'])}: {counts}, exact sign test p {judge['p']:.3f}, {judge['verdict']}"]
