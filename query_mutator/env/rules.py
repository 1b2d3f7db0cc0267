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

    @property
    def calls_per_rewrite(self) -> int:
        """Return the maximum calls of a step with an operator."""
        return 2 if self.asks_rewrites else 1

    def max_calls(self, max_episode_steps: int) -> int:
        """Return the maximum calls of an episode: one answer in addition to its steps."""
        return 1 + self.calls_per_rewrite * max_episode_steps

    def max_answers(self, max_episode_steps: int) -> int:
        """Return the maximum answers of an episode: where the policy asks, a rewrite lies between two of them."""
        return 1 + max_episode_steps if self.asks_forms else (max_episode_steps + 1) // 2


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

    @property
    def max_calls(self) -> int:
        """Return the maximum calls of one episode; a round trip makes one more for every answer."""
        answers = self.asking.max_answers(self.max_episode_steps) if self.answer == "round_trip" else 0
        return self.asking.max_calls(self.max_episode_steps) + answers
