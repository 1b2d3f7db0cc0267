"""The rows of evaluation.jsonl: grouped by question for the page, and as outcomes for the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from query_mutator.data.split import target_key
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.evaluation.summary import POLICY, Results, summarize
from query_mutator.forms import FORMS
from query_mutator.report.page.messages import Message, TextTable, chunks, section
from query_mutator.rewards import is_not_sure, is_refusal
from query_mutator.runs.pairs import pair_rows, paired_json
from query_mutator.types import AS_IS, UNDO, ErrorInfo, Question, success_in

_ALL_RUNS = -1
SHORTEST_CALL_S = 1e-3  # of a model; a lookup takes less

Verdict = Literal["right", "wrong", "refused", "not_sure", "none"]

_SHOWN = ("success", "score", "refused", "calls", "tokens", "reply_tokens", "seconds")
_NOT_THERE = ErrorInfo(kind="not_asked", message="the file has no row for it")


class Evaluation:
    """The rows of an evaluation; `texts` gets what was said."""

    def __init__(self, texts: TextTable) -> None:
        self._texts = texts
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}  # by set and id, as the page gets them
        self._questions: dict[tuple[str, str], Question] = {}
        self._outcomes: dict[str, dict[tuple[str, str], Outcome]] = {}  # by method

    def __bool__(self) -> bool:
        """Return whether there is a row."""
        return bool(self._rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        place, method = (str(row["set"]), str(row["question_id"])), str(row["method"])
        if place not in self._rows:
            accept, tags = tuple(row["accepted"]), tuple(row["tags"])
            self._rows[place] = {
                "id": place[1],
                "q": self._texts.number(row["question"]),
                "tags": row["tags"],
                "set": place[0],
                "accepted": self._texts.numbers(accept),
                "methods": {},
            }
            about, text = row["target"], row["question"]
            self._questions[place] = Question(id=place[1], text=text, accept=accept, tags=tags, about=about)
        found = self._rows[place]
        found["methods"][method] = self._method(row)
        self._outcomes.setdefault(method, {})[place] = _outcome(row)

    def _method(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the page shows of a method on a question."""
        error = row.get("error")
        return {
            **{name: row.get(name) for name in _SHOWN},
            "steps": row["steps"],
            "forms": row["forms"],
            "step_forms": step_forms(row["steps"], row["forms"]),
            **{name: self._texts.numbers(row[name]) for name in ("rewrites", "asked", "answers")},
            **{name: row[name] or [None] * len(row["answers"]) for name in ("parts", "scores", "fits")},
            "verdicts": _verdicts(row),
            "submitted": row.get("submitted"),
            "why": row.get("why", ""),
            "error": f"{error['kind']}: {error['message']}" if error else None,
        }

    def messages(self, run: int) -> Iterator[Message]:
        """Yield the messages with all rows."""
        for part in chunks(self._rows.values()):
            yield {"kind": "questions", "run": run, "rows": part}

    @property
    def methods(self) -> list[str]:
        """Return the methods, in the order of the file."""
        return list(self._outcomes)

    def report(self) -> dict[str, Any]:
        """Return the report of the rows, as summary.json has it; an interrupted run has rows and no summary."""
        sets = {label: [place for place in self._rows if place[0] == label] for label in ("test", "guard")}
        results = Results(
            questions=[self._questions[place] for place in sets["test"]],
            outcomes={name: self._column(name, sets["test"]) for name in self._outcomes},
            guard=[self._questions[place] for place in sets["guard"]],
            guarded={name: self._column(name, sets["guard"]) for name in self._outcomes},
        )
        return summarize(results)

    def held_out(self, method: str) -> list[dict[str, Any]]:
        """Return what `pair_rows` compares of a method's rows on held-out questions."""
        found = []
        for place, outcome in self._outcomes.get(method, {}).items():
            if place[0] == "test":
                row: dict[str, Any] = {"question_id": place[1], "success": None if outcome.error else outcome.success}
                question = self._questions[place]
                row |= {"question": question.text, "accepted": question.accept, "target": target_key(question)}
                found.append(row)
        return found

    def seconds(self, method: str) -> float | None:
        """Return the mean seconds of the calls for a question, over those that no cache and no recording answered."""
        took = [
            outcome.seconds
            for place, outcome in self._outcomes.get(method, {}).items()
            if place[0] == "test" and outcome.seconds >= SHORTEST_CALL_S
        ]
        return sum(took) / len(took) if took else None

    def tokens(self, method: str) -> tuple[float, float | None] | None:
        """Return the mean tokens of a held-out question, and the replies' part where the rows have it."""
        rows = [way for _, way in self.rows_of(method) if not way["error"]]
        if not rows:
            return None
        replies = [way["reply_tokens"] for way in rows]
        reply = None if None in replies else sum(replies) / len(rows)
        return sum(way["tokens"] for way in rows) / len(rows), reply

    @property
    def has_policy(self) -> bool:
        """Return whether there are rows of the policy."""
        return POLICY in self._outcomes

    def rows_of(self, method: str, label: str = "test") -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the questions of a set, each with what a method did."""
        for place, row in self._rows.items():
            if place[0] == label and method in row["methods"]:
                yield row, row["methods"][method]

    def _column(self, method: str, places: Sequence[tuple[str, str]]) -> list[Outcome]:
        found = self._outcomes[method]
        return [found.get(place) or Outcome(question_id=place[1], error=_NOT_THERE) for place in places]


def step_forms(steps: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return the form after each step; `asked` are forms in which the target was asked, plugins' among them."""
    form, found = AS_IS, []
    for name in steps:
        if name == UNDO:
            form = AS_IS
        elif name in asked or name in FORMS.registered():
            form = name
        found.append(form)
    return found


def _verdicts(row: Mapping[str, Any]) -> list[Verdict | None]:
    """Return the verdict on each answer."""
    rights: list[bool | None] = [success_in(parts) >= 0.5 for parts in row["parts"]]
    rights = rights or [None] * len(row["answers"])
    return [verdict_of(str(answer), right) for answer, right in zip(row["answers"], rights, strict=True)]


def verdict_of(answer: str, is_right: bool | None) -> Verdict | None:
    """Return the verdict on an answer, None where only its gold could tell and is not known."""
    if is_refusal(answer):
        return "refused"
    if is_not_sure(answer):
        return "not_sure"
    return None if is_right is None else "right" if is_right else "wrong"


def _outcome(row: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a row, without its texts."""
    if row.get("error"):
        error = ErrorInfo(kind=str(row["error"]["kind"]), message=str(row["error"]["message"]))
        return Outcome(question_id=str(row["question_id"]), error=error)
    return Outcome(
        question_id=str(row["question_id"]),
        success=float(row["success"]),
        score=float(row["score"]),
        refused=bool(row["refused"]),
        calls=int(row["calls"]),
        tokens=int(row["tokens"]),
        seconds=float(row["seconds"]),
        asked=("",) * len(row["asked"]),
    )


def pairs_of(runs: Sequence[tuple[str, Evaluation]]) -> Message:
    """Return the message that compares every two runs, given by name, method by method: the second minus the first.

    Questions are paired as `qm compare` does.
    """
    rows: list[dict[str, Any]] = []
    names = [name for name, _ in runs]
    numbered = [(f"{name} ({n})" if names.count(name) > 1 else name, rows) for n, (name, rows) in enumerate(runs, 1)]
    for (a, ours), (b, theirs) in combinations(numbered, 2):
        for method in ours.methods:
            if method in theirs.methods:
                found, left_out = pair_rows(theirs.held_out(method), ours.held_out(method))
                rows.append({"a": a, "b": b, "method": method, **paired_json(found), "left_out": left_out.total()})
    return section(_ALL_RUNS, "pairs", {"rows": rows})
