"""The environment: rewards worked by hand, gold unseen, gymnasium's contracts, batched equal to single."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, InvalidAction, ResetNeeded

from query_mutator.env.task import Task
from query_mutator.errors import BackendError
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.testing import StubServer
from query_mutator.types import CALL_PRICE, ChatRequest, Completion
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv
from tests.conftest import QUESTIONS

MakeTask = Callable[..., Task]
SPELLING, NEUTRAL, FILLER, UNDO, SUBMIT = range(5)
KILL = {"question": 1}  # "how do i kill the process": refused as the original, right once softened


@pytest.fixture
def env(tiny_task: MakeTask, tiny_client: Client) -> QueryMutationEnv:
    return QueryMutationEnv(tiny_task(), client=tiny_client)


class FailingModel:
    """Fails calls to one model for good, around a real client."""

    def __init__(self, client: Client, model: str, *, kind: str = "server") -> None:
        self.client, self.model, self.kind, self.calls = client, model, kind, 0

    def complete(self, request: ChatRequest) -> Completion:
        self.calls += 1
        if request.model == self.model:
            return Completion.failed(self.kind, "broken for good")
        return self.client.complete(request)

    def close(self) -> None:
        self.client.close()


NO_RETRY = RetryPolicy(max_retries=0)


def test_reward_is_the_change_of_score_minus_the_cost_of_a_step(env: QueryMutationEnv) -> None:
    _, info = env.reset(seed=0, options=KILL)
    before = info["baseline_score"]
    _, reward, terminated, truncated, info = env.step(NEUTRAL)
    assert not terminated
    assert not truncated
    assert info["score"] > before
    assert reward == pytest.approx(info["score"] - before - 2 * CALL_PRICE)
    _, reward, terminated, _, info = env.step(SUBMIT)
    assert (reward, terminated) == (0.0, True)
    assert info["success"] == 1.0
    assert info["baseline_success"] == 0.0
    assert info["calls"] == 3


def test_undo_goes_back_without_a_call_and_best_keeps_the_better_answer(env: QueryMutationEnv) -> None:
    env.reset(seed=0, options=KILL)
    env.step(NEUTRAL)
    assert env.episode is not None
    calls = env.episode.calls
    assert env.step(UNDO)[1] == 0.0
    assert env.episode.calls == calls
    assert env.episode.current.text == QUESTIONS[1].text
    assert env.step(SUBMIT)[4]["success"] == 1.0


def test_text_asked_before_is_not_asked_again(env: QueryMutationEnv) -> None:
    env.reset(seed=0, options=KILL)
    env.step(NEUTRAL)
    assert env.episode is not None
    calls = env.episode.calls
    env.step(FILLER)  # the softener gives the same text back: one mutator call, no target call
    assert env.episode.calls == calls + 1


def test_actions_that_lead_nowhere_are_closed(env: QueryMutationEnv) -> None:
    columns = env.task.observer.slices["closed"]
    obs, _ = env.reset(seed=0, options=KILL)
    assert obs[columns].tolist() == [0, 0, 0, 1, 0]  # nothing to undo yet
    obs = env.step(SPELLING)[0]  # another text
    assert obs[columns].tolist() == [0, 0, 0, 0, 0]
    obs = env.step(NEUTRAL)[0]  # changes nothing
    assert obs[columns].tolist() == [0, 1, 0, 0, 0]
    obs = env.step(UNDO)[0]
    assert obs[columns].tolist() == [1, 0, 0, 1, 0]  # what spelling makes of it is known


def test_observations_hold_nothing_of_the_gold(tiny_task: MakeTask, tiny_client: Client) -> None:
    liars = [replace(question, accept=("zlib.crc32",), reference="Something else entirely.") for question in QUESTIONS]
    runs = []
    for questions in (QUESTIONS, liars):
        env = QueryMutationEnv(tiny_task(questions), client=tiny_client)
        obs = [env.reset(seed=3)[0]]
        obs += [env.step(action)[0] for action in (NEUTRAL, UNDO, SPELLING, FILLER, SUBMIT)]
        runs.append(np.stack(obs))
    assert np.array_equal(runs[0], runs[1])


@pytest.mark.parametrize(("kind", "calls"), [("server", 15), ("timeout", 15), ("request", 5), ("prompt_too_long", 5)])
def test_reset_repeats_a_transient_failure_twice_then_takes_the_next_question_and_gives_up_at_last(
    tiny_task: MakeTask, tiny_client: Client, kind: str, calls: int
) -> None:
    client = FailingModel(tiny_client, "librarian", kind=kind)
    env = QueryMutationEnv(tiny_task(), client=client, retry_policy=NO_RETRY)
    with pytest.raises(BackendError, match="broken for good"):
        env.reset(seed=0)
    assert client.calls == calls


def test_same_seed_gives_the_same_episodes(env: QueryMutationEnv) -> None:
    runs = []
    for _ in range(2):
        drawn = [env.reset(seed=5)[1]["_text"]["question_id"]]
        drawn += [env.reset()[1]["_text"]["question_id"] for _ in range(6)]
        runs.append(drawn)
    assert runs[0] == runs[1]
    assert sorted(runs[0][:5]) == ["q0", "q1", "q2", "q3", "q4"]


# --- the batched environment ---------------------------------------------------------------------------------------


@pytest.fixture
def batched(tiny_task: MakeTask, tiny_client: Client) -> Iterator[Callable[..., BatchedQueryMutationEnv]]:
    made: list[BatchedQueryMutationEnv] = []

    def make(batch_size: int | None, **settings: Any) -> BatchedQueryMutationEnv:
        task = tiny_task()
        envs = [QueryMutationEnv(task, client=tiny_client, env_id=i) for i in range(5)]
        made.append(BatchedQueryMutationEnv(envs, batch_size, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_without_autoreset_an_ended_environment_waits_for_its_reset(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    env = batched(4, autoreset_mode="DISABLED")
    env.reset(seed=1)
    _, _, terminations, _, infos = env.step(np.array([SUBMIT, UNDO, UNDO, UNDO, SUBMIT]))
    assert terminations.tolist() == [True, False, False, False, True]
    assert infos["episode_length"].tolist() == [1] * 5
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        env.step(np.full(5, UNDO))
    assert [one.total_steps for one in env.envs] == [1] * 5  # none of the five took a step
    env.reset(options={"reset_mask": terminations})
    assert env.step(np.full(5, UNDO))[4]["episode_length"].tolist() == [1, 2, 2, 2, 1]


def test_unknown_autoreset_mode_lists_the_known_ones(batched: Callable[..., BatchedQueryMutationEnv]) -> None:
    with pytest.raises(ValueError, match="SAME_STEP"):
        batched(2, autoreset_mode="same")


@pytest.mark.parametrize("action", [5, -1, 1.0, "submit", None])
def test_action_that_does_not_exist_is_an_error_and_takes_no_step(
    action: Any, env: QueryMutationEnv, batched: Callable[..., BatchedQueryMutationEnv]
) -> None:
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match=re.escape(f"action {action} must be a whole number from 0 to 4 (submit)")):
        env.step(action)
    many = batched(4)
    many.reset(seed=0)
    with pytest.raises(InvalidAction, match="from 0 to 4"):
        many.step([UNDO, UNDO, action, UNDO, UNDO])  # type: ignore[arg-type]
    assert [one.total_steps for one in [env, *many.envs]] == [0] * 6
    many.step(np.full(5, UNDO))


def test_step_outside_an_episode_is_an_error(env: QueryMutationEnv) -> None:
    with pytest.raises(ResetNeeded, match=r"call reset\(\) before step"):
        env.step(UNDO)
    env.reset(seed=0)
    env.step(SUBMIT)
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        env.step(UNDO)
    copy = QueryMutationEnv(env.task, client=env.client)
    copy.load_state_dict(env.state_dict())
    with pytest.raises(ResetNeeded, match="the episode has ended"):
        copy.step(UNDO)


def test_a_restored_environment_has_the_counts_of_steps_episodes_and_failures(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    client = FailingModel(tiny_client, "softener", kind="prompt_too_long")
    env, copy = (QueryMutationEnv(tiny_task(), client=client, retry_policy=NO_RETRY) for _ in range(2))
    env.reset(seed=0, options=KILL)
    for action in (NEUTRAL, NEUTRAL, SUBMIT):
        env.step(action)
    assert (env.total_steps, env.total_episodes, env.invalid_steps, env.prompts_too_long) == (3, 1, 2, {"q1": 2})
    copy.load_state_dict(env.state_dict())
    counts = (copy.total_steps, copy.total_episodes, copy.invalid_steps, copy.prompts_too_long)
    assert counts == (3, 1, 2, {"q1": 2})


def test_environments_of_equal_settings_share_what_runs_until_the_last_is_closed(
    tiny_server: StubServer, tmp_path: Path
) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"question": "What is {n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(30)))
    settings = {"ollama_url": tiny_server.url, "target_model": "librarian", "mutator_model": "softener"}
    settings |= {"encoder": "hash", "dataset": str(path)}
    for _ in range(2):
        one, other = (gymnasium.make("rl_query_mutator_env:QueryMutation-v0", **settings) for _ in range(2))
        client = one.get_wrapper_attr("client")
        assert client is other.get_wrapper_attr("client")
        one.close()
        other.reset(seed=0)
        other.close()
        error = client.complete(ChatRequest.user("why?", model="librarian")).error
        assert error is not None
        assert error.kind == "cancelled"


def test_question_that_does_not_exist_is_an_error(env: QueryMutationEnv) -> None:
    for index in (-1, len(QUESTIONS)):
        with pytest.raises(ValueError, match="must be from 0 to 4"):
            env.reset(options={"question": index})


def test_every_info_has_the_same_arrays(env: QueryMutationEnv) -> None:
    infos = [env.reset(seed=0, options=KILL)[1], *(env.step(action)[4] for action in (NEUTRAL, UNDO, SUBMIT))]
    assert {tuple(info) for info in infos} == {tuple(infos[0])}
    for info in infos:
        assert {key for key, value in info.items() if not isinstance(value, np.ndarray)} == {"_text"}
    assert infos[0]["action_mask"].tolist() == [1, 1, 1, 0, 1]
    assert env.action_space.sample(mask=infos[0]["action_mask"]) != UNDO
    assert env.action_masks().tolist() == infos[-1]["action_mask"].astype(bool).tolist()
    assert infos[-1]["episode_return"] == pytest.approx(infos[-1]["score"] - infos[-1]["baseline_score"] - 0.01)
    assert infos[-1]["_text"]["answer"] == "`os.kill` is what you want."


def test_results_of_steps_in_flight_are_not_taken_for_others(batched: Callable[..., BatchedQueryMutationEnv]) -> None:
    env = batched(4)
    env.reset(seed=0)
    env.send([UNDO, UNDO], [1, 3])
    sends = [lambda: env.send([UNDO], [3]), lambda: env.send([UNDO, UNDO], [0, 0])]
    for call in (lambda: env.step(np.full(5, UNDO)), env.reset, env.send_reset, *sends):
        with pytest.raises(AlreadyPendingCallError, match="in the middle of a step"):
            call()
    assert env.recv(min_envs=2)[4]["env_id"].tolist() == [1, 3]
    env.step(np.full(5, UNDO))


def test_batched_environment_gives_access_to_its_environments(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    env = batched(4)
    env.reset(seed=0)
    assert env.get_attr("env_id") == (0, 1, 2, 3, 4)
    assert env.call("render") == env.render()
    assert np.array_equal(np.stack(env.call("action_masks")), env.action_masks())
    env.set_attr("env_id", [5, 6, 7, 8, 9])
    env.set_attr("render_mode", "ansi")
    assert env.get_attr("env_id") == (5, 6, 7, 8, 9)
    assert env.call("render_mode") == ("ansi",) * 5
    with pytest.raises(ValueError, match="2` values for 5"):
        env.set_attr("env_id", (1, 2))


def test_reset_mask_resets_only_the_masked_and_is_left_in_the_options(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    env = batched(4)
    before, _ = env.reset(seed=1)
    options = {"reset_mask": np.array([True, False, False, False, True])}
    after, infos = env.reset(options=options)
    assert "reset_mask" in options
    assert np.array_equal(before[1:4], after[1:4])
    assert infos["_question"].tolist() == [True, False, False, False, True]
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": np.zeros(5, dtype=bool)})


def test_batch_size_of_zero_and_wrong_action_count_are_value_errors(
    batched: Callable[..., BatchedQueryMutationEnv],
) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        batched(0)
    env = batched(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="3 actions for 5"):
        env.step(np.zeros(3, dtype=np.int64))


def test_recv_with_a_timeout_returns_what_is_there(batched: Callable[..., BatchedQueryMutationEnv]) -> None:
    env = batched(2)
    env.reset(seed=0)
    assert env.recv(timeout_s=0.0)[4]["env_id"].tolist() == []
    env.send([SUBMIT, SUBMIT], [1, 3])
    assert env.recv(min_envs=2)[4]["env_id"].tolist() == [1, 3]
