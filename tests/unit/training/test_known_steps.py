"""Steps from known answers: they are those of an environment that asks, and cost no call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from query_mutator import forms
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.task import Task
from query_mutator.errors import BackendError
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.plans import PlanScores
from query_mutator.learners.direct import DirectMethod
from query_mutator.learners.learner import Steps
from query_mutator.learners.plan import Plan
from query_mutator.llm.client import Client
from query_mutator.operators import LocalOperator
from query_mutator.settings.learner import DirectConfig
from query_mutator.training.known_steps import known_steps, recall
from query_mutator.types import ASK, FloatArray, Question
from rl_query_mutator_env import QueryMutationEnv

MakeTask = Callable[..., Task]
PLAN = Plan(steps=(ASK, "question_answer", ASK, "short_answer"))
MANY = [Question(id=f"q{number}", text=f"sort list {number}", accept=("sorted",)) for number in range(80)]


def asked(task: Task, client: Client) -> dict[int, QuestionMemory]:
    """Answers to every second question."""
    scores, rows = PlanScores(Evaluator(client=client, batch_size=4), task), range(0, len(task.questions), 2)
    scores.gather([PLAN], rows)
    return {row: QuestionMemory(attempts=dict(scores.answers(row))) for row in rows}


def form_task(tiny_task: MakeTask, **rules: object) -> Task:
    """Return a task of three forms, two operators that need a model, and one that adds a mark."""
    chosen = forms.select("question_answer,short_answer,statement")
    task = tiny_task(forms=chosen, ask="form", max_asks=4, max_episode_steps=6, call_price=(0.05,), **rules)
    mark = LocalOperator(name="mark", summary="Add a mark.", function=lambda text, context: f"{text.rstrip('!')}!")
    return replace(task, operators=(mark, *task.operators[1:]))


class FailingEncoder:
    """An encoder on a server that fails on texts with a mark."""

    name, dim, source, fingerprint = "failing", 1, "", ""

    def encode(self, texts: Sequence[str]) -> FloatArray:
        raise BackendError(f"no vector for {texts[0]}")

    def close(self) -> None:
        pass


def test_they_are_the_steps_of_an_environment_that_asks(tiny_task: MakeTask, tiny_client: Client) -> None:
    task = form_task(tiny_task)
    answers = asked(task, tiny_client)
    steps = known_steps(task, answers, seed=3)
    assert steps is not None
    assert steps.env_ids.tolist() == sorted(steps.env_ids)
    assert steps.calls.sum() > 2
    assert {0, 3, 4} <= {*steps.actions.tolist()} <= {0, *range(3, len(task.actions))}  # no operator with a model
    check_as_played(steps, QueryMutationEnv(task, client=tiny_client), list(answers))


def check_as_played(steps: Steps, env: QueryMutationEnv, questions: Sequence[int]) -> None:
    """Assert that steps are those of an environment, an episode on each of the questions."""
    for episode, question in enumerate(questions):
        obs, _ = env.reset(options={"question": question})
        for row in np.flatnonzero(steps.env_ids == episode):
            np.testing.assert_array_equal(steps.obs[row], obs)
            obs, reward, terminated, truncated, info = env.step(steps.actions[row])
            np.testing.assert_array_equal(steps.next_obs[row], obs)
            assert (steps.rewards[row], steps.calls[row]) == (reward, info["step_calls"])
            assert (steps.terminations[row], steps.truncations[row]) == (terminated, truncated)
        assert env.has_ended


def test_a_wording_that_is_not_embedded_ends_the_episode(tiny_task: MakeTask, tiny_client: Client) -> None:
    task = form_task(tiny_task, questions=MANY)
    steps = known_steps(replace(task, encoder=FailingEncoder()), asked(task, tiny_client), seed=3)
    assert steps is not None
    assert steps.actions.all()  # none is the first


def test_where_every_episode_asks_first_there_are_none(tiny_task: MakeTask, tiny_client: Client) -> None:
    answers = asked(form_task(tiny_task), tiny_client)
    assert known_steps(tiny_task(), {row: QuestionMemory() for row in answers}, seed=0) is None


def test_a_learner_starts_from_them(tiny_task: MakeTask, tiny_client: Client) -> None:
    task, config = form_task(tiny_task, questions=MANY), DirectConfig(num_processes=2)
    size, closed = task.observer.size, task.observer.slices["closed"]
    direct, again = (DirectMethod(size, len(task.actions), config, mask_columns=closed) for _ in range(2))
    recall(direct, task, asked(task, tiny_client), seed=3)
    assert direct.frozen.models
    assert (direct.env_steps, direct.updates_done) == (0, 0)
    state = direct.state_dict()
    again.load_state_dict(state)
    obs = QueryMutationEnv(task, client=tiny_client).reset(seed=0)[0][None]
    np.testing.assert_array_equal(again.frozen.values(obs), direct.frozen.values(obs))
    assert state["optimizer"]["episodes"] == [40, 41]
