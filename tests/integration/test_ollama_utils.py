"""The calls a person types, against the test server over real HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ollama_utils import (
    batch_encode_queries,
    batch_mutate_queries,
    batch_query_target_model,
    mutate_query,
    query_target_model,
)
from query_mutator.errors import UsageError
from query_mutator.llm.stack import build_client
from query_mutator.operators import OPERATORS, OperatorContext
from query_mutator.testing import FaultPlan, StubServer, start_server
from tests.conftest import Upper

OPERATOR = OPERATORS.names()[0]


class Talker:
    """A mutator that wraps the question in the chatter of a language model, or says nothing but a label."""

    name = "talker"

    def reply(self, prompt: str) -> str:
        question = prompt.split("<question>")[1].split("</question>")[0].strip()
        if question == "silence":
            return "Rewritten question:"
        prompts = {OPERATORS.get(name).render(question, context=OperatorContext()): name for name in OPERATORS.names()}
        return f'Rewritten question: "{question} by {prompts[prompt]}"'


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with start_server([Upper(), Talker()], num_parallel=8) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", server.url)
    monkeypatch.setenv("QUERY_MUTATOR_TARGET_MODEL", "upper")
    monkeypatch.setenv("QUERY_MUTATOR_MUTATOR_MODEL", "talker")


def test_each_query_may_have_its_own_operator() -> None:
    names = OPERATORS.names()[:3]
    assert batch_mutate_queries(["a", "b", "c"], names) == [f"{'abc'[i]} by {names[i]}" for i in range(3)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: batch_mutate_queries(["a", "b"], OPERATORS.names()[:3]), "3 operators for 2 queries"),
        (lambda: mutate_query("why?", "no-such-operator", url="127.0.0.1:1"), "unknown operator"),  # before any call
        (lambda: batch_query_target_model(["a"], batch_size=0), "batch_size=0"),
        (lambda: batch_mutate_queries(["a"], OPERATOR, max_workers=-1), "batch_size=-1"),
        (lambda: batch_encode_queries([], batch_size=0, model="hash"), "batch_size=0"),
        (lambda: batch_query_target_model(["a"], max_workers=2, batch_size=4), "one setting"),
        (lambda: batch_query_target_model("why?"), "a list of texts"),
        (lambda: batch_query_target_model(["why?"], temprature=0.1), "temprature"),  # type: ignore[call-overload]
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_one_query_is_a_batch_of_one() -> None:
    assert query_target_model("why?") == "WHY?"
    assert query_target_model("why?", return_errors=True) == ("WHY?", None)
    assert mutate_query("why?", OPERATOR) == f"why? by {OPERATOR}"
    assert mutate_query("why?", OPERATOR, return_errors=True) == (f"why? by {OPERATOR}", None)


def test_a_rewrite_without_a_question_in_it_is_a_failure() -> None:
    [(text, error)] = batch_mutate_queries(["silence"], OPERATOR, return_errors=True)
    assert text == "silence"
    assert error is not None
    assert error.kind == "empty"


def test_an_empty_list_gives_an_empty_list() -> None:
    assert batch_query_target_model([]) == []
    assert batch_mutate_queries([], OPERATOR, return_errors=True) == []
    assert batch_encode_queries([], model="hash").shape[0] == 0


def test_without_a_model_the_message_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUERY_MUTATOR_TARGET_MODEL")
    with pytest.raises(UsageError, match="set QUERY_MUTATOR_TARGET_MODEL"):
        query_target_model("why?")


def test_a_client_that_is_given_is_used_and_left_open(server: StubServer) -> None:
    stack = build_client(server.url)
    for _ in range(3):
        assert batch_query_target_model(["a"], url="127.0.0.1:1", client=stack.retry) == ["A"]
    stack.close()


def test_ctrl_c_ends_calls_that_stall() -> None:
    code = "import ollama_utils; ollama_utils.batch_query_target_model(list('abcdefgh'), batch_size=2)"
    with start_server([Upper()], num_parallel=4, faults=FaultPlan(1.0, kinds=("stall",))) as stalling:
        environ = {**os.environ, "OLLAMA_HOST": stalling.url}
        process = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True)
        while stalling.stats()["in_service"] < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
