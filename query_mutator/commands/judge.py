"""`qm judge check`: how a judge agrees with labels of people, before it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from query_mutator.bounds import Threads, group_of
from query_mutator.cli.console import progress, table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.data.readers import read_rows
from query_mutator.errors import DatasetError, TooManyFailuresError
from query_mutator.llm.backends import ServerFlags
from query_mutator.llm.retry import Retry
from query_mutator.rewards import Judge
from query_mutator.session.models import open_models
from query_mutator.session.task import make_judge
from query_mutator.settings.models import ModelSettings
from query_mutator.settings.questions import Judging
from query_mutator.stats.agreement import agreement
from query_mutator.types import Completion

_YES = frozenset({"yes", "y", "1", "1.0", "true", "right", "correct", "good"})
_NO = frozenset({"no", "n", "0", "0.0", "false", "wrong", "incorrect", "bad"})
GOOD_KAPPA, FEW = 0.4, 50  # lower end of the interval: "moderate" of Landis and Koch (1977); labelled answers


@dataclass(frozen=True, kw_only=True)
class JudgeCheckFlags(ServerFlags, Judging, JsonFlags):
    """Compare a judge's verdicts with labels: Cohen's kappa and rates, next to those of a constant answer.

    The file has the columns question, answer and label (yes or no), and may have accepted (a text or a list).
    """

    FIRST: ClassVar[tuple[str, ...]] = ("file", "judge_model", "judge_rubric", "backend", "ollama_url", "openai_url")
    file: Positional[str]
    """The labelled answers: .jsonl, .json, .csv or .parquet."""
    judge_model: str = field()  # required, which an inherited default would hide
    """The model that judges."""
    batch_size: Threads = 8
    """Calls in flight at once."""


def check_judge(flags: JudgeCheckFlags) -> None:
    """Print the agreement of the judge with the labels, and in one sentence what it is good for."""
    rows = _read(Path(flags.file))
    settings = group_of(
        ModelSettings, flags, target_model=flags.judge_model, mutator_model=flags.judge_model, encoder="hash"
    )
    with open_models(settings) as models:
        judge = make_judge(models.calls, flags, seed=0)
        assert judge is not None
        client = Retry(models.calls.eval_client, models.retry_policy)
        requests = [judge.request(row["question"], row["answer"], accepted=row["accepted"]) for row in rows]
        replies = []
        with ThreadPoolExecutor(flags.batch_size) as pool, progress("judging", len(rows), unit="answer") as bar:
            for reply in pool.map(client.complete, requests):
                replies.append(reply)
                bar.update()
    report = _report(judge, rows, replies)
    show(flags, report, _in_words(report))


def _read(path: Path) -> list[dict[str, Any]]:
    rows = [_labelled(row, f"{path}:{line}") for line, row in read_rows(path)]
    labels = {row["label"] for row in rows}
    if len(labels) < 2:
        what = "no rows" if not rows else f"only the label {'yes' if rows[0]['label'] else 'no'}"
        raise DatasetError(f"{path}: {what}; give answers of both labels, about as many of each")
    return rows


def _labelled(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row of the file; DatasetError for one that lacks a column or has another label."""
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str):
            raise DatasetError(f"{where}: `{name}` must be a text; columns: {', '.join(map(str, row))[:200]}")
    word = str(row.get("label")).strip().lower()
    if word not in _YES | _NO:
        raise DatasetError(f"{where}: `label` is {word[:40]!r}; write yes or no")
    accepted = row.get("accepted") or ()
    accepted = (accepted,) if isinstance(accepted, str) else accepted
    if not isinstance(accepted, (list, tuple)) or not all(isinstance(text, str) for text in accepted):
        raise DatasetError(f"{where}: `accepted` must be a text or a list of texts")
    return {**row, "accepted": tuple(accepted), "label": word in _YES}


def _report(judge: Judge, rows: Sequence[Mapping[str, Any]], replies: Sequence[Completion]) -> dict[str, Any]:
    """Return the report; TooManyFailuresError when no answer has a verdict."""
    found = [judge.verdict(reply) if reply.ok else None for reply in replies]
    kinds = Counter(
        reply.error.kind if reply.error else "no verdict"
        for reply, verdict in zip(replies, found, strict=True)
        if verdict is None
    )
    scored = [(verdict >= 0.5, row["label"]) for verdict, row in zip(found, rows, strict=True) if verdict is not None]
    if not scored:
        reasons = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise TooManyFailuresError(f"{judge.model} gave no verdict on any answer ({reasons}); use another model")
    labels = [label for _, label in scored]
    usual = 2 * sum(labels) >= len(labels)
    own, constant = agreement([said for said, _ in scored], labels), agreement([usual] * len(labels), labels)
    constant |= {"kappa_ci": (0.0, 0.0)}  # 0 whatever the labels
    return {
        "judge": judge.model,
        "unscored": dict(kinds),
        "agreement": own,
        "constant": {"verdict": "yes" if usual else "no", **constant},
        "verdict": _sentence(judge.model, own, "yes" if usual else "no"),
    }


def _sentence(model: str, own: Mapping[str, Any], usual: str) -> str:
    low, high = own["kappa_ci"]
    kappa = f"kappa {own['kappa']:.2f} [{low:.2f}, {high:.2f}]"
    few = f"; with {own['n']} labelled answers every interval is wide" if own["n"] < FEW else ""
    if low <= 0:
        return f"Do not train on {model}: it is not shown to be better than always answering {usual} ({kappa}){few}."
    if low < GOOD_KAPPA:
        return f"{model} agrees with the labels better than a constant answer, but perhaps weakly ({kappa}){few}."
    rates = f"{own['true_positive_rate']:.0%} of the labels yes and {own['true_negative_rate']:.0%} of the labels no"
    return f"{model} agrees with the labels ({kappa}): it finds {rates}{few}."


def _in_words(report: dict[str, Any]) -> str:
    own, constant = report["agreement"], report["constant"]
    names = {"accuracy": "accuracy", "true_positive_rate": "yes where the label is yes",
             "true_negative_rate": "no where the label is no", "kappa": "Cohen's kappa"}  # fmt: skip

    def cell(column: Mapping[str, Any], key: str) -> str:
        low, high = column[f"{key.removesuffix('_rate')}_ci"]
        return f"{column[key]:.2f} [{low:.2f}, {high:.2f}]"

    rows = [(name, cell(own, key), cell(constant, key)) for key, name in names.items()]
    unscored = ", ".join(f"{count} {kind}" for kind, count in report["unscored"].items()) or "none"
    title = f"{own['n']} labelled answers, 95 % intervals; without a verdict: {unscored}"
    header = ("", report["judge"][:24], f"always {constant['verdict']}")
    return f"{table(title, header, rows)}\n{report['verdict']}"
