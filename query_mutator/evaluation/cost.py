"""The maximum cost of an evaluation, known before it starts, and the questions that fit into a number of calls.

Calls that methods share are made once, and most episodes end early: the calls that are made are usually half of this.
Retries of failed calls come in addition. `power_in_words` says what that many questions can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from query_mutator.data.split import target_key
from query_mutator.errors import UsageError
from query_mutator.plan.choose import MIN_QUESTIONS
from query_mutator.plan.race import MIN_CALLS
from query_mutator.stats import (
    CORRELATION,
    DISCORDANT,
    design_effect,
    detectable_difference,
)
from query_mutator.types import Question

RANKING_QUESTIONS = 120  # of training, on which operators are compared
SEARCH_SHARE = 1 / 3  # of bounded calls, for the plan search
PLAN_CALLS = 12  # of a plan for one question, before it is found


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """The questions of an evaluation and its calls at most."""

    num_test: int
    num_guard: int
    num_train: int
    num_operators: int  # and forms
    num_asked: int  # of them, those that a model carries out
    episode_calls: int  # of the policy
    asking: int = 0  # parts of the reward that ask a model, about each answer but those to the guard's requests
    search_calls: int = 0  # of the plan search
    plan_calls: int = PLAN_CALLS  # of the plan for one question, if there is a search
    num_models: int = 1  # that answer

    @property
    def num_ranking(self) -> int:
        """Return the number of training questions on which operators are compared."""
        return min(RANKING_QUESTIONS, self.num_train)

    @property
    def per_request(self) -> int:
        """Return the calls for a request that should be refused: of policy, random and best_of_k, and of the plan.

        best_of_k, which shares its first ones, exceeds the policy's calls by one at most. Several models are asked
        alone, and as the policy asks them for another question.
        """
        several = self.episode_calls + self.num_models if self.num_models > 1 else 0
        return 3 * self.episode_calls + 1 + several + (self.plan_calls if self.search_calls else 0)

    @property
    def per_question(self) -> int:
        """Return the calls for a question, those of judges included."""
        return (1 + self.asking) * self.per_request

    @property
    def calls(self) -> int:
        """Return the calls at most."""
        per_ranked = (1 + self.asking) * (1 + self.num_operators + self.num_asked)
        asked = self.num_test * self.per_question + self.num_guard * self.per_request
        return asked + self.num_ranking * per_ranked + self.search_calls

    def within(self, max_calls: int | None) -> EvaluationCost:
        """Return the largest evaluation that fits into a number of calls; all sets shrink by the same share.

        The plan search gets a third of the calls, or more where the sets leave it more: few calls find no plan. It is
        left out when it would be too small. Training questions shrink further if fewer held-out ones than a verdict
        needs would fit. UsageError when not even one question of each set fits.
        """
        if max_calls is None or self.calls <= max_calls:
            return self
        others = self.calls - self.search_calls
        search = min(self.search_calls, max(int(SEARCH_SHARE * max_calls), max_calls - others))
        share = (max_calls - search) / others
        guard, train = (int(share * count) or min(1, count) for count in (self.num_guard, self.num_ranking))
        search = search if search >= MIN_CALLS else 0
        smallest = [
            replace(self, num_test=1, num_guard=min(most, guard), num_train=min(most, train), search_calls=search_calls)
            for most, search_calls in ((max(guard, train), search), (MIN_QUESTIONS, search), (1, 0))
        ]
        found = [one.filled(max_calls, available=self.num_test) for one in smallest if one.calls <= max_calls]
        if not found:
            least = smallest[-1].calls
            raise UsageError(
                f"--eval-calls {max_calls} does not allow one question of each method; give at least {least}"
            )
        return next((one for one in found[:2] if one.num_test >= min(MIN_QUESTIONS, self.num_test)), found[0])

    def filled(self, max_calls: int, *, available: int) -> EvaluationCost:
        """Return the evaluation on as many of the `available` questions as the calls allow, at least one."""
        left = max_calls - replace(self, num_test=0).calls
        return replace(self, num_test=min(available, max(1, left // self.per_question)))

    def announced(self, bound: int, *, available: int) -> str:
        """Return what is said before the first call, of an evaluation on some of the `available` questions."""
        of = "" if self.num_test == available else f" of {available}"
        parts = [f"at most {bound:,} model calls for {self.num_test}{of} questions"]
        if self.num_guard:
            requests = f"{self.num_guard} request{'s' * (self.num_guard > 1)} that should be refused"
            parts.append(f"{self.num_guard * self.per_request:,} of them for {requests}")
        if self.search_calls:
            parts.append(f"{self.search_calls:,} of them to search for a plan")
        return f"{', '.join(parts)}; fewer where shared"


def power_in_words(questions: Sequence[Question]) -> str:
    """Return the smallest difference that a comparison on held-out questions shows."""
    targets = [target_key(question) for question in questions]
    design = design_effect(targets, correlation=CORRELATION)
    least = detectable_difference(len(questions), discordant=DISCORDANT, design=design)
    one, n = len(questions) == 1, len(questions)
    few = f"{'is' if one else 'are'} too few to show a difference"
    shown = f"can show differences of {100 * least:.1f} points or more" if least <= 1 else few
    return (
        f"{n} held-out question{'' if one else 's'} {shown} (80 % power at the 5 % level, if two methods "
        f"differ on {DISCORDANT:.0%} of the questions, with correlation {CORRELATION:.2g} within a target)"
    )
