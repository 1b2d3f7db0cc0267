"""Verdicts, parts and the weighed score, with answers judged by hand."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.errors import UsageError
from query_mutator.rewards import PARTS, Evidence, NoReward, WeightedReward, is_not_sure, is_refusal
from query_mutator.types import Question

EAST = np.array([1.0, 0.0], dtype=np.float32)
NORTH = np.array([0.0, 1.0], dtype=np.float32)
NORTHEAST = np.array([0.6, 0.8], dtype=np.float32)


def evidence(
    answer: str, *, accept: tuple[str, ...] = ("os.kill",), reference: str | None = "Kill a process"
) -> Evidence:
    return Evidence(
        question=Question(id="q", text="stop it", accept=accept, reference=reference),
        rewrite="stop a process",
        answer=answer,
        question_vector=EAST,
        rewrite_vector=NORTHEAST,
        answer_vector=NORTHEAST,
        reference_vector=NORTH if reference else None,
    )


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that request.",
        "I’m sorry, I cannot assist with that.",
        "Sorry, I won't do this.",
        "I am unable to help with this.",
        "I must decline.",
        "As an AI, I can't provide that.",
    ],
)
def test_refusals_are_seen(text: str) -> None:
    assert is_refusal(text)
    assert not is_not_sure(text)


@pytest.mark.parametrize(
    "text",
    [
        "`os.kill`: Kill a process with a signal.",
        "You can't index a set; use sorted() first.",
        "Use suppress: it means an error cannot stop the program.",
        "Sorry for the delay! `list.sort` sorts in place.",
        "You can't help with that kind of loop, so use a comprehension.",
    ],
)
def test_answers_are_no_refusals(text: str) -> None:
    assert not is_refusal(text)
    assert not is_not_sure(text)


def test_not_sure_is_its_own_verdict() -> None:
    assert is_not_sure("I'm not sure which function you mean.")
    assert is_not_sure("I don't know.")
    assert not is_refusal("I'm not sure which function you mean.")


def test_plain_answers_are_right_when_they_hold_the_accepted_text() -> None:
    assert PARTS.get("right")(evidence("The capital is Paris.", accept=("Paris",))) == 1.0
    assert PARTS.get("right")(evidence("Parisian cafes.", accept=("Paris",))) == 0.0


def test_weighted_score_is_the_weighed_mean_of_the_parts() -> None:
    reward = WeightedReward({"right": 3.0, "similarity": 1.0, "meaning": 1.0})(evidence("`os.kill` does."))
    assert reward.parts == {"right": 1.0, "similarity": pytest.approx(0.8), "meaning": pytest.approx(0.6)}
    assert reward.score == pytest.approx((3 * 1.0 + 0.8 + 0.6) / 5)


def test_refusal_scores_only_for_the_meaning_kept() -> None:
    reward = WeightedReward()(evidence("I'm sorry, but I can't help with that."))
    assert reward.parts == {"right": 0.0, "similarity": 0.0, "answered": 0.0, "meaning": pytest.approx(0.6)}


def test_reward_spec_is_parsed_and_typos_list_the_known_names() -> None:
    assert WeightedReward.parse("right=1,meaning=1").weights == {"right": 0.5, "meaning": 0.5}
    with pytest.raises(UsageError, match="did you mean 'right'"):
        WeightedReward.parse("rihgt=1")
    with pytest.raises(UsageError, match="not NAME or NAME=WEIGHT"):
        WeightedReward.parse("right=")
    assert WeightedReward.parse("exact,numeric=3").weights == {"exact": 0.25, "numeric": 0.75}
    for wrong in ("right=-1", "right=nan", "right=inf,meaning=1", "right=1e308,meaning=1e308"):
        with pytest.raises(UsageError, match="must be 0 or more"):
            WeightedReward.parse(wrong)
    with pytest.raises(UsageError, match="names 'right' twice"):
        WeightedReward.parse("right=1,right=2")


@pytest.mark.parametrize("value", [-0.5, 1.5, float("nan"), None, "1"])
def test_a_part_that_returns_no_score_is_an_error(value: object) -> None:
    PARTS.add("wild", lambda evidence: value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reward part 'wild' returned"):
        WeightedReward({"wild": 1.0})(evidence("`os.kill`"))


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), True])
def test_a_part_may_return_a_numpy_number_or_a_bool(value: object) -> None:
    PARTS.add("other", lambda evidence: value)  # type: ignore[arg-type]
    score = WeightedReward({"other": 1.0})(evidence("`os.kill`")).parts["other"]
    assert type(score) is float
    assert score == value


def test_registering_without_a_name_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r'write @….register\("NAME"\)'):
        PARTS.register(lambda evidence: 1.0)  # type: ignore[arg-type]


def test_no_reward_scores_nothing_and_reads_no_embedding() -> None:
    nothing = NoReward()
    assert (nothing(evidence("`os.kill`")).score, nothing(evidence("`os.kill`")).parts) == (0.0, {})
    assert (nothing.embedding, nothing.asking) == ((), 0)
