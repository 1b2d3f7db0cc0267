"""What a run leaves for others: training rows of the rewrites that won, its replies as a log with grades."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from query_mutator import forms as form_registry
from query_mutator.data import target_key
from query_mutator.errors import UsageError
from query_mutator.files import as_type, read_json_lines, record_of
from query_mutator.files.run_dir import STORE
from query_mutator.forms import FORMS, FormContext
from query_mutator.llm.store import Store
from query_mutator.plan.table import is_right
from query_mutator.registry import use_plugins
from query_mutator.rewards import WeightedReward
from query_mutator.session.policy_file import check_named, reaching
from query_mutator.session.task import default_reward, split_dataset
from query_mutator.settings import TaskSettings
from query_mutator.training.run_folder import run_settings
from query_mutator.types import AS_IS, CONTROLS, success_in

_NEEDED: Mapping[str, Any] = {
    **dict.fromkeys(("env", "episode"), int),
    **dict.fromkeys(("question_id", "question", "operator", "rewrite"), str),
    "parts": Mapping[str, float],
    "baseline_score": float | None,
    "valid": bool,
}


def read_steps(run: str) -> list[dict[str, Any]]:
    """Return the steps in a run folder or a transcripts.jsonl; UsageError if there are none."""
    path = Path(run) / "transcripts.jsonl" if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give a run folder such as runs/latest, or a transcripts.jsonl")
    steps = list(read_json_lines(path))
    for number, step in enumerate(steps, start=1):
        try:
            as_type(step, Mapping[str, Any], "it")
            for name, hint in _NEEDED.items():
                as_type(step[name], hint, f"its {name}")
        except (KeyError, ValueError) as error:
            what = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"{path}:{number}: not a step of a run, {what}; export from the run that wrote it"
            ) from None
    return steps


def reward_of(run: str, plugins: Sequence[str] = ()) -> WeightedReward:
    """Return the reward the run was made with, from its config.json, else the default one, after loading `plugins`.

    UsageError for a plugin of the run that is not given.
    """
    path = (Path(run) if Path(run).is_dir() else Path(run).parent) / "config.json"
    flags, recorded = run_settings(path) if path.exists() else ({}, {})
    use_plugins(recorded, plugins, source=path)
    reward = flags.get("reward") or default_reward(str(flags.get("dataset")))
    return WeightedReward.parse(str(reward)) if reward else WeightedReward()


def rewrites_in(steps: Iterable[Mapping[str, Any]], reward: WeightedReward) -> dict[str, list[dict[str, Any]]]:
    """Return the different rewrites of each question, in the order in which they were made, as rows of training data.

    They have `instruction` (the question), `response` (the rewrite) and what is known of it.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}  # question -> text -> its first rewrite
    for row in _rewrites(steps, reward):
        found.setdefault(row["instruction"], {}).setdefault(row["response"], row)
    return {question: list(by_text.values()) for question, by_text in found.items()}


def winner(rewrites: Iterable[dict[str, Any]], *, min_gain: float, only_right: bool) -> dict[str, Any] | None:
    """Return the rewrite of a question whose answer scored best, None where none gained more than `min_gain`."""
    gained = [
        row for row in rewrites
        if row["response"] != row["instruction"]
        and round(row["score"] - row["baseline_score"], 6) > min_gain
        and (row["success"] or not only_right)
    ]  # fmt: skip
    return min(gained, key=lambda row: (-row["score"], len(row["response"]), row["response"]), default=None)


def _rewrites(steps: Iterable[Mapping[str, Any]], reward: WeightedReward) -> Iterator[dict[str, Any]]:
    """Yield the text after each valid step of a transcript that has an answer.

    What was asked in a form is left out: its gain is not the text's. The baseline of a question whose original was not
    asked is 0.
    """
    applied: dict[tuple[int, int], list[str]] = {}  # operators so far in each episode
    for step in steps:
        names = applied.setdefault((int(step["env"]), int(step["episode"])), [])
        if not step["valid"] or "rewrite" in step.get("cut", ()):  # the transcript has its beginning only
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
        yield {
            "id": str(step["question_id"]),
            "instruction": str(step["question"]),
            "response": str(step["rewrite"]),
            "score": round(min(1.0, max(0.0, score)), 6),
            "baseline_score": round(float(step["baseline_score"] or 0.0), 6),
            "success": success_in(parts) >= 0.5,
            "operators": list(names),
        }


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
    forms = [one for one in {FORMS.get(AS_IS), *form_registry.select(settings.forms)} if not one.uses_examples]
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
                yield {
                    "question": question.text,
                    "form": form.name,
                    "reply": reply.text,
                    "label": is_right(form.read(reply.text), question, reward, where=str(path)),
                    "target": target_key(question),
                    "logprob": reply.logprob,
                    "cut": reply.hit_limit,
                }
