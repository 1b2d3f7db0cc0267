"""The actions of the policy in words: what it is told, two examples, and what its replies say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from query_mutator.env.task import Task
from query_mutator.types import AS_IS, CONTROLS

__all__ = ["NOT_READ", "REWRITE", "actions_in", "asked", "examples", "instructions", "shown"]

REWRITE = "rewrite"  # in the policy's own words
NOT_READ = "No action was found. Reply with one action on a line, such as:\nASK\n"
_LINE = re.compile(r"\W*(rewrite|operator|form|ask|undo|submit)\b[\s:*\"`']*(.*?)[\"`*]*\s*", re.IGNORECASE)

_TOLD = """\
You improve questions for another language model, the target, so that its answer is right. You never answer a question \
yourself: you change its wording or its form, and the meaning stays the same.

Reply with actions only, one on a line:
REWRITE question    the question in your own words
{operators}{forms}ASK                 the target answers the question as it now is, and you see the answer
UNDO                back to the original question
SUBMIT              the end; the last answer is submitted, and the target is asked if it was not yet

There are at most {steps} actions.
"""


def instructions(task: Task) -> str:
    """Return what the policy is told: its actions, with the operators and forms of a task."""
    return _TOLD.format(
        operators=_listed("OPERATOR", "a rewrite by a rule or another model", task.operators),
        forms=_listed("FORM", "how the target gets the question", task.forms),
        steps=task.rules.max_episode_steps,
    )


def _listed(word: str, meaning: str, named: Sequence[object]) -> str:
    lines = [f"    {one.name}: {one.summary}" for one in named]  # type: ignore[attr-defined]
    return "\n".join([f"{f'{word} name':<20}{meaning}:", *lines, ""]) if lines else ""


def examples(task: Task) -> list[dict[str, str]]:
    """Return the turns of two episodes as messages; small models imitate them where they follow no instructions."""
    steps = task.rules.max_episode_steps
    first, second = "What is the capital of France?", "Who wrote Hamlet?"
    form = task.forms[0].name if task.forms else AS_IS
    turns = [
        (asked("wats the captial of france"), f"REWRITE {first}\nASK"),
        (shown(first, AS_IS, "The capital of France is Paris.", steps - 2), "SUBMIT"),
        (asked(second), f"FORM {form}\nASK" if task.forms else "ASK"),
        (shown(second, form, "William Shakespeare wrote Hamlet.", steps - 2), "SUBMIT"),
    ]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def asked(question: str) -> str:
    """Return the message that begins an episode."""
    return f"Question: {question}"


def shown(text: str, form: str, answer: str | None, steps_left: int) -> str:
    """Return what the policy is told after a reply: the question as it now is, and the answer to it if it was asked."""
    said = "" if answer is None else f"Answer of the target: {answer}\n"
    return f"Question now: {text}\nForm: {form}\n{said}Actions left: {steps_left}"


def actions_in(reply: str) -> Iterator[tuple[str, str]]:
    """Yield (action, words) for each line of a reply that is an action; words are those of a rewrite."""
    for line in reply.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        word, rest = found[1].lower(), found[2].strip()
        if word == REWRITE and rest:
            yield REWRITE, rest
        elif word in CONTROLS and not rest.strip(".!"):  # else a sentence that begins with it
            yield word, ""
        elif word in ("operator", "form") and rest:
            yield rest.split()[0].strip(".,:;"), ""
