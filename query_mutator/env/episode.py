"""One episode: the attempts at a question, and which of them would be submitted.

Episodes are saved in checkpoints as plain types and tensors, so that a run resumes in the middle of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from query_mutator.rewards import is_not_sure, is_refusal
from query_mutator.types import AnswerRule, FloatArray, Reward


def _tensor(vector: FloatArray) -> Any:
    import torch

    return torch.from_numpy(np.array(vector))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A question text, the target's answer to it, and its score; vectors are [D]."""

    text: str
    answer: str
    text_vector: FloatArray
    answer_vector: FloatArray
    fit: float  # cosine of this text and the answer to it
    closeness: float  # cosine of the original question and the answer
    reward: Reward

    @property
    def answers(self) -> bool:
        """Return whether the answer is neither a refusal nor "not sure"."""
        return not is_refusal(self.answer) and not is_not_sure(self.answer)

    def rank(self, rule: AnswerRule) -> tuple[bool, bool, float]:
        """Return the sort key of a rule, without gold: an answer beats "not sure" beats a refusal, then a cosine."""
        cosine = self.closeness if rule == "closest" else self.fit
        return not is_refusal(self.answer), not is_not_sure(self.answer), cosine

    def to_state(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        return {
            "text": self.text,
            "answer": self.answer,
            "text_vector": _tensor(self.text_vector),
            "answer_vector": _tensor(self.answer_vector),
            "fit": self.fit,
            "closeness": self.closeness,
            "score": self.reward.score,
            "parts": dict(self.reward.parts),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Attempt:
        """Return the attempt saved by `to_state`, whose tensors may be arrays."""
        return cls(
            text=state["text"],
            answer=state["answer"],
            text_vector=np.array(state["text_vector"]),
            answer_vector=np.array(state["answer_vector"]),
            fit=state["fit"],
            closeness=state["closeness"],
            reward=Reward(score=state["score"], parts=state["parts"]),
        )


def why_submitted(attempts: Sequence[Attempt], chosen: Attempt, rule: AnswerRule) -> str:
    """Return the rule that chose among the attempts of an episode, and the numbers it compared."""
    if len(attempts) == 1:
        return "the only answer"
    count = f"{len(attempts)} answers"
    if rule == "last":
        return f"the last of {count}"
    if rule == "round_trip" and len({attempt.answer for attempt in attempts if attempt.answers}) > 1:
        return f"round trip: the question told from it is closest to the original, of {count}"
    baselines = [attempt for attempt in attempts if attempt.rank(rule)[:2] == chosen.rank(rule)[:2]]
    numbers = sorted((attempt.rank(rule)[2] for attempt in baselines), reverse=True)
    name = "closest: similarity to the question" if rule == "closest" else "best: fit to its wording"
    shown = ", then ".join(f"{number:.2f}" for number in numbers[:2])
    left_out = len(attempts) - len(baselines)
    return f"{name} {shown}, of {count}" + (f", {left_out} not counted: refused or not sure" if left_out else "")


@dataclass(slots=True, kw_only=True)
class Episode:
    """The state since the question was drawn."""

    index: int  # of the question in the task
    original: str
    text: str  # the current wording of the question
    vectors: dict[str, FloatArray]  # every text of this episode, [D]
    used: list[bool]  # operators
    call_price: float = 0.0
    known: dict[str, Attempt] = field(
        default_factory=dict
    )  # every text asked in this episode, which is not asked again
    best: Attempt | None = None  # None before the first answer
    last: Attempt | None = None  # the current wording's, or that of the last one asked
    tried: set[tuple[str, int]] = field(default_factory=set)  # texts and the operators applied to them
    steps: int = 0
    calls: int = 0
    total_reward: float = 0.0
    ended: bool = False  # terminated or truncated
    names: list[str] = field(default_factory=list)  # actions taken

    @property
    def first(self) -> Attempt | None:
        """Return the answer to the original question, None if it was not asked."""
        return self.known.get(self.original)

    @property
    def current(self) -> Attempt | None:
        """Return the answer to the current wording, None if it was not asked."""
        return self.known.get(self.text)

    @property
    def answer(self) -> str | None:
        """Return the target's answer to the current wording, None if it was not asked."""
        return None if self.current is None else self.current.answer

    @property
    def different_answers(self) -> dict[str, Attempt]:
        """Return the answers that neither refuse nor are unsure, with the last attempt that got each."""
        return {attempt.answer: attempt for attempt in self.known.values() if attempt.answers}

    def was_tried(self, action: int) -> bool:
        """Return whether an operator was applied to the current wording."""
        return (self.text, action) in self.tried

    def add(self, attempt: Attempt, rule: AnswerRule) -> None:
        """Add the answer to the current wording."""
        self.known[attempt.text] = attempt
        self.move(attempt.text, rule)

    def move(self, text: str, rule: AnswerRule) -> None:
        """Make `text` the current wording; its answer, if there is one, may become the best."""
        self.text = text
        if self.current is not None:
            self.last = self.current
            self.best = max(filter(None, (self.best, self.current)), key=lambda attempt: attempt.rank(rule))

    def describe(self) -> str:
        """Return question, actions taken, current wording and its answer, one per line."""
        actions = " > ".join(self.names) or "-"
        answer = "(not asked)" if self.current is None else self.current.answer
        return f"{self.original}\n  {actions}\n{self.text}\n  {answer}"

    def to_state(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        return {
            "index": self.index,
            "first": self.original,
            "current": self.text,
            "best": self.best and self.best.text,
            "last": self.last and self.last.text,
            "known": [attempt.to_state() for attempt in self.known.values()],
            "vectors": {text: _tensor(vector) for text, vector in self.vectors.items()},
            "used": list(self.used),
            "tried": sorted(self.tried),
            "steps": self.steps,
            "calls": self.calls,
            "call_price": self.call_price,
            "total_reward": self.total_reward,
            "ended": self.ended,
            "names": list(self.names),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Return the episode saved by `to_state`; files of earlier versions lack some of its entries."""
        known = {attempt["text"]: Attempt.from_state(attempt) for attempt in state["known"]}
        vectors = {text: np.array(vector) for text, vector in state.get("vectors", {}).items()}
        return cls(
            index=state["index"],
            original=state["first"],
            text=state["current"],
            vectors=vectors or {text: attempt.text_vector for text, attempt in known.items()},
            best=known.get(state["best"]),
            last=known.get(state.get("last", state["current"])),
            known=known,
            used=list(state["used"]),
            tried={(text, action) for text, action in state["tried"]},
            steps=state["steps"],
            calls=state["calls"],
            call_price=state.get("call_price", 0.0),
            total_reward=state["total_reward"],
            ended=state.get("ended", False),
            names=list(state["names"]),
        )
