"""How many calls and answers an episode may take."""

from __future__ import annotations

import pytest

from query_mutator.env.task import EpisodeRules


@pytest.mark.parametrize(
    ("ask", "steps", "calls"),
    [
        ("every_step", 1, 3),  # the original's answer, a rewrite and its answer
        ("every_step", 5, 11),
        ("form", 1, 2),  # a rewrite, and the answer at the end
        ("form", 4, 5),
    ],
)
def test_an_episode_takes_at_most(ask: str, steps: int, calls: int) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=steps)  # type: ignore[arg-type]
    assert rules.max_calls(asked=1) == calls


def test_an_episode_ends_at_submit_and_after_its_steps() -> None:
    rules = EpisodeRules(max_episode_steps=3)
    taken = (("submit", 1), ("spelling", 2), ("spelling", 3))
    assert [rules.ends(name, steps=number) for name, number in taken] == [True, False, True]


@pytest.mark.parametrize(
    ("ask", "max_asks", "asked", "calls"),
    [
        ("every_step", None, 0, 7),  # the original's answer, and one after each step
        ("every_step", 3, 0, 3),
        ("form", None, 0, 6),
        ("form", 4, 0, 4),
        ("form", 4, 2, 7),  # six steps and the answer at the end
        ("form", 1, 0, 1),
        ("form", 1, 2, 7),
    ],
)
def test_an_episode_of_six_steps_takes_fewer_where_operators_are_local_or_asks_few(
    ask: str, max_asks: int | None, asked: int, calls: int
) -> None:
    rules = EpisodeRules(ask=ask, max_episode_steps=6, max_asks=max_asks)  # type: ignore[arg-type]
    assert rules.max_calls(asked=asked) == calls
