"""The state machine of one question: what an action does, what the policy sees, what would be submitted.

It does no I/O. Its flows yield the calls and embeddings they need (`env.scheduling`) and are sent the results, so the
same engine runs in an environment that trains (`rl_query_mutator_env`) and in a program that uses a policy
(`query_mutator.apply`), with threads or with asyncio.

O observation, A operators
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from query_mutator.env.episode import Asked, Attempt, Episode, QuestionMemory, Rewriting, Wording, why_submitted
from query_mutator.env.scheduling import Call, Encode, Flow
from query_mutator.env.task import Task
from query_mutator.operators import OperatorContext, clean_rewrite, local_rewrite, rejecting_guard, would_change
from query_mutator.rewards import Evidence, Unscored, cosine
from query_mutator.types import (
    AS_IS,
    ASK,
    SUBMIT,
    UNDO,
    ChatRequest,
    Completion,
    ErrorInfo,
    FloatArray,
    StepRecord,
    read_part,
)


class EpisodeEngine:
    """An episode and the flows that advance it; `turn` is the environment's number and step, where there is one.

    What `memory` has is neither called for, nor scored or tested again, but counted as a call of this episode. Without
    `observes`, wordings that are not asked are not embedded, and `observe` may not be called.
    """

    def __init__(
        self,
        task: Task,
        episode: Episode,
        *,
        memory: QuestionMemory | None = None,
        observes: bool = True,
    ) -> None:
        self.task, self.episode, self.memory, self.observes = task, episode, memory, observes
        self.timing: dict[str, float] = {}  # seconds of the calls of the current step
        self.guard: str | None = None  # that rejected the rewrite of the current step
        self.turn: tuple[int, int] | None = None
        self._changes = {} if memory is None else memory.changes

    @classmethod
    def open(cls, task: Task, index: int, **options: Any) -> EpisodeEngine:
        """Return the engine of a new episode on question `index`, which is not asked yet, with options as above."""
        text = task.questions[index].text
        episode = Episode(
            index=index,
            original=text,
            text=text,
            vectors={text: task.question_vectors[index]},
            used=[False] * task.num_rewrites,
        )
        return cls(task, episode, **options)

    # --- flows -----------------------------------------------------------------------------------------------------

    def ask_original(self, number: int = 1) -> Flow:
        """Have the target answer the original question, the one of this number in a reset; return as `add_first`."""
        request = self.task.target(self.episode.index, self.episode.original)
        answered: Completion = yield self._call(request, f"first answer {number}")
        self.episode.calls += 1
        return answered.error or (yield from self.add_first(answered, number))

    def add_first(self, answered: Completion, number: int = 1) -> Flow:
        """Add the target's answer to the original question; return the error of a call that failed for good."""
        first = yield from self._attempt((self.episode.original, AS_IS), answered, phase=f"first judge {number}")
        if isinstance(first, ErrorInfo):
            return first
        self._add(first)
        return None

    def act(self, action: int, *, asks_at_end: bool = True) -> Flow:
        """Take one action, whose number was checked; return the error of a call that failed for good, if any.

        The end of an episode asks the target where nothing was asked. Without `asks_at_end` the caller does that, and
        a form asks nothing.
        """
        episode, name = self.episode, self.task.actions[action]
        self.timing, self.guard = {}, None
        ends = self.task.rules.ends(name, steps=episode.steps + 1)
        error: ErrorInfo | None = None
        if name == UNDO:
            self._show_form(AS_IS)
            episode.text, episode.form = episode.original, AS_IS
        elif name not in (ASK, SUBMIT):
            error = yield from self._rewrite(action, asks_form=asks_at_end)
        if error is None and (
            (name == ASK and self.is_recorded(action)) or (ends and asks_at_end and episode.best is None)
        ):
            error = yield from self.ask()
        episode.names.append(name)
        episode.steps += 1
        return error

    def ask(self, asked: Asked | None = None) -> Flow:
        """Have the target answer a wording in a form, by default the current ones; return the error of a failed call.

        What was asked before in this episode has an answer.
        """
        episode = self.episode
        asked = episode.asked if asked is None else asked
        if asked in episode.known:
            return None
        kept = {} if self.memory is None else self.memory.attempts
        found = kept.get(asked)
        if found is None:
            found = kept[asked] = yield from self._answer(asked)
        else:
            episode.calls += 1
        if isinstance(found, ErrorInfo):
            return found
        episode.vectors[found.text] = found.text_vector
        self._add(found)
        return None

    def _add(self, attempt: Attempt) -> None:
        """Add an answer to the episode, and choose the one that would be submitted by the rule of the task."""
        episode, rule = self.episode, self.task.rules.answer
        episode.known[attempt.asked] = attempt
        episode.text, episode.form = attempt.asked
        if rule == "best":
            episode.best = max(filter(None, (episode.best, attempt)), key=lambda one: one.rank)
            return
        kept = {} if self.memory is None else self.memory.chosen
        key, known = (rule, *episode.known), list(episode.known.values())
        if key not in kept:
            kept[key] = self.task.choose(episode.index, known)
        place, episode.p_right = kept[key]
        episode.best = known[place]

    def _answer(self, asked: Asked) -> Flow:
        """Have the target answer a wording in a form; return the Attempt, or the error of a failed call."""
        answered = yield from self._timed(self.task.target(self.episode.index, *asked), "answer", "target")
        if not answered.ok:
            return answered.error
        return (yield from self._attempt(asked, answered, phase="judge"))

    def _rewrite(self, action: int, *, asks_form: bool) -> Flow:
        """Rewrite the current question, or choose its form; return the error of a call that failed for good.

        The target answers it in a form that was chosen, and after a rewrite where the policy does not ask. An action
        that is not recorded does nothing.
        """
        if not self.is_recorded(action):
            return None
        episode, before, form = self.episode, self.episode.text, self.task.form_of(action)
        may_change = self.may_change(action)
        text = before if form else (yield from self._rewritten(action, may_change=may_change))
        if isinstance(text, ErrorInfo):
            return text
        asked = (text, form.name if form else episode.form)
        error: ErrorInfo | None = None
        if asks_form if form else not self.task.rules.policy_asks:
            error = yield from self.ask(asked)
        elif self.observes and text not in episode.vectors:
            (episode.vectors[text],) = yield Encode((text,))
        if error is not None:
            return error
        self._show_form(asked[1])
        episode.used[action] = True
        if may_change:  # else the mask has it; an operator that needs the answer may get one later
            episode.tried.add((before, action))
        episode.text, episode.form = asked
        return None

    def _show_form(self, name: str) -> None:
        """Mark which form is the current one in what the policy sees."""
        self.episode.used[len(self.task.operators) :] = [form.name == name for form in self.task.forms]

    def _rewritten(self, action: int, *, may_change: bool) -> Flow:
        """Return the current question as an operator rewrites it, or the error of a call that failed for good.

        A rewrite that fails a guard of the operator is not used: the question stays.
        """
        is_local = self.task.is_local(action)
        if not is_local and not may_change:
            return self.episode.text
        kept, key = {} if self.memory is None else self.memory.rewrites, self.wording(action)
        found = kept.get(key)
        if found is None:
            prompt = self._prompt(action)
            mutated = None if prompt is None else (yield from self._timed(prompt, "rewrite", "mutator"))
            failed = None if mutated is None else mutated.error
            found = kept[key] = failed or self._rewriting(action, mutated)
        else:
            self.episode.calls += not is_local
        if isinstance(found, ErrorInfo):
            return found
        self.guard = found.guard
        return found.text

    def _prompt(self, action: int) -> ChatRequest | None:
        """Return the request for a rewrite of the current question, None for an operator without a model."""
        if self.task.is_local(action):
            return None
        return self.task.calls.rewrite(self.task.operators[action], self.episode.text, context=self._context())

    def _rewriting(self, action: int, mutated: Completion | None) -> Rewriting:
        """Return the current question as rewritten, unless the rewrite is empty or fails a guard."""
        operator, text, context = self.task.operators[action], self.episode.text, self._context()
        local = local_rewrite(operator)
        rewrite = local(text, context=context) if local else clean_rewrite("" if mutated is None else mutated.text)
        guard = rejecting_guard(operator, text, rewrite or text, context=context)
        return Rewriting((rewrite or text) if guard is None else text, guard)

    def _call(self, request: ChatRequest, phase: str) -> Call:
        """Return the need of a call, under its name within the step."""
        return Call(request if self.turn is None else replace(request, turn=(*self.turn, phase)))

    def _timed(self, request: ChatRequest, phase: str, kind: str) -> Flow:
        """Yield one call of a step, count it and note its time; return the Completion."""
        completion: Completion = yield self._call(request, phase)
        self.episode.calls += 1
        is_own = completion.attempts > 0  # else it was stored, or shared with another episode
        self.timing[f"{kind}_s"] = completion.latency_s if is_own else 0.0
        waited_s = completion.queue_wait_s if is_own else 0.0
        self.timing["queue_wait_s"] = self.timing.get("queue_wait_s", 0.0) + waited_s
        return completion

    def _attempt(self, asked: Asked, answered: Completion, *, phase: str) -> Flow:
        """Embed and score an answer as its form reads it; return the Attempt, or the error of a failed call.

        A reward part that asks a model is a cost of training, not of the policy: its calls are not in `episode.calls`.
        """
        task, index, (text, form) = self.task, self.episode.index, asked
        text_vector, answer_vector = yield from self._vectors(text, read_part(answered.text))
        original = task.question_vectors[index]
        evidence = Evidence(
            question=task.questions[index],
            rewrite=text,
            answer=task.form_named(form).answer_in(answered.text),
            question_vector=original,
            rewrite_vector=text_vector,
            answer_vector=answer_vector,
            reference_vector=task.reference_vectors[index],
        )
        reward = yield from self._reward(evidence, phase)
        if isinstance(reward, ErrorInfo):
            return reward
        return Attempt(
            text=text,
            form=form,
            answer=answered.text,
            thought=answered.thought,
            logprob=answered.logprob,
            cut=answered.hit_limit if answered.model else None,
            text_vector=text_vector,
            answer_vector=answer_vector,
            fit=cosine(text_vector, answer_vector),
            closeness=cosine(original, answer_vector),
            reward=reward,
            price=task.price(task.model_of(form), answered),
        )

    def _reward(self, evidence: Evidence, phase: str) -> Flow:
        """Return the Reward, or the ErrorInfo of a failed call; the calls of parts that ask a model count from 1."""
        scoring, reply = self.task.reward.score(evidence), None
        for number in itertools.count(1):
            try:
                request = scoring.send(reply)  # type: ignore[arg-type]
            except StopIteration as stop:
                return stop.value
            except Unscored as error:
                return ErrorInfo(kind="unscored", message=str(error))
            reply = yield self._call(request, f"{phase} {number}")
            if not reply.ok:
                return reply.error

    def _vectors(self, text: str, answer: str) -> Flow:
        """Return the embeddings [D] of a wording and an answer, zeros for one that nothing reads."""
        known, reads = self.episode.vectors.get(text), self.task.embeds_answers
        texts = [text] * (known is None) + [answer] * reads
        found = (yield Encode(tuple(texts))) if texts else []
        of_text = found[0] if known is None else known
        return of_text, found[-1] if reads else np.zeros_like(of_text)

    # --- the current state -----------------------------------------------------------------------------------------

    @property
    def submitted(self) -> Attempt | None:
        """Return what would be submitted now, None before the first answer."""
        return self.episode.best

    @property
    def spent(self) -> float:
        """Return the price of the calls so far; their number where no prices are known."""
        answers = self.episode.known.values()
        rewrites = self.episode.calls - len(answers)
        return sum(one.price for one in answers) + rewrites * self.task.price(self.task.calls.mutator_model)

    @property
    def cost(self) -> float:
        """Return the calls so far as rewards count them: with prices, in calls to the cheapest model."""
        return self.spent / self.task.price_unit

    @property
    def is_over(self) -> bool:
        """Return whether the last action ended the episode, by its rules."""
        names = self.episode.names
        return bool(names) and self.task.rules.ends(names[-1], steps=self.episode.steps)

    @property
    def score(self) -> float:
        """Return the score of what would be submitted now, 0 before the first answer."""
        return 0.0 if self.submitted is None else self.submitted.reward.score

    @property
    def worth(self) -> float:
        """Return what rewards are changes of: P(right) of what would be submitted where that is learned, else score."""
        return max(self.episode.p_right) if self.episode.p_right else self.score

    def action_mask(self) -> list[bool]:
        """Return which actions are allowed; the others have no effect, or none that is worth a call."""
        return [self.allows(action) for action in range(len(self.task.actions))]

    def allows(self, action: int) -> bool:
        """Return whether an action is allowed.

        Masked are operators and forms tried on the current question or that would not change it, undo at the original,
        ask where the answer is known or an arm asks the same, and what recorded replies do not have. With `max_asks=1`
        submit asks, and there is no answer to go back from. After the last ask only submit is allowed.
        """
        episode, rules, name = self.episode, self.task.rules, self.task.actions[action]
        if name == SUBMIT:
            return True
        if rules.max_asks is not None and len(episode.known) >= rules.max_asks:
            return False
        if name == UNDO:
            return rules.max_asks != 1 and episode.asked != (episode.original, AS_IS)
        if name == ASK:
            is_new = episode.current is None and not self.task.has_plain_arm
            return rules.max_asks != 1 and is_new and self.is_recorded(action)
        was_tried = (episode.text, action) in episode.tried
        return not was_tried and self.may_change(action) and self.is_recorded(action)

    def is_recorded(self, action: int) -> bool:
        """Return whether recorded replies have what an action calls for; models can be asked anything."""
        if self.task.recorded is None:
            return True
        episode, rules, found = self.episode, self.task.rules, self.task.is_recorded
        asks_now = rules.max_asks == 1 or not rules.policy_asks
        key = (episode.original, episode.asked, episode.answer, self.task.actions[action], asks_now)
        if key not in found:
            found[key] = self._has_replies(self.task.recorded, action, asks_now=asks_now)
        return found[key]

    def _has_replies(self, find: Callable[[ChatRequest], Completion | None], action: int, *, asks_now: bool) -> bool:
        """Return whether the replies to an operator's prompt, and to the question after an action, are recorded."""
        task, episode = self.task, self.episode
        form = task.form_of(action)
        if form is not None or task.actions[action] == ASK:
            asked_in = episode.form if form is None else form.name
            return find(task.target(episode.index, episode.text, asked_in)) is not None
        prompt = self._prompt(action)
        mutated = None if prompt is None else find(prompt)
        if prompt is not None and (mutated is None or not mutated.ok):
            return False
        text = self._rewriting(action, mutated).text
        return find(task.target(episode.index, text, episode.form if asks_now else AS_IS)) is not None

    def why(self) -> str:
        """Return why the submitted answer was chosen, "" without one."""
        episode, task, chosen = self.episode, self.task, self.submitted
        if chosen is None:
            return ""
        attempts = list(episode.known.values())
        why = why_submitted(attempts, chosen, task.rules.answer, p_right=episode.p_right)
        return f"{why}; {task.reason(episode.index, attempts, chosen)}" if episode.p_right else why

    def may_change(self, action: int) -> bool:
        """Return whether an action may change the current question or its form; without a local test it may."""
        if form := self.task.form_of(action):
            return form.name != self.episode.form
        key = self.wording(action)
        if key not in self._changes:
            tested, operator = self.task.rules.skip_unchanged, self.task.operators[action]
            self._changes[key] = not tested or would_change(operator, self.episode.text, context=self._context())
        return self._changes[key]

    def observe(self) -> FloatArray:
        """Return the observation [O]."""
        return self.task.observer(self.episode, self.action_mask())

    def info(self, *, valid: bool, since: tuple[int, float] = (0, 0.0)) -> dict[str, Any]:
        """Return the info of the current state: of what would be submitted now, and of the episode so far.

        `since` has the calls and the cost before the step.
        """
        episode, submitted, first = self.episode, self.submitted, self.episode.first
        return {
            "valid": valid,
            "score": self.score,
            "baseline_score": math.nan if first is None else first.reward.score,
            "success": 0.0 if submitted is None else submitted.reward.success,
            "baseline_success": math.nan if first is None else first.reward.success,
            "refused": submitted is not None and submitted.verdicts[0],
            "calls": episode.calls,
            "step_calls": episode.calls - since[0],
            "step_cost": self.cost - since[1],
            "asks": len(episode.known),
            "call_price": episode.call_price,
            "episode_return": episode.total_reward,
            "episode_length": episode.steps,
            "question": episode.index,
            "action_mask": np.array(self.action_mask(), dtype=np.int8),  # int8 is what Discrete.sample takes
            "_text": {
                "question_id": self.task.questions[episode.index].id,
                "rewrite": episode.text if submitted is None else submitted.text,
                "form": episode.form if submitted is None else submitted.form,
                "answer": "" if submitted is None else submitted.answer,
            },
        }

    def record(self, *, reward: float, error: ErrorInfo | None, calls: int, **numbers: int) -> StepRecord:
        """Return the transcript's record of a step that just ended; `numbers` are env, step and episode in the run."""
        episode, question = self.episode, self.task.questions[self.episode.index]
        first, current, submitted = episode.first, episode.current, self.submitted
        opening = first if episode.steps == 1 and not self.task.rules.policy_asks else None
        return StepRecord(
            question_id=question.id,
            operator=episode.names[-1],
            question=question.text,
            rewrite=episode.text,
            form=episode.form,
            answer="" if current is None else current.answer,
            thought="" if current is None else current.thought,
            baseline_score=None if first is None else first.reward.score,
            score=self.score,
            parts={} if current is None else dict(current.reward.parts),
            reward=reward,
            valid=error is None,
            error=error,
            calls=calls,
            guard=self.guard,
            submitted=None if submitted is None else [*episode.known].index(submitted.asked),
            first_answer=None if opening is None else opening.answer,
            first_thought=None if opening is None else opening.thought,
            first_parts=None if opening is None else dict(opening.reward.parts),
            timing=self.timing,
            **numbers,
        )

    def wording(self, action: int) -> Wording:
        """Return under what the memory of a question has the rewrite of an action."""
        return action, self.episode.text, self.episode.form if self.episode.current is not None else None

    def _context(self) -> OperatorContext:
        """Return what an operator may know about the current question."""
        return self.task.context(self.episode.index, self.episode.answer)
