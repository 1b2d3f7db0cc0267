"""`ask="form"`: rewriting and asking are separate actions, priced by the call; local tests save calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from query_mutator.encoder import HashEncoder
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import Attempt
from query_mutator.env.task import Task
from query_mutator.llm.client import Client, RetryPolicy
from query_mutator.operators import LocalOperator, PromptOperator
from query_mutator.rewards import WeightedReward
from query_mutator.types import AskRule, FloatArray, Reward, StepRecord
from rl_query_mutator_env import QueryMutationEnv
from tests.conftest import QUESTIONS
from tests.fake_client import FakeClient

MakeTask = Callable[..., Task]
SPELLING, NEUTRAL, FILLER, ASK, UNDO, SUBMIT = range(6)
SORT = {"question": 0}  # "plz sort my list": a word for `spelling`
KILL = {"question": 1}  # "how do i kill the process": refused as the original, right once softened
PRICE = 0.02


@pytest.fixture
def task(tiny_task: MakeTask) -> Task:
    return tiny_task(ask="form", call_price=(PRICE,), max_episode_steps=4)


@pytest.fixture
def env(task: Task, tiny_client: Client) -> QueryMutationEnv:
    return QueryMutationEnv(task, client=tiny_client)


def test_of_answers_that_rank_alike_the_first_is_submitted(task: Task) -> None:
    engine, zero = EpisodeEngine.open(task, 1), np.zeros(1, dtype=np.float32)
    alike = {"text_vector": zero, "answer_vector": zero, "fit": 0.5, "closeness": 0.5, "reward": Reward(score=0.0)}
    first, second = (Attempt(text=text, answer=text, **alike) for text in ("`len`", "`sum`"))
    for each in (first, second):
        engine._add(each)
    assert engine.submitted is first


def test_a_rewrite_costs_one_call_and_an_answer_another(task: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    env = QueryMutationEnv(task, client=client)
    obs, info = env.reset(seed=0, options=KILL)
    assert client.purposes == []
    assert (info["calls"], info["score"], info["asks"]) == (0, 0, 0)
    assert np.isnan(info["baseline_score"])
    assert not obs[task.observer.slices["answer"]].any()
    assert obs[task.observer.slices["asked"]].tolist() == [0, 0, 0]
    obs, reward, _, _, info = env.step(NEUTRAL)
    assert client.purposes == ["mutate"]
    assert reward == pytest.approx(-PRICE)
    assert obs[task.observer.slices["asked"]].tolist() == [0, 0, 0]
    obs, reward, _, _, info = env.step(ASK)
    assert client.purposes == ["mutate", "target"]
    assert reward == pytest.approx(info["score"] - PRICE)
    assert info["success"] == 1
    assert obs[task.observer.slices["answer"]].any()
    assert obs[task.observer.slices["asked"]].tolist() == [1, 1, 0.25]
    _, reward, terminated, _, info = env.step(SUBMIT)
    assert (reward, terminated, info["calls"], info["step_calls"]) == (0, True, 2, 0)


@pytest.mark.parametrize(
    ("rules", "options", "actions", "calls"),
    [
        ({}, KILL, (NEUTRAL, SUBMIT), 2),  # nothing was asked: submit asks
        ({"max_episode_steps": 2}, SORT, (SPELLING, NEUTRAL), 3),  # the last allowed step asks
        ({"max_asks": 1}, SORT, (NEUTRAL, SUBMIT), 2),  # the only ask is left to submit
    ],
)
def test_the_end_of_an_episode_asks_when_nothing_was_asked(
    rules: dict[str, int],
    options: dict[str, int],
    actions: tuple[int, int],
    calls: int,
    task: Task,
    tiny_client: Client,
) -> None:
    env = QueryMutationEnv(task.with_rules(**rules), client=tiny_client)
    env.reset(seed=0, options=options)
    assert env.action_masks()[ASK] == ("max_asks" not in rules)
    env.step(actions[0])
    assert env.action_masks()[UNDO] == ("max_asks" not in rules)  # no answer to go back from
    _, reward, terminated, truncated, info = env.step(actions[1])
    assert (terminated, truncated, info["success"], info["calls"]) == (True, False, 1, calls)
    assert reward == pytest.approx(info["score"] - PRICE * info["step_calls"])
    assert info["_text"]["answer"].endswith(" is what you want.")


def test_the_best_answer_is_submitted_and_asks_are_bounded(task: Task, tiny_client: Client) -> None:
    env = QueryMutationEnv(task.with_rules(max_asks=2), client=tiny_client)
    env.reset(seed=0, options=KILL)
    env.step(ASK)
    assert not env.action_masks()[ASK]  # the answer is known
    assert env.step(NEUTRAL)[4]["success"] == 0
    assert env.action_masks()[ASK]
    env.step(ASK)
    assert env.action_masks().tolist() == [False] * 5 + [True]  # after the last ask there is nothing to do but submit
    assert env.step(SUBMIT)[4]["success"] == 1


@pytest.mark.parametrize(
    ("max_asks", "reward", "embeds"), [(1, "right", False), (1, "similarity", True), (2, "right", True)]
)
def test_an_only_answer_is_embedded_for_the_reward_alone(
    task: Task, tiny_client: Client, max_asks: int, reward: str, embeds: bool
) -> None:
    encoded, records = list[str](), list[StepRecord]()

    class Noted(HashEncoder):
        def encode(self, texts: Sequence[str]) -> FloatArray:
            encoded.extend(texts)
            return super().encode(texts)

    noted = replace(task.with_rules(max_asks=max_asks), encoder=Noted(), reward=WeightedReward.parse(reward))
    env = QueryMutationEnv(noted, client=tiny_client, on_record=records.append)
    env.reset(seed=0, options=KILL)
    obs = env.step(SUBMIT)[0]
    assert (records[0].answer in encoded) is embeds
    assert np.isfinite(obs).all()
    env.load_state_dict(env.state_dict())


def test_a_rewrite_that_would_change_nothing_costs_no_call_and_is_masked(task: Task, tiny_client: Client) -> None:
    client, records = FakeClient(tiny_client.complete), list[StepRecord]()
    never = PromptOperator.of("spelling", "Correct.", "{question}", test=lambda text: "lsit" in text)
    operators = (never, *task.operators[1:])
    env = QueryMutationEnv(replace(task, operators=operators), client=client, on_record=records.append)
    env.reset(seed=0, options=KILL)
    assert not env.action_masks()[SPELLING]
    _, reward, _, _, info = env.step(SPELLING)
    assert (client.purposes, reward, info["step_calls"]) == ([], 0, 0)
    assert (records[0].calls, records[0].rewrite) == (0, QUESTIONS[1].text)
    asked = QueryMutationEnv(replace(task, operators=operators).with_rules(skip_unchanged=False), client=client)
    asked.reset(seed=0, options=KILL)
    assert asked.action_masks()[SPELLING]
    assert asked.step(SPELLING)[4]["step_calls"] == 1


def test_each_episode_draws_one_price_and_sees_it(task: Task, tiny_client: Client) -> None:
    env = QueryMutationEnv(task.with_rules(call_price=(0.0, 0.04)), client=tiny_client)
    seen = set()
    for seed in range(8):
        obs, info = env.reset(seed=seed)
        assert obs[task.observer.slices["price"]] == pytest.approx(50 * info["call_price"])
        assert env.step(NEUTRAL)[1] == pytest.approx(-info["call_price"])
        seen.add(float(info["call_price"]))
    assert seen == {0.0, 0.04}


def test_a_restored_environment_continues_with_texts_that_were_not_asked(task: Task, tiny_client: Client) -> None:
    one, other = (QueryMutationEnv(task, client=tiny_client) for _ in range(2))
    one.reset(seed=0, options=KILL)
    one.step(SPELLING)
    expected = one.step(NEUTRAL)[0]
    assert np.array_equal(other.load_state_dict(one.state_dict()), expected)  # type: ignore[arg-type]
    for action in (ASK, SUBMIT):
        mine, theirs = one.step(action), other.step(action)
        assert np.array_equal(mine[0], theirs[0])
        assert mine[1:4] == theirs[1:4]


def test_a_local_operator_makes_no_call(task: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    softer = LocalOperator(name="neutral", summary="Soften.", function=lambda text, _: text.replace("kill", "stop"))
    env = QueryMutationEnv(replace(task, operators=(task.operators[0], softer, task.operators[2])), client=client)
    env.reset(seed=0, options=KILL)
    _, reward, _, _, info = env.step(NEUTRAL)
    assert (client.purposes, reward, info["step_calls"]) == ([], 0, 0)
    assert not env.action_masks()[NEUTRAL]  # it would change nothing
    assert env.step(SUBMIT)[4]["success"] == 1


def test_an_operator_may_use_the_answer_to_the_present_question(task: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    again = PromptOperator.of("spelling", "Ask otherwise.", "Not <a>{answer}</a>\n<question>{question}</question>")
    env = QueryMutationEnv(replace(task, operators=(again, *task.operators[1:])), client=client)
    env.reset(seed=0, options=KILL)
    assert not env.action_masks()[SPELLING]  # there is no answer yet
    assert env.step(SPELLING)[4]["step_calls"] == 0
    env.step(ASK)
    assert env.action_masks()[SPELLING]  # although it was taken in vain before
    env.step(SPELLING)
    assert "Not <a>I'm sorry, but I can't help with that.</a>" in client.prompts("mutate")[-1]
    assert not env.action_masks()[SPELLING]  # the new wording has no answer yet


@pytest.mark.parametrize("ask", ["form", "every_step"])
def test_a_question_that_does_not_fit_the_context_comes_once(task: Task, tiny_client: Client, ask: AskRule) -> None:
    task = task.with_rules(ask=ask)
    text = QUESTIONS[KILL["question"]].text
    client = FakeClient(
        tiny_client.complete, kind="prompt_too_long", fails=lambda one: text in one.messages[-1].content
    )
    env = QueryMutationEnv(task, client=client, retry_policy=RetryPolicy(max_retries=0))
    for number in range(4 * len(task.questions)):
        env.reset(seed=0 if number == 0 else None)
        env.step(len(task.actions) - 1)
        copy = QueryMutationEnv(task, client=env.client, retry_policy=env.retry_policy)
        copy.load_state_dict(env.state_dict())
        env = copy
    assert env.prompts_too_long == {QUESTIONS[KILL["question"]].id: 1}
