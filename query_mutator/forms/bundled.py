"""The forms that come with the package."""

from __future__ import annotations

import re

from query_mutator.forms.base import Form, FormContext, Framed
from query_mutator.types import AS_IS, Message

__all__ = ["FORMS_OF_PACKAGE", "asking_sentence", "last_answer"]

_ANSWER = re.compile(r"(?:^|\n)[^\w\n]*(?:final )?answer\W*[:：]\W*(?P<answer>\S[^\n]*)", re.IGNORECASE)
_SENTENCE = re.compile(r"\S[^.!?。！？\n]*(?:[.!?](?=\S)[^.!?。！？\n]*)*[.!?。！？]*")
_MARKS = ("?", "？", "؟", ";")


def last_answer(reply: str) -> str:
    """Return what follows the last "Answer:" of a reply, else its last line."""
    found = [match["answer"] for match in _ANSWER.finditer(reply)]
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return found[-1] if found else (lines[-1] if lines else reply)


def asking_sentence(text: str) -> str:
    """Return the last sentence of a text that ends in a question mark, the text where there is none."""
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(text)]
    asking = [sentence for sentence in sentences if sentence.endswith(_MARKS)]
    return asking[-1] if asking else text


def _examples(text: str, context: FormContext) -> Framed:
    turns = [
        message
        for example in context.examples
        for message in (
            Message(role="user", content=example.question), Message(role="assistant", content=example.answer)
        )
    ]  # fmt: skip
    return Framed(messages=(*turns, Message(role="user", content=text)))


def _examples_text(text: str, context: FormContext) -> Framed:
    shown = [f"Question: {example.question}\nAnswer: {example.answer}" for example in context.examples]
    prompt = "\n\n".join([*shown, f"Question: {text}\nAnswer:"])
    return Framed.user(prompt, options={"stop": ["\nQuestion:"]})


FORMS_OF_PACKAGE = (
    Form(name=AS_IS, summary="The question as it is worded.", function=lambda text, context: text),
    Form.of("question_answer", "In the frame of a quiz.", "Question: {question}\nAnswer:"),
    Form.of("short_answer", "In the frame of a quiz that wants a short answer.", "Question: {question}\nShort answer:"),
    Form.of("statement", "As the beginning of a sentence to complete.", 'The answer to the question "{question}" is'),
    Form.of(
        "expert",
        "To an expert who states the answer.",
        "You are a helpful expert. State the correct answer.\nQuestion: {question}\nAnswer:",
    ),
    Form.of(
        "read_twice",
        "Read again (Xu et al., 2023, arXiv:2309.06275).",
        "{question}\nRead the question again: {question}",
    ),
    Form.of("one_sentence", "Answered in one full sentence.", "{question}\nAnswer in one full sentence."),
    Form.of("few_words", "Answered in a few words.", "{question}\nAnswer in a few words."),
    Form.of(
        "steps",
        "Steps first, then the answer on a line of its own (Kojima et al., 2022, arXiv:2205.11916).",
        "{question}\nThink step by step. Then write the answer alone on the last line, after \"Answer:\".",
        read=last_answer,
    ),
    Form.of("restate", "Restated, then answered (Deng et al., 2023, arXiv:2311.04205).",
            "{question}\nRestate the question in clear words, then answer it."),
    Form(
        name="asking_sentence",
        summary="The sentence that asks, alone.",
        function=lambda text, context: asking_sentence(text),
    ),
    Form(
        name="examples",
        summary="After the nearest questions with their answers, as turns.",
        function=_examples,
        uses_examples=True,
    ),
    Form(
        name="examples_text",
        summary="After the nearest questions with their answers, as one text.",
        function=_examples_text,
        uses_examples=True,
    ),
)  # fmt: skip
