"""Our runs, or methods of them, compared question by question: every pair of them, in words and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json
from query_mutator.registry import check_known
from query_mutator.runs.pairs import PairedRows, pair_rows, read_held_out
from query_mutator.stats.significance import holm

__all__ = ["Entry", "compare_entries", "paired_text", "read_entry"]

MOST_RUNS = len(ascii_uppercase)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method of one run: its rows on held-out questions, and what the run was."""

    path: Path
    method: str
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]  # config.json; empty for a file of rows

    @property
    def name(self) -> str:
        """Return the name of the folder or file."""
        return self.path.resolve().name

    @property
    def seed(self) -> int | None:
        """Return the run's seed, None if it is not recorded."""
        seed = self.config.get("flags", {}).get("seed")
        return seed if isinstance(seed, int) else None

    def made_with(self) -> dict[str, Any]:
        """Return what must be equal for a difference to be the policy's: who was asked what."""
        backend, flags = self.config.get("backend", {}), self.config.get("flags", {})
        return {"target model": backend.get("target_model"), "questions": flags.get("dataset")}

    def to_json(self, label: str) -> dict[str, Any]:
        """Return plain JSON types."""
        scored = [row["success"] >= 0.5 for row in self.rows if row["success"] is not None]
        return {
            "label": label,
            "run": str(self.path),
            "method": self.method,
            "seed": self.seed,
            "target_model": self.made_with()["target model"],
            "dataset": self.made_with()["questions"],
            "scored": len(scored),
            "success": sum(scored) / len(scored) if scored else None,
        }


def read_entry(path: Path, method: str) -> Entry:
    """Return a method of a run folder or of a file of rows; UsageError for one that it does not have."""
    by_method = read_held_out(path)
    check_known(f"method of {path}", method, by_method)
    config = path / "config.json"
    known = read_checked_json(config) if path.is_dir() and config.exists() else {}
    return Entry(path=path, method=method, rows=by_method[method], config=known)


def compare_entries(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return every pair of entries on its common questions; UsageError for a pair without any."""
    labels = ascii_uppercase[: len(entries)]
    pairs = []
    for (a, first), (b, second) in combinations(zip(labels, entries, strict=True), 2):
        found = pair_rows(second.rows, first.rows)
        if not found.result.questions:
            raise UsageError(_nothing_in_common(first, second, found))
        pairs.append(_pair(a, b, found))
    for pair, p in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = p
    runs = [entry.to_json(label) for label, entry in zip(labels, entries, strict=True)]
    return {"runs": runs, "pairs": pairs, "remarks": _remarks(labels, entries, pairs)}


def _pair(a: str, b: str, found: PairedRows) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        **found.to_json(),  # the difference is b minus a
        "is_clear": found.result.is_clear,
        "left_out": {
            f"only {a} has": found.only_theirs,
            f"only {b} has": found.only_ours,
            "changed": found.changed,
            "unscored": found.result.unscored,
        },
    }


def _nothing_in_common(first: Entry, second: Entry, found: PairedRows) -> str:
    asked = [f"{entry.path} asked {len(entry.rows)} of {entry.made_with()['questions']}" for entry in (first, second)]
    why = ", ".join(asked) + (f"; {found.changed} have one id but differ" if found.changed else "")
    advice = "evaluate both on one --dataset with qm eval --evaluation, or compare metrics with qm analyze"
    return f"no held-out question in common: {why}; {advice}"


def _remarks(labels: str, entries: Sequence[Entry], pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sentences that say what the table does and does not show."""
    lines = [_verdict(pair) for pair in pairs]
    for what in ("target model", "questions"):
        values = {label: entry.made_with()[what] for label, entry in zip(labels, entries, strict=True)}
        if len({value for value in values.values() if value is not None}) > 1:
            named = ", ".join(f"{label} {value}" for label, value in values.items() if value is not None)
            lines.append(f"Not the same {what} ({named}): a difference may come from that.")
    for pair in pairs:
        reasons = [f"{count} {name}" for name, count in pair["left_out"].items() if count]
        if reasons:
            lines.append(f"Left out of {pair['b']} and {pair['a']}, questions: {', '.join(reasons)}.")
    seeds = "One seed" if len({entry.path.resolve() for entry in entries}) == 1 else "One seed each"
    lines.append(f"{seeds}: the intervals say nothing about other seeds (see qm analyze).")
    return lines


def _verdict(pair: Mapping[str, Any]) -> str:
    a, b = pair["a"], pair["b"]
    if not pair["is_clear"]:
        return f"{b} and {a}: no clear difference (the interval includes 0)."
    return f"{b} is {'better' if pair['difference'] > 0 else 'worse'} than {a} on such questions."


def paired_text(report: Mapping[str, Any]) -> str:
    """Return the comparison as text of at most 80 columns, names of runs aside."""
    runs = [_run_line(run) for run in report["runs"]]
    several = len(report["pairs"]) > 1
    header = ("", "questions", "difference", "gained", "lost", "same", "p", *(["p, Holm"] if several else []))
    rows = [
        (
            f"{pair['b']} minus {pair['a']}",
            str(pair["questions"]),
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in (pair["difference"], *pair["ci"]))),
            str(pair["gained"]),
            str(pair["lost"]),
            str(pair["same_right"] + pair["same_wrong"]),
            _p(pair["p"]),
            *([_p(pair["p_holm"])] if several else []),
        )
        for pair in report["pairs"]
    ]
    title = "success in points with 95 % intervals; McNemar's exact p"
    return "\n".join([*runs, table(title, header, rows), *report["remarks"]])


def _run_line(run: Mapping[str, Any]) -> str:
    seed = "" if run["seed"] is None else f", seed {run['seed']}"
    rate = "no question scored" if run["success"] is None else f"{100 * run['success']:.1f} % of {run['scored']} right"
    return f"{run['label']}  {Path(run['run']).resolve().name}: {run['method']}{seed}, {rate}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
