"""The task of a run, shared by its environments and frozen: questions, embeddings, operators, reward, observer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder import Encoder
from query_mutator.env.episode import Episode
from query_mutator.env.observation import Observer, Projection
from query_mutator.errors import UsageError
from query_mutator.operators import ROUND_TRIP, Operator, OperatorContext, would_change
from query_mutator.rewards import WeightedReward
from query_mutator.types import (
    ASK,
    CALL_PRICE,
    CONTROLS,
    SUBMIT,
    UNDO,
    UNSAFE,
    AnswerRule,
    AskRule,
    ChatRequest,
    Purpose,
    Question,
)

FloatArray = NDArray[np.float32]

PYTHON_DOMAIN = "Python's standard library"


def controls(ask: AskRule) -> tuple[str, ...]:
    """Return the actions that are not operators, which follow them."""
    return CONTROLS if ask == "policy" else (UNDO, SUBMIT)


def operator_names(actions: Sequence[str]) -> tuple[str, ...]:
    """Return the operators among the names of all actions."""
    return tuple(name for name in actions if name not in CONTROLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Settings of calls to both models; one seed per run, so that equal requests are equal calls."""

    target_model: str
    mutator_model: str
    target_max_tokens: int = 256
    mutator_max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = 0

    def target(self, text: str) -> ChatRequest:
        """Return the request that asks the target a question."""
        return self._request(text, self.target_model, "target", self.target_max_tokens)

    def mutator(self, prompt: str) -> ChatRequest:
        """Return the request for a rewrite."""
        return self._request(prompt, self.mutator_model, "mutate", self.mutator_max_tokens)

    def _request(self, text: str, model: str, purpose: Purpose, max_tokens: int) -> ChatRequest:
        return ChatRequest.user(
            text, model=model, purpose=purpose, max_tokens=max_tokens, temperature=self.temperature, seed=self.seed
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions [Q] with embeddings [Q, D], and the rules of an episode on them."""

    questions: tuple[Question, ...]
    calls: CallSettings
    encoder: Encoder
    operators: tuple[Operator, ...]
    observer: Observer
    question_vectors: FloatArray  # [Q, D]
    reference_vectors: tuple[FloatArray | None, ...]  # Q of [D]
    neighbors: tuple[str | None, ...]  # Q: the nearest other training question
    train_questions: tuple[Question, ...]
    train_vectors: FloatArray  # [train Q, D]
    reward: WeightedReward = field(default_factory=WeightedReward)
    domain: str = PYTHON_DOMAIN
    max_episode_steps: int = 5
    answer: AnswerRule = "best"
    ask: AskRule = "every_step"
    max_asks: int | None = None  # of an episode; 1: the policy rewrites blindly, and submit asks
    call_price: tuple[float, ...] = (CALL_PRICE,)  # one is drawn for each episode
    skip_unchanged: bool = True  # an operator that says that it would change nothing is not asked

    @cached_property
    def actions(self) -> tuple[str, ...]:
        """Return the names of all actions: the operators, then ask (if the policy asks), undo and submit."""
        return (*(operator.name for operator in self.operators), *controls(self.ask))

    def would_change(self, action: int, text: str, context: OperatorContext) -> bool:
        """Return whether operator `action` may change a wording; without a local test it may."""
        return not self.skip_unchanged or would_change(self.operators[action], text, context=context)

    def allows(self, action: int, episode: Episode) -> bool:
        """Return whether an action is allowed; the others have no effect, or none that is worth a call.

        Masked are operators tried on the present question or that would not change it, undo at the original, and ask
        where the answer is known or, with `max_asks=1`, given by submit. After the last ask only submit is allowed.
        """
        name = self.actions[action]
        if name == SUBMIT:
            return True
        if self.max_asks is not None and len(episode.known) >= self.max_asks:
            return False
        if name == UNDO:
            return episode.text != episode.original
        if name == ASK:
            return self.max_asks != 1 and episode.current is None
        context = self.context(episode.index, episode.answer)
        return not episode.was_tried(action) and self.would_change(action, episode.text, context)

    def context(self, index: int, answer: str | None = None) -> OperatorContext:
        """Return what an operator may know about a wording of question `index` and the answer to it, if it has one."""
        original = self.questions[index].text
        return OperatorContext(domain=self.domain, neighbor=self.neighbors[index], original=original, answer=answer)

    def round_trip(self, index: int, answer: str) -> ChatRequest:
        """Return the request for the question that an answer to question `index` answers."""
        prompt = ROUND_TRIP.render(self.questions[index].text, context=self.context(index, answer))
        return self.calls.mutator(prompt)

    def on(self, questions: Sequence[Question]) -> Task:
        """Return the task on other (held-out) questions, with the projection and neighbors of the training set."""
        vectors, references, neighbors = _embed(
            questions, self.encoder, train=self.train_questions, train_vectors=self.train_vectors
        )
        return replace(
            self,
            questions=tuple(questions),
            question_vectors=vectors,
            reference_vectors=references,
            neighbors=neighbors,
        )


def build_task(
    questions: Sequence[Question],
    *,
    calls: CallSettings,
    encoder: Encoder,
    operators: Sequence[Operator],
    known_words: Collection[str],
    embedding_dims: int = 6,
    projection: Projection | None = None,
    **rules: Any,
) -> Task:
    """Return the task on training questions; without `projection` a PCA is fitted on their texts (not on answers).

    `rules` are the fields of Task from `reward` on.
    """
    train = tuple(questions)
    if unsafe := next((question for question in train if UNSAFE in question.tags), None):
        raise UsageError(f"question {unsafe.id!r} should be refused (tag {UNSAFE!r}): never train on it")
    train_vectors = encoder.encode([question.text for question in train])
    if projection is None:
        projection = Projection.fit(train_vectors, dims=embedding_dims)
    vectors, references, neighbors = _embed(train, encoder, train=train, train_vectors=train_vectors)
    return Task(
        questions=train,
        calls=calls,
        encoder=encoder,
        operators=tuple(operators),
        observer=Observer(
            projection=projection,
            known_words=known_words,
            num_operators=len(operators),
            policy_asks=rules.get("ask") == "policy",
        ),
        question_vectors=vectors,
        reference_vectors=references,
        neighbors=neighbors,
        train_questions=train,
        train_vectors=train_vectors,
        **rules,
    )


def _embed(
    questions: Sequence[Question], encoder: Encoder, *, train: Sequence[Question], train_vectors: FloatArray
) -> tuple[FloatArray, tuple[FloatArray | None, ...], tuple[str | None, ...]]:
    vectors = encoder.encode([question.text for question in questions])
    with_reference = [question.reference for question in questions if question.reference]
    encoded = iter(encoder.encode(with_reference)) if with_reference else iter(())
    references = tuple(next(encoded) if question.reference else None for question in questions)
    return vectors, references, _neighbors(questions, vectors, train, train_vectors)


def _neighbors(
    questions: Sequence[Question], vectors: FloatArray, train: Sequence[Question], train_vectors: FloatArray
) -> tuple[str | None, ...]:
    similar = vectors @ train_vectors.T  # [Q, train Q]
    place = {question.id: index for index, question in enumerate(train)}
    for row, question in enumerate(questions):
        if question.id in place:
            similar[row, place[question.id]] = -np.inf
    nearest = similar.argmax(axis=1)
    return tuple(train[best].text if np.isfinite(similar[row, best]) else None for row, best in enumerate(nearest))
