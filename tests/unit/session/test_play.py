"""`play`: the same episodes as the environment, and a memory that is counted but not called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.session.play import ByObservation, Limits, Played, Player, Script, Uniform, play
from query_mutator.types import AnswerRule, AskRule, ChatRequest, Completion
from rl_query_mutator_env import QueryMutationEnv

MakeTask = Callable[..., Task]


class Counting:
    """A real client that keeps the requests."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.requests: list[ChatRequest] = []

    @property
    def calls(self) -> int:
        return len(self.requests)

    def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        return self.client.complete(request)

    def close(self) -> None:
        self.client.close()


def played(player: Player, engine: EpisodeEngine, client: Client, **settings: Any) -> Played:
    flow = play(player, engine, **settings)
    result: Played = run_flow(flow, client=client, encoder=engine.task.encoder, retry_policy=RetryPolicy())
    return result


@pytest.mark.parametrize("answer", ["best", "vote"])
@pytest.mark.parametrize("ask", ["every_step", "form"])
def test_an_episode_is_that_of_the_environment(
    tiny_task: MakeTask, tiny_client: Client, ask: AskRule, answer: AnswerRule
) -> None:
    task = tiny_task(ask=ask, answer=answer, max_episode_steps=6)
    for index in range(len(task.questions)):
        env = QueryMutationEnv(task, client=tiny_client)
        obs, info = env.reset(seed=0, options={"question": index})
        seen, rng = [obs], np.random.default_rng(index)
        ended = False
        while not ended:
            obs, _, terminated, truncated, info = env.step(rng.integers(len(task.actions)))
            ended = terminated or truncated
            seen.append(obs)

        engine, ours = EpisodeEngine.open(task, index), []
        rng = np.random.default_rng(index)

        def choose(obs: np.ndarray[Any, Any], ours: list[Any] = ours, rng: np.random.Generator = rng) -> int:
            ours.append(obs)
            return int(rng.integers(len(task.actions)))

        engine.episode.call_price = task.rules.call_price[0]
        result = played(ByObservation(choose), engine, tiny_client)
        assert result.stopped is None
        assert [step.operator for step in result.steps] == env.episode.names  # type: ignore[union-attr]
        np.testing.assert_array_equal(ours, seen[:-1])
        assert engine.submitted is not None
        assert (engine.score, engine.episode.calls) == (info["score"], info["calls"])
        assert engine.submitted.answer == info["_text"]["answer"]


def actions_of(task: Task, names: Sequence[str]) -> Script:
    return Script([task.actions.index(name) for name in names])


def test_a_memory_saves_calls_that_are_still_counted(tiny_task: MakeTask, tiny_client: Client) -> None:
    task, client = tiny_task(ask="form", max_episode_steps=6), Counting(tiny_client)
    script = actions_of(task, ["ask", "spelling", "neutral", "ask", "submit"])
    for index in range(len(task.questions)):
        memory = QuestionMemory()
        first = EpisodeEngine.open(task, index, memory=memory, observes=False)
        played(script, first, client)
        made = client.calls
        again = EpisodeEngine.open(task, index, memory=memory, observes=False)
        played(script, again, client)
        assert client.calls == made
        assert again.episode.calls == first.episode.calls
        assert again.submitted == first.submitted
        longer = EpisodeEngine.open(task, index, memory=memory, observes=False)
        played(actions_of(task, ["spelling", "neutral", "filler", "submit"]), longer, client)
        assert client.calls <= made + 3


def test_only_an_observed_wording_is_embedded(tiny_task: MakeTask, tiny_client: Client) -> None:
    task = tiny_task(ask="form", max_episode_steps=3)
    script = actions_of(task, ["filler", "undo", "submit"])
    for observes in (True, False):
        engine = EpisodeEngine.open(task, 0, observes=observes)
        played(script, engine, tiny_client)
        assert len(engine.episode.vectors) == (2 if observes else 1)


def test_a_failed_first_answer_ends_an_episode_after_its_tries(tiny_task: MakeTask) -> None:
    class Broken:
        calls = 0

        def complete(self, request: ChatRequest) -> Completion:
            self.calls += 1
            return Completion.failed("server", "broken for now")

        def close(self) -> None: ...

    for tries in (1, 3):
        client = Broken()
        engine = EpisodeEngine.open(tiny_task(), 0)
        flow = play(Uniform(np.random.default_rng(0)), engine, first_tries=tries)
        result = run_flow(flow, client=client, encoder=engine.task.encoder, retry_policy=RetryPolicy(max_retries=0))
        assert (result.stopped, result.error.kind, result.steps) == ("error", "server", [])
        assert client.calls == tries


def test_half_of_the_deadline_is_kept_for_the_first_answer(tiny_task: MakeTask, tiny_client: Client) -> None:
    task, deadline_s = tiny_task(ask="form", max_episode_steps=6), 600.0
    client, engine = Counting(tiny_client), EpisodeEngine.open(task, 0)
    script = actions_of(task, ["spelling", "ask", "filler", "submit"])
    played(script, engine, client, limits=Limits(deadline_s=deadline_s))
    rewriting, _, after = [request.deadline or 0.0 for request in client.requests]
    assert after - rewriting == pytest.approx(deadline_s / 2)
