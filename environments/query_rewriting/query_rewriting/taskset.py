"""The questions as tasks: what the policy gets, and how a rollout is rewarded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from query_rewriting.environments import Environments
from query_rewriting.harness import INFO, instructions, metrics_of

__all__ = ["QueryRewritingConfig", "QueryRewritingTask", "QueryRewritingTaskset"]


class QueryRewritingData(vf.TaskData):
    """A question by its place in the dataset; its gold stays in the environment."""

    question: int
    dataset: str


class QueryRewritingState(vf.State):
    """The environments of a live rollout, for its harness."""

    environments: Any = None


class QueryRewritingTaskConfig(vf.TaskConfig):
    """How a rollout is rewarded; `vf-replay` takes another price for saved traces."""

    call_price: float = Field(0.005, ge=0)
    """Subtracted from the reward for each call to the target or the rewriter."""


class QueryRewritingTask(vf.Task[QueryRewritingData, QueryRewritingState, QueryRewritingTaskConfig]):
    """One question. A rollout in which a call failed is not scored: it has an error and no reward."""

    environments: Environments | None = None

    @property
    def key(self) -> str:
        """Return the dataset and the question's id."""
        return f"{self.data.dataset} {self.data.id}"

    async def setup(self, trace: vf.Trace) -> None:
        """Give the harness the environments."""
        trace.state.environments = self.environments

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """Return the score of the submitted answer."""
        return float(trace.info[INFO]["score"])

    @vf.reward
    async def calls(self, trace: vf.Trace) -> float:
        """Return the price of the calls to target and rewriter, below 0."""
        return -self.config.call_price * float(trace.info[INFO]["calls"])

    @vf.metric
    async def counts(self, trace: vf.Trace) -> dict[str, float]:
        """Return whether the answer is right, and what the rollout asked."""
        return metrics_of(trace)


class QueryRewritingConfig(vf.TasksetConfig):
    """Which questions are asked, of which target."""

    dataset: str = "general"
    """A question set of Query Mutator, or a file; its training questions are asked."""
    operators: str = "clean"
    """Operators that the policy may name, as A,B,..."""
    forms: str = "question_answer,statement"
    """Forms of the request that the policy may name, as A,B,..., or none."""
    max_steps: int = Field(8, ge=1)
    """Actions of an episode, and at most as many replies of the policy."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """More keywords of `rl_query_mutator_env.make_env`, such as gguf, ollama_url, target_model, batch_size, reward."""
    task: QueryRewritingTaskConfig = QueryRewritingTaskConfig()


class QueryRewritingTaskset(vf.Taskset[QueryRewritingTask, QueryRewritingConfig]):
    """Any question set of Query Mutator."""

    def __init__(self, config: QueryRewritingConfig) -> None:
        super().__init__(config)
        named = {name: getattr(config, name) for name in ("dataset", "operators", "forms")}
        self.environments = Environments(max_steps=config.max_steps, **named, **config.settings)

    def load(self) -> Iterator[QueryRewritingTask]:
        """Yield a task for each question; opens the models."""
        env = self.environments.take()
        told, questions = instructions(env, self.config.max_steps), env.task.questions
        self.environments.give_back(env)
        for place, question in enumerate(questions):
            data = QueryRewritingData(
                id=question.id,
                prompt=question.text,
                system_prompt=told,
                question=place,
                dataset=self.config.dataset,
            )
            task = QueryRewritingTask(data, self.config.task)
            task.environments = self.environments
            yield task
