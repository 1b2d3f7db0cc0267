"""Report prompts that do not fit a model's context, and replies that ended at the token limit.

Servers report neither as an error: some drop the beginning of a prompt, all of them end a reply. A prompt that does
not fit is a failed call (`prompt_too_long`); a reply that ended at its limit is scored and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from query_mutator.env.task import Task
from query_mutator.llm.hf import is_local
from query_mutator.llm.http_server import USUAL_CONTEXT
from query_mutator.llm.stack import CallTotals, ClientStack
from query_mutator.types import ChatRequest, Question

__all__ = ["LongPrompts", "cut_line", "long_questions"]

MAX_CUT_SHARE = 0.05  # of the replies, without a line about it
CHARS_PER_TOKEN = 2  # fewer than any language has in the mean: a prompt of more tokens than that is rare
_SHOWN = 5


class HasLongPrompts(Protocol):
    """An environment, with how often a prompt of a question did not fit, by the question's id."""

    prompts_too_long: Counter[str]


class LongPrompts:
    """Gathers the prompts of a run's environments that did not fit."""

    def __init__(self, envs: Sequence[HasLongPrompts], advice: str) -> None:
        """Count over `envs`; `advice` says how to get a larger context."""
        self._envs = envs
        self._advice = advice
        self._reported: set[str] = set()

    @property
    def counts(self) -> Counter[str]:
        """Return how often a prompt did not fit, by the question's id."""
        return sum((env.prompts_too_long for env in self._envs), Counter())

    def new_warnings(self) -> list[str]:
        """Return a line for each question that was not reported yet; after the first few they are only counted."""
        new = [question for question in self.counts if question not in self._reported]
        lines = [
            f"question {question}: its prompt does not fit the model's context and is not scored; {self._advice}"
            for question in new[: max(0, _SHOWN - len(self._reported))]
        ]
        self._reported.update(new)
        return lines

    def shown(self) -> dict[str, str]:
        """Return the figure for the progress bar, with the question that failed most often."""
        counts = self.counts
        return {"too long": f"{counts.total()} ({counts.most_common(1)[0][0]})"} if counts else {}

    def lines(self) -> list[str]:
        """Return the line for the end of a run, if there is one."""
        counts = self.counts
        if not counts:
            return []
        return [
            f"{counts.total()} prompts of {_ids([*counts])} did not fit the model's context and were not scored; "
            f"{self._advice}"
        ]


def cut_line(totals: CallTotals) -> list[str]:
    """Return a line about replies that ended at the token limit, if their share is above 5 %."""
    if totals.cut_share <= MAX_CUT_SHARE:
        return []
    return [
        f"{totals.cut_share:.0%} of the replies ({totals.cut_replies}) ended at the token limit and were scored as "
        "they are; give a larger --target-max-tokens or --mutator-max-tokens"
    ]


def long_questions(calls: ClientStack, task: Task, questions: Sequence[Question], *, send: bool = True) -> list[str]:
    """Return lines about questions whose prompt will not fit, by the server's tokenizer or an estimate.

    The mutator's prompt is the question and the longest operator's text. Without `send` only lengths are read: no part
    of a question is sent to the server.
    """
    if not questions:
        return []
    first = questions[0].text
    context = task.context(0, "x" * CHARS_PER_TOKEN * task.calls.target_max_tokens)
    around = max(len(operator.render(first, context=context)) for operator in task.operators) - len(first)
    models: Mapping[str, int] = {task.calls.target_model: 0}
    if not is_local(task.calls.mutator_model):
        models = {**models, task.calls.mutator_model: around}
    return [line for model, extra in models.items() for line in _too_long(calls, model, extra, questions, send)]


def _too_long(calls: ClientStack, model: str, around: int, questions: Sequence[Question], send: bool) -> list[str]:
    """Return the line for one model; `around` are the characters that a prompt adds to the question."""
    longest = max(len(question.text) for question in questions) + around
    context = calls.context(model)
    if context is None and longest > CHARS_PER_TOKEN * USUAL_CONTEXT:
        calls.limit.complete(ChatRequest.user("Hello", model=model, max_tokens=1))  # a loaded model has a context
        context = calls.context(model)
    if context is None:
        return []
    counting = calls if send else None
    found = {q.id: _tokens(counting, model, q.text, around) for q in questions if _is_long(q.text, around, context)}
    found = {question: tokens for question, tokens in found.items() if tokens >= context}
    if not found:
        return []
    most = max(found.values())
    return [
        f"{_ids([*found])}: the prompt (up to about {most} tokens) does not fit the context of {model} ({context} "
        f"tokens) and will not be scored; {calls.backend_class.more_context}"
    ]


def _is_long(text: str, around: int, context: int) -> bool:
    return len(text) + around >= CHARS_PER_TOKEN * context


def _tokens(calls: ClientStack | None, model: str, text: str, around: int) -> int:
    """Return the tokens of a prompt: the server's count of the question's, or an estimate."""
    counted = calls.count_tokens(model, text) if calls else None
    return (len(text) + around) // CHARS_PER_TOKEN if counted is None else counted + around // CHARS_PER_TOKEN


def _ids(questions: Sequence[str]) -> str:
    more = f" and {len(questions) - _SHOWN} more" if len(questions) > _SHOWN else ""
    noun = "question" if len(questions) == 1 else "questions"
    return f"{noun} {', '.join(questions[:_SHOWN])}{more}"
