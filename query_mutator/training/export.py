"""What a run leaves for others: training rows of the rewrites that won, its replies as a log with grades."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from query_mutator import forms as form_registry
from query_mutator.bounds import Cosine
from query_mutator.data.logs import LoggedReply
from query_mutator.data.split import target_key
from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.run_dir import STORE
from query_mutator.files.whole import record_of
from query_mutator.forms import FormContext
from query_mutator.llm.store import Store
from query_mutator.plan.table import is_right
from query_mutator.plugins import load_plugins, replaced
from query_mutator.rewards.parts import WeightedReward
from query_mutator.session.checkpoint import run_settings
from query_mutator.session.policy_file import check_named, check_plugins, reaching
from query_mutator.session.task import default_reward, split_dataset
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import AS_IS, CONTROLS, success_in

_NUMBER = (int, float)
_NEEDED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("env", "episode"), int),
    **dict.fromkeys(("question_id", "question", "operator", "rewrite"), str),
    "parts": dict,
    "baseline_score": (*_NUMBER, type(None)),
    "valid": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite of a question and the score of the answer to it."""

    question_id: str
    question: str
    text: str
    score: float
    baseline_score: float
    right: bool
    operators: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Return the score above that of the answer to the original question."""
        return round(self.score - self.baseline_score, 6)  # differences in the last bits are not a gain


@dataclass(frozen=True, kw_only=True)
class ExportRules:
    """Which rewrites of a question become rows."""

    min_gain: Cosine = 0.0
    """A rewrite counts if its answer scored this much more than the answer to the original question."""
    only_right: bool = False
    """Take only rewrites whose answer was right."""
    every: bool = False
    """Write all rewrites that gained, not only the best of each question."""
    keep_unchanged: bool = False
    """Add questions that were right originally and that no rewrite improved, with themselves as the rewrite."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"--min-gain {self.min_gain} must be at least 0 and below 1")

    def winners(self, rewrites: Collection[Rewrite]) -> list[Rewrite]:
        """Return the rewrites of one question that become rows."""
        gained = sorted(filter(self._counts, rewrites), key=lambda one: (-one.score, len(one.text), one.text))
        if gained:
            return gained if self.every else gained[:1]
        unchanged = [one for one in rewrites if one.text == one.question and one.right]
        return unchanged[:1] if self.keep_unchanged else []

    def _counts(self, one: Rewrite) -> bool:
        return one.text != one.question and one.gain > self.min_gain and (one.right or not self.only_right)


class Choice(NamedTuple):
    """The rewrites chosen, and the numbers of steps, questions and different rewrites they come from."""

    rewrites: list[Rewrite]
    steps: int
    invalid_steps: int
    questions: int
    different: int


def read_steps(run: str) -> list[dict[str, Any]]:
    """Return the steps in a run folder or a transcripts.jsonl; UsageError if there are none."""
    path = Path(run) / "transcripts.jsonl" if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give a run folder such as runs/latest, or a transcripts.jsonl")
    steps = list(read_json_lines(path))
    for number, step in enumerate(steps, start=1):
        if wrong := _wrong_in(step):
            raise UsageError(f"{path}:{number}: not a step of a run, {wrong}; export from the run that wrote it")
    return steps


def _wrong_in(step: dict[str, Any]) -> str:
    """Return what a step of a transcript lacks, or which entry has another type than in a run; "" if nothing."""
    if missing := _NEEDED.keys() - step.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(step[name], kind)]
    wrong = wrong or [f"parts.{name}" for name, value in step["parts"].items() if not isinstance(value, _NUMBER)]
    return f"its {wrong[0]} has another type" if wrong else ""


def reward_of(run: str, plugins: Sequence[str] = ()) -> WeightedReward:
    """Return the reward the run was made with, from its config.json, else the default one, after loading `plugins`.

    UsageError for a plugin of the run that is not given.
    """
    path = (Path(run) if Path(run).is_dir() else Path(run).parent) / "config.json"
    flags, recorded = run_settings(path) if path.exists() else ({}, {})
    check_plugins(replaced(recorded, plugins), plugins, source=path)
    load_plugins(plugins)
    reward = flags.get("reward") or default_reward(str(flags.get("dataset")))
    return WeightedReward.parse(str(reward)) if reward else WeightedReward()


def choose(steps: Iterable[Mapping[str, Any]], reward: WeightedReward, rules: ExportRules) -> Choice:
    """Return the rewrites of each question that win by the rules."""
    found: dict[str, dict[str, Rewrite]] = {}  # question -> text -> its first rewrite
    count = invalid = 0
    for one in _rewrites(steps, reward):
        count += 1
        if one is None:
            invalid += 1
        else:
            found.setdefault(one.question, {}).setdefault(one.text, one)
    chosen = [winner for rewrites in found.values() for winner in rules.winners(rewrites.values())]
    return Choice(chosen, count, invalid, len(found), sum(map(len, found.values())))


def training_rows(rewrites: Iterable[Rewrite]) -> Iterator[dict[str, Any]]:
    """Yield rows with `instruction` (the question), `response` (the rewrite) and metadata; further ids are `ID#2`."""
    seen: dict[str, int] = {}
    for one in rewrites:
        seen[one.question_id] = count = seen.get(one.question_id, 0) + 1
        yield {
            "id": one.question_id if count == 1 else f"{one.question_id}#{count}",
            "instruction": one.question,
            "response": one.text,
            "score": round(one.score, 6),
            "baseline_score": round(one.baseline_score, 6),
            "success": one.right,
            "operators": list(one.operators),
        }


def _rewrites(steps: Iterable[Mapping[str, Any]], reward: WeightedReward) -> Iterator[Rewrite | None]:
    """Yield the text after each step of a transcript that has an answer, None for a step whose call failed.

    What was asked in a form is left out: its gain is not the text's. The baseline of a question whose original was not
    asked is 0.
    """
    applied: dict[tuple[int, int], list[str]] = {}  # operators so far in each episode
    for step in steps:
        names = applied.setdefault((int(step["env"]), int(step["episode"])), [])
        if not step["valid"] or "rewrite" in step.get("cut", ()):  # the transcript has its beginning only
            yield None
            continue
        form = step.get("form", AS_IS)
        if step["operator"] == "undo":
            names.clear()
        elif (
            step["rewrite"] != step["question"] and not step.get("guard") and step["operator"] not in (*CONTROLS, form)
        ):
            names.append(str(step["operator"]))
        if not step.get("answer", " ") or form != AS_IS:  # not asked, or not as it is
            continue
        parts = step["parts"]
        score = sum(weight * float(parts.get(name, 0.0)) for name, weight in reward.weights.items())
        yield Rewrite(
            question_id=str(step["question_id"]),
            question=str(step["question"]),
            text=str(step["rewrite"]),
            score=min(1.0, max(0.0, score)),
            baseline_score=float(step["baseline_score"] or 0.0),
            right=success_in(parts) >= 0.5,
            operators=tuple(names),
        )


def reply_rows(run: str | Path, *, given: Mapping[str, Any], plugins: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the replies in a run's store to its training questions as they stand, graded, as `--from-logs` reads them.

    A form that shows examples is left out, and so are questions with nothing to compare a reply with. UsageError for a
    data file or plugin of the run that is not named again; `given` are the settings of the command.
    """
    path = Path(run) / STORE
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give a run folder such as runs/latest")
    reward = reward_of(str(run), plugins)
    flags, _ = run_settings(Path(run) / "config.json")
    check_named(reaching({"dataset": flags.get("dataset")}), given, source=run)
    settings = record_of(TaskSettings, {**flags, "judge_rubric": "", **given}, where="flags")
    split = split_dataset(replace(settings, validation_fold="none"))
    forms = [one for one in {form_registry.get(AS_IS), *form_registry.select(settings.forms)} if not one.uses_examples]
    contexts = [(one, FormContext(domain=settings.domain, original=one.text)) for one in split.train if one.accept]
    asked = {
        form.frame(question.text, context=context).messages: (question, form)
        for form in forms
        for question, context in contexts
    }
    with closing(Store(path)) as store:
        for messages, reply in store.replies():
            if messages in asked:
                question, form = asked[messages]
                logged = LoggedReply(where=str(path), question=question.text, form=form.name, reply=reply.text)
                yield {
                    "question": question.text,
                    "form": form.name,
                    "reply": reply.text,
                    "label": is_right(form.read(reply.text), logged, question, reward),
                    "target": target_key(question),
                    "logprob": reply.logprob,
                    "cut": reply.hit_limit,
                }
