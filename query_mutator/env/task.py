"""The task of a run, shared by its environments and frozen: questions, embeddings, operators, reward, observer."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from query_mutator.confidence import Attempt as Reply
from query_mutator.confidence import ConfidenceModel, plain_vote
from query_mutator.confidence.crossfit import attempt_columns
from query_mutator.confidence.gain import GainModel, gain_inputs
from query_mutator.data import general_bank, recorded_examples, target_key
from query_mutator.encoder import CachedEncoder
from query_mutator.env.episode import Attempt, EpisodeRules, Observer, Projection
from query_mutator.errors import UsageError
from query_mutator.forms import FORMS, Example, Form, FormContext, Framed, arm_named
from query_mutator.llm.prices import Prices
from query_mutator.operators import NONE, Operator, OperatorContext, local_rewrite
from query_mutator.rewards import WeightedReward
from query_mutator.settings import Operators, Sampling, TaskSettings
from query_mutator.types import (
    AS_IS,
    CONTROLS,
    UNSAFE,
    ChatRequest,
    Completion,
    FloatArray,
    Message,
    Question,
    in_context,
)

NUM_EXAMPLES = 4
ROWS_AT_ONCE = 2000  # of questions next to all others, which bounds the memory
_MAX_CHARS = 400  # of an example: longer ones crowd out the question


@dataclass(frozen=True, slots=True)
class Bank:
    """Questions with an accepted answer [B], and their embeddings [B, D]."""

    questions: tuple[Question, ...]
    vectors: FloatArray
    recorded: Mapping[str, Sequence[int]] = field(default_factory=dict)  # digest of a text -> places, not the nearest

    def nearest(self, questions: Sequence[Question], vectors: FloatArray) -> tuple[tuple[Example, ...], ...]:
        """Return for each question [Q] with its embedding [Q, D] the nearest others, the nearest last.

        A question about the same target is none of them, nor is one of the same text.
        """
        if not self.questions:
            return ((),) * len(questions)
        found: list[tuple[Example, ...]] = []
        targets = [target_key(question) for question in self.questions]
        for question, similar in zip(questions, _similarities(vectors, self.vectors), strict=True):
            target, order = target_key(question), self.recorded.get(_digest(question.text))
            others = (
                self.questions[place]
                for place in (np.argsort(-similar, kind="stable") if order is None else order)
                if targets[place] != target and self.questions[place].text != question.text
            )
            chosen = list(itertools.islice(others, NUM_EXAMPLES))
            found.append(tuple(Example(other.text, other.accept[0]) for other in reversed(chosen)))
        return tuple(found)


def can_be_shown(question: Question) -> bool:
    """Return whether a question has an accepted answer and is short enough to be an example."""
    return bool(question.accept) and len(question.text + question.accept[0]) <= _MAX_CHARS


def bank_of(questions: Sequence[Question], encoder: CachedEncoder) -> Bank:
    """Return the bank of those questions that can be shown; of the bundled one, requests are as they were recorded."""
    shown = tuple(filter(can_be_shown, questions))
    recorded = recorded_examples() if shown == tuple(general_bank()) else {}
    return Bank(shown, encoder.encode([question.text for question in shown]), recorded)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def operator_names(actions: Sequence[str]) -> tuple[str, ...]:
    """Return the operators and forms among the names of all actions."""
    return tuple(name for name in actions if name not in CONTROLS)


def rewrite_settings(actions: Sequence[str], models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings that name the operators and forms among `actions`; forms may name one of several `models`."""
    names = operator_names(actions)
    forms = [name for name in names if arm_named(name, models) is not None]
    operators = ",".join(name for name in names if name not in forms)
    return {"operators": operators or NONE, "forms": ",".join(forms) or NONE, "samples": 1}


@dataclass(frozen=True, kw_only=True)
class CallSettings(Sampling):
    """Calls to both models; one seed per run, so that equal requests are equal calls."""

    target_model: str
    mutator_model: str
    logprobs: bool = False  # ask for the log probabilities of answers, which P(right) reads
    seed: int | None = 0
    sample_temperature: float = Operators.sample_temperature
    samples_at_once: int = 1  # further replies to ask for together, where all of them will be wanted

    def target(self, framed: Framed | str, *, model: str = "", context: Sequence[Message] = ()) -> ChatRequest:
        """Return the request that asks the target, or another model, a question, which a form may have framed.

        It comes after the messages of a `context`, which may have a system prompt in place of that of the settings.
        """
        if isinstance(framed, str):
            framed = Framed.user(framed)
        if self.system and not any(one.role == "system" for one in context):
            context = (Message(role="system", content=self.system.strip()), *context)
        return ChatRequest(
            messages=in_context(framed.messages, context),
            model=model or self.target_model,
            purpose="target",
            max_tokens=self.target_max_tokens if framed.max_tokens is None else framed.max_tokens,
            temperature=self.temperature if framed.temperature is None else framed.temperature,
            think=self.think if framed.think is None else framed.think,
            seed=self.seed,
            options=framed.options,
            logprobs=self.logprobs,
        )

    def rewrite(self, operator: Operator, text: str, *, context: OperatorContext) -> ChatRequest:
        """Return the request for a rewrite by an operator."""
        return ChatRequest.user(
            operator.render(text, context=context),
            model=self.mutator_model,
            purpose="mutate",
            max_tokens=self.mutator_max_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions [Q] with embeddings [Q, D], and the rules of an episode on them."""

    questions: tuple[Question, ...] = ()
    calls: CallSettings
    encoder: CachedEncoder
    operators: tuple[Operator, ...]
    projection: Projection  # of the embeddings in observations
    question_vectors: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))  # [Q, D]
    reference_vectors: tuple[FloatArray | None, ...] = ()  # Q of [D]
    neighbors: tuple[str | None, ...] = ()  # Q: the nearest other training question
    train_questions: tuple[Question, ...]
    train_vectors: FloatArray  # [train Q, D]
    forms: tuple[Form, ...] = ()
    bank: Bank | None = None  # of examples; None where no form uses them
    examples: tuple[tuple[Example, ...], ...] = ()  # Q, from the bank; empty without one
    reward: WeightedReward = field(default_factory=WeightedReward)
    domain: str = Operators.domain
    rules: EpisodeRules = field(default_factory=EpisodeRules)
    confidence: ConfidenceModel | None = None  # P(right) of an answer, for the rule `learned`
    gains: GainModel | None = None  # of asking another arm, for plans that ask where it gains most
    prices: Prices = field(default_factory=dict)
    recorded: Callable[[ChatRequest], Completion | None] | None = None  # finds the only replies; None: models answer
    is_recorded: dict[Hashable, bool] = field(default_factory=dict, repr=False, compare=False)  # found so far

    @cached_property
    def observer(self) -> Observer:
        """Return what makes the observations."""
        return Observer(projection=self.projection, num_operators=self.num_rewrites, rules=self.rules)

    @cached_property
    def actions(self) -> tuple[str, ...]:
        """Return the names of all actions: operators, forms, then ask (if the policy asks), undo and submit."""
        operators, forms = (operator.name for operator in self.operators), (form.name for form in self.forms)
        return (*operators, *forms, *self.rules.controls)

    @property
    def num_rewrites(self) -> int:
        """Return the number of actions that change the wording or the form: operators and forms, which come first."""
        return len(self.operators) + len(self.forms)

    @cached_property
    def num_asked(self) -> int:
        """Return the number of operators that a model carries out."""
        return sum(not self.is_local(action) for action in range(len(self.operators)))

    @property
    def max_episode_calls(self) -> int:
        """Return the maximum calls of one episode."""
        return self.rules.max_calls(asked=self.num_asked)

    @cached_property
    def embeds_answers(self) -> bool:
        """Return whether anything reads embeddings of answers: an only answer's, at most the reward."""
        return self.rules.max_asks != 1 or bool(self.reward.embedding)

    def form_of(self, action: int) -> Form | None:
        """Return the form that an action chooses, None for other actions."""
        return self.forms[action - len(self.operators)] if len(self.operators) <= action < self.num_rewrites else None

    def form_named(self, name: str) -> Form:
        """Return a form of the task, or `as_is`."""
        return next((form for form in self.forms if form.name == name), None) or FORMS.get(name)

    @cached_property
    def has_plain_arm(self) -> bool:
        """Return whether a form asks the target a question as it is worded, which the action ask does too."""
        return any(form.name == form.model == self.calls.target_model for form in self.forms)

    def is_local(self, action: int) -> bool:
        """Return whether an action that changes wording or form calls no model for it."""
        return self.form_of(action) is not None or local_rewrite(self.operators[action]) is not None

    def target(self, index: int, text: str, form: str = AS_IS) -> ChatRequest:
        """Return the request that asks the target a wording of question `index` in a form."""
        question = self.questions[index]
        if form == AS_IS:
            return self.calls.target(text, context=question.context)
        shown = FormContext(
            domain=self.domain,
            original=question.text,
            examples=self.examples[index] if self.examples else (),
        )
        arm = self.form_named(form)
        request = self.calls.target(arm.frame(text, context=shown), model=arm.model, context=question.context)
        if not arm.sample:
            return request
        return replace(
            request,
            temperature=self.calls.sample_temperature,
            sample=arm.sample - 1,
            samples=self.calls.samples_at_once,
        )

    def model_of(self, form: str) -> str:
        """Return the model that answers in a form."""
        return self.form_named(form).model or self.calls.target_model

    def price(self, model: str, reply: Completion | None = None) -> float:
        """Return what a reply of a model costs, without one the price of a call; 1 where no price is known."""
        found = self.prices.get(model)
        return 1.0 if found is None else found.call if reply is None else found.of(reply)

    @cached_property
    def price_unit(self) -> float:
        """Return what rewards count as one call: a typical one to the cheapest model that has a price."""
        return min(filter(None, (price.typical for price in self.prices.values())), default=1.0)

    def reply_of(self, index: int, attempt: Attempt) -> Reply:
        """Return what P(right) is learned and read from: the answer to question `index` as its form reads it."""
        form, question = self.form_named(attempt.form), self.questions[index]
        shown = self.examples[index] if form.uses_examples and self.examples else ()
        return Reply(
            text=form.answer_in(attempt.answer),
            asked=attempt.text,
            form=attempt.form,
            logprob=attempt.logprob,
            cut=attempt.cut,
            context=" ".join([*(example.answer for example in shown), *(one.content for one in question.context)]),
        )

    def choose(self, index: int, attempts: Sequence[Attempt]) -> tuple[int, tuple[float, ...]]:
        """Return which answer to question `index` is submitted by the rules `vote` and `learned`, and P(right) of all.

        The first of equals. UsageError where P(right) was not learned.
        """
        text, replies = self.questions[index].text, [self.reply_of(index, one) for one in attempts]
        if self.rules.answer == "vote":
            return plain_vote(text, replies), ()
        found = self._fitted(index).submit(text, replies)
        return found.index, found.of_all

    def gains_of(self, index: int, attempt: Attempt) -> dict[str, float]:
        """Return by arm what asking it is expected to add per unit of price, given an answer to question `index`.

        There are none for an answer in an arm that no gain was learned for.
        """
        if self.gains is None or attempt.form not in self.gains.arms:
            return {}
        text, reply = self.questions[index].text, self.reply_of(index, attempt)
        kind = None if self.confidence is None else self.confidence.kind
        inputs = gain_inputs(attempt_columns(text, [reply], kind=kind), [text])
        gains = self.gains.gains(attempt.form, inputs)[0] / self.gains.prices
        return dict(zip(self.gains.arms, gains.tolist(), strict=True))

    def reason(self, index: int, attempts: Sequence[Attempt], chosen: Attempt) -> str:
        """Return what moves the P(right) of an answer to question `index` most, in words."""
        replies = [self.reply_of(index, one) for one in attempts]
        found = self._fitted(index).explain(self.questions[index].text, replies, attempts.index(chosen))
        if not found:
            return "a usual answer"
        return f"{'raised' if found[0].log_odds > 0 else 'lowered'} most by: {found[0].text}"

    def _fitted(self, index: int) -> ConfidenceModel:
        """Return the model of P(right) that has seen no answer about the target of question `index`."""
        if self.confidence is None:
            raise UsageError("--answer learned: P(right) was not learned; qm plan --answer learned does")
        return self.confidence.for_target(target_key(self.questions[index]))

    def context(self, index: int, answer: str | None = None) -> OperatorContext:
        """Return what an operator may know about a wording of question `index` and the answer to it, if it has one."""
        original = self.questions[index].text
        return OperatorContext(domain=self.domain, neighbor=self.neighbors[index], original=original, answer=answer)

    def with_rules(self, **changes: Any) -> Task:
        """Return the task with some rules of its episodes changed."""
        return replace(self, rules=replace(self.rules, **changes))

    def on(self, questions: Sequence[Question]) -> Task:
        """Return the task on other (held-out) questions, with the projection and neighbors of the training set."""
        vectors = self.encoder.encode([question.text for question in questions])
        with_reference = [question.reference for question in questions if question.reference]
        encoded = iter(self.encoder.encode(with_reference))
        return replace(
            self,
            questions=tuple(questions),
            question_vectors=vectors,
            reference_vectors=tuple(next(encoded) if question.reference else None for question in questions),
            neighbors=_neighbors(questions, vectors, self.train_questions, self.train_vectors),
            examples=() if self.bank is None else self.bank.nearest(questions, vectors),
        )


def build_task(
    questions: Sequence[Question],
    *,
    calls: CallSettings,
    encoder: CachedEncoder,
    operators: Sequence[Operator],
    embedding_dims: int = TaskSettings.embedding_dims,
    projection: Projection | None = None,
    reward: WeightedReward | None = None,
    forms: Sequence[Form] = (),
    bank: Sequence[Question] | None = None,
    **others: Any,
) -> Task:
    """Return the task on training questions; without `projection` a PCA is fitted on their texts (not on answers).

    Forms that show examples take them from `bank`, by default from the training questions. `others` are fields of Task.
    """
    train = tuple(questions)
    if unsafe := next((question for question in train if UNSAFE in question.tags), None):
        raise UsageError(f"question {unsafe.id!r} should be refused (tag {UNSAFE!r}): never train on it")
    train_vectors = encoder.encode([question.text for question in train])
    if projection is None:
        projection = Projection.fit(train_vectors, dims=embedding_dims)
    shown = bank_of(train if bank is None else bank, encoder) if any(form.uses_examples for form in forms) else None
    task = Task(
        calls=calls,
        encoder=encoder,
        operators=tuple(operators),
        projection=projection,
        train_questions=train,
        train_vectors=train_vectors,
        forms=tuple(forms),
        bank=shown,
        reward=reward or WeightedReward(),
        **others,
    )
    return task.on(train)


def _neighbors(
    questions: Sequence[Question], vectors: FloatArray, train: Sequence[Question], train_vectors: FloatArray
) -> tuple[str | None, ...]:
    place, found = {question.id: index for index, question in enumerate(train)}, list[str | None]()
    for question, similar in zip(questions, _similarities(vectors, train_vectors), strict=True):
        if question.id in place:
            similar[place[question.id]] = -np.inf
        best = int(similar.argmax())
        found.append(train[best].text if np.isfinite(similar[best]) else None)
    return tuple(found)


def _similarities(vectors: FloatArray, others: FloatArray) -> Iterator[FloatArray]:
    """Yield the cosines [m] of each of some vectors [n, D] with others [m, D]."""
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        yield from vectors[start : start + ROWS_AT_ONCE] @ others.T
