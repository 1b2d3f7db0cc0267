"""The result table of an evaluation: one row per method, in percent with 95 % intervals; and methods in pairs.

Two methods or runs are paired question by question, from the rows of `evaluation.jsonl`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from types import NoneType
from typing import Any

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.evaluation.comparison import CLASSIFIER, LOGPROB_CASCADE, RANDOM_CASCADE
from query_mutator.evaluation.summary import rejections_in_words, warning_of
from query_mutator.files import read_checked_json, read_json_lines
from query_mutator.plan.choose import MIN_QUESTIONS, shares_in_words
from query_mutator.registry import check_known
from query_mutator.stats import Interval, Paired, compare_pairs

EVALUATION = "evaluation.jsonl"
Row = Mapping[str, Any]
_HEADER = (
    "",
    "success",
    "score",
    "false refusals",
    "guard refusals",
    "calls/question",
    "price/question",
    "share of calls",
    "to mutator",
    "to target",
    "policy minus this",
    "unscored",
)

_SHOWN_CHARS = 100  # of a question or an answer


def result_table(report: Mapping[str, Any]) -> str:
    """Return the table of an evaluation report with notes on its rows, success by group, and the verdict."""
    title = f"{_questions(report)}, answered by {report['target']}; percent with 95 % intervals"
    differences = report["policy_minus"]
    methods = report["methods"]
    by_model = any(_to_mutator(method) for method in methods.values())  # else all calls are to the target
    rows = [_row(name, method, differences.get(name), by_model=by_model) for name, method in methods.items()]
    shown = [column for column in range(len(_HEADER)) if column == 0 or any(row[column] for row in rows)]
    header, *cells = ([row[column] for column in shown] for row in (_HEADER, *rows))
    notes = [*_notes(report), *_unscored_notes(report["unscored"]), *_examples(report["examples"])]
    warnings = warning_of(report["n"], of=_of(report), below=MIN_QUESTIONS)
    return "\n".join(
        [
            *warnings,
            table(title, header, cells),
            *notes,
            *_group_table(report["by_group"]),
            report["verdict"]["sentence"],
        ]
    )


def _questions(report: Mapping[str, Any]) -> str:
    """Return how many questions an evaluation asked, of which, and why not all of them."""
    n, asked, available = report["n"], report["asked"], report.get("available", report["asked"])
    left = f" ({asked - n} more were not finished)" if asked > n else ""
    if available > asked:
        why = left or f", limited to {report['eval_calls']:,} calls"
        return f"{n} of {available} {_of(report)}{why}"
    return f"{n} {_of(report)}{left}"


def _of(report: Mapping[str, Any]) -> str:
    dataset = report.get("dataset")
    questions = "question" if report["n"] == report.get("available") == 1 else "questions"
    return f"{questions} of {dataset} that training did not have" if dataset else f"held-out {questions}"


def _notes(report: Mapping[str, Any]) -> list[str]:
    chosen = []
    if report["best_single_operator"]:
        chosen.append(f"best_single: {report['best_single_operator']}")
    if report["k"]:
        cost = "that costs at least as much" if _is_priced(report) else "with at least as many calls"
        chosen.append(f"best_of_k: a vote, k = {report['k']}, the smallest {cost} as the policy")
    if RANDOM_CASCADE in report["methods"]:
        chosen.append(f"{RANDOM_CASCADE}, {LOGPROB_CASCADE}, {CLASSIFIER}: at the policy's price on these questions")
    if report["plan_search"]:
        search = report["plan_search"]
        cost = f"found in {search['calls']:,} calls and {search['seconds']:.0f} s, apart from the calls of the table"
        chosen.append(f"best_plan: {search['best']['plan']}; {cost}")
        if reason := search.get("not_learned"):
            chosen.append(f"best_plan does not submit by P(right): {reason}")
    is_guarded = any(_rate(one["guard_refusal"], one["guard_refusal_ci"]) for one in report["methods"].values())
    of_guard = "; guard refusals: of questions that should be refused" if is_guarded else ""
    rejected = rejections_in_words(report.get("rewrites", {}))
    return [*chosen, f"false refusals: of harmless questions{of_guard}", *filter(None, [rejected])]


def _is_priced(report: Mapping[str, Any]) -> bool:
    return any("price_per_question" in method for method in report["methods"].values())


def _group_table(groups: Mapping[str, Any]) -> list[str]:
    """Return success by group of questions, a column for each method; nothing for fewer than two groups."""
    if len(groups) < 2:
        return []
    methods = list(next(iter(groups.values()))["methods"])
    rows = [
        (name, str(group["n"]), *(_number(group["methods"][method]["success"], ".1f", scale=100) for method in methods))
        for name, group in groups.items()
    ]
    return [table("success by group of questions, percent", ("", "questions", *methods), rows)]


def _examples(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of answers none of which was right."""
    lines = [
        f"  {_short(one['question'])} -> {_short(one['answer'])} (accepted: {' | '.join(map(_short, one['accepted']))})"
        for one in examples
    ]
    return ["no method gave a right answer; compare the answers with what is accepted:", *lines] if lines else []


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"


def _to_mutator(method: Mapping[str, Any]) -> float:
    """Return the mean calls to the mutator for each question, 0 without calls."""
    return float((method["calls_per_question"] or 0) - (method["target_calls_per_question"] or 0))


def _row(
    name: str, method: Mapping[str, Any], difference: Mapping[str, Any] | None, *, by_model: bool
) -> Sequence[str]:
    unscored = _counts(method.get("unscored", {}))
    on_guard = _counts(method.get("guard_unscored", {}))
    return (
        name,
        _rate(method["success"], method["success_ci"]) or f"no replies: {unscored}",
        _number(method["score"], ".3f"),
        _rate(method["false_refusal"], method["false_refusal_ci"]),
        _rate(method["guard_refusal"], method["guard_refusal_ci"]) or (f"no replies: {on_guard}" if on_guard else ""),
        _number(method["calls_per_question"], ".1f"),
        _number(method.get("price_per_question"), ".3g"),
        shares_in_words(method.get("model_shares", {})),
        _number(_to_mutator(method), ".1f") if by_model else "",
        _number(method["target_calls_per_question"], ".1f") if by_model else "",
        _rate(difference["success"], difference["success_ci"], signed=True) if difference else "",
        "; ".join(filter(None, (unscored, on_guard and f"guard {on_guard}"))),
    )


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} ×{count}" for kind, count in kinds.items())


def _unscored_notes(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one line for each kind of failure, with its first question."""
    first = {row["kind"]: row for row in reversed(rows)}
    return [
        f"unscored, excluded from rates: {kind}, as question {row['question_id']} ({row['method']}): {row['message']}"
        for kind, row in first.items()
    ]


def _rate(rate: float | None, interval: Sequence[float], *, signed: bool = False) -> str:
    """Return a rate and its interval in percent, "" for none."""
    if rate is None or math.isnan(rate):
        return ""
    sign = "+" if signed else ""
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def _number(value: float | None, form: str, *, scale: float = 1) -> str:
    return "" if value is None or math.isnan(value) else format(scale * value, form)


# --- pairs of methods -------------------------------------------------------------------------------------------------


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


#: A method of a run: its rows on held-out questions, and what `qm compare --json` has of the run, where None is what
#: the run's config.json does not say.
Entry = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]


def read_entry(path: Path, method: str) -> Entry:
    """Return a method of a run folder or of a file of rows; UsageError for one that it does not have."""
    by_method = read_held_out(path)
    check_known(f"method of {path}", method, by_method)
    file, rows = path / "config.json", by_method[method]
    config = read_checked_json(file) if path.is_dir() and file.exists() else {}
    flags = config.get("flags", {})
    scored = [row["success"] >= 0.5 for row in rows if row["success"] is not None]
    return rows, {
        "run": str(path),
        "method": method,
        "seed": flags.get("seed"),
        "target_model": config.get("backend", {}).get("target_model"),
        "dataset": flags.get("dataset"),
        "scored": len(scored),
        "success": sum(scored) / len(scored) if scored else None,
    }


def compare_entries(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return every pair of entries on its common questions, later minus earlier; UsageError for a pair without any."""
    named = [*zip(ascii_uppercase, entries, strict=False)]
    pairs = []
    for (a, (theirs, one)), (b, (ours, other)) in combinations(named, 2):
        found, left = pair_rows(ours, theirs)
        if not found.questions:
            why = f"{one['run']} ({one['dataset']}) and {other['run']} ({other['dataset']})"
            why += f"; {left['changed']} have one id but differ" if left["changed"] else ""
            raise UsageError(f"no held-out question in common: {why}; evaluate both on one --dataset with qm eval")
        left_out = {f"only {a} has": left["theirs"], f"only {b} has": left["ours"], "changed": left["changed"]}
        left_out["unscored"] = found.unscored
        pairs.append({"a": a, "b": b, **paired_json(found), "is_clear": found.is_clear, "left_out": left_out})
    return {"runs": [{"label": label, **about} for label, (_, about) in named], "pairs": pairs}


def paired_text(report: Mapping[str, Any]) -> str:
    """Return the comparison as text of at most 80 columns, names of runs aside."""
    header = ("", "questions", "difference", "gained", "lost", "same", "p")
    rows = [
        (
            f"{pair['b']} minus {pair['a']}",
            str(pair["questions"]),
            _rate(pair["difference"], pair["ci"], signed=True),
            str(pair["gained"]),
            str(pair["lost"]),
            str(pair["same_right"] + pair["same_wrong"]),
            shown_p(pair["p"]),
        )
        for pair in report["pairs"]
    ]
    title = "success in points with 95 % intervals; McNemar's exact p"
    lines = [*map(_run_line, report["runs"]), table(title, header, rows), *map(_pair_line, report["pairs"])]
    return "\n".join([*lines, "The intervals say nothing about other seeds (see qm analyze)."])


def _run_line(run: Mapping[str, Any]) -> str:
    rate = "no question scored" if run["success"] is None else f"{100 * run['success']:.1f} % of {run['scored']} right"
    about = {"seed": run["seed"], "target": run["target_model"], "questions": run["dataset"]}
    known = [f"{name} {value}" for name, value in about.items() if value is not None]
    return f"{run['label']}  {Path(run['run']).resolve().name}: {', '.join([run['method'], *known, rate])}"


def _pair_line(pair: Mapping[str, Any]) -> str:
    """Return what the interval says of two methods, and which questions are not in it."""
    a, b = pair["a"], pair["b"]
    line = f"{b} is {'better' if pair['difference'] > 0 else 'worse'} than {a} on such questions."
    line = line if pair["is_clear"] else f"{b} and {a}: no clear difference (the interval includes 0)."
    reasons = [f"{count} {name}" for name, count in pair["left_out"].items() if count]
    return f"{line} Left out: {', '.join(reasons)}." if reasons else line
