"""Report prompts that do not fit a model's context, and replies that ended at the token limit.

Servers report neither as an error: some drop the beginning of a prompt, all of them end a reply. A prompt that does
not fit is a failed call (`prompt_too_long`); a reply that ended at its limit is scored and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from query_mutator.env.task import Task
from query_mutator.llm.http_server import USUAL_CONTEXT
from query_mutator.llm.stack import CallTotals, ClientStack
from query_mutator.operators import OperatorContext
from query_mutator.types import ChatRequest, Question

MAX_CUT_SHARE = 0.05  # of the replies, without a line about it
MOSTLY_CUT = 0.5
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
    more = ", or a smaller one to a model that does not end by itself (qm doctor suggests it)"
    return [
        f"{totals.cut_share:.0%} of the replies ({totals.cut_replies}) ended at the token limit and were scored as "
        "they are; give a larger --target-max-tokens or --mutator-max-tokens"
        f"{more if totals.cut_share > MOSTLY_CUT else ''}"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Prompts to one model: texts by question, and the characters that a prompt adds to them."""

    model: str
    texts: Mapping[str, str]
    around: int = 0
    name: str = "the prompt"

    def is_long(self, text: str, context: int) -> bool:
        """Return whether a text may have more tokens than a context."""
        return len(text) + self.around >= CHARS_PER_TOKEN * context


def long_questions(calls: ClientStack, task: Task, questions: Sequence[Question], *, send: bool = True) -> list[str]:
    """Return lines about questions whose prompt will not fit, by the server's tokenizer or an estimate.

    The mutator's prompt is the question and the longest operator's text; an operator that adds the nearest question has
    a line of its own. Without `send` only lengths are read: no part of a question is sent to the server.
    """
    if not questions:
        return []
    texts = {question.id: question.text for question in questions}
    prompts = _of_mutator(task, texts)
    if task.calls.target_model != task.calls.mutator_model:
        prompts.insert(0, _Prompts(model=task.calls.target_model, texts=texts))
    lines, named = [], set[tuple[str, str]]()
    for one in prompts:
        context = _context(calls, one)
        found = {} if context is None else _too_long(calls if send else None, one, context)
        found = {question: tokens for question, tokens in found.items() if (one.model, question) not in named}
        named.update((one.model, question) for question in found)
        if found:
            lines.append(
                f"{_ids([*found])}: {one.name} (up to about {max(found.values())} tokens) does not fit the context of "
                f"{one.model} ({context} tokens) and will not be scored; {calls.backend_class.more_context}"
            )
    return lines


def _of_mutator(task: Task, texts: Mapping[str, str]) -> list[_Prompts]:
    """Return the longest prompts without the nearest question, then those of each operator that adds it."""
    model, answer = task.calls.mutator_model, "x" * CHARS_PER_TOKEN * task.calls.target_max_tokens
    alone, near = (OperatorContext(domain=task.domain, neighbor=text, answer=answer) for text in ("", "x"))
    around = {operator.name: len(operator.render("", context=alone)) for operator in task.operators}
    merging = [one.name for one in task.operators if len(one.render("", context=near)) > around[one.name]]
    pairs = zip(task.questions, task.neighbors, strict=True)
    both = {q.id: f"{texts[q.id]} {near}" for q, near in pairs if q.id in texts and near is not None}
    return [
        _Prompts(model=model, texts=texts, around=max(around.values(), default=0)),
        *(
            _Prompts(
                model=model, texts=both, around=around[name], name=f"the prompt of {name}, with the nearest question,"
            )
            for name in merging
        ),
    ]


def _context(calls: ClientStack, prompts: _Prompts) -> int | None:
    """Return the context of a model in tokens, None where it is unknown and the prompts are short."""
    context = calls.context(prompts.model)
    if context is None and any(prompts.is_long(text, USUAL_CONTEXT) for text in prompts.texts.values()):
        calls.limit.complete(ChatRequest.user("Hello", model=prompts.model, max_tokens=1))  # a loaded model has one
        context = calls.context(prompts.model)
    return context


def _too_long(calls: ClientStack | None, prompts: _Prompts, context: int) -> dict[str, int]:
    """Return the tokens of prompts that do not fit, by question: the server's count of the text, or an estimate."""
    found = {}
    for question, text in prompts.texts.items():
        if prompts.is_long(text, context):
            counted = calls.count_tokens(prompts.model, text) if calls else None
            found[question] = prompts.around // CHARS_PER_TOKEN + (
                len(text) // CHARS_PER_TOKEN if counted is None else counted
            )
    return {question: tokens for question, tokens in found.items() if tokens >= context}


def _ids(questions: Sequence[str]) -> str:
    more = f" and {len(questions) - _SHOWN} more" if len(questions) > _SHOWN else ""
    noun = "question" if len(questions) == 1 else "questions"
    return f"{noun} {', '.join(questions[:_SHOWN])}{more}"
