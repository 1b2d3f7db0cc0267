"""The section on real traffic: questions that `qm serve --shadow` answered both ways, and each of them in the browser.

In the table of questions the original way is `identity` and the rewritten one `policy`; no answer has a score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.evaluation.summary import IDENTITY, POLICY
from query_mutator.report.page.messages import Message, Redactor, TextTable, chunks, section
from query_mutator.report.page.questions import Evaluation
from query_mutator.runs.shadow import ORIGINAL, REWRITTEN, SENT, read_shadow, shadow_result
from query_mutator.types import AS_IS

TAG = "traffic"  # of the questions, and the name of their set


class Traffic:
    """Pairs of real traffic; `texts` gets what was said."""

    def __init__(self, pairs: Sequence[Mapping[str, Any]], texts: TextTable) -> None:
        self._pairs, self._texts = pairs, texts

    def __bool__(self) -> bool:
        """Return whether there is a pair."""
        return bool(self._pairs)

    def messages(self, run: int) -> Iterator[Message]:
        """Yield the messages with the questions."""
        questions = [self._question(number, pair) for number, pair in enumerate(self._pairs, 1)]
        yield from self._texts.take()
        for part in chunks(questions):
            yield {"kind": "questions", "run": run, "rows": part}

    def section(self) -> dict[str, Any]:
        """Return what the pairs show."""
        return shadow_result(self._pairs)

    def _question(self, number: int, pair: Mapping[str, Any]) -> dict[str, Any]:
        """Return a pair as a row of the table of questions."""
        question, rewrite, form = (str(pair[name]) for name in ("question", "rewrite", "form"))
        operators = [*map(str, pair["operators"])] if rewrite != question else []
        return {
            "id": f"{TAG}-{number}",
            "q": self._texts.number(question),
            "tags": [TAG, str(pair["mode"]), *([f"judge: {pair['judge']['choice']}"] if pair["judge"] else [])],
            "set": TAG,
            "accepted": [],
            "methods": {
                IDENTITY: self._way(pair, ORIGINAL, question, [], AS_IS),
                POLICY: self._way(pair, REWRITTEN, rewrite, operators, form),
            },
        }

    def _way(self, pair: Mapping[str, Any], name: str, asked: str, operators: list[str], form: str) -> dict[str, Any]:
        way = pair[name]
        return {
            "success": None,
            "score": None,
            "refused": way["refused"],
            "not_sure": way["not_sure"],
            **{key: way[key] for key in ("calls", "tokens", "seconds")},
            "reply_tokens": way["tokens"],
            "steps": operators,
            "step_forms": [form] * len(operators),
            "rewrites": [self._texts.number(asked)] * len(operators),
            "forms": [form],
            "asked": [self._texts.number(asked)],
            "answers": [self._texts.number(way["answer"])],
            "parts": [None],
            "scores": [None],
            "fits": [way["fit"]],
            "verdicts": [None],
            "submitted": 0 if pair[SENT] == name else None,
            "why": "sent to the client" if pair[SENT] == name else "",
            "error": None,
        }


class TrafficReader:
    """A file of `qm serve --shadow` as messages of a page, as a RunReader gives those of a run."""

    def __init__(self, path: str | Path, *, run: int = 0) -> None:
        self.path, self.run = Path(path), run
        self.texts = TextTable(run, Redactor({}).text)
        self.evaluation = Evaluation(self.texts)
        self.traffic = Traffic(read_shadow(self.path), self.texts)

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return self.path.name

    def messages(self) -> Iterator[Message]:
        """Yield the messages."""
        about = {"state": "", "name": self.name, "folder": str(self.path), "methods": [], "warnings": [], "n": 0}
        found = self.traffic.section()
        yield section(self.run, "answer", {**about, "verdict": found["sentence"], "only_traffic": True})
        yield section(self.run, "traffic", found)
        yield from self.traffic.messages(self.run)
