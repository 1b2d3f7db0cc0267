"""Models are opened as a record; the pace of calls; `play`: the environment's episodes, memory, forms, failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from query_mutator import forms
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.cache import request_key
from query_mutator.llm.client import Client, ModelServer, RetryPolicy
from query_mutator.llm.store import Store
from query_mutator.session.models import ResolvedModels, call_time, open_models
from query_mutator.session.play import FailureWindow, Limits, Played, Player, play, script, uniform
from query_mutator.settings import ModelSettings
from query_mutator.types import AnswerRule, AskRule, ChatRequest, Completion
from rl_query_mutator_env import QueryMutationEnv
from tests.fake_client import FakeClient

RECORDED = ModelSettings(backend="recorded", encoder="hash", cache="off", batch_size=2)


def test_resolved_settings_open_the_same_models() -> None:
    with open_models(dataclasses.replace(RECORDED, use_batching=False)) as models:
        resolved = models.resolved
    assert (resolved.backend, resolved.target_model, resolved.batch_size) == (
        "recorded",
        ("SmolLM2-135M-Instruct.Q4_1",),
        1,
    )
    with open_models(resolved) as models:
        assert models.resolved == resolved


def test_blas_has_one_thread_while_models_are_open() -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        with open_models(RECORDED):
            assert threads() == {1}
        assert threads() == {2}


def test_files_of_models_must_have_their_digests() -> None:
    with pytest.raises(UsageError, match="changed since this policy was trained"):
        open_models(ResolvedModels(backend="recorded", encoder="hash", cache="off", file_digests=("0" * 64,)))


class TwoModels(ModelServer):
    """A backend with a model for each part."""

    title = "two models"

    def default_models(self) -> tuple[str, str]:
        return "large", "small"

    def complete(self, request: ChatRequest) -> Completion:
        return Completion(text=request.model)


def test_a_server_names_the_models_of_a_run_that_names_none() -> None:
    BACKENDS.add("two", TwoModels)
    two = ModelSettings(backend="two", encoder="hash", cache="off", batch_size=2)
    for given, used in (({}, ("large", "small")), ({"target_model": "huge"}, ("huge", "small"))):
        with open_models(dataclasses.replace(two, **given)) as models:
            assert (models.target_model, models.mutator_model) == used


def test_the_time_of_a_call_is_that_of_the_newest_replies_to_the_models(tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    settings = replace(RECORDED, backend="ollama", target_model="small", cache_path=str(path), batch_size=4)
    assert call_time(settings) == (0.5, "2 s a call, assumed: no reply of these models is kept, 4 in flight")
    store = Store(path)
    for number, (model, latency_s) in enumerate([("other", 9.0), ("small", 0.5), ("small:latest", 0.7)]):
        request = ChatRequest.user("why?", model=model, seed=number)
        store.put(request_key(request), request, Completion(text="x", latency_s=latency_s))
    store.close()
    call_s, said = call_time(settings)
    assert (round(call_s, 3), said) == (0.15, "0.6 s a call, as the newest replies that are kept, 4 in flight")


MakeTask = Callable[..., Task]


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
        result = played(Player(lambda engine: choose(engine.observe()), observes=True), engine, tiny_client)
        assert result.stopped is None
        assert [step.operator for step in result.steps] == env.episode.names  # type: ignore[union-attr]
        np.testing.assert_array_equal(ours, seen[:-1])
        assert engine.submitted is not None
        assert (engine.score, engine.episode.calls) == (info["score"], info["calls"])
        assert engine.submitted.answer == info["_text"]["answer"]


def actions_of(task: Task, names: Sequence[str]) -> Player:
    return script([task.actions.index(name) for name in names])


def test_a_memory_saves_calls_that_are_still_counted(tiny_task: MakeTask, tiny_client: Client) -> None:
    task, client = tiny_task(ask="form", max_episode_steps=6), FakeClient(tiny_client.complete)
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


def test_a_failed_first_answer_ends_an_episode(tiny_task: MakeTask, tiny_client: Client) -> None:
    client, engine = FakeClient(tiny_client.complete, fails=lambda request: True), EpisodeEngine.open(tiny_task(), 0)
    flow = play(uniform(seed=0), engine)
    result = run_flow(flow, client=client, encoder=engine.task.encoder, retry_policy=RetryPolicy(max_retries=0))
    assert (result.stopped, result.error.kind, result.steps) == ("error", "server", [])
    assert client.calls == 1


def test_half_of_the_deadline_is_kept_for_the_first_answer(tiny_task: MakeTask, tiny_client: Client) -> None:
    task, deadline_s = tiny_task(ask="form", max_episode_steps=6), 600.0
    client, engine = FakeClient(tiny_client.complete), EpisodeEngine.open(task, 0)
    script = actions_of(task, ["spelling", "ask", "filler", "submit"])
    played(script, engine, client, limits=Limits(deadline_s=deadline_s))
    rewriting, _, after = [request.deadline or 0.0 for request in client.requests]
    assert after - rewriting == pytest.approx(deadline_s / 2)


@pytest.mark.parametrize("most", [1, 2])
def test_one_call_suffices_for_a_form(tiny_task: Callable[..., Task], tiny_client: Client, most: int) -> None:
    task = tiny_task(forms=forms.select("short_answer"), ask="form")
    steps = [task.actions.index("short_answer"), task.actions.index("submit")]
    engine = EpisodeEngine.open(task, 0, observes=False)
    flow = play(script(steps), engine, limits=Limits(max_calls=most), asks_when_stopped=True)
    played = run_flow(flow, client=tiny_client, encoder=task.encoder, retry_policy=RetryPolicy())
    assert (played.stopped, engine.episode.calls) == (None, 1)
    assert engine.submitted is not None
    assert engine.submitted.form == "short_answer"


def test_stops_above_the_rate_once_the_window_is_full() -> None:
    window = FailureWindow(0.2, size=10, why=lambda: ", most often 'busy'")
    window.add(np.array([True] * 7 + [False] * 2))  # 2 of 9
    window.add(np.array([True]))  # 2 of 10: not above
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 10 steps, most often 'busy'.*--max-failure-rate"):
        window.add(np.array([False]))


def test_old_failures_leave_the_window() -> None:
    window = FailureWindow(0.5, size=4)
    for valid in [False, False, True, True, True, True, False, False]:
        window.add(np.array([valid]))
