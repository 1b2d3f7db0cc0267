"""The questions that an evaluation draws: at random, and the same ones each time."""

from __future__ import annotations

from query_mutator.evaluation.heldout import GrowingSample, fixed_sample
from query_mutator.types import Question

QUESTIONS = [Question(id=str(number), text=f"question {number}") for number in range(100)]


def test_a_sample_is_random_in_order_and_the_same_each_time() -> None:
    found = fixed_sample(QUESTIONS, 10)
    assert found == fixed_sample(QUESTIONS, 10) != tuple(QUESTIONS[:10])
    assert [int(one.id) for one in found] == sorted(int(one.id) for one in found)
    assert fixed_sample(QUESTIONS, 100) == tuple(QUESTIONS)


def test_a_growing_sample_grows_in_one_random_order_whatever_its_bound() -> None:
    def first(most: int) -> list[str]:
        sample = GrowingSample.of(QUESTIONS, most=most)
        assert sorted(sample.order) == list(range(min(most, 100)))
        return [sample.questions[place].id for place in sample.order[:20]]

    assert first(60) == first(1000)
    assert first(60) != [one.id for one in QUESTIONS[:20]]
