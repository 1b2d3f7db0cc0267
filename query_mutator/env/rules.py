"""The rules of an episode in one record: how long it is, when the target is asked, which answer is submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from query_mutator.registry import check_known
from query_mutator.settings.episode import Episode
from query_mutator.types import CONTROLS, SUBMIT, UNDO, AskRule

__all__ = ["EpisodeRules"]


@dataclass(frozen=True, kw_only=True)
class EpisodeRules(Episode):
    """What may happen in an episode."""

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
