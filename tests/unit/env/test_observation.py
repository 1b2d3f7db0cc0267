"""The observation vector, slice by slice, and the projection under it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from query_mutator.env.observation import AnswerFeatures, Observer, Projection, StepFeatures, TextFeatures
from query_mutator.env.task import EpisodeRules

NORTH = np.array([0.0, 1.0, 0.0], dtype=np.float32)
SIGHT = TextFeatures(
    original="sort a lsit",
    current="sort a list? now!",
    drift=1.0,
    current_vector=NORTH,
    answer=AnswerFeatures(vector=NORTH, closeness=0.0, fit=1.0, refused=True, not_sure=False),
    first_refused=False,
    first_not_sure=True,
)
BEST = AnswerFeatures(vector=NORTH, closeness=0.75, fit=0.25, refused=False, not_sure=True)
MOMENT = StepFeatures(
    best=BEST, step_fraction=0.4, used=[False, True, False], action_mask=[False, True, True, False, True]
)


def observer(*, policy_asks: bool = False) -> Observer:
    vectors = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    return Observer(
        projection=Projection.fit(vectors, dims=2),
        known_words={"sort", "a", "list"},
        num_operators=3,
        policy_asks=policy_asks,
    )


def test_every_slice_holds_what_its_line_says() -> None:
    see = observer()
    obs = see(see.draw(SIGHT), MOMENT)
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.dtype == np.float32
    assert obs.shape == (see.size,) == (2 + 2 + 3 + 1 + 4 + 4 + 2 + 3 + 5,)
    assert part["similarity"] == pytest.approx([-2.5, 2.5, -1.25])
    assert part["drift"] == pytest.approx([5.0])
    assert part["verdicts"] == [1, 0, 0, 1]
    assert part["words"] == pytest.approx([4 * 1 / 4, np.log1p(4) / 2, 2 / 3, 0.5])
    assert part["progress"] == pytest.approx([0.4, 0.0])
    assert part["used"] == [0, 1, 0]
    assert part["closed"] == [1, 0, 0, 1, 0]


def test_an_observation_without_an_answer_says_so() -> None:
    see = observer(policy_asks=True)
    moment = replace(MOMENT, best=None, action_mask=[True] * 6, is_asked=False, call_price=0.02)
    obs = see(see.draw(replace(SIGHT, answer=None)), moment)
    part = {name: obs[piece].tolist() for name, piece in see.slices.items()}
    assert obs.shape == (see.size,)
    assert part["answer"] == [0, 0]
    assert part["similarity"] == [0, 0, 0]
    assert part["verdicts"] == [0, 0, 0, 1]
    assert part["closed"] == [0] * 6
    assert part["asked"] == part["best"] == [0, 0, 0]
    assert part["price"] == pytest.approx([1.0])


def test_with_answers_the_policy_that_asks_sees_the_best_one() -> None:
    see = observer(policy_asks=True)
    obs = see(see.draw(SIGHT), replace(MOMENT, action_mask=[True] * 6, ask_fraction=0.5))
    assert obs[see.slices["asked"]].tolist() == [1, 1, 0.5]
    assert obs[see.slices["best"]] == pytest.approx([0, 1, 1.25])


@pytest.mark.parametrize("policy_asks", [False, True])
def test_slices_cover_the_vector_without_gap(policy_asks: bool) -> None:
    pieces = list(observer(policy_asks=policy_asks).slices.values())
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]


def test_projection_whitens_what_it_was_fitted_on() -> None:
    data = np.random.default_rng(1).normal(size=(400, 5)).astype(np.float32) * np.array([5, 3, 1, 0.5, 0.1], np.float32)
    projected = np.array([Projection.fit(data, dims=3)(row) for row in data])
    assert projected.mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-5)
    assert np.cov(projected.T) == pytest.approx(np.eye(3), abs=1e-4)


def test_projection_of_few_texts_pads_with_zeros() -> None:
    few = np.eye(3, dtype=np.float32)[:2]
    assert Projection.fit(few, dims=3)(few[0])[1:] == pytest.approx(np.zeros(2))


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
