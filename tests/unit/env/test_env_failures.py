"""Steps whose calls fail for good, as each `on_failure` has it: masked, truncated, or raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from query_mutator.adapters.sb3 import GymVecEnv
from query_mutator.env.task import Task
from query_mutator.errors import BackendError
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.testing import FaultPlan, StubServer, start_server
from query_mutator.types import ChatRequest, Completion, StepRecord
from rl_query_mutator_env import MAX_FAILED_STEPS, OnFailure, QueryMutationEnv, make_vector_env
from tests.conftest import Librarian, Softener

MakeTask = Callable[..., Task]
SPELLING, NEUTRAL, FILLER, UNDO, SUBMIT = range(5)
KILL = {"question": 1}
NO_RETRY = RetryPolicy(max_retries=0)
ID = "rl_query_mutator_env:QueryMutation-v0"


class Failing:
    """Fails the calls to some models, around a real client."""

    def __init__(self, client: Client, *models: str) -> None:
        self.client, self.models = client, models

    def complete(self, request: ChatRequest) -> Completion:
        if request.model in self.models:
            return Completion.failed("server", "broken for good")
        return self.client.complete(request)

    def close(self) -> None:
        self.client.close()


def failing_env(task: Task, client: Client, on_failure: OnFailure, *models: str, **settings: Any) -> QueryMutationEnv:
    return QueryMutationEnv(
        task, client=Failing(client, *models), retry_policy=NO_RETRY, on_failure=on_failure, **settings
    )


def test_a_failed_step_truncates_the_episode_with_the_observation_it_started_from(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    records: list[StepRecord] = []
    env = failing_env(tiny_task(), tiny_client, "truncate", "softener", on_record=records.append)
    before, _ = env.reset(seed=0, options=KILL)
    obs, reward, terminated, truncated, info = env.step(NEUTRAL)
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert np.array_equal(obs, before)
    assert not info["valid"]
    assert env.has_ended
    assert not records[0].valid
    assert env.reset()[1]["valid"]


def test_a_last_step_that_is_masked_truncates_since_its_result_is_unknown(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    env = failing_env(tiny_task(max_episode_steps=2), tiny_client, "mask", "softener")
    env.reset(seed=0, options=KILL)
    assert env.step(UNDO)[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step(NEUTRAL)
    assert (reward, terminated, truncated, bool(info["valid"])) == (0.0, False, True, False)


def test_a_submit_that_fails_is_truncated_and_a_moved_question_is_not_observed(
    tiny_task: MakeTask, tiny_client: Client
) -> None:
    task = tiny_task(ask="form", max_episode_steps=2)
    submit = task.actions.index("submit")
    for action in (submit, NEUTRAL):  # the rewrite of the last step succeeds, then the target is asked
        env = failing_env(task, tiny_client, "truncate", "librarian")
        env.reset(seed=0, options=KILL)
        before = env.step(SPELLING)[0]
        obs, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, bool(info["valid"])) == (0.0, False, True, False)
        assert np.array_equal(obs, before)
    masked = failing_env(task, tiny_client, "mask", "librarian")
    masked.reset(seed=0, options=KILL)
    assert masked.step(submit)[1:4] == (0.0, True, False)


def test_raise_ends_the_episode_and_names_the_step(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = failing_env(tiny_task(), tiny_client, "raise", "softener")
    env.reset(seed=0, options=KILL)
    with pytest.raises(
        BackendError, match=r"step neutral failed for good: .*broken for good.*check the server"
    ) as raised:
        env.step(NEUTRAL)
    assert raised.value.kind == "server"
    assert env.has_ended
    env.reset()


def test_a_server_that_fails_every_step_is_an_error_at_last(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = failing_env(tiny_task(ask="form"), tiny_client, "truncate", "softener")  # reset makes no call
    for step in range(MAX_FAILED_STEPS):
        env.reset(seed=0)
        if step == MAX_FAILED_STEPS - 1:
            with pytest.raises(BackendError, match=rf"\({MAX_FAILED_STEPS} in a row\)"):
                env.step(NEUTRAL)
        else:
            assert env.step(NEUTRAL)[3]
    broken, env.client = env.client, tiny_client
    env.reset()
    assert env.step(NEUTRAL)[4]["valid"]
    env.client = broken
    assert env.step(SPELLING)[3]  # counts from zero again


def test_an_unknown_choice_lists_the_known_ones(tiny_task: MakeTask, tiny_client: Client) -> None:
    for make in (lambda name: failing_env(tiny_task(), tiny_client, name), lambda name: gym.make(ID, on_failure=name)):
        with pytest.raises(ValueError, match="truncate"):
            make("ignore")


# --- over HTTP, as a trainer of another library has it ----------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"question": "plz sort list {n}", "answer": "sorted"}}\n' for n in range(40)))
    return {
        "target_model": "librarian", "mutator_model": "softener", "encoder": "hash", "dataset": str(path),
        "operators": "spelling,neutral,filler", "skip_unchanged": False,
    }  # fmt: skip


def server_with(share: float) -> StubServer:
    faults = FaultPlan(share, kinds=("500", "empty"), seed=1)
    return start_server([Librarian(), Softener()], num_parallel=8, faults=faults)


def test_make_and_make_vec_truncate_and_a_bootstrapping_learner_is_not_misled(settings: dict[str, Any]) -> None:
    with server_with(0.3) as server:
        settings |= {"ollama_url": server.url, "max_retries": 0}
        single = gym.make(ID, **settings)
        assert single.get_wrapper_attr("on_failure") == "truncate"
        single.close()
        envs = make_vector_env(4, **settings)
        assert envs.get_attr("on_failure") == ("truncate",) * 4
        adapted = GymVecEnv(envs)
        model = PPO("MlpPolicy", adapted, n_steps=4, batch_size=16, n_epochs=1, gamma=0.99, seed=0, device="cpu")
        errors: list[float] = []

        def on_step(found: dict[str, Any], _: dict[str, Any]) -> bool:
            errors.extend(_failed(model, found))
            return True

        model.learn(64, callback=on_step)
        assert len(errors) > 5
        # r + gamma V(s) - V(s): the value of the last observation less one step's discount.
        assert max(abs(error) for error in errors) < 0.05
        envs.close()


def _failed(model: PPO, found: dict[str, Any]) -> list[float]:
    """Return the errors of the failed steps, as SB3's rollout sees them before it bootstraps."""
    errors = []
    values = found["values"].numpy().ravel()
    for index, info in enumerate(found["infos"]):
        if not info["valid"]:
            assert info["TimeLimit.truncated"]
            assert np.array_equal(info["terminal_observation"], model._last_obs[index])  # type: ignore[index]
            obs = model.policy.obs_to_tensor(info["terminal_observation"])[0]
            errors.append(found["rewards"][index] + 0.99 * model.policy.predict_values(obs).item() - values[index])
    return errors


def test_retries_hide_transient_failures_until_their_deadline(settings: dict[str, Any]) -> None:
    with server_with(0.3) as server:
        settings |= {"ollama_url": server.url, "max_retries": 50}
        for deadline_s, valid in ((20.0, True), (1e-6, False)):
            envs = make_vector_env(4, deadline_s=deadline_s, **settings)
            envs.reset(seed=0)
            found = [envs.step(np.full(4, action)) for action in (SPELLING, NEUTRAL, FILLER)]
            assert all(step[4]["valid"].all() and not step[3].any() for step in found) is valid
            envs.close()
