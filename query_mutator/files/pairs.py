"""The rows of an evaluation (`evaluation.jsonl`) by method, and two methods or runs paired question by question."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.stats import Interval, Paired, compare_pairs

EVALUATION = "evaluation.jsonl"
Row = Mapping[str, Any]


def read_held_out(path: Path) -> dict[str, list[Row]]:
    """Return the rows on held-out questions by method, from a run folder or a file of rows; UsageError without any."""
    file = path / EVALUATION if path.is_dir() else path
    if not file.exists():
        raise UsageError(
            f"{path} has no {EVALUATION}: its evaluation did not finish, or it ran with --no-evaluate; "
            f"make one with `qm eval --checkpoint {path} --evaluation FILE`, and give FILE"
        )
    found: dict[str, list[Row]] = {}
    for row in read_json_lines(file):
        if not _is_row(row):
            raise UsageError(f"{file} has no rows of an evaluation; give a run folder, or its {EVALUATION}")
        if row["set"] == "test":
            found.setdefault(row["method"], []).append(row)
    if not found:
        raise UsageError(f"{file} has no row of a held-out question; evaluate again with `qm eval`")
    return found


def pair_rows(
    ours: Iterable[Row], theirs: Iterable[Row], *, interval: Interval | None = None
) -> tuple[Paired, Counter[str]]:
    """Return how two methods or runs differ on the questions that both have; a row for each question on either side.

    Second is how many were left out: "ours" and "theirs" have no other side, "changed" have another wording or other
    accepted answers. `interval` is that of the difference, where it is known already.
    """
    one, other = ({row["question_id"]: row for row in rows} for rows in (ours, theirs))
    both = [(one[name], other[name]) for name in one if name in other]
    same = [(a, b) for a, b in both if all(a[key] == b[key] for key in ("question", "accepted"))]
    columns = [_right(a) for a, _ in same], [_right(b) for _, b in same], [str(a["target"]) for a, _ in same]
    left_out = Counter(ours=len(one) - len(both), theirs=len(other) - len(both), changed=len(both) - len(same))
    return compare_pairs(*columns, interval=interval), left_out


def paired_json(result: Paired) -> dict[str, Any]:
    """Return counts, difference of success, its interval and p as plain JSON types."""
    names = ("questions", "difference", "gained", "lost", "same_right", "same_wrong", "unscored", "p")
    return {**{name: getattr(result, name) for name in names}, "ci": list(result.interval)}


def _is_row(row: Row) -> bool:
    names = all(isinstance(row.get(name), str) for name in ("method", "set", "question_id", "question", "target"))
    return names and "accepted" in row and isinstance(row.get("success", ""), (int, float, NoneType))


def _right(row: Row) -> float:
    """Return 1 for a right answer, 0 for a wrong one, NaN for a question that is unscored."""
    return math.nan if row["success"] is None else float(row["success"] >= 0.5)


def shown_p(p: float) -> str:
    """Return a p value for a table."""
    return "<0.001" if p < 0.001 or math.isnan(p) else f"{p:.3f}"
