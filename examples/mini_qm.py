"""The idea of Query Mutator in one file: ask in three forms, learn P(right), stop, submit, and get a verdict.

    python examples/mini_qm.py                              # recorded replies of SmolLM2-135M, some seconds
    python examples/mini_qm.py --model llama3.2 --questions my_questions.jsonl     # a model on your Ollama server

A small model answers a question right in one form of the request and wrong in another. Which form suits a question is
hard to tell before; whether an answer is right can be learned from answers that were graded. So: ask in a cheap form,
estimate how likely the answer is right, ask again in another form only if that is worth a call, and submit the answer
that is most likely right. Gold answers are read on the training questions, and once, at the end, to judge the others.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import query_mutator
from query_mutator import forms
from query_mutator.confidence import Attempt, ConfidenceModel, LoggedAnswer, plain_vote
from query_mutator.data import load_questions
from query_mutator.forms import FormContext
from query_mutator.llm.client import Client
from query_mutator.llm.stack import build_client
from query_mutator.rewards import PARTS, Evidence
from query_mutator.types import AS_IS, ChatRequest, Question

FORMS = (AS_IS, "question_answer", "statement")  # in the order in which they are asked
BUNDLED = Path(query_mutator.__file__).parent / "data" / "questions" / "general.jsonl"
RECORDED_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Asked:
    """A question with the replies to it in every form, and whether each is right."""

    question: Question
    attempts: tuple[Attempt, ...]
    right: tuple[bool, ...]


# --- 1. ask in three forms ---


def request_for(question: str, form: str, model: str) -> ChatRequest:
    """Return the call that puts a question to the model in a form: other words around it, the question as it is."""
    framed = forms.FORMS.get(form).frame(question, context=FormContext(original=question))
    limit = {} if framed.max_tokens is None else {"max_tokens": framed.max_tokens}
    return ChatRequest(messages=framed.messages, model=model, purpose="target", options=framed.options, **limit)


def ask(client: Client, question: Question, model: str) -> Asked | None:
    """Return the question with its replies; None if a call failed, which is never a wrong answer."""
    replies = [client.complete(request_for(question.text, form, model)) for form in FORMS]
    if any(reply.error for reply in replies):
        return None
    attempts = tuple(
        Attempt(text=reply.text, form=form, logprob=reply.logprob, cut=reply.hit_limit)
        for form, reply in zip(FORMS, replies, strict=True)
    )
    return Asked(question, attempts, tuple(is_right(question, one) for one in attempts))


def is_right(question: Question, attempt: Attempt) -> bool:
    """Return whether the answer in a reply is an accepted one."""
    answer = forms.FORMS.get(attempt.form).answer_in(attempt.text)
    unread = (0.0,)  # this part of a reward reads texts, not vectors
    evidence = Evidence(
        question=question,
        rewrite="",
        answer=answer,
        question_vector=unread,
        rewrite_vector=unread,
        answer_vector=unread,
    )
    return PARTS.get("right")(evidence) == 1.0


# --- 2. learn P(right) from graded answers ---


def learn(training: Sequence[Asked]) -> ConfidenceModel:
    """Return the model of P(right): cross-fitted on features of replies, calibrated, with what agreement is worth."""
    rows = [
        LoggedAnswer(question=asked.question.text, attempt=attempt, right=right)
        for asked in training
        for attempt, right in zip(asked.attempts, asked.right, strict=True)
    ]
    return ConfidenceModel.fit(rows)


# --- 3. stop when another call is not worth its price, 4. submit ---


def answer(model: ConfidenceModel, threshold: float, asked: Asked) -> tuple[int, int]:
    """Return the calls made for a question and the place of the attempt that is submitted."""
    for calls in range(1, len(FORMS) + 1):
        chosen = model.submit(asked.question.text, asked.attempts[:calls])
        if chosen.p_right >= threshold:
            break
    return calls, chosen.index


def threshold_for(model: ConfidenceModel, training: Sequence[Asked], *, budget: float) -> float:
    """Return the P(right) below which to ask again, so that training questions take `budget` calls on average."""
    # P(right) of what would be submitted after each call, by a model that has not seen the question.
    curves = []
    for asked in training:
        judge = model.for_target(asked.question.text)
        submitted = [judge.submit(asked.question.text, asked.attempts[:calls]) for calls in range(1, len(FORMS) + 1)]
        curves.append([one.p_right for one in submitted])

    def mean_calls(threshold: float) -> float:
        return mean([next((n for n, p in enumerate(curve, 1) if p >= threshold), len(curve)) for curve in curves])

    return max(percent / 100 for percent in range(101) if mean_calls(percent / 100) <= budget)


# --- 5. the verdict, on questions that nothing was learned from ---


def verdict(model: ConfidenceModel, threshold: float, held_out: Sequence[Asked]) -> str:
    """Return the table and what to conclude from it."""
    chosen = [answer(model, threshold, asked) for asked in held_out]
    ours = [asked.right[place] for asked, (_, place) in zip(held_out, chosen, strict=True)]
    votes = [asked.right[plain_vote(asked.question.text, asked.attempts)] for asked in held_out]
    rows = {form: ([asked.right[place] for asked in held_out], 1.0) for place, form in enumerate(FORMS)}
    rows |= {"vote": (votes, float(len(FORMS))), "learned": (ours, sum(calls for calls, _ in chosen) / len(chosen))}
    lines = [f"{len(held_out)} held-out questions   right   calls"]
    lines += [f"{name:23} {100 * mean(right):5.1f} % {calls:6.2f}" for name, (right, calls) in rows.items()]
    low, high = difference_interval(ours, rows[AS_IS][0])
    sign = "better" if low > 0 else "worse" if high < 0 else "not clearly different"
    gain = 100 * (mean(ours) - mean(rows[AS_IS][0]))
    lines += [
        f"learned against the question as it is: {gain:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]: {sign}"
    ]
    return "\n".join(lines)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def difference_interval(ours: Sequence[bool], theirs: Sequence[bool], *, draws: int = 2000) -> tuple[float, float]:
    """Return a 95 % interval of the difference of two methods on the same questions, by the bootstrap."""
    rng, pairs = random.Random(0), [a - b for a, b in zip(ours, theirs, strict=True)]
    means = sorted(mean(rng.choices(pairs, k=len(pairs))) for _ in range(draws))
    return means[draws // 40], means[-draws // 40 - 1]


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, learn, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a model on your Ollama server; without it, recorded replies")
    parser.add_argument("--url", default="http://127.0.0.1:11434", help="the Ollama server")
    parser.add_argument("--questions", type=Path, default=BUNDLED, help="JSON lines with `query` and `accept`")
    parser.add_argument("--size", type=int, default=600, help="questions: half to learn from, half to judge by")
    parser.add_argument("--budget", type=float, default=2.0, help="mean calls a question")
    flags = parser.parse_args(argv)
    questions = [question for question in load_questions(flags.questions) if question.accept]
    questions = random.Random(0).sample(questions, min(flags.size, len(questions)))
    stack = build_client(flags.url) if flags.model else build_client(RECORDED_MODEL, backend="recorded")
    try:
        with ThreadPoolExecutor(8) as pool:  # calls in flight
            model = flags.model or stack.servers[0].default_models()[0]
            found = list(pool.map(lambda question: ask(stack.client, question, model), questions))
    finally:
        stack.close()
    asked = [one for one in found if one is not None]
    training, held_out = asked[::2], asked[1::2]
    confidence = learn(training)
    threshold = threshold_for(confidence, training, budget=flags.budget)
    print(f"learned from {len(training) * len(FORMS)} answers; ask again while P(right) < {threshold:.2f}")
    print(verdict(confidence, threshold, held_out))


if __name__ == "__main__":
    main()
