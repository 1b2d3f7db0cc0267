"""The pace of a run's calls: measured next to each other with the run's limits, and kept for its estimate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from query_mutator import operators
from query_mutator.env.task import CallSettings
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.operators import select
from query_mutator.session.pace import Pace, combined_pace, keep_pace, kept_pace, measure_pace
from query_mutator.settings.models import Address, Sampling
from query_mutator.testing import FaultPlan, start_server
from query_mutator.types import ErrorInfo, Question

QUESTIONS = [Question(id=str(number), text=f"how do i count to {number}") for number in range(3)]
CALLS = CallSettings(target_model="rambler", mutator_model="rambler", target_max_tokens=40, mutator_max_tokens=500)
PACE = Pace(at_once=4, target_model="rambler:latest", rewrite_s=1.0, answer_s=3.0, cut_answers=4)


class Rambler:
    """A model that writes 400 words, and takes as long as all requests of its batch need."""

    name = "rambler"

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.prompts += prompts
        time.sleep(0.02 * len(prompts))
        return ["word " * 400] * len(prompts)


def test_questions_are_rewritten_then_answered_all_at_once() -> None:
    model = Rambler()
    with start_server([model], num_parallel=4) as server, closing(OllamaBackend(server.url)) as backend:
        pace = measure_pace(backend, CALLS, QUESTIONS, operators.select("spelling"), at_once=4)
    assert isinstance(pace, Pace)
    assert (pace.at_once, pace.cut_answers) == (4, 4)  # 400 words do not fit 40 tokens
    assert pace.call_s > 0.02
    assert sorted(model.prompts[4:]) == sorted(question.text for question in [*QUESTIONS, QUESTIONS[0]])
    assert all("<question>" in prompt for prompt in model.prompts[:4])


def test_a_call_that_fails_is_the_result() -> None:
    faults = FaultPlan(1.0, kinds=("500",))
    with (
        start_server([Rambler()], faults=faults) as server,
        closing(OllamaBackend(server.url)) as backend,
    ):
        assert isinstance(measure_pace(backend, CALLS, QUESTIONS, (), at_once=2), ErrorInfo)


def test_a_pace_is_found_by_runs_with_the_same_server_models_and_limits() -> None:
    where, limits = Address(ollama_url=("http://127.0.0.1:9",)), Sampling(target_max_tokens=40)
    named = Address(ollama_url=("http://127.0.0.1:9",), target_model="rambler")
    assert kept_pace(where, limits, mutator=None) is None
    keep_pace(PACE, where, limits, mutator=None)
    assert kept_pace(where, limits, mutator=None) == kept_pace(named, limits, mutator=None) == PACE
    assert kept_pace(named, limits, mutator="rambler:latest") == PACE
    assert kept_pace(named, Sampling(), mutator=None) is None
    assert kept_pace(named, limits, mutator="other") is None
    assert kept_pace(Address(target_model="rambler"), limits, mutator=None) is None


def test_servers_share_the_calls() -> None:
    both = combined_pace([PACE, Pace(at_once=12, target_model="rambler", rewrite_s=2.0, answer_s=7.0, cut_answers=1)])
    assert (both.at_once, both.rewrite_s, both.answer_s, both.cut_answers) == (16, 1.75, 6.0, 5)


def test_a_run_whose_operators_call_no_model_makes_answers_only() -> None:
    assert PACE.call_s_with(select("expand,clean")) == PACE.call_s == 2.0
    assert PACE.call_s_with(select("clean")) == PACE.call_s_with(()) == 3.0
