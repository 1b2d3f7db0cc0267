"""What new scores change: success, score and each part of it, before and after, for steps and for each method."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from query_mutator.cli.console import table
from query_mutator.evaluation.rescoring.answers import Row
from query_mutator.types import SUCCESS_PARTS, success_in, wire_text

__all__ = ["STEPS", "changes", "changes_text"]

STEPS, HELD_OUT = "training steps", "held-out questions"
#: A row as the run wrote it, and with its new scores.
Pair = tuple[Row, Row]


def changes(steps: Iterable[Pair], outcomes: Iterable[Pair]) -> dict[str, Any]:
    """Return the figures before and after as plain JSON types: of all steps, and of each method on held-out questions.

    Rows that the run left unscored, or that have no new score, are counted and left out.
    """
    groups: dict[str, list[Pair]] = {STEPS: list(steps)}
    held_out = [pair for pair in outcomes if pair[0].get("set", "test") == "test"]
    for pair in held_out:
        groups.setdefault(wire_text(pair[0]["method"]), []).append(pair)
    parts = {STEPS: _parts(groups[STEPS]), HELD_OUT: _parts(held_out)}
    return {
        "groups": {name: _figures(pairs) for name, pairs in groups.items() if pairs},
        "parts": {name: found for name, found in parts.items() if found},
    }


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    was_scored = [pair for pair in pairs if _is_scored(pair[0])]
    both = [pair for pair in was_scored if _is_scored(pair[1])]
    errors = [pair[1]["error"] for pair in was_scored if not _is_scored(pair[1])]
    return {
        "rows": len(pairs),
        "failed": len(pairs) - len(was_scored),
        "unscored": dict(Counter(str(error["kind"]) for error in errors)),
        "reasons": {str(error["kind"]): error["message"] for error in errors},
        "success": _change([(_success(old), _success(new)) for old, new in _answers(pairs)]),
        "score": _change([(old.get("score"), new["score"]) for old, new in both]),
    }


def _parts(pairs: Sequence[Pair]) -> dict[str, Any]:
    answers = _answers(pairs)
    names = dict.fromkeys(name for pair in answers for parts in pair for name in parts)
    return {wire_text(name): _change([(old.get(name), new.get(name)) for old, new in answers]) for name in names}


def _answers(pairs: Sequence[Pair]) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Return the parts of the answers that have a score before and after."""
    parts = [(_parts_of(old), _parts_of(new)) for old, new in pairs if _is_scored(old)]
    return [pair for pair in parts if pair[1]]


def _is_scored(row: Row) -> bool:
    return row.get("error") is None and row.get("valid", True)


def _parts_of(row: Row) -> Mapping[str, float]:
    """Return the parts of the score of a step's answer, or of the answer that was submitted; {} without any."""
    parts = row.get("parts") or {}
    if isinstance(parts, Mapping):
        return parts
    submitted: Mapping[str, float] = parts[row.get("submitted") or 0]
    return submitted


def _success(parts: Mapping[str, float]) -> float | None:
    """Return whether an answer is right, None where no part says so."""
    return success_in(parts) if set(SUCCESS_PARTS) & set(parts) else None


def _change(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Return the means before and after, None without values, and how many values rose and fell."""
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    columns = ([value for value in column if value is not None] for column in zip(*pairs, strict=True))
    before, after = (float(np.mean(column)) if column else None for column in columns) if pairs else (None, None)
    return {
        "before": before,
        "after": after,
        "rose": sum(b > a for a, b in known),
        "fell": sum(b < a for a, b in known),
    }


# --- in words --------------------------------------------------------------------------------------------------------


def changes_text(report: Mapping[str, Any]) -> str:
    """Return the tables of a report, and what was not scored."""
    groups, parts = report["groups"], report["parts"]
    header = ("", "rows", "success before", "after", "gained", "lost", "score before", "after")
    title = f"scored again by {report['reward']}; success in percent"
    lines = [table(title, header, [_row(*one) for one in groups.items()])]
    columns = ("part", *itertools.chain(*((f"{name}: before", "after") for name in parts)))
    names = dict.fromkeys(itertools.chain(*parts.values()))
    rows = [(name, *itertools.chain(*(_both(found.get(name), 3) for found in parts.values()))) for name in names]
    lines.append(table("mean of each part of the answers' scores", columns, rows))
    if failed := sum(one["failed"] for one in groups.values()):
        lines.append(f"unscored before and after: {failed:,} rows whose call failed in the run")
    unscored = sum((Counter(one["unscored"]) for one in groups.values()), Counter())
    if unscored:
        reasons = {kind: reason for one in groups.values() for kind, reason in one["reasons"].items()}
        kinds = "; ".join(f"{kind} ×{count}: {reasons[kind]}" for kind, count in unscored.most_common())
        lines.append(f"not scored again: {unscored.total():,} rows ({kinds})")
    return "\n".join(lines)


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    success, score = one["success"], one["score"]
    is_known = None not in (success["before"], success["after"])
    flips = [f"{success[key]:,}" if is_known else "" for key in ("rose", "fell")]
    return (name, f"{one['rows']:,}", *_both(success, 1, percent=True), *flips, *_both(score, 3))


def _both(change: Mapping[str, Any] | None, digits: int, *, percent: bool = False) -> list[str]:
    values = [None if change is None else change[when] for when in ("before", "after")]
    return ["" if value is None else f"{value * (100 if percent else 1):.{digits}f}" for value in values]
