"""One episode: its rules, the attempts at a question, and which of them would be submitted.

Episodes are saved in checkpoints as plain types and arrays, so that a run resumes in the middle of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from query_mutator.reading import is_not_sure, is_refusal
from query_mutator.registry import check_known
from query_mutator.settings import Episode as EpisodeSettings
from query_mutator.types import (
    AS_IS,
    CONTROLS,
    SUBMIT,
    UNDO,
    AnswerRule,
    AskRule,
    ErrorInfo,
    FloatArray,
    Reward,
)

#: A wording, and the form in which the target gets it.
Asked = tuple[str, str]

#: An operator's number, the text it is applied to, and the form in which that is answered: some use the answer.
Wording = tuple[int, str, str | None]


@dataclass(frozen=True, kw_only=True)
class EpisodeRules(EpisodeSettings):
    """Rules of an episode: actions, prices, and when it ends."""

    def __post_init__(self) -> None:
        check_known("ask", self.ask, get_args(AskRule))
        object.__setattr__(self, "call_price", tuple(self.call_price))  # a file has a list
        super().__post_init__()

    @property
    def policy_asks(self) -> bool:
        """Return whether asking is an action; else the original question and every rewrite are asked at once."""
        return self.ask == "form"

    @property
    def controls(self) -> tuple[str, ...]:
        """Return the actions that are not operators or forms, which they follow."""
        return CONTROLS if self.policy_asks else (UNDO, SUBMIT)

    def ends(self, action: str, *, steps: int) -> bool:
        """Return whether an action is the last one of an episode, of which it is number `steps`."""
        return action == SUBMIT or steps >= self.max_episode_steps

    def max_calls(self, *, asked: int) -> int:
        """Return the maximum calls of one episode with `asked` operators that a model carries out.

        A step makes one call, or two where rewrites are asked at once; an answer comes before or after the steps.
        """
        steps = self.max_episode_steps
        answers = min(steps + (not self.policy_asks), self.max_asks or steps + 1)
        return min(answers + steps * (asked > 0), 1 + steps * (1 + (not self.policy_asks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A question text in a form, the target's answer to it, and its score; vectors are [D]."""

    text: str
    form: str = AS_IS
    answer: str
    thought: str = ""
    logprob: float | None = None  # mean log probability of the answer's tokens; None where it was not reported
    cut: bool | None = None  # ended at the token limit; None where it is not known
    text_vector: FloatArray
    answer_vector: FloatArray
    fit: float  # cosine of this text and the answer to it
    closeness: float  # cosine of the original question and the answer
    reward: Reward
    price: float = 1.0  # of the call

    @property
    def asked(self) -> Asked:
        """Return what was asked."""
        return self.text, self.form

    @property
    def verdicts(self) -> tuple[bool, bool]:
        """Return whether the answer is a refusal, and whether it is "not sure"."""
        return is_refusal(self.answer), is_not_sure(self.answer)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Return the sort key of `best`, without gold: an answer beats "not sure" beats a refusal, then fit."""
        refused, not_sure = self.verdicts
        return not refused, not not_sure, self.fit

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Attempt:
        """Return the attempt that `asdict` saved; its arrays may be tensors."""
        vectors = {name: np.array(state[name]) for name in ("text_vector", "answer_vector")}
        return cls(**{**state, **vectors, "reward": Reward(**state["reward"])})


def why_submitted(
    attempts: Sequence[Attempt], chosen: Attempt, rule: AnswerRule, *, p_right: Sequence[float] = ()
) -> str:
    """Return the rule that chose among the attempts of an episode, and the numbers it compared."""
    count = f"{len(attempts)} answers"
    if p_right:
        place = f"{attempts.index(chosen) + 1} of {count}" if len(attempts) > 1 else "the only answer"
        return f"{place}: P(right) {', '.join(f'{p:.2f}' for p in p_right)}"
    if len(attempts) == 1:
        return "the only answer"
    if rule == "vote":
        return f"the most frequent of {count}"
    return f"best: fit to its wording {chosen.fit:.2f}, of {count}"


@dataclass(slots=True, kw_only=True)
class Episode:
    """The state since the question was drawn."""

    index: int  # of the question in the task
    original: str
    text: str  # the current wording of the question
    form: str = AS_IS  # in which the target would get it
    vectors: dict[str, FloatArray]  # every text of this episode, [D]
    used: list[bool]  # operators, and which form is the current one
    call_price: float = 0.0
    known: dict[Asked, Attempt] = field(default_factory=dict)  # all that was asked, which is not asked again
    best: Attempt | None = None  # None before the first answer
    p_right: tuple[float, ...] = ()  # of all that is known, by the rule `learned`
    tried: set[tuple[str, int]] = field(default_factory=set)  # texts and the actions taken on them
    steps: int = 0
    calls: int = 0
    total_reward: float = 0.0
    ended: bool = False  # terminated or truncated
    names: list[str] = field(default_factory=list)  # actions taken

    @property
    def first(self) -> Attempt | None:
        """Return the answer to the original question as it is, None if it was not asked."""
        return self.known.get((self.original, AS_IS))

    @property
    def current(self) -> Attempt | None:
        """Return the answer to the current wording in the current form, None if it was not asked."""
        return self.known.get(self.asked)

    @property
    def asked(self) -> Asked:
        """Return the current wording and form."""
        return self.text, self.form

    @property
    def answer(self) -> str | None:
        """Return the target's answer to the current wording, None if it was not asked."""
        return None if self.current is None else self.current.answer

    @property
    def assurance(self) -> float:
        """Return how good the best answer seems: its P(right) by the rule `learned`, else its fit; 0 without one."""
        return max(self.p_right, default=0.0 if self.best is None else self.best.fit)

    def describe(self) -> str:
        """Return question, actions taken, current wording and its answer, one per line."""
        actions = " > ".join(self.names) or "-"
        answer = "(not asked)" if self.current is None else self.current.answer
        return f"{self.original}\n  {actions}\n{self.text}\n  {answer}"

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Return the episode that `asdict` saved; its arrays may be tensors."""
        known = {asked: Attempt.from_state(attempt) for asked, attempt in state["known"].items()}
        vectors = {text: np.array(vector) for text, vector in state["vectors"].items()}
        best = state["best"] and known[state["best"]["text"], state["best"]["form"]]
        return cls(**copy.deepcopy(dict(state)) | {"vectors": vectors, "known": known, "best": best})


class Rewriting(NamedTuple):
    """The wording after an operator: its rewrite, or the wording before where a `guard` rejected that."""

    text: str
    guard: str | None = None


@dataclass(frozen=True, slots=True)
class QuestionMemory:
    """Results of the calls and local tests on one question; an ErrorInfo where a call failed for good."""

    rewrites: dict[Wording, Rewriting | ErrorInfo] = field(default_factory=dict)
    attempts: dict[Asked, Attempt | ErrorInfo] = field(default_factory=dict)
    changes: dict[Wording, bool] = field(default_factory=dict)  # whether the operator may change the text
    #: By rule and what is known: the place of the answer that is submitted, and the P(right) of all.
    chosen: dict[tuple[str | Asked, ...], tuple[int, tuple[float, ...]]] = field(default_factory=dict)
