"""One episode: the attempts at a question, and which of them would be submitted.

Episodes are saved in checkpoints as plain types and tensors, so that a run resumes in the middle of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.rewards import is_not_sure, is_refusal
from query_mutator.types import AnswerRule, Reward

FloatArray = NDArray[np.float32]


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

    def rank(self, rule: AnswerRule) -> tuple[bool, bool, float]:
        """Return the sort key of a rule, without gold: an answer beats "not sure" beats a refusal, then a cosine."""
        cosine = self.closeness if rule == "closest" else self.fit
        return not is_refusal(self.answer), not is_not_sure(self.answer), cosine

    def to_state(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        import torch

        return {
            "text": self.text,
            "answer": self.answer,
            "text_vector": torch.from_numpy(np.array(self.text_vector)),
            "answer_vector": torch.from_numpy(np.array(self.answer_vector)),
            "fit": self.fit,
            "closeness": self.closeness,
            "score": self.reward.score,
            "parts": dict(self.reward.parts),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Attempt:
        """Return the attempt saved by `to_state`."""
        return cls(
            text=state["text"],
            answer=state["answer"],
            text_vector=state["text_vector"].numpy(),
            answer_vector=state["answer_vector"].numpy(),
            fit=state["fit"],
            closeness=state["closeness"],
            reward=Reward(score=state["score"], parts=state["parts"]),
        )


@dataclass(slots=True, kw_only=True)
class Episode:
    """The state since the question was drawn."""

    index: int  # of the question in the task
    first: Attempt
    current: Attempt
    best: Attempt
    known: dict[str, Attempt]  # every text asked in this episode, which is not asked again
    used: list[bool]
    tried: set[tuple[str, int]] = field(default_factory=set)  # texts and the operators applied to them
    steps: int = 0
    calls: int = 1
    total_reward: float = 0.0
    ended: bool = False  # terminated or truncated
    names: list[str] = field(default_factory=list)  # actions taken

    def action_mask(self) -> list[bool]:
        """Return which actions are allowed: not an operator tried on this text, nor undo at the original question."""
        text = self.current.text
        tried = {action for asked, action in self.tried if asked == text}
        return [*(action not in tried for action in range(len(self.used))), text != self.first.text, True]

    def to_state(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        return {
            "index": self.index,
            "first": self.first.text,
            "current": self.current.text,
            "best": self.best.text,
            "known": [attempt.to_state() for attempt in self.known.values()],
            "used": list(self.used),
            "tried": sorted(self.tried),
            "steps": self.steps,
            "calls": self.calls,
            "total_reward": self.total_reward,
            "ended": self.ended,
            "names": list(self.names),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Return the episode saved by `to_state`."""
        known = {attempt["text"]: Attempt.from_state(attempt) for attempt in state["known"]}
        return cls(
            index=state["index"],
            first=known[state["first"]],
            current=known[state["current"]],
            best=known[state["best"]],
            known=known,
            used=list(state["used"]),
            tried={(text, action) for text, action in state["tried"]},
            steps=state["steps"],
            calls=state["calls"],
            total_reward=state["total_reward"],
            ended=state.get("ended", False),  # not in files of earlier versions
            names=list(state["names"]),
        )
