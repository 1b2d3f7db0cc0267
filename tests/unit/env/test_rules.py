"""How many calls and answers an episode may take."""

from __future__ import annotations

import pytest

from query_mutator.env.rules import EpisodeRules


@pytest.mark.parametrize(
    ("ask", "steps", "calls", "answers"),
    [
        ("every_step", 1, 3, 2),  # the original's answer, a rewrite and its answer
        ("every_step", 5, 11, 6),
        ("policy", 1, 2, 1),  # a rewrite, and the answer at the end
        ("policy", 4, 5, 2),  # ask, rewrite, ask, rewrite
        ("policy", 5, 6, 3),  # ask, rewrite, ask, rewrite, ask
    ],
)
def test_an_episode_takes_at_most(ask: str, steps: int, calls: int, answers: int) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=steps)  # type: ignore[arg-type]
    assert rules.max_calls(asked=1) == calls
    assert rules.asking.max_answers(steps) == answers
    round_trips = EpisodeRules(ask=ask, max_episode_steps=steps, answer="round_trip")  # type: ignore[arg-type]
    assert round_trips.max_calls(asked=1) == calls + answers


@pytest.mark.parametrize(
    ("ask", "max_asks", "asked", "calls"),
    [
        ("every_step", None, 0, 7),  # the original's answer, and one after each step
        ("every_step", 3, 0, 3),
        ("form", None, 0, 6),
        ("form", 4, 0, 4),
        ("form", 4, 2, 7),  # six steps and the answer at the end
        ("policy", None, 0, 3),
        ("policy", 1, 0, 1),
        ("policy", 1, 2, 7),
    ],
)
def test_an_episode_of_six_steps_takes_fewer_where_operators_are_local_or_asks_few(
    ask: str, max_asks: int | None, asked: int, calls: int
) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=6, max_asks=max_asks)  # type: ignore[arg-type]
    assert rules.max_calls(asked=asked) == calls
