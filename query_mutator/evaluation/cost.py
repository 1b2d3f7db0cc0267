"""What an evaluation costs at most, said before it starts, and the questions that fit into a number of calls.

Calls that methods share are made once, and most episodes end early: the calls that are made are usually half of this.
Retries of failed calls come in addition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from query_mutator.errors import UsageError
from query_mutator.types import AskRule

__all__ = ["RANKING_QUESTIONS", "EvaluationCost", "episode_calls"]

RANKING_QUESTIONS = 120  # of training, on which operators are compared


def episode_calls(ask: AskRule, *, max_episode_steps: int) -> int:
    """Return the most calls of one episode: a rewrite and an answer a step, or one of the two when the policy asks."""
    return 1 + (max_episode_steps if ask == "policy" else 2 * max_episode_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """The questions of an evaluation and its calls at most."""

    num_test: int
    num_guard: int
    num_train: int
    num_operators: int
    episode_calls: int  # of the policy
    more_calls: int = 0  # of further methods for one question, together

    @property
    def num_ranking(self) -> int:
        """Return the number of training questions on which operators are compared."""
        return min(RANKING_QUESTIONS, self.num_train)

    @property
    def per_question(self) -> int:
        """Return the calls for one question: of policy, random and best_of_k, which shares its first ones.

        best_of_k exceeds the policy's calls by one at most.
        """
        return 3 * self.episode_calls + 1 + self.more_calls

    @property
    def calls(self) -> int:
        """Return the calls at most."""
        per_ranked = 1 + 2 * self.num_operators
        return (self.num_test + self.num_guard) * self.per_question + self.num_ranking * per_ranked

    def within(self, most_calls: int | None) -> EvaluationCost:
        """Return the largest evaluation of at most so many calls; all sets of questions shrink by the same share.

        UsageError when not even one question of each set fits.
        """
        if most_calls is None or self.calls <= most_calls:
            return self
        share = most_calls / self.calls
        guard, train = (int(share * count) or min(1, count) for count in (self.num_guard, self.num_ranking))
        smallest = replace(self, num_test=1, num_guard=guard, num_train=train)
        if smallest.calls > most_calls:
            least = replace(self, num_test=1, num_guard=min(1, guard), num_train=min(1, train)).calls
            raise UsageError(
                f"--eval-calls {most_calls} does not allow one question of each method; give at least {least}"
            )
        return replace(smallest, num_test=1 + (most_calls - smallest.calls) // self.per_question)

    def __str__(self) -> str:
        return (
            f"at most {self.calls:,} model calls for {self.num_test} + {self.num_guard} questions, fewer where shared"
        )
