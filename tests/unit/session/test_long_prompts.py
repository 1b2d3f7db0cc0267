"""The lines about prompts that do not fit and replies that end at their limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from query_mutator import operators
from query_mutator.env.task import Task
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import CallTotals
from query_mutator.session.truncation import LongPrompts, cut_line, long_questions
from query_mutator.types import Question


class Env:
    def __init__(self, **counts: int) -> None:
        self.prompts_too_long = Counter(counts)


def test_long_prompts_are_reported_once_shown_and_summed() -> None:
    envs = [Env(q1=2), Env(q1=1, q2=1), Env()]
    found = LongPrompts(envs, OllamaBackend.more_context)
    assert [line.split(":")[0] for line in found.new_warnings()] == ["question q1", "question q2"]
    assert found.new_warnings() == []
    assert found.shown() == {"too long": "4 (q1)"}
    envs[2].prompts_too_long.update({f"r{number}": 1 for number in range(9)})
    assert len(found.new_warnings()) == 3  # after five questions they are only counted
    [line] = found.lines()
    assert line.startswith("13 prompts of questions q1, q2, r0, r1, r2 and 6 more did not fit the model's context")
    assert line.endswith("--num-ctx")


def test_a_run_without_long_prompts_shows_nothing() -> None:
    found = LongPrompts([Env(), Env()], OllamaBackend.more_context)
    assert (found.new_warnings(), found.shown(), found.lines()) == ([], {}, [])


def test_a_line_about_cut_replies_appears_above_five_percent() -> None:
    assert cut_line(CallTotals()) == []
    assert cut_line(CallTotals(calls=110, failed=10, cut_replies=5)) == []
    [line] = cut_line(CallTotals(calls=110, failed=10, cut_replies=6))
    assert "smaller" not in line
    assert "a smaller one to a model that does not end by itself" in cut_line(CallTotals(calls=10, cut_replies=6))[0]
    assert line.startswith("6% of the replies (6) ended at the token limit")


class Servers:
    """A model with a context of 1,000 tokens, which counts none."""

    backend_class = OllamaBackend

    def context(self, model: str) -> int:
        return 1000

    def count_tokens(self, model: str, text: str) -> None:
        return None


def test_a_long_nearest_question_makes_no_other_prompt_long(tiny_task: Callable[..., Task]) -> None:
    questions = [Question(id=f"q{number}", text=f"how do i sort it {number}") for number in range(9)]
    long = [Question(id=f"long{number}", text="sort the list " * 200) for number in range(2)]
    task = replace(tiny_task([*questions, *long]), operators=operators.select("spelling,merge"))
    neighbors = [long[0].text] * 3 + [questions[0].text] * 8
    calls: Any = Servers()
    lines = long_questions(calls, replace(task, neighbors=tuple(neighbors)), task.questions)
    assert [line.partition(" (")[0] for line in lines] == [
        "questions long0, long1: the prompt",
        "questions long0, long1: the prompt",
        "questions q0, q1, q2: the prompt of merge, with the nearest question,",
    ]
    no_merge = replace(task, operators=task.operators[:1])
    assert len(long_questions(calls, no_merge, task.questions)) == 2
    assert long_questions(calls, no_merge, questions) == []
