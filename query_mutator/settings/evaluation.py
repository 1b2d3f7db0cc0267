"""Comparisons with the baselines, and when a run stops because calls fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from ppo.fields import Ge, Le
from query_mutator.bounds import Count, CountOrNone, Group, Share


@dataclass(frozen=True, kw_only=True)
class FailureRate(Group):
    """The limit of failed calls."""

    max_failure_rate: Share = 0.2
    """Stop with exit code 3, training with a checkpoint, when more than this share of recent steps, or of the questions
    of an evaluation, failed for good."""


@dataclass(frozen=True, kw_only=True)
class CallBudget(Group):
    """The limit of calls per question in use."""

    budget: Annotated[float, Ge(1), Le(10_000)] | None = None
    """Mean calls per question: the plan that is right most often within them is saved, or a policy with the price of a
    call at which it makes as many; without it --call-price decides."""


@dataclass(frozen=True, kw_only=True)
class PeriodicEvaluation(Group):
    """Evaluations during training."""

    eval_interval: Annotated[CountOrNone | None, Parameter(alias="--validation-interval")] = None
    """Updates between two evaluations on validation questions; by default about ten per run, 0 for none."""
    eval_questions: Annotated[Count, Parameter(alias="--validation-questions")] = 120
    """Maximum validation questions of a periodic evaluation; the same ones each time."""
    evaluate: bool = True
    """Compare the policy with the baselines on all held-out questions at the end."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Group):
    """The comparison with the baselines on held-out questions."""

    eval_calls: Count | None = None
    """Maximum model calls of the comparison with the baselines, retries aside: of a random sample of the questions,
    the same for all methods."""
    guard: bool = False
    """Ask the bundled requests that should be refused too; with a bundled set of questions they are always asked."""
    answer_calls: Count = 3000
    """Model calls before training whose graded answers teach P(right), for --answer learned."""
    plan_calls: CountOrNone = 3000
    """Model calls to search for the best plan on training questions, a row of that comparison; 0 leaves it out."""
