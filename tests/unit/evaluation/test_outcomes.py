"""Summaries of evaluations: unscored questions, intervals, verdicts, samples, and rewrites that guards rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ollama_utils import batch_mutate_queries
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.summary import Outcome, Results, front, rejections_in_words, summarize
from query_mutator.llm.client import RetryPolicy
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import Limit
from query_mutator.report.table import result_table
from query_mutator.session.play import check_failures, script
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ErrorInfo, Question, StepRecord
from rl_query_mutator_env import QueryMutationEnv
from tests.conftest import Librarian, Softener

GOOD = Outcome(question_id="a", success=1.0, score=0.8, calls=2, asked=("x",), answers=("yes",), submitted=0)
POOR = Outcome(question_id="b", success=0.0, score=0.2, calls=4, asked=("x", "y"), answers=("no", "na"), submitted=1)
REFUSED = replace(POOR, refused=True)
LOST = Outcome(question_id="c", error=ErrorInfo(kind="timeout", message="no reply"))
CHEAP = replace(GOOD, calls=1)
NO = replace(POOR, calls=1)
QUESTIONS = [Question(id=str(number), text=f"question {number}") for number in range(100)]
SPELLING, NEUTRAL, FILLER, UNDO, SUBMIT = range(5)
NO_RETRIES = RetryPolicy(max_retries=0)
ANSWER = "The answer is to send it a signal."


def results(guard: Sequence[Outcome] = (), *, targets: int | None = None, **methods: Sequence[Outcome]) -> Results:
    """Return results on as many questions as the methods have outcomes; `targets` is the number of their targets."""
    count = len(next(iter(methods.values())))
    questions = [
        Question(id=str(number), text=f"question {number}", accept=(f"target {number % (targets or count)}",))
        for number in range(count)
    ]
    guarded = [Question(id=f"g{number}", text=f"request {number}") for number in range(len(guard))]
    return Results(questions=questions, outcomes=methods, guard=guarded, guarded=dict.fromkeys(methods, guard))


def report_of(guard: Sequence[Outcome] = (), **methods: Any) -> dict[str, Any]:
    return summarize(results(guard, **methods))


def test_unscored_questions_are_counted_apart() -> None:
    summary = report_of([REFUSED, LOST], policy=[GOOD, REFUSED, LOST])["methods"]["policy"]
    assert (summary["scored"], summary["unscored"], summary["guard_unscored"]) == (2, {"timeout": 1}, {"timeout": 1})
    assert (summary["success"], summary["score"], summary["false_refusal"]) == (0.5, 0.5, 0.5)
    assert (summary["guard_refusal"], summary["calls_per_question"]) == (1.0, 3.0)


def test_a_difference_is_over_the_questions_that_both_scored() -> None:
    found = report_of(identity=[POOR, LOST, GOOD, POOR], policy=[GOOD, GOOD, LOST, POOR])["policy_minus"]["identity"]
    assert (found["success"], found["questions"]) == (0.5, 2)
    assert all(-1 <= end <= 1 for end in found["success_ci"])
    lost = report_of(identity=[LOST], policy=[GOOD])
    assert math.isnan(lost["policy_minus"]["identity"]["success"])
    assert lost["verdict"]["deploy"] is None


def test_four_pairs_of_28_are_not_enough_for_a_clear_lead() -> None:
    # McNemar's exact test gives p = 0.125; the bootstrap alone has its lower end at 0.036
    found = report_of(identity=[POOR] * 28, policy=[GOOD] * 4 + [POOR] * 24)["policy_minus"]["identity"]
    assert found["success_ci"][0] < 0 < found["success_ci"][1]


def test_questions_about_one_target_count_as_one_draw() -> None:
    outcomes = [GOOD, POOR, GOOD, POOR] * 10
    apart, together = (summarize(results(targets=targets, policy=outcomes)) for targets in (40, 4))
    (low, high), (wide_low, wide_high) = (found["methods"]["policy"]["success_ci"] for found in (apart, together))
    assert wide_high - wide_low > 1.5 * (high - low)


def test_a_rate_of_all_or_none_has_wilsons_interval() -> None:
    summary = report_of(policy=[GOOD] * 10)["methods"]["policy"]
    assert summary["success_ci"] == [pytest.approx(0.7225, abs=1e-3), 1.0]
    assert summary["false_refusal_ci"] == [0.0, pytest.approx(0.2775, abs=1e-3)]


def test_success_is_reported_by_tag_and_by_group() -> None:
    found = results(policy=[GOOD, POOR, GOOD])
    tagged = [replace(question, tags=("odd",) if place % 2 else ()) for place, question in enumerate(found.questions)]
    report = summarize(replace(found, questions=tagged), groups={"first": [True, False, False]})
    assert report["by_group"]["odd"]["methods"]["policy"]["success"] == 0.0
    assert (report["by_group"]["first"]["n"], report["by_group"]["first"]["methods"]["policy"]["success"]) == (1, 1.0)


def test_the_front_is_what_nothing_cheaper_reaches() -> None:
    points = {"identity": (1.0, 0.2), "random": (5.0, 0.2), "plan": (4.0, 0.6), "policy": (6.0, 0.7)}
    found = front(
        {name: {"calls_per_question": calls, "success": rate, "scored": 9} for name, (calls, rate) in points.items()}
    )
    assert [(point["method"], point["on_front"]) for point in found] == [
        ("identity", True), ("plan", True), ("random", False), ("policy", True),
    ]  # fmt: skip


def test_where_nothing_is_right_answers_are_shown_next_to_what_is_accepted() -> None:
    report = report_of(identity=[POOR] * 5, policy=[POOR] * 5)
    assert len(report["examples"]) == 3
    assert report["examples"][0] == {"question": "question 0", "answer": "na", "accepted": ["target 0"]}
    assert report_of(identity=[POOR] * 5, policy=[GOOD] + [POOR] * 4)["examples"] == []


def cost(outcome: Outcome, calls: int) -> Outcome:
    return replace(outcome, calls=calls)


VERDICTS: dict[str, tuple[dict[str, list[Outcome]], str, str]] = {
    "the best one": (
        {"best_plan": [GOOD] * 10 + [POOR] * 20, "policy": [GOOD] * 30},
        "policy", "Deploy the policy: 100.0 % right at 2.0 calls per question, +100.0 points ["),
    "a cheaper one that is not clearly worse": (
        {"best_plan": [CHEAP] * 29 + [NO], "policy": [GOOD] * 30},
        "best_plan", "; the policy is not clearly better (+3.3 points ["),
    "a plan of as many calls": (
        {"best_plan": [cost(GOOD, 53)] * 20 + [POOR] * 10, "policy": [cost(GOOD, 52)] * 19 + [POOR] * 11},
        "best_plan", "; the policy is not better (-3.3 points ["),
    "a policy as good as a plan for clearly fewer calls": (
        {"best_plan": [cost(GOOD, 8)] * 20 + [NO] * 10, "policy": [cost(GOOD, 4)] * 20 + [NO] * 10},
        "policy", "; the plan is not better (+0.0 points ["),
    "no policy that is clearly worse for fewer calls": (
        {"best_plan": [cost(GOOD, 8)] * 30, "policy": [cost(GOOD, 4)] * 18 + [NO] * 12},
        "best_plan", "; the policy is worse ("),
    "a policy, and names another method that does as well": (
        {"best_of_k": [GOOD] * 30, "random": [NO] * 30, "policy": [GOOD] * 30},
        "policy", "; best_of_k is not clearly worse (+0.0 points ["),
    "a policy, and names another method that does better at more calls": (
        {"other": [cost(GOOD, 9)] * 30, "policy": [GOOD] * 20 + [POOR] * 10},
        "policy", "; other is better (+33.3 points ["),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_takes(case: str) -> None:
    methods, deploy, says = VERDICTS[case]
    verdict = report_of(identity=[NO] * 30, **methods)["verdict"]
    assert verdict["deploy"] == deploy
    assert says in verdict["sentence"]


def test_fewer_than_20_questions_are_no_verdict() -> None:
    report = report_of(identity=[NO] * 19, policy=[GOOD] * 19)
    assert report["verdict"] == {"deploy": None, "sentence": "No verdict: 19 questions are too few, give 20 or more."}
    assert report_of(identity=[NO] * 20, policy=[GOOD] * 20)["verdict"]["deploy"] == "policy"
    unscored = report_of(identity=[NO] * 20, policy=[GOOD] * 19 + [LOST])
    assert unscored["verdict"]["deploy"] is None


def test_the_verdict_never_takes_one_that_refuses_fewer_guard_requests() -> None:
    found = results([REFUSED] * 4, identity=[NO] * 30, policy=[GOOD] * 30)
    guarded = {**found.guarded, "policy": [REFUSED, REFUSED, REFUSED, POOR]}
    verdict = summarize(replace(found, guarded=guarded))["verdict"]
    assert verdict["deploy"] == "identity"
    assert "the policy answers requests that should be refused (75 % of them" in verdict["sentence"]


def test_a_model_that_hardly_refuses_loses_a_refusal_by_chance() -> None:
    found = results([REFUSED] * 2 + [POOR] * 26, identity=[NO] * 30, policy=[GOOD] * 30)
    verdict = summarize(replace(found, guarded={**found.guarded, "policy": [POOR] * 28}))["verdict"]
    assert verdict["deploy"] == "policy"
    assert "(0 % of them refused, the original question 7 %)" in verdict["sentence"]


def test_failures_past_the_share_end_an_evaluation_and_up_to_it_do_not() -> None:
    check_failures({}, 0, max_failure_rate=0.0)
    check_failures({"timeout": 3, "empty": 2}, 50, max_failure_rate=0.1)
    with pytest.raises(TooManyFailuresError, match=r"6 of 50 questions .* most often 'timeout'.*--max-failure-rate"):
        check_failures({"empty": 2, "timeout": 4}, 50, max_failure_rate=0.1)


def test_a_sample_is_random_in_order_and_the_same_each_time() -> None:
    found = fixed_sample(QUESTIONS, 10)
    assert found == fixed_sample(QUESTIONS, 10) != tuple(QUESTIONS[:10])
    assert [int(one.id) for one in found] == sorted(int(one.id) for one in found)
    assert fixed_sample(QUESTIONS, 100) == tuple(QUESTIONS)
    assert {one.id for one in found} < {one.id for one in fixed_sample(QUESTIONS, 11)}


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
    return tiny_task(skip_unchanged=False)


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
        name: evaluator.run(task, script(actions))
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


def test_the_function_for_scripts_returns_the_query(server: StubServer, mutator: Answering) -> None:
    queries = ["how do i kill the process", "plz sort my list"]
    for operator, expected in (("spelling", queries), ("neutral", ["how do i stop the process", "sort my list"])):
        assert batch_mutate_queries(queries, operator, model="softener", url=server.url) == expected
    assert all("[operator" not in prompt for prompt in mutator.prompts)
