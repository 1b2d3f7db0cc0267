"""The rules of an episode in one record: how long it is, when the target is asked, which answer is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from query_mutator.registry import check_known
from query_mutator.settings.episode import Episode
from query_mutator.types import ASK, SUBMIT, UNDO

__all__ = ["ASKING", "EVERY_STEP", "FORMS_ASK", "POLICY_ASKS", "Asking", "EpisodeRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """When the target is asked, with the actions and the bounds of calls that follow from it."""

    controls: tuple[str, ...]  # the actions that are not operators, which they follow
    asks_original: bool  # when an episode begins
    asks_rewrites: bool  # each in the step that makes it
    asks_forms: bool  # in the step that chooses one

    @property
    def policy_asks(self) -> bool:
        """Return whether asking is an action; an episode that ends without an answer asks then."""
        return ASK in self.controls

    def max_answers(self, max_episode_steps: int) -> int:
        """Return the maximum answers of an episode: where the policy asks, a rewrite lies between two of them."""
        return self.asks_original + max_episode_steps if self.asks_forms else (max_episode_steps + 1) // 2


EVERY_STEP = Asking(controls=(UNDO, SUBMIT), asks_original=True, asks_rewrites=True, asks_forms=True)
FORMS_ASK = Asking(controls=(ASK, UNDO, SUBMIT), asks_original=False, asks_rewrites=False, asks_forms=True)
POLICY_ASKS = Asking(controls=(ASK, UNDO, SUBMIT), asks_original=False, asks_rewrites=False, asks_forms=False)
ASKING: Mapping[str, Asking] = {"every_step": EVERY_STEP, "form": FORMS_ASK, "policy": POLICY_ASKS}


@dataclass(frozen=True, kw_only=True)
class EpisodeRules(Episode):
    """What may happen in an episode."""

    def __post_init__(self) -> None:
        check_known("ask", self.ask, ASKING)
        object.__setattr__(self, "call_price", tuple(self.call_price))  # a file has a list
        super().__post_init__()

    @property
    def asking(self) -> Asking:
        """Return what `ask` stands for."""
        return ASKING[self.ask]

    def max_calls(self, *, asked: int) -> int:
        """Return the maximum calls of one episode with `asked` operators that a model carries out.

        A step makes one call, or two where rewrites are asked at once; an answer comes before or after the steps, and a
        round trip makes one more call for every answer.
        """
        steps = self.max_episode_steps
        answers = min(self.asking.max_answers(steps), self.max_asks or steps + 1)
        calls = min(answers + steps * (asked > 0), 1 + steps * (1 + self.asking.asks_rewrites))
        return calls + answers * (self.answer == "round_trip")
