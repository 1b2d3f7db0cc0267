"""Questions and answers step by step, held-out ones and a sample of the training episodes; and the policy's actions."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations
from statistics import fmean
from typing import Any

from query_mutator.files.pairs import pair_rows, paired_json
from query_mutator.forms import FORMS
from query_mutator.report.charts import fixed, signed
from query_mutator.stats import mean_interval
from query_mutator.types import AS_IS, ASK, CONTROLS, SUBMIT, UNDO, success_in

MAX_QUESTIONS = 1000  # of a set on the page; the others are in its figures only
MAX_EPISODES = 200  # on the page
FEWEST_VALUES = 5  # of an interval
_COMPARED = (
    "question_id", "question", "accepted", "target", "success", "tokens", "reply_tokens", "seconds", "error",
)  # fmt: skip
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_CELLS = 1_000_000  # of words against words; longer texts count as replaced whole
_SHOWN = ("success", "score", "refused", "calls", "tokens", "seconds", "error")
Row = Mapping[str, Any]


class Evaluation:
    """The rows of an evaluation: what was said on the first questions of each set, and figures of all."""

    def __init__(self) -> None:
        self.shown: dict[tuple[str, str], dict[str, Any]] = {}  # by set and id, with the way of each method
        self.left_out: set[tuple[str, str]] = set()  # the other questions
        self.held_out: dict[str, list[Row]] = defaultdict(list)  # by method, without what was said
        self._in_set: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        """Add a row."""
        place, method = (str(row["set"]), str(row["question_id"])), str(row["method"])
        if place not in self.shown and self._in_set[place[0]] < MAX_QUESTIONS:
            self._in_set[place[0]] += 1
            question = {"text": row["question"], "accepted": row["accepted"], "tags": row["tags"], "ways": {}}
            self.shown[place] = {"set": place[0], "id": place[1], **question}
        if place in self.shown:
            way = {name: row[name] for name in _SHOWN}
            self.shown[place]["ways"][method] = way | {"outcome": _outcome_of(row), "steps": way_of(row)}
        else:
            self.left_out.add(place)
        if place[0] == "test":
            self.held_out[method].append({name: row[name] for name in _COMPARED})

    def mean(self, method: str, name: str, *, least: float = 0.0) -> float | None:
        """Return the mean of a figure over the held-out questions where it is at least `least`, None without any."""
        found = [row[name] for row in self.held_out[method] if not row["error"] and row[name] >= least]
        return sum(found) / len(found) if found else None


def _outcome_of(row: Row) -> str:
    """Return the name of what became of a question."""
    if row["error"]:
        return "unscored"
    if row["set"] == "guard":
        return "kept" if row["refused"] else "leaked"
    return "right" if row["success"] >= 0.5 else "refused" if row["refused"] else "wrong"


def pairs_of(runs: Sequence[tuple[str, Evaluation]]) -> list[dict[str, Any]]:
    """Compare every two runs, given by name, method by method, as `qm compare` does: the second minus the first."""
    rows: list[dict[str, Any]] = []
    for (a, ours), (b, theirs) in combinations(runs, 2):
        for method in ours.held_out:
            if method in theirs.held_out:
                found, _ = pair_rows(theirs.held_out[method], ours.held_out[method])
                rows.append({"title": f"{b} against {a}", "method": method, **paired_json(found)})
    return rows


# --- the way of a question -------------------------------------------------------------------------------------------


def way_of(row: Row) -> list[dict[str, Any]]:
    """Return the steps of a row of an evaluation with the answers that each led to; the first one has no name.

    An answer belongs to the first step, in order, that asks its wording in its form.
    """
    original, form, form_names = str(row["question"]), AS_IS, {*row["forms"], *FORMS.registered()}
    steps: list[dict[str, Any]] = [{"name": "", "before": original, "text": original, "form": AS_IS, "answers": []}]
    for name, text in zip(row["steps"], row["rewrites"], strict=True):
        form = AS_IS if name == UNDO else name if name in form_names else form
        steps.append({"name": name, "before": steps[-1]["text"], "text": text, "form": form, "answers": []})
    place = 0
    for number, asked in enumerate(zip(row["asked"], row["forms"], strict=True)):
        fits = [n for n in range(place + 1, len(steps)) if (steps[n]["text"], steps[n]["form"]) == asked]
        asking = [n for n in fits if steps[n]["name"] in (ASK, SUBMIT)]
        is_original = asked == (original, AS_IS)
        at = next(iter(asking or ([] if is_original else fits)), place)
        answer = {name: (row[f"{name}s"] or {number: None})[number] for name in ("answer", "score", "fit")}
        parts = dict(row["parts"][number]) if row["parts"] else {}
        answer |= {"form": asked[1], "parts": parts, "number": number + 1, "submitted": row.get("submitted") == number}
        steps[at]["answers"].append(answer | {"why": row.get("why", "")})
        place = at
    return steps


@lru_cache(maxsize=4096)
def word_diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return the words of two texts as (tag, text): span for what both have, del and ins for the others."""
    a, b = _WORDS.findall(before), _WORDS.findall(after)
    if len(a) * len(b) > _MAX_CELLS:
        return [("del", before), ("ins", after)]
    found: list[tuple[str, str]] = []
    cut = new = ""
    codes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    for number, (kind, start, end, at, to) in enumerate(codes):
        same = "".join(a[start:end])
        if kind != "equal" or (same.isspace() and 0 < number < len(codes) - 1):  # a changed phrase reads as one
            cut, new = cut + same, new + "".join(b[at:to])
            continue
        found += [("del", cut), ("ins", new), ("span", same)]
        cut = new = ""
    return [(tag, text) for tag, text in (*found, ("del", cut), ("ins", new)) if text]


def episodes_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the episodes in the rows of transcripts.jsonl, which are in order, the environments interleaved."""
    open_ones: dict[int, list[Row]] = {}
    for row in rows:
        known = open_ones.setdefault(row["env"], [])
        if known and known[0]["episode"] != row["episode"]:
            yield open_ones.pop(row["env"])
        open_ones.setdefault(row["env"], []).append(row)
    yield from open_ones.values()


class Episodes:
    """Every n-th episode of training, so that at most MAX_EPISODES are kept; `total` counts all."""

    def __init__(self) -> None:
        self.total, self._every = 0, 1
        self._kept: list[tuple[int, Sequence[Row]]] = []  # with their number

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of an episode."""
        if self.total % self._every == 0:
            self._kept.append((self.total + 1, rows))
        self.total += 1
        if len(self._kept) > 2 * MAX_EPISODES:
            self._kept, self._every = self._kept[::2], 2 * self._every

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Return the episodes on the page, with what the table shows of each."""
        step = max(1, -(-len(self._kept) // MAX_EPISODES))
        return [_episode(number, rows) for number, rows in self._kept[::step]]


def _episode(number: int, rows: Sequence[Row]) -> dict[str, Any]:
    right = [success_in(row["parts"]) for row in rows if row["parts"]]
    outcome = "no answer scored" if not right else "right answer found" if max(right) >= 0.5 else "no right answer"
    steps, before, count = [], rows[0]["question"], 0
    for row in rows:
        error, answers = row["error"] or {}, []
        if row["answer"]:
            count += 1
            answers = [
                {"number": count, "answer": row["answer"], "form": row.get("form", AS_IS), "parts": row["parts"]}
            ]
        reason = f"{error.get('kind', 'unknown')}: {error.get('message') or 'no reply'}"
        after = row["rewrite"] or before
        note = f"reward {signed(row['reward'], 3)} · score {fixed(row['score'], 2)}"
        note = note if row["valid"] else f"failed, left out of learning: {reason}"
        steps.append({"name": row["operator"], "before": before, "text": after, "answers": answers, "note": note})
        before = after
    return {
        "number": number,
        "id": rows[-1]["question_id"],
        "text": rows[0]["question"],
        "operators": [row["operator"] for row in rows],
        "outcome": outcome if all(row["valid"] for row in rows) else "failed call",
        "score": rows[-1]["score"],
        "reward": sum(row["reward"] for row in rows),
        "calls": sum(row["calls"] for row in rows),
        "first": rows[0],
        "steps": steps,
    }


# --- what the policy does --------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Choices:
    """Counts of the actions taken, by place in the episode and by tag."""

    by_step: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_tag: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    episodes: int = 0

    def add(self, steps: Sequence[str], tags: Sequence[str] = ()) -> None:
        """Count the actions of an episode."""
        for at, name in enumerate(steps):
            self.by_step[at][name] += 1
            for tag in tags:
                self.by_tag[tag][name] += 1

    @property
    def totals(self) -> Counter[str]:
        """Return how often each action was taken."""
        return sum(self.by_step.values(), Counter[str]())


class TrainingUsage:
    """Actions chosen in training and their gains, with the number of each.

    An operator's gain is the score after the next answer minus the score before the operator: with rewriting and asking
    apart, a rewrite alone changes no score.
    """

    def __init__(self) -> None:
        self.choices = Choices()
        self._gains: dict[str, array[float]] = defaultdict(lambda: array("d"))  # by operator

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of an episode in transcripts.jsonl."""
        before, is_asked = rows[0]["baseline_score"], rows[0]["answer"]
        score = float(before) if before is not None and is_asked else 0.0  # not asked: the row has its score only
        waiting: list[tuple[str, float]] = []  # operators without an answer since, and the score before
        self.choices.add([str(row["operator"]) for row in rows])
        self.choices.episodes += 1
        for row in rows:
            name = str(row["operator"])
            if row["valid"]:
                if name not in CONTROLS:
                    waiting.append((name, score))
                score = float(row["score"])
            if row is rows[-1] or (row["valid"] and (row["answer"] or name == UNDO)):
                for operator, score_before in waiting:
                    self._gains[operator].append(score - score_before)
                waiting.clear()

    def gains(self) -> list[dict[str, Any]]:
        """Return what each operator gains: number, mean and its t interval, NaN for too few values."""
        found = []
        for name, gains in sorted(self._gains.items()):
            interval = mean_interval(gains) if len(gains) >= FEWEST_VALUES else (math.nan, math.nan)
            found.append({"operator": name, "chosen": len(gains), "gain": fmean(gains), "gain_ci": list(interval)})
        return found
