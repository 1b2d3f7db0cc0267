"""A mutator that answers: the wording stays everywhere, and the rejections are counted by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ollama_utils import batch_mutate_queries
from query_mutator.apply.rewriter import rewrite_flow
from query_mutator.encoder import Encoder
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Evaluator, always
from query_mutator.evaluation.outcomes import rejections_in_words
from query_mutator.evaluation.plans import PlanScores
from query_mutator.evaluation.summary import Results, summarize
from query_mutator.learners.plan import Plan, plan_policy, plan_task
from query_mutator.llm.limit import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.retry import RetryPolicy
from query_mutator.report.table import result_table
from query_mutator.testing import StubServer, start_server
from query_mutator.types import StepRecord
from rl_query_mutator_env import QueryMutationEnv
from tests.conftest import Librarian, Softener

SPELLING, NEUTRAL, FILLER, UNDO, SUBMIT = range(5)
NO_RETRIES = RetryPolicy(max_retries=0)
ANSWER = "The answer is to send it a signal."


class Answering(Softener):
    """Answers the spelling prompt, and rewrites by the others."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return ANSWER if "spelling" in prompt else super().reply(prompt)


@pytest.fixture
def mutator() -> Answering:
    return Answering()


@pytest.fixture
def server(mutator: Answering) -> Iterator[StubServer]:
    with start_server([Librarian(), mutator], num_parallel=8) as server:
        yield server


@pytest.fixture
def client(server: StubServer) -> Iterator[Limit]:
    client = Limit(OllamaBackend(server.url, timeout_s=20, pool_size=8), limit=8)
    yield client
    client.close()


@pytest.fixture
def task(tiny_task: Callable[..., Task]) -> Task:
    return tiny_task()


def test_a_step_keeps_the_wording_and_names_the_guard(task: Task, client: Limit, mutator: Answering) -> None:
    records: list[StepRecord] = []
    env = QueryMutationEnv(task, client=client, on_record=records.append)
    env.reset(options={"question": 1})
    for action in (SPELLING, NEUTRAL):
        env.step(action)
    assert [(record.guard, record.rewrite) for record in records] == [
        ("answer", "how do i kill the process"), (None, "how do i stop the process"),
    ]  # fmt: skip
    assert [record.calls for record in records] == [1, 2]  # a wording that stays is not asked again
    assert all("[operator" not in prompt for prompt in mutator.prompts)


def test_an_evaluation_counts_them_by_operator(task: Task, client: Limit) -> None:
    evaluator = Evaluator(client=client, batch_size=4, retry_policy=NO_RETRIES)
    outcomes = {
        name: evaluator.run(task, always(actions))
        for name, actions in (("identity", [SUBMIT]), ("policy", [SPELLING, NEUTRAL, SUBMIT]))
    }
    assert {outcome.rejected for outcome in outcomes["policy"]} == {(("spelling", "answer"),)}
    assert outcomes["policy"][0].to_row(task.questions[0])["guards"] == ["answer", None, None]
    guarded = dict.fromkeys(outcomes, ())
    report = summarize(Results(questions=task.questions, outcomes=outcomes, guard=(), guarded=guarded))
    found = {"neutral": {"rewrites": 3, "rejected": {}}, "spelling": {"rewrites": 5, "rejected": {"answer": 5}}}
    assert report["rewrites"] == found
    line = "rejected rewrites (the wording stays): spelling 100% of 5 (answer 5)"
    more = {"target": "m", "asked": 5, "best_single_operator": None, "k": None, "plan_search": None}
    assert line in result_table({**report, **more}).splitlines()
    assert rejections_in_words({"neutral": found["neutral"]}) == "rejected rewrites: none of 3"
    assert rejections_in_words({}) == ""


def test_a_plan_search_counts_them_too(task: Task, client: Limit) -> None:
    scores = PlanScores(Evaluator(client=client, batch_size=4, retry_policy=NO_RETRIES), task)
    plans, rows = [Plan(), Plan(steps=("spelling",)), Plan(steps=("spelling", "neutral"))], range(5)
    scores.gather(plans, rows)
    assert [result.attempt and result.attempt.text for result in scores.results(plans[1], rows)] == [
        question.text for question in task.questions
    ]
    assert scores.rewrites["spelling"] == {"rewrites": 5, "rejected": {"answer": 5}}
    assert scores.rewrites["neutral"]["rejected"] == {}


def test_a_policy_in_use_names_them(task: Task, client: Limit, hash_encoder: Encoder) -> None:
    plan = Plan(steps=("spelling", "neutral"))
    acting = plan_task(plan, task).on(task.questions[1:2])
    flow = rewrite_flow(acting, plan_policy(plan, acting))
    found = run_flow(flow, client=client, encoder=hash_encoder, retry_policy=NO_RETRIES)
    assert found.rejected == (("spelling", "answer"),)
    assert (found.text, found.answer) == ("how do i stop the process", "`os.kill` is what you want.")


def test_the_function_for_scripts_returns_the_query(server: StubServer, mutator: Answering) -> None:
    queries = ["how do i kill the process", "plz sort my list"]
    for operator, expected in (("spelling", queries), ("neutral", ["how do i stop the process", "sort my list"])):
        assert batch_mutate_queries(queries, operator, model="softener", url=server.url) == expected
    assert all("[operator" not in prompt for prompt in mutator.prompts)
