"""Score an answer: what an environment and a search over plans have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from query_mutator.env.episode import Asked, Attempt
from query_mutator.env.flow import Call, Flow
from query_mutator.env.task import Task
from query_mutator.rewards import Evidence, Unscored, cosine
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray

__all__ = ["score_answer"]


def score_answer(
    task: Task,
    index: int,
    *,
    asked: Asked,
    answered: Completion,
    vectors: Sequence[FloatArray],
    call: Callable[[ChatRequest, int], Call],
) -> Flow:
    """Score the answer to a wording of question `index`; return the Attempt, or the ErrorInfo of a failed call.

    What the form reads in the answer is scored. `vectors` are those of text and answer. Reward parts that ask a model
    make calls, which `call` numbers from 1.
    """
    original, (text_vector, answer_vector), (text, form) = task.question_vectors[index], vectors, asked
    evidence = Evidence(
        question=task.questions[index],
        rewrite=text,
        answer=task.form_named(form).answer_in(answered.text),
        question_vector=original,
        rewrite_vector=text_vector,
        answer_vector=answer_vector,
        reference_vector=task.reference_vectors[index],
    )
    reward = yield from _reward_flow(evidence, task, call=call)
    if isinstance(reward, ErrorInfo):
        return reward
    return Attempt(
        text=text,
        form=form,
        answer=answered.text,
        logprob=answered.logprob,
        cut=answered.hit_limit if answered.model else None,
        text_vector=text_vector,
        answer_vector=answer_vector,
        fit=cosine(text_vector, answer_vector),
        closeness=cosine(original, answer_vector),
        reward=reward,
    )


def _reward_flow(evidence: Evidence, task: Task, *, call: Callable[[ChatRequest, int], Call]) -> Flow:
    scoring, reply, number = task.reward.score(evidence), None, 0
    while True:
        try:
            request = scoring.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            return stop.value
        except Unscored as error:
            return ErrorInfo(kind="unscored", message=str(error))
        number += 1
        reply = yield call(request, number)
        if not reply.ok:
            return reply.error
