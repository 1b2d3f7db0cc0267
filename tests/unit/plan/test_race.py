"""Plans: their policy, searches whose scores are those of the environment, and races."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from query_mutator.data import FOLDS, fold_of
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.errors import TooManyFailuresError, UsageError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.summary import Outcome
from query_mutator.learners import Plan, PlanPolicy, plan_task
from query_mutator.llm.client import Client, RetryPolicy
from query_mutator.operators import LocalOperator, PromptOperator
from query_mutator.plan.choose import PlanChoice, PlanPoint
from query_mutator.plan.race import find_plan
from query_mutator.plan.table import Cell, Table
from query_mutator.session.play import greedy, play
from query_mutator.types import AnswerRule, ChatRequest, Completion, Question
from tests.fake_client import FakeClient

MakeTask = Callable[..., Task]
OPERATORS = ("spelling", "neutral", "filler", "shout")
RULES: tuple[tuple[AnswerRule, float | None], ...] = (
    ("best", None), ("best", 0.4), ("vote", None), ("vote", 0.3),
)  # fmt: skip
#: Questions of four in each fold that are right as they are, and with a mark: better in one fold, by chance.
AS_IT_IS, WITH_MARK = (1, 2, 2, 2, 2), (4, 1, 1, 2, 2)
QUESTIONS, CALLS = 60, 900
#: What a mark at a text's end adds to the 30 % of questions that are right as they are.
GAINS = {"good": 0.3, "clean": 0.2, "poor": -0.2, "bad": -0.3, "idle": 0.0, "also": 0.05}


def evaluator(client: Client, *, max_failure_rate: float = 1.0) -> Evaluator:
    return Evaluator(
        client=client,
        batch_size=4,
        retry_policy=RetryPolicy(max_retries=0),
        max_failure_rate=max_failure_rate,
    )


def plans() -> list[Plan]:
    """Plans of up to three operators, with asks in every place, every rule, and thresholds."""
    chains = [chain for size in range(5) for chain in itertools.permutations(OPERATORS, size)]
    found = [Plan(steps=chain) for chain in chains]
    for chain in chains:
        for places in itertools.product((False, True), repeat=len(chain)):
            if any(places):
                steps = [name for at, op in enumerate(chain) for name in (("ask",) if places[at] else ()) + (op,)]
                found += [Plan(steps=tuple(steps), answer=rule, stop_at=fit) for rule, fit in RULES]
    return found


def ours(result: Cell) -> tuple[object, ...]:
    """Return what must be equal: the error, or success, score, calls and texts."""
    if result.attempt is None:
        return (result.error,)
    return result.success, result.score, result.calls, result.attempt.text, result.attempt.answer


def theirs(outcome: Outcome) -> tuple[object, ...]:
    if outcome.error is not None:
        return (outcome.error,)
    return outcome.success, outcome.score, outcome.calls, outcome.asked[outcome.submitted or 0], outcome.answer


@pytest.fixture
def tested(tiny_task: MakeTask) -> Task:
    """A task whose operators have local tests, one of which needs the answer, and one of which is local."""
    task = tiny_task(call_price=(0.01,))
    spelling, neutral, filler = task.operators
    assert isinstance(spelling, PromptOperator)
    assert isinstance(filler, PromptOperator)
    spelling = replace(spelling, test=lambda text: "plz" in text)
    shout = LocalOperator(name="shout", summary="Add a mark.", function=lambda text, context: f"{text.rstrip('!')}!")
    return replace(task, operators=(spelling, neutral, shout, replace(filler, template=filler.template + "{answer}")))


@pytest.mark.parametrize("skip_unchanged", [True, False])
@pytest.mark.parametrize("max_asks", [pytest.param(None, marks=pytest.mark.slow), 1, 2])
def test_scores_are_those_of_the_environment(
    tested: Task, tiny_client: Client, skip_unchanged: bool, max_asks: int | None
) -> None:
    task = tested.with_rules(skip_unchanged=skip_unchanged, max_asks=max_asks)
    runner, rows = evaluator(tiny_client), range(len(task.questions))
    scores = Table(runner, task)
    chosen = plans()[:: 23 if max_asks is None else 41]
    scores.gather(chosen, rows)
    for plan in chosen:
        outcomes = runner.run(plan_task(plan, task), greedy(PlanPolicy(plan)))
        assert list(map(ours, scores.cells(plan, rows))) == list(map(theirs, outcomes)), plan


def test_a_plan_stops_at_an_answer_that_is_good_enough(tested: Task, tiny_client: Client) -> None:
    steps, asked = ("shout", "ask", "neutral", "ask", "spelling"), []
    for row in range(len(tested.questions)):
        engines = []
        for stop_at in (None, 0.3):
            plan = Plan(steps=steps, stop_at=stop_at)
            engines.append(EpisodeEngine.open(plan_task(plan, tested), row))
            flow = play(greedy(PlanPolicy(plan)), engines[-1])
            run_flow(flow, client=tiny_client, encoder=tested.encoder, retry_policy=RetryPolicy())
        whole, stopped = (list(engine.episode.known.values()) for engine in engines)
        enough = [number for number, one in enumerate(whole, start=1) if one.fit >= 0.3]
        assert len(stopped) == min([*enough, len(whole)])
        assert engines[0].episode.names[:2] == ["shout", "ask"]
        asked.append(len(stopped))
    assert len(set(asked)) > 1


def test_a_failed_call_leaves_the_same_questions_unscored(tested: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete, fails=lambda request: "kill" in request.messages[-1].content)
    runner, rows, plan = (
        evaluator(client),
        range(len(tested.questions)),
        Plan(steps=("neutral", "ask", "filler"), answer="best"),
    )
    scores = Table(runner, tested)
    scores.gather([plan], rows)
    outcomes = runner.run(plan_task(plan, tested), greedy(PlanPolicy(plan)))
    assert sum(outcome.error is not None for outcome in outcomes) == 1
    assert list(map(ours, scores.cells(plan, rows))) == list(map(theirs, outcomes))
    with pytest.raises(TooManyFailuresError, match="1 of 5 questions"):
        Table(evaluator(client, max_failure_rate=0.1), tested).gather([plan], rows)


def test_no_call_is_made_twice(tested: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    scores, rows = Table(evaluator(client), tested), range(len(tested.questions))
    scores.gather([Plan(steps=("neutral", "spelling"))], rows)
    assert scores.calls == client.calls
    shorter = Plan(steps=("spelling",))
    assert 0 < scores.max_calls(shorter, rows) <= len(rows)
    scores.gather([shorter, Plan(steps=("spelling", "neutral"))], rows)
    assert scores.calls == client.calls
    assert scores.max_calls(shorter, rows) == 0
    scores.gather([shorter], rows)
    assert scores.calls == client.calls


def test_answers_to_questions_of_one_text_count_once(tested: Task, tiny_client: Client) -> None:
    first, *_ = tested.questions
    table, plan = Table(evaluator(tiny_client), tested.on([first, replace(first, id="again")])), Plan(steps=("shout",))
    table.gather([Plan(), plan], range(2))
    assert len(list(table.graded(range(2)))) == len(list(table.graded(range(2), [Plan(), plan]))) == 2


def test_what_needs_no_model_is_no_call(tested: Task, tiny_client: Client) -> None:
    turn = LocalOperator(name="shout", summary="Turn.", function=lambda text, context: text.upper())
    task = replace(tested, operators=(*tested.operators[:2], turn, tested.operators[3]))
    rows = range(len(task.questions))
    plan = Plan(steps=("ask", "shout"), answer="best")
    assert Table(evaluator(tiny_client), task).max_calls(plan, rows) == 2 * len(rows)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"steps": ("slang", "terms", "slang")}, "slang occurs twice"),
        ({"steps": ("slang",), "stop_at": 0.5}, "only stop after an answer"),
    ],
)
def test_a_plan_checks_itself(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Plan(**fields)  # type: ignore[arg-type]


def test_the_search_finds_the_best_plan(tested: Task, tiny_client: Client) -> None:
    search = find_plan(evaluator(tiny_client), tested, max_calls=2000)
    scores, rows = Table(evaluator(tiny_client), tested), range(len(tested.questions))
    every = [plan for plan in plans() if plan.stop_at is None]
    scores.gather(every, rows)
    best = max(sum(result.score - 0.01 * result.calls for result in scores.cells(plan, rows)) for plan in every)
    assert search.points[0].score - 0.01 * search.points[0].calls >= best / len(rows) - 1e-9
    assert search.best_plan_at(1).plan == Plan()
    assert list(search.front) == list(range(1, 9))
    assert all(point.calls <= budget for budget, point in search.front.items())
    with pytest.raises(UsageError, match=r"budget 0\.5 is below the 1\.00 calls"):
        search.best_plan_at(0.5)


@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_plan_that_is_better_by_chance_is_not_saved(tiny_task: MakeTask, budget: float | None) -> None:
    numbered = [Question(id=str(n), text=f"question {n}", accept=(f"item.n{n:03d}",)) for n in range(200)]
    by_fold = [[question for question in numbered if fold_of(question) == fold][:4] for fold in range(FOLDS)]
    right = [(question, "") for fold, count in zip(by_fold, AS_IT_IS, strict=True) for question in fold[:count]]
    right += [(question, "!") for fold, count in zip(by_fold, WITH_MARK, strict=True) for question in fold[:count]]
    mark = LocalOperator(name="mark", summary="Add a mark.", function=lambda text, context: f"{text.rstrip('!')}!")
    task = replace(tiny_task([*itertools.chain(*by_fold)], call_price=(0.01,)), operators=(mark,))
    known = {f"{question.text}{end}": question.accept[0] for question, end in right}
    client = FakeClient(lambda request: Completion(text=f"`{known.get(request.messages[-1].content, 'nothing')}`"))
    search = find_plan(evaluator(client), task, max_calls=400, budget=budget)
    assert (search.chosen.plan, search.chosen.success) == (Plan(steps=("mark",)), 0.5)
    assert (search.bar.success, search.cross_fitted) == (0.45, 0.35)
    assert search.saved == search.bar
    assert search.verdict == (
        "Keep the original question: 45.0 % of 20 training questions right; "
        "the best plan, mark, has 35.0 % cross-fitted."
    )


def test_a_blind_search_asks_at_the_end_only(tested: Task, tiny_client: Client) -> None:
    search = find_plan(evaluator(tiny_client), tested.with_rules(max_asks=1), max_calls=500)
    assert search.points[0].success > search.front[1].success
    assert not any(point.plan.asks_early for point in search.points)


def test_the_search_keeps_to_its_calls(tested: Task, tiny_client: Client) -> None:
    for limit in (20, 40, 60):
        client = FakeClient(tiny_client.complete)
        search = find_plan(evaluator(client), tested, max_calls=limit)
        assert 0 < search.calls == client.calls <= limit
        assert search.points[0].questions == min(5, limit // 15)


def test_a_search_that_cannot_learn_p_right_makes_no_more_calls(tested: Task, tiny_client: Client) -> None:
    client = FakeClient(tiny_client.complete)
    search = find_plan(evaluator(client), tested, max_calls=60, learned=True)
    assert 0 < search.calls == client.calls <= 60
    assert search.confidence is None
    assert "two or more with --forms" in search.not_learned
    assert search.best_learned is None


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


def search(task: Task, client: Marked, **settings: object) -> PlanChoice:
    settings = {"max_calls": CALLS, **settings}
    return find_plan(Evaluator(client=client, batch_size=4), task, **settings)  # type: ignore[arg-type]


def test_a_race_finds_the_best_composition_on_all_questions(task: Task) -> None:
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


def test_the_best_plan_so_far_is_known_after_each_stage(task: Task) -> None:
    seen: list[PlanPoint] = []
    found = search(task, Marked(), on_best=seen.append)
    assert [point.questions for point in seen] == sorted(point.questions for point in seen)
    assert {point.questions for point in seen} == {8, 16, 32, QUESTIONS}
    assert seen[0].plan != Plan()
    assert seen[-1] == found.points[0]
