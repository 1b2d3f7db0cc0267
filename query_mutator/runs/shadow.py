"""Questions of real traffic answered both ways, as `qm serve --shadow` keeps them, and what they show.

    {"kind": "shadow", "version": 1}                            the first row of a file
    {"time", "model", "mode", "decision", "sent", "operators", "question", "rewrite", "form", "original",
     "rewritten", "judge"}

`original` and `rewritten` are the two ways, `sent` names the one whose answer the client got. Each has "answer",
"refused", "not_sure", "fit", "chars", "tokens", "calls" and "seconds".
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.runs.pairs import shown_p
from query_mutator.stats.intervals import Interval, mean_interval
from query_mutator.stats.paired import compare_pairs, difference_interval, mcnemar_p

Row = Mapping[str, Any]

SHADOW = "shadow.jsonl"  # of a run folder
HEADER: Row = {"kind": "shadow", "version": 1}
MARK = b'"kind":"shadow"'  # by which a file is recognized
ORIGINAL, REWRITTEN, SENT = "original", "rewritten", "sent"

RATES = ("refused", "not_sure")
MEANS = ("fit", "chars", "tokens", "calls", "seconds")
_WAY = (*RATES, *MEANS, "answer")
_NAMES = {"refused": "refused, %", "not_sure": "not sure, %", "chars": "characters"}


def read_shadow(path: Path) -> list[Row]:
    """Return the pairs of a file; UsageError for one that is not of `qm serve --shadow`, or is damaged."""
    rows = read_json_lines(path)
    first = next(rows, None)
    if first is None or first.get("kind") != HEADER["kind"]:
        raise UsageError(f"{path} has no pairs of real traffic; give a file that qm serve --shadow wrote")
    if first["version"] != HEADER["version"]:
        raise UsageError(f"{path} is of version {first['version']}; read it with the query-mutator that wrote it")
    return [_check_pair(row, path) for row in rows]


def _check_pair(row: Row, path: Path) -> Row:
    """Return a row of a file; UsageError if it lacks what every pair has."""
    ways = [row.get(name) for name in (ORIGINAL, REWRITTEN)]
    whole = all(isinstance(way, Mapping) and not {*_WAY} - {*way} for way in ways)
    if not (whole and isinstance(row.get("question"), str) and row.get(SENT) in (ORIGINAL, REWRITTEN)):
        raise UsageError(f"{path}: a row is not a pair of answers; give a file that qm serve --shadow wrote")
    return row


def shadow_result(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the pairs show: the rewritten way, and what was sent, each minus the original way."""
    ways = [REWRITTEN]
    if any(row[SENT] == ORIGINAL and row["rewrite"] != row["question"] for row in rows):
        ways.append(SENT)
    comparisons = [_comparison(rows, ours) for ours in ways]
    return {
        "pairs": len(rows),
        "questions": len(set(map(_cluster, rows))),
        "first": rows[0]["time"] if rows else None,
        "last": rows[-1]["time"] if rows else None,
        "models": dict(Counter(row["model"] for row in rows).most_common()),
        "modes": dict(Counter(row["mode"] for row in rows).most_common()),
        "decisions": dict(Counter(row["decision"] for row in rows).most_common()),
        "unchanged": sum(row["rewrite"] == row["question"] for row in rows),
        "comparisons": comparisons,
        "sentence": _sentence(rows, comparisons[0]),
    }


def _cluster(row: Row) -> str:
    """Return what makes two questions one: people ask the same thing again, and get the same answers."""
    return " ".join(str(row["question"]).casefold().split())


def _way(row: Row, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row[row[SENT] if name == SENT else name]
    return found


def _comparison(rows: Sequence[Row], ours: str) -> dict[str, Any]:
    rates = [_rate(rows, ours, name) for name in RATES]
    means = [found for name in MEANS if (found := _mean(rows, ours, name)) is not None]
    return {"ours": ours, "theirs": ORIGINAL, "rows": [*rates, *means], "judge": _judged(rows, ours)}


def _rate(rows: Sequence[Row], ours: str, name: str) -> dict[str, Any]:
    a, b = ([float(_way(row, way)[name]) for row in rows] for way in (ours, ORIGINAL))
    found = compare_pairs(a, b, [_cluster(row) for row in rows])
    return _figure(name, a, b, found.difference, found.interval, more=found.gained, less=found.lost, p=found.p)


def _mean(rows: Sequence[Row], ours: str, name: str) -> dict[str, Any] | None:
    """Return a mean and its difference, over the pairs that have it both ways; None without any."""
    known = [row for row in rows if None not in (_way(row, ours)[name], row[ORIGINAL][name])]
    if not known:
        return None
    a, b = ([_way(row, way)[name] for row in known] for way in (ours, ORIGINAL))
    by_question = defaultdict(list)
    for row, one, other in zip(known, a, b, strict=True):
        by_question[_cluster(row)].append(one - other)
    differences = [float(np.mean(found)) for found in by_question.values()]
    more, less = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    mean = float(np.mean(differences))
    return _figure(name, a, b, mean, mean_interval(differences), more=more, less=less, p=None)


def _figure(
    name: str, ours: Sequence[float], theirs: Sequence[float], difference: float, interval: Interval, **counts: Any
) -> dict[str, Any]:
    """Return one row of a comparison."""
    means = {way: float(np.mean(column)) if column else None for way, column in (("ours", ours), ("theirs", theirs))}
    shown = {"difference": difference, "ci": list(interval), **counts, "verdict": _verdict(interval)}
    return {"metric": name, "pairs": len(ours), **means, **shown}


def _judged(rows: Sequence[Row], ours: str) -> dict[str, Any] | None:
    """Return wins, losses and ties by the judge's choice; an exact sign test of wins against losses."""
    known = [row for row in rows if row.get("judge")]
    if not known:
        return None
    score = {REWRITTEN: 1.0, ORIGINAL: -1.0}
    scores = [
        0.0 if ours == SENT and row[SENT] == ORIGINAL else score.get(row["judge"]["choice"], 0.0) for row in known
    ]
    wins, losses = scores.count(1.0), scores.count(-1.0)
    interval = difference_interval(np.array(scores), [_cluster(row) for row in known])
    return {
        "models": sorted({row["judge"]["model"] for row in known}),
        "pairs": len(known),
        "wins": wins,
        "losses": losses,
        "ties": len(known) - wins - losses,
        "difference": float(np.mean(scores)),
        "ci": list(interval),
        "p": mcnemar_p(wins, losses),  # the exact sign test: wins and losses are equally likely
        "verdict": _verdict(interval),
    }


def _verdict(interval: Sequence[float]) -> str:
    low, high = interval
    return "more" if low > 0 else "less" if high < 0 else "inconclusive"


def _sentence(rows: Sequence[Row], found: Mapping[str, Any]) -> str:
    """Return in one sentence what rewriting changes on this traffic."""
    if not rows:
        return "No question was answered both ways yet."
    parts = [_rate_clause(row) for row in found["rows"] if row["metric"] in RATES]
    if judge := found["judge"]:
        said = {"more": "the judge prefers the rewritten way", "less": "the judge prefers the original way"}
        preferred = said.get(judge["verdict"], "the judge is inconclusive")
        parts.append(f"{preferred} ({_counts(judge)}, p {shown_p(judge['p'])})")
    return f"With rewriting, on {len(rows)} questions of real traffic: {'; '.join(parts)}."


def _rate_clause(row: Mapping[str, Any]) -> str:
    name = {"refused": "refused", "not_sure": '"not sure"'}[row["metric"]]
    low, high = row["ci"]
    numbers = f"({100 * row['difference']:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    words = {"more": f"{name} more often", "less": f"{name} less often", "inconclusive": f"{name} inconclusive"}
    return f"{words[row['verdict']]} {numbers}"


# --- as a table ------------------------------------------------------------------------------------------------------


def traffic_text(result: Mapping[str, Any]) -> str:
    """Return what `shadow_result` found as text."""
    left = f"{result['unchanged']} left as they were"
    title = f"{result['pairs']} questions of real traffic answered both ways, {left}; 95 % intervals, McNemar's exact p"
    parts = []
    for found in result["comparisons"]:
        header = ("", "original", found["ours"], "difference", "more", "less", "p", "verdict")
        parts.append(table(title, header, [_text_row(row) for row in found["rows"]]))
        if judge := found["judge"]:
            counts = f"{_counts(judge)}, exact sign test p {judge['p']:.3f}, {judge['verdict']}"
            parts.append(f"judge {', '.join(judge['models'])}: {counts}")
    return "\n".join([*parts, result["sentence"]])


def _text_row(row: Mapping[str, Any]) -> Sequence[str]:
    scale, digits = (100.0, 1) if row["metric"] in RATES else (1.0, 3 if row["metric"] == "fit" else 2)

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


def _counts(judge: Mapping[str, Any]) -> str:
    return f"{judge['wins']} won, {judge['losses']} lost, {judge['ties']} tied"
