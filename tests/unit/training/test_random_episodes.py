"""What a policy that chooses uniformly costs by the rules alone, next to the engine of episodes itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from query_mutator import forms
from query_mutator.encoder import Encoder
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.flow import Call, Encode, Flow
from query_mutator.env.task import EpisodeRules, Task
from query_mutator.training.estimate import EPISODES, random_episodes
from query_mutator.types import Completion

FORMS = forms.select("question_answer,few_words,steps,restate")


def drive(flow: Flow, encoder: Encoder, numbers: Iterator[int]) -> Any:
    """Run a flow to its end; no two replies are the same."""
    result = None
    while True:
        try:
            need = flow.send(result)
        except StopIteration as stop:
            return stop.value
        if isinstance(need, Call):
            word = "".join(chr(ord("a") + int(digit)) for digit in str(next(numbers)))  # a guard rejects new numbers
            result = Completion(text=f"sort my list {word}", model="any")
        else:
            result = encoder.encode(need.texts) if isinstance(need, Encode) else None


def played(task: Task, rng: random.Random, numbers: Iterator[int]) -> tuple[int, int, int]:
    """Return steps, calls and answers of an episode of the engine whose actions are chosen uniformly."""
    engine = EpisodeEngine.open(task, 0)
    if not task.rules.policy_asks:
        assert drive(engine.ask_original(), task.encoder, numbers) is None
    episode, name = engine.episode, ""
    while not task.rules.ends(name, steps=episode.steps):
        allowed = [action for action, is_allowed in enumerate(engine.action_mask()) if is_allowed]
        action = rng.choice(allowed)
        name = task.actions[action]
        assert drive(engine.act(action), task.encoder, numbers) is None
    return episode.steps, episode.calls, len(episode.known)


@pytest.mark.parametrize(
    "rules",
    [
        {"ask": "every_step"},
        {"ask": "form", "max_episode_steps": 12},
        {"ask": "form", "max_asks": 1},
        {"ask": "form", "max_asks": 2, "max_episode_steps": 8},
        {"ask": "form", "max_episode_steps": 4},
    ],
    ids=lambda rules: "-".join(map(str, rules.values())),
)
def test_steps_calls_and_answers_are_those_of_the_engine(rules: dict[str, Any], tiny_task: Callable[..., Task]) -> None:
    task, rng, numbers = tiny_task(forms=FORMS, **rules), random.Random(1), count()
    columns = list(zip(*(played(task, rng, numbers) for _ in range(EPISODES)), strict=True))
    assert max(columns[1]) <= task.max_episode_calls
    steps, calls, answers = (sum(column) / EPISODES for column in columns)
    found = random_episodes(EpisodeRules(**rules), asked=len(task.operators), local=0, forms=len(FORMS))
    assert (found.steps, found.calls, found.answers) == pytest.approx((steps, calls, answers), rel=0.15)


def test_an_operator_that_no_model_carries_out_costs_no_call_and_changes_a_question_once() -> None:
    rules = EpisodeRules(ask="form", max_asks=1)
    assert random_episodes(rules, asked=0, local=5, forms=0).calls == 1
    assert random_episodes(rules, asked=5, local=0, forms=0).calls > 2
    assert random_episodes(rules, asked=0, local=1, forms=0).steps == pytest.approx(1.5, abs=0.05)
