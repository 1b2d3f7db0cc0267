"""Which requests are recorded, in the order in which they are asked: useful wherever the recording stops.

Forms come one after the other, `as_is` first, each with the versions of all texts, held-out and training
questions; then random replies, the rewrites by the model, and the answers to those that pass their guards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from query_mutator import forms
from query_mutator.data import general_bank, guard_questions, load_questions
from query_mutator.encoder import resolve_encoder
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import UsageError
from query_mutator.operators import OPERATORS, Operator, clean_rewrite, local_rewrite, rejecting_guard, would_change
from query_mutator.types import AS_IS, ChatRequest, Completion

MAX_TOKENS = 32  # of a reply, in all forms
#: The forms in which the texts before they were spoiled are asked: what an ideal cleaner would bring.
YARDSTICK = (AS_IS, "question_answer", "short_answer", "statement", "expert")
#: The forms in which what the model rewrote is asked: the plain one, and the three that bring this model most.
FORMS_OF_REWRITES = (AS_IS, "question_answer", "statement", "short_answer")
TEMPERATURE = 0.7  # of the random replies
SAMPLES = 3

Version = dict[int, str]  # a text of each question by its number in the task, without those that it equals


def task_of(dataset: str, calls: CallSettings, *, encoder: str, forms_asked: str = forms.ALL) -> Task:
    """Return the task on all questions of a file, and on the guard requests, with forms."""
    questions = load_questions(Path(dataset))
    task = build_task(
        questions,
        calls=calls,
        encoder=resolve_encoder(encoder),
        operators=(),
        forms=forms.select(forms_asked),
        bank=general_bank(),
    )
    return task.on([*questions, *guard_questions()])


def versions_of(dataset: str, task: Task) -> list[Version]:
    """Return the texts as they stand, and those before they were spoiled: a yardstick that no policy reaches."""
    lines = Path(dataset).read_text(encoding="utf-8").splitlines()
    clean = {row["id"]: row.get("clean") for row in map(json.loads, lines)}
    texts = {index: question.text for index, question in enumerate(task.questions)}
    return [texts, {index: clean.get(task.questions[index].id) or text for index, text in texts.items()}]


def requests_of(
    task: Task, versions: Sequence[Version], *, sampled: Sequence[str] = (), samples: int = SAMPLES
) -> Iterator[ChatRequest]:
    """Yield the requests; those for random replies in the forms `sampled` have `sample` 0 to `samples` - 1."""
    for form in (AS_IS, *(form.name for form in task.forms)):
        yield from _in_form(task, versions if form in YARDSTICK else versions[:1], form)
    for form in sampled:
        for number in range(samples):
            for request in _in_form(task, versions[:1], form):
                yield replace(request, temperature=TEMPERATURE, sample=number)


def _in_form(task: Task, versions: Sequence[Version], form: str) -> Iterator[ChatRequest]:
    for version in versions:
        for index, text in version.items():
            yield task.target(index, text, form)


def rewriting(task: Task, operators: Sequence[str]) -> Iterator[ChatRequest]:
    """Yield the requests for rewrites by the model, where an operator has something to do."""
    return (request for _, _, request in _rewriting(task, operators))


def answers_to_rewrites(
    task: Task, operators: Sequence[str], reply: Callable[[ChatRequest], Completion | None]
) -> Iterator[ChatRequest]:
    """Yield the requests with the rewrites in `reply`, but for those that a guard rejects."""
    asked: list[tuple[int, str]] = []
    for operator, index, request in _rewriting(task, operators):
        completion = reply(request)
        text = task.questions[index].text
        rewrite = clean_rewrite(completion.text) if completion is not None and completion.ok else ""
        guard = rejecting_guard(operator, text, rewrite, context=task.context(index)) if rewrite else "empty"
        if guard is None and rewrite != text:
            asked.append((index, rewrite))
    for form in FORMS_OF_REWRITES:
        for index, rewrite in asked:
            yield task.target(index, rewrite, form)


def _rewriting(task: Task, operators: Sequence[str]) -> Iterator[tuple[Operator, int, ChatRequest]]:
    for operator in map(OPERATORS.get, operators):
        if local_rewrite(operator) is not None:
            raise UsageError(
                f"--rewritten-by {operator.name}: it calls no model; name operators that a model carries out"
            )
        for index, question in enumerate(task.questions):
            context = task.context(index)
            if would_change(operator, question.text, context=context):
                yield operator, index, task.calls.rewrite(operator, question.text, context=context)
