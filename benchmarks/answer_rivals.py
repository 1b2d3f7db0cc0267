"""Rivals of learned submission for `benchmarks/learned_answer.py`: votes among forms, self-consistency and P(True).

Self-consistency (Wang et al., 2023, arXiv:2203.11171) votes on random replies to one request. P(True) (Kadavath et al.,
2022, arXiv:2207.05221) asks the model whether its answer is true: one more call for each answer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from query_mutator.confidence import Attempt, plain_vote
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from query_mutator.rewards import Evidence, right
from query_mutator.types import ChatRequest, DoubleArray, Question
from scripts.recorded_requests import SAMPLES, TEMPERATURE

__all__ = ["Replies", "grade", "likeliest", "most_true", "random_replies", "votes_of"]

MOST_VOTES = 8
_ASK_TRUE = "Question: {question}\nAnswer: {answer}\nIs this answer correct? Reply with one word, yes or no."


@dataclass(frozen=True, kw_only=True)
class Replies:
    """Replies to each of n questions, in the order in which they are asked, and whether each is right."""

    questions: Sequence[Question]
    attempts: Sequence[Sequence[Attempt]]  # n of [k]
    right: DoubleArray  # [n, k]

    def chosen(self, calls: int, rule: Callable[[str, Sequence[Attempt]], int]) -> DoubleArray:
        """Return whether what a rule submits of the first replies is right [n]."""
        places = [rule(question.text, own[:calls]) for question, own in zip(self.questions, self.attempts, strict=True)]
        return self.right[np.arange(len(places)), places]


def likeliest(question: str, attempts: Sequence[Attempt]) -> int:
    """Return the attempt whose tokens are the most probable."""
    return max(range(len(attempts)), key=lambda at: attempts[at].logprob or -math.inf)


VOTES = {"vote": plain_vote, "likeliest": likeliest}


def votes_of(replies: Replies, *, of: str = "") -> dict[tuple[str, int], DoubleArray]:
    """Return whether each rule's choice is right [n], by its name and its calls."""
    most = min(MOST_VOTES, replies.right.shape[1])
    return {
        (f"{name}{of} {calls}", calls): replies.chosen(calls, rule)
        for name, rule in VOTES.items()
        for calls in range(1, most + 1)
    }


def random_replies(client: Client, task: Task, form: str) -> Replies:
    """Return random replies to the questions of a task in a form."""
    attempts, right = [], []
    for index, question in enumerate(task.questions):
        request = replace(task.target(index, question.text, form), temperature=TEMPERATURE)
        found = [client.complete(replace(request, sample=number)) for number in range(SAMPLES)]
        attempts.append([Attempt(text=one.text, asked=question.text, form=form, logprob=one.logprob) for one in found])
        right.append([grade(question, one.text) for one in found])
    return Replies(questions=task.questions, attempts=attempts, right=np.array(right))


def grade(question: Question, answer: str) -> float:
    """Return what the grader of `general` gives an answer."""
    none = np.zeros(1, np.float32)  # embeddings, which it does not read
    evidence = Evidence(
        question=question, rewrite="", answer=answer, question_vector=none, rewrite_vector=none, answer_vector=none
    )
    found = right(evidence)
    assert isinstance(found, float)
    return found


def most_true(client: Client, model: str, replies: Replies, *, slots: int) -> Mapping[tuple[str, int], DoubleArray]:
    """Return whether the answer is right of which a model says most surely that it is true [n], two calls for each."""

    def p_true(attempt: Attempt) -> float:
        text = _ASK_TRUE.format(question=attempt.asked, answer=attempt.text)
        reply = client.complete(ChatRequest.user(text, model=model, max_tokens=1, choices=("yes", "no")))
        if reply.error is not None:
            raise RuntimeError(str(reply.error))
        found = json.loads(reply.text)
        return float(found["yes"] / (sum(found.values()) or 1.0))

    with ThreadPoolExecutor(slots) as pool:
        p = np.array(list(pool.map(p_true, itertools.chain(*replies.attempts)))).reshape(replies.right.shape)
    return {
        (f"P(True) of {k}", 2 * k): replies.right[np.arange(len(p)), p[:, :k].argmax(axis=1)]
        for k in range(1, p.shape[1] + 1)
    }
