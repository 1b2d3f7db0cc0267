"""Plain prompts for `benchmarks/prompt_optimizers.py`, and the calls for them: recorded replies first, then a model.

A model of 135 million parameters cannot fill the field markers of a framework: an instruction is the text around the
question, examples are turns before it, and the whole reply is the answer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from query_mutator import forms
from query_mutator.forms import FormContext
from query_mutator.llm.client import Client
from query_mutator.llm.recorded import Recording, reply_key
from query_mutator.types import ChatRequest, Completion, Message

QUESTION = "{question}"
#: Not candidates: they show examples, cut the question, or have a line of the reply read.
_NOT_TEXTS = ("examples", "examples_text", "asking_sentence", "steps")


def template(form: str) -> str:
    """Return the text of a form with {question} in it."""
    framed = forms.get(form).frame(QUESTION, context=FormContext())
    assert framed.text is not None
    return framed.text


#: The best form of the training questions, with which every optimizer starts.
SEED = template("statement")
#: The forms that are a text around the question; candidates where an optimizer takes any.
TEMPLATES = tuple(template(name) for name in forms.names() if name not in _NOT_TEXTS)
#: Written by hand before any was asked, in place of what a reflecting model would propose.
BY_HAND = (
    'Answer with the name or the number only.\nQuestion: "{question}"\nAnswer:',
    'In one short sentence, the correct answer to "{question}" is',
    "Fact: {question}\nThe correct answer is",
    'A teacher asks: "{question}" The pupil answers correctly:',
    "Quiz question: {question}\nCorrect answer (one word or number):",
    '"{question}" The answer to this question is',
    "Give the single right answer and nothing else.",
    "Ignore small talk and spelling mistakes. Find what is asked, then answer it.",
    "You know geography, arithmetic and English very well.",
    "If two things are asked, answer both, one after the other.",
    "Name exactly one place, word or number for each thing that is asked.",
    "Work out sums first, then state the result as digits.",
)


def messages_of(instruction: str, examples: Iterable[tuple[str, str]], question: str) -> list[Message]:
    """Return the turns of a prompt; an instruction without {question} stands before the seed's sentence."""
    has_place = QUESTION in instruction
    frame, before = (instruction, "") if has_place else (SEED, f"{instruction.strip()}\n")
    turns = []
    for shown, answer in examples:
        turns.append(Message(role="user", content=frame.replace(QUESTION, shown)))
        turns.append(Message(role="assistant", content=answer))
    turns.append(Message(role="user", content=frame.replace(QUESTION, question)))
    turns[0] = Message(role="user", content=(before + turns[0].content).strip())
    return turns


def task_text(instruction: str, inputs: Mapping[str, object], output: str) -> str:
    """Return the prompt of any other task of an optimizer: instruction, inputs by name, the name of the output."""
    shown = [f"{name.replace('_', ' ').capitalize()}: {value}" for name, value in inputs.items()]
    return "\n\n".join([instruction.strip(), *shown, f"{output.replace('_', ' ').capitalize()}:"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was asked; a request that was asked before in the same part of a run counts once."""

    calls: int = 0
    tokens: int = 0
    empty: int = 0  # replies without a text
    too_long: int = 0  # prompts that do not fit the context: of proposals
    failed: int = 0

    def __add__(self, other: Spent) -> Spent:
        """Return the sums."""
        return Spent(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Spent)})


class Asker:
    """Asks a model what is not recorded, from many threads."""

    def __init__(self, client: Client, model: str, recording: Recording) -> None:
        self.spent = Spent()
        self._client, self._model, self._recording = client, model, recording
        self._seen: dict[tuple[str, int], Completion] = {}
        self._draws: Counter[str] = Counter()
        self._last = threading.local()
        self._lock = threading.Lock()  # guards all but the last three

    @property
    def last(self) -> Completion:
        """Return the last reply in this thread."""
        return self._last.reply

    def begin(self) -> None:
        """Begin a part of a run: count from zero, and draw random replies from the first."""
        with self._lock:
            self.spent = Spent()
            self._seen.clear()
            self._draws.clear()

    def ask(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> Completion:
        """Return the reply; above temperature 0 each call of a part draws another one, the same in the next run."""
        request = ChatRequest(
            model=self._model, messages=tuple(messages), max_tokens=max_tokens, temperature=temperature, seed=0
        )
        key, draw = reply_key(request), 0
        with self._lock:
            if temperature:
                draw = self._draws[key]
                self._draws[key] += 1
                request = replace(request, seed=1 + draw, sample=draw, logprobs=True)
            known = self._seen.get((key, draw))
        reply = known or (None if temperature else self._recording.find(request)) or self._client.complete(request)
        with self._lock:
            if (key, draw) not in self._seen:
                self.spent += cost_of(reply)
            self._seen[key, draw] = reply
        self._last.reply = reply
        return reply


def has_no_reply(reply: Completion) -> bool:
    """Return whether there is no reply; a model that says nothing has replied."""
    return reply.error is not None and reply.error.kind != "empty"


def cost_of(reply: Completion) -> Spent:
    """Return what one call costs."""
    kind = reply.error.kind if reply.error is not None else ""
    return Spent(
        calls=1,
        tokens=reply.prompt_tokens + reply.completion_tokens,
        empty=int(kind == "empty"),
        too_long=int(kind == "prompt_too_long"),
        failed=int(kind not in ("", "empty", "prompt_too_long")),
    )
