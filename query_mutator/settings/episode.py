"""Settings of an episode, and all that making a task takes."""

from __future__ import annotations

from dataclasses import dataclass

from ppo.config import ComputeConfig
from query_mutator.bounds import Few, Group, Parallel, Prose, Weight
from query_mutator.settings.models import Sampling
from query_mutator.settings.questions import Questions, Reward, ValidationFold
from query_mutator.types import CALL_PRICE, AnswerRule, AskRule


@dataclass(frozen=True, kw_only=True)
class Operators(Group):
    """Operators and forms that the policy may choose."""

    operators: str = ""
    """Rewrite operators that the policy may choose, as a,b,c, or none; by default rewrites by the mutator model that
    keep the meaning."""
    forms: str = "question_answer,short_answer,statement,one_sentence,restate,examples"
    """Forms of the request that the policy may choose, as a,b,c, all or none."""
    domain: Prose = "general knowledge"
    """Subject of the questions, for the operators that mention it."""


@dataclass(frozen=True, kw_only=True)
class CallRules(Group):
    """Calls of an episode, and their price."""

    max_asks: Few | None = None
    """Maximum questions to the target in an episode with --ask form; 1: no answer is seen before the end."""
    call_price: tuple[Weight, ...] = (CALL_PRICE,)
    """Subtracted from the reward for every model call; of several prices each episode draws one and sees it."""
    skip_unchanged: bool = True
    """Make no call for a rewrite whose local test says that it would change nothing (no misspelt word, no slang)."""


@dataclass(frozen=True, kw_only=True)
class Episode(CallRules):
    """The rules of an episode."""

    answer: AnswerRule = "best"
    """Answer that an episode submits: best fits its question, vote is the most frequent one, learned the one that is
    most likely right, as learned from --answer-calls graded answers."""
    ask: AskRule = "every_step"
    """When the target is asked: after every rewrite, or when the policy decides to or chooses a form (form)."""
    max_episode_steps: Few = 5
    """Steps after which an episode ends."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Questions, Operators, Reward, Episode, Sampling, ComputeConfig):
    """Questions and rules of an episode: what `make_task` takes."""

    embedding_dims: Parallel = 6
    """Principal components of the embeddings in an observation."""
    validation_fold: ValidationFold = 0
    """Fifth of the training questions, by target, for periodic evaluations only; none: all are learned from."""
