"""Read what the page shows of a run folder, without secrets: learning and calls, questions and answers, comparison.

`Figures` has metrics.jsonl as curves and totals, and the steps that failed; `Evaluation` the held-out questions, step
by step, and `Episodes` a sample of those of training; `Choices` the policy's actions; `RunReader` reads them all.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from query_mutator.errors import HIDDEN, UsageError, hide_credentials
from query_mutator.evaluation.comparison import BEST_SINGLE, RANDOM
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, warning_of
from query_mutator.files import read_checked_json, read_json_lines
from query_mutator.files.run_dir import CONFIG, METRICS, METRICS_FILE, SUMMARY, run_state, steps_asked
from query_mutator.forms import FORMS
from query_mutator.report.charts import axis, compact, fixed, signed, thin
from query_mutator.report.table import EVALUATION, Row, pair_rows, paired_json
from query_mutator.stats import mean_interval, wilson_interval
from query_mutator.types import AS_IS, ASK, CONTROLS, SUBMIT, UNDO, success_in, wire_text

VALIDATION = "validation/success"
#: Title and metric keys of each chart; keys that a run did not log are left out.
LEARNING = {
    "Success on validation questions": (VALIDATION,),
    "Return": ("charts/episodic_return",),
    "Success of training episodes": ("charts/success", "charts/baseline_success"),
    "Policy loss": ("losses/policy_loss",),
    "Value loss": ("losses/value_loss", "losses/td_loss"),
    "Entropy": ("losses/entropy",),
    "KL divergence": ("losses/approx_kl",),
    "Explained variance": ("losses/explained_variance",),
    "Gradient norm": ("grads/norm_before_clip_median", "grads/norm_before_clip_max"),
    "Learning rate": ("charts/learning_rate",),
}
CALLS = {"Calls per second": ("llm/calls_per_s",), "Latency of a call": ("llm/latency_s", "llm/queue_wait_s")}
_LINES = (IDENTITY, RANDOM, BEST_SINGLE, PLAN)
_TOTALS = (
    "llm/calls", "llm/failed_calls", "llm/retries", "llm/invalid_steps", "llm/cut_replies", "llm/prompts_too_long",
    "counters/tokens", "llm/shared_calls", "llm/cache_hits", "llm/limit",
)  # fmt: skip
_RESTARTED = ("llm/failed_calls", "llm/retries", "llm/shared_calls", "llm/cache_hits")
_MEANS = ("llm/tokens_per_call", "llm/reply_tokens_per_call", "llm/calls_per_s", "llm/latency_s", "llm/queue_wait_s")
_NUM_TIMES = 3  # of the means, the last ones


class Figures:
    """The rows of metrics so far, as sums; and the training steps that failed."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.last: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)  # of the means, weighted by calls
        self._weights: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = defaultdict(float)  # counted by earlier parts of a resumed run
        self._in_flight = 0.0
        self._calls = 0.0
        self.failures: Counter[tuple[str, str]] = Counter()  # steps by kind and operator

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        self.rows.append(row)
        for key in _RESTARTED:
            if key in row:
                restarted = row[key] < self.last.get(key, 0.0)
                self._before[key] += self.last.get(key, 0.0) if restarted else 0.0
        self.last |= row
        calls = max(0.0, row.get("llm/calls", self._calls) - self._calls)
        self._calls += calls
        for key in _MEANS:
            if key in row:
                self._sums[key] += calls * row[key]
                self._weights[key] += calls
        self._in_flight += calls * row.get("llm/calls_per_s", 0.0) * row.get("llm/latency_s", 0.0)

    def add_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of transcripts.jsonl."""
        failed = (row for row in rows if not row["valid"])
        self.failures.update(((row["error"] or {}).get("kind", "unknown"), row["operator"]) for row in failed)

    def calls(self, *, is_timed: bool = True) -> dict[str, float]:
        """Return the figures on calls; without times unless `is_timed`."""
        found = {key: self.last[key] + self._before[key] for key in _TOTALS if key in self.last}
        for key in _MEANS if is_timed else _MEANS[:-_NUM_TIMES]:
            if self._weights[key]:
                found[key] = self._sums[key] / self._weights[key]
        if "llm/latency_s" in found and "llm/queue_wait_s" in found:
            found["service time"] = found["llm/latency_s"] - found["llm/queue_wait_s"]
        if is_timed and self._calls and "llm/limit" in self.last:
            found["calls in flight"] = self._in_flight / self._calls
            found["share of the limit"] = found["calls in flight"] / self.last["llm/limit"]
        return found

    def curve(self, key: str) -> dict[str, Any] | None:
        """Return points and, of success on validation questions, Wilson's interval; None for what was not logged."""
        rows = thin([row for row in self.rows if row.get(key) is not None])
        band = [_band(row) for row in rows] if key == VALIDATION else []
        return {"points": [(row["step"], row[key]) for row in rows], "band": band} if rows else None

    def lines(self, methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the methods that success on validation questions is compared with."""
        known = {name: methods[name]["success"] for name in _LINES if name in methods}
        lines = [{"name": name, "success": rate, "of": "held-out"} for name, rate in known.items() if rate is not None]
        if (original := self.last.get("validation/identity_success")) is not None:
            lines = [line for line in lines if line["name"] != IDENTITY]
            lines.insert(0, {"name": IDENTITY, "success": original, "of": "validation"})
        return lines


def curves_of(
    charts: Mapping[str, Sequence[str]],
    runs: Sequence[tuple[str, str, Figures]],
    lines: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the charts with a curve for each metric of each run, given by name and color; without empty ones.

    Success on validation questions is compared with the `lines`.
    """
    found = []
    for title, keys in charts.items():
        series = []
        for place, key in enumerate(keys):
            for name, color, figures in runs:
                if curve := figures.curve(key):
                    what = key.rpartition("/")[2].replace("_", " ")
                    named = [what] * (len(keys) > 1) + [name] * (len(runs) > 1)
                    shown = color if len(runs) > 1 or not place else f"var(--c{5 * place + 1})"
                    series.append({"name": " · ".join(named) or title, "color": shown, "dash": place > 0, **curve})
        if series:
            across = lines if keys[0] == VALIDATION else ()
            values = [value for each in series for _, *more in (*each["points"], *each["band"]) for value in more]
            values += [line["success"] for line in across]
            unit, steps = METRICS[keys[0]]["unit"], [step for each in series for step, _ in each["points"]]
            show, label = (_percent, "%") if unit == "share" else (compact, unit.removeprefix("1"))
            x = axis(steps, tight=True, whole=True, label="environment steps")
            y = axis(values, zero=bool(across), count=4, show=show, label=label, vertical=True)
            found.append({"title": title, "series": series, "lines": across, "x": x, "y": y})
    return found


def _percent(share: float | None) -> str:
    return compact(None if share is None else 100 * share)


def _band(row: Mapping[str, Any]) -> tuple[float, float, float] | tuple[()]:
    """Return step and Wilson's interval of the success on validation questions."""
    n = int(row.get("validation/questions", 0) - row.get("validation/unscored", 0))
    return (row["step"], *wilson_interval(min(n, round(row[VALIDATION] * n)), n)) if n > 0 else ()


# --- questions, episodes ---------------------------------------------------------------------------------------------

MAX_QUESTIONS = 1000  # of a set on the page; the others are in its figures only
MAX_EPISODES = 200  # on the page
FEWEST_VALUES = 5  # of an interval
_COMPARED = (
    "question_id", "question", "accepted", "target", "success", "tokens", "reply_tokens", "seconds", "error",
)  # fmt: skip
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_CELLS = 1_000_000  # of words against words; longer texts count as replaced whole
_SHOWN = ("success", "score", "refused", "calls", "tokens", "seconds", "error")


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


# --- the way of a question ------------------------------------------------------------------------------------------


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


# --- what the policy does -------------------------------------------------------------------------------------------


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


# --- the run folder ---------------------------------------------------------------------------------------------------

_STEPS = "transcripts.jsonl"
_SHOWN_CHARS = 200  # of an error
_ORIGIN = ("command_line", "flags", "versions", "hardware", "commit", "dataset_sha256", "started", "resumed")

_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credential|auth(orization)?)$", re.IGNORECASE)
_MIN_CHARS = 8  # of a secret: shorter values of such variables are words
_PATTERNS = (
    re.compile(r"(?P<name>--[\w-]*(key|token|secret|password|passwd|credential)[= ]+)(?P<secret>('[^']*'|\S+))", re.I),
    re.compile(
        r"(?P<name>\b((proxy-)?authorization|cookie|[\w-]*(api-key|token|secret))\s*:\s*)"
        r"(?P<secret>((bearer|basic|token)\s+)?[^\s'\",;]+)",
        re.I,
    ),
    re.compile(r"(?P<name>)(?P<secret>\bsk-[\w/+-]{16,})"),
)


class RunReader:
    """A run as its files are now; UsageError for a folder that is not one of a run, and for a damaged file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.evaluation, self.figures, self.usage = Evaluation(), Figures(), TrainingUsage()
        self.episodes, self.choices = Episodes(), Choices()
        if not any((self.folder / name).exists() for name in (CONFIG, METRICS_FILE, _STEPS, EVALUATION)):
            raise UsageError(f"{folder}: no run folder; give one such as runs/latest")
        self._reading = CONFIG  # what an error is in
        config = self._json(CONFIG)
        self._secrets = _secrets_of(config)
        try:
            self._read_all(config)
        except UsageError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
            raise UsageError(
                f"{self.folder / self._reading} is not a file of a run ({reason}); restore it or remove it"
            ) from error

    def _read_all(self, config: Mapping[str, Any]) -> None:
        flags, backend = config.get("flags", {}), config.get("backend", {})
        for row in self._rows(METRICS_FILE):
            self.figures.add(row)
        for rows in episodes_of(self._rows(_STEPS)):
            self.figures.add_steps(rows)
            self.usage.add(rows)
            self.episodes.add(rows)
        self.episode_rows = self._clean(self.episodes.shown)
        for row in self._rows(EVALUATION):
            self.evaluation.add(row)
            if (row["method"], row["set"]) == (POLICY, "test"):
                self.choices.add(row["steps"], row["tags"])
                self.choices.episodes += not row["error"]
        self.questions = self._clean([*self.evaluation.shown.values()])
        summary, self._reading = self._json(SUMMARY), f"{SUMMARY} or {CONFIG}"
        self.is_timed = backend.get("kind") != "recorded" or any(
            flags.get(name) for name in ("latency_ms", "running_speed")
        )
        self.results = results_of(summary, self.evaluation, is_timed=self.is_timed)
        self.is_greedy = POLICY in self.evaluation.held_out
        self.choices = self.choices if self.is_greedy else self.usage.choices
        self.gains = self.usage.gains()
        self.operators = sorted({*self.choices.totals, *self.usage.choices.totals})
        self.lines = self.figures.lines(self.results["methods"])
        self.calls = self.figures.calls(is_timed=self.is_timed)
        self.eval_calls = summary.get("eval_llm_calls")
        self.server = ", ".join(map(str, flags.get("ollama_url") or [backend.get("url") or ""]))
        self.origin = {name: self._setting(config.get(name)) for name in _ORIGIN}
        self.state = run_state(self.folder)
        self.written = f"{datetime.now():%H:%M:%S}" if self.state == "running" else None
        self.step, self.steps = self.figures.last.get("step", 0), steps_asked(flags)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_checked_json(path) if path.exists() else {}

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path, self._reading = self.folder / name, name
        return read_json_lines(path) if path.exists() else iter(())

    def _clean(self, value: Any) -> Any:
        """Return data with no secret that is known in its texts, and with what a file in UTF-8 can hold."""
        if isinstance(value, str):
            for secret in self._secrets:
                if secret in value:
                    value = value.replace(secret, HIDDEN)
            return wire_text(value).replace("\0", "\ufffd")
        if isinstance(value, dict):
            return {name: self._clean(item) for name, item in value.items()}
        return [*map(self._clean, value)] if isinstance(value, list) else value

    def _setting(self, value: Any) -> Any:
        """Return a setting, nested ones included, without secrets and without what looks like one."""
        if isinstance(value, str):
            shown = hide_credentials(self._clean(value))
            for pattern in _PATTERNS:
                shown = pattern.sub(lambda match: f"{match['name']}{HIDDEN}", shown)
            return shown
        if isinstance(value, Mapping):
            return {name: HIDDEN if _is_secret(name, item) else self._setting(item) for name, item in value.items()}
        return [*map(self._setting, value)] if isinstance(value, (list, tuple)) else value


def _is_secret(name: object, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(str(name)) is not None


def _secrets_of(config: Mapping[str, Any]) -> list[str]:
    """Return the values of variables of the environment and of settings that are named as secrets, longest first."""
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)} | {*_secrets_in(config)}
    return sorted((value for value in found if len(value) >= _MIN_CHARS), key=len, reverse=True)


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the values of settings that are named as secrets."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from [item] if _is_secret(name, item) else _secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item)


# --- the comparison: methods with their intervals, verdict and warnings, the front, and the policy against each method


_CHOSEN_ON = "Plans were chosen on these questions, so the success of a plan is too high; measure it with qm eval."
_OUT_OF_FOLD = "Figures are out of fold, by target, on the logged questions; on others measure the plan with qm eval."
SHORTEST_CALL_S = 1e-3  # of a model; a lookup in the cache takes less


def results_of(summary: Mapping[str, Any], evaluation: Evaluation, *, is_timed: bool = True) -> dict[str, Any]:
    """Return the comparison of an evaluation, or that of a search for a plan; without either, no method.

    Seconds are left out unless `is_timed`: those of recorded replies mean nothing.
    """
    if report := summary.get("eval"):
        methods, search = report["methods"], report.get("plan_search") or {}
        timed = methods if is_timed else ()
        return {
            **report,
            "seconds": {name: evaluation.mean(name, "seconds", least=SHORTEST_CALL_S) for name in timed},
            "plan": search["best"]["plan"] if search else None,
            "verdict": report["verdict"]["sentence"],
            "warnings": warning_of(report["n"]),
            "of": "held-out question",
            "front": [{**point, "success_ci": methods[point["method"]]["success_ci"]} for point in report["front"]],
            "paired": _paired(report, evaluation),
            "tags": report["by_group"],
            "p_right": _reliability(search),
        }
    if "plan" in summary:
        return _plan_results(summary["plan"], summary["search"])
    return {"methods": {}, "warnings": [], "n": 0, "front": [], "tags": {}}


def _plan_results(plan: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a search for a plan, which read training questions only, or of what a log taught."""
    best, is_log = plan if plan["steps"] else search["best"], not search["calls"]
    in_calls = search["front"].values()  # the best plan within each number of calls per question
    points = {point["plan"]: point for point in (*filter(None, [search.get("original")]), *in_calls)}
    on_front = {point["plan"] for point in in_calls}
    found = {IDENTITY: search.get("original"), BEST_SINGLE: search.get("single"), PLAN: best}
    methods = {name: point for name, point in found.items() if point}
    if len(methods) > 1 and not best["steps"]:
        methods.popitem()
    return {
        "methods": methods,
        "verdict": search.get("verdict"),
        "warnings": [_OUT_OF_FOLD if is_log else _CHOSEN_ON],
        "n": plan["questions"],
        "of": "logged question" if is_log else "training question",
        "front": [{**point, "method": name, "on_front": name in on_front} for name, point in points.items()],
        "tags": {},
        "p_right": _reliability(search),
        "only_plan": True,
    }


def _reliability(search: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how good P(right) is, with an interval for each bin; None where it was not learned."""
    quality = search.get("p_right") or {}
    counted = [(each, each["n"]) for each in quality.get("reliability", ())]
    bins = [{**each, "rate_ci": wilson_interval(round(each["rate"] * n), n)} for each, n in counted]
    return {**quality, "reliability": bins} if bins else None


def _paired(report: Mapping[str, Any], evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the policy against each other method, question by question."""
    rows, ours = [], evaluation.held_out[POLICY]
    for name, difference in report["policy_minus"].items():
        if name in evaluation.held_out:
            found, _ = pair_rows(ours, evaluation.held_out[name], interval=difference["success_ci"])
            rows.append({"method": name, **paired_json(found)})
    return rows
