"""A race finds the best plan with few calls for each question, and drops bad actions early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from query_mutator.env.task import Task
from query_mutator.evaluation import plan_trials
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.plan_search import find_plan, is_wide, race_sizes
from query_mutator.evaluation.plan_trials import PlanPoint, PlanSearch
from query_mutator.learners.plan import Plan
from query_mutator.operators import LocalOperator
from query_mutator.types import ChatRequest, Completion, Question

MakeTask = Callable[..., Task]
QUESTIONS, CALLS = 60, 900
#: What a mark at a text's end adds to the 30 % of questions that are right as they are.
GAINS = {"good": 0.3, "clean": 0.2, "poor": -0.2, "bad": -0.3, "idle": 0.0, "also": 0.05}


class Marked:
    """A model that is right on the more questions the better their marks are."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, ...]] = Counter()

    def complete(self, request: ChatRequest) -> Completion:
        words = request.messages[-1].content.split()
        number, marks = int(words[1]), tuple(words[2:])
        self.asked[marks] += 1
        is_right = number * 37 % QUESTIONS < QUESTIONS * (0.3 + sum(GAINS[mark] for mark in marks))
        return Completion(text=f"`item.n{number:03d}`" if is_right else "`nothing`", model=request.model)

    def close(self) -> None:
        pass


def marking(name: str) -> LocalOperator:
    return LocalOperator(name=name, summary="Add a mark.", function=lambda text, context: f"{text} {name}")


@pytest.fixture
def task(tiny_task: MakeTask) -> Task:
    questions = [Question(id=str(n), text=f"question {n}", accept=(f"item.n{n:03d}",)) for n in range(QUESTIONS)]
    blind = tiny_task(questions, call_price=(0.01,)).with_rules(max_asks=1)
    return replace(blind, operators=tuple(map(marking, GAINS)))


def search(task: Task, client: Marked, **settings: object) -> PlanSearch:
    settings = {"max_calls": CALLS, **settings}
    return find_plan(Evaluator(client=client, batch_size=4), task, **settings)  # type: ignore[arg-type]


def test_a_race_finds_the_best_composition_on_all_questions(task: Task) -> None:
    assert not is_wide(task, CALLS)
    client = Marked()
    found = search(task, client)
    assert found.calls == client.asked.total() <= CALLS
    assert {"good", "clean"} <= set(found.saved.plan.steps)
    assert found.saved.success >= 0.8
    assert {point.questions for point in found.points} == {QUESTIONS}
    assert client.asked[("bad",)] < QUESTIONS / 2 < client.asked[("good",)]


def test_a_race_keeps_to_the_budget_of_the_plan(task: Task) -> None:
    found = search(task, Marked(), budget=1.0)
    assert found.saved.calls == 1
    assert found.saved.success >= 0.8


class Slow(Marked):
    """The same model, by a clock on which a call takes a tenth of a second: half as fast as expected."""

    now = 0.0

    def complete(self, request: ChatRequest) -> Completion:
        self.now += 0.1
        return super().complete(request)


@pytest.mark.parametrize(("seconds", "calls", "questions"), [(45.0, 900, QUESTIONS), (15.0, 300, 16), (0.0, 300, 8)])
def test_a_race_ends_at_its_deadline_with_the_questions_that_it_reached(
    task: Task, monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int, questions: int
) -> None:
    client, seen = Slow(), list[PlanPoint]()
    monkeypatch.setattr(plan_trials.time, "perf_counter", lambda: client.now)
    found = search(task, client, max_calls=calls, seconds=seconds, on_best=seen.append)
    assert client.now <= seconds + 1
    assert seen[0].questions == 8
    assert found.original.questions == found.saved.questions >= questions
    assert seconds < 45 or {"good", "clean"} <= set(found.saved.plan.steps)


def test_the_best_plan_so_far_is_known_after_each_stage(task: Task) -> None:
    seen: list[PlanPoint] = []
    found = search(task, Marked(), on_best=seen.append)
    assert [point.questions for point in seen] == sorted(point.questions for point in seen)
    assert {point.questions for point in seen} == set(race_sizes(QUESTIONS)) == {8, 16, 32, QUESTIONS}
    assert seen[0].plan != Plan()
    assert seen[-1] == found.best
