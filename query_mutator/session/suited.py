"""Defaults for a language model: other actions and rules suit it than the embedded assistant.

They are what learns best on the training questions of `general` by `benchmarks/general.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ppo.config import PPOConfig
from query_mutator.bounds import Group
from query_mutator.settings.learner import DirectConfig

__all__ = ["SUITED", "SUITED_ENV", "SUITED_PLAN", "suited"]

G = TypeVar("G", bound=Group)

SUITED: Mapping[str, Any] = {
    "operators": "clean",
    "forms": "question_answer,short_answer,statement,one_sentence,restate,asking_sentence,examples",
    "ask": "form",
    "max_asks": 4,
    "max_episode_steps": 6,
    "answer": "learned",
    "budget": 2.0,
    "call_price": (0.005, 0.02, 0.08),
    "algo": "direct",
}
#: With one answer, of which nothing tells whether it is right: the best plan, left only where that is surely better.
SUITED_ONCE = {"algo": "bandit", "teacher": "auto"}
#: Those of a search for a plan, which asks once.
SUITED_PLAN = {"operators": SUITED["operators"], "forms": SUITED["forms"], "max_asks": 1}
#: Those of an environment that others train on.
SUITED_ENV = {**SUITED, "answer": "vote"}
_OF_PPO = {one.name for one in fields(PPOConfig)} - {one.name for one in fields(DirectConfig)} - {"num_steps"}


def suited(settings: G, *, embedded: bool, values: Mapping[str, Any] = SUITED) -> tuple[G, list[str]]:
    """Return the settings with what no flag says set to `values` on a language model, and a line that says so.

    A run that is resumed keeps the actions it has, also where an earlier version had no flag for them.
    """
    if embedded or vars(settings).get("resume"):
        return settings, []
    given = settings.given
    left = given | ({"algo"} if given & _OF_PPO else set())
    if "ask" in given and vars(settings)["ask"] == "every_step":
        left |= {"max_asks"}
    once = "max_asks" in given and vars(settings)["max_asks"] == 1
    if once:  # nothing to choose from
        left |= {"answer", "budget", "call_price"}
    chosen = {name: value for name, value in values.items() if name not in left and hasattr(settings, name)}
    if not chosen:
        return settings, []
    fits = [chosen, {name: value for name, value in chosen.items() if name != "algo"}]
    if once and "algo" in chosen and "teacher" not in left:
        fits.insert(0, chosen | SUITED_ONCE)
    # Some settings exclude a learner: --deterministic the bandit, a teacher or workers the direct method too.
    for chosen in fits:
        try:
            found = replace(settings, **chosen)
            break
        except ValueError:
            if chosen is fits[-1]:
                raise
    object.__setattr__(found, "_given", given)
    said = " ".join(f"--{name.replace('_', '-')} {_word(value)}" for name, value in chosen.items())
    return found, [f"a language model answers: {said}"]


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
