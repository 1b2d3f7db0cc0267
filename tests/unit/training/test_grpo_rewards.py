"""What rewrites of a group are worth: the score of the answer, never a made-up reward for a call that failed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from query_mutator.encoder import Encoder
from query_mutator.env.task import Task
from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.llm.retry import RetryPolicy
from query_mutator.training.group_rewards import GroupRewards
from query_mutator.types import ChatRequest, Completion
from tests.qm_command import qm

PRICE = 0.05
GOOD, BAD = "how do i sort my list", "how do i paint my list"


class Failing(ClientWrapper):
    """Fails the calls for one text."""

    def complete(self, request: ChatRequest) -> Completion:
        if "paint" in request.messages[-1].content:
            return Completion.failed("server", "broken for good")
        return super().complete(request)


@pytest.fixture
def rewards(tiny_task: Callable[..., Task], tiny_client: Client, hash_encoder: Encoder) -> GroupRewards:
    models: Any = SimpleNamespace(
        calls=SimpleNamespace(client=tiny_client),
        encoder=hash_encoder,
        retry_policy=RetryPolicy(max_retries=0),
        settings=SimpleNamespace(batch_size=2),
    )
    return GroupRewards(models, tiny_task(), "as_is", price=PRICE, group_size=3)


def test_a_rewrite_is_worth_the_score_of_its_answer_minus_two_calls(rewards: GroupRewards) -> None:
    one, same, other = rewards.of([0, 0, 0], [GOOD, f'"{GOOD}"', BAD])
    assert one == same > other >= -PRICE
    assert one == pytest.approx(rewards._score(0, GOOD) - PRICE)
    assert rewards.failed == 0


def test_what_a_guard_rejects_counts_as_the_question(rewards: GroupRewards) -> None:
    answer, nothing, question = rewards.of([0, 0, 0], ["You can use `sorted`.", "", rewards.task.questions[0].text])
    assert answer == nothing == question
    assert rewards.rejected == 1


def test_a_failed_call_gets_the_mean_of_its_group(rewards: GroupRewards, tiny_client: Client) -> None:
    rewards.models.calls.client = Failing(tiny_client)  # type: ignore[misc]
    found = rewards.of([0, 0, 0, 1, 1, 1], [GOOD, BAD, "sort my list", BAD, BAD, BAD])
    assert found[1] == pytest.approx((found[0] + found[2]) / 2)
    assert found[3:] == pytest.approx([-PRICE] * 3)  # all alike: nothing is learned
    assert rewards.failed == 4


def test_without_its_library_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("train", "grpo", "--model", "smollm2") == 2
    assert capsys.readouterr().err == "qm: qm train grpo needs trl: pip install 'query-mutator[grpo]'\n"
