"""The questions as tasks: what the policy gets, and how the submitted answer is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from query_mutator.encoder import CachedEncoder
from query_mutator.errors import UsageError
from query_mutator.rewards import Evidence, WeightedReward
from query_mutator.session.judging import make_reward
from query_mutator.session.models import encoder_of
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.models import ModelSettings
from query_mutator.types import CALL_PRICE, Question, Reward
from query_rewriting.actions import instructions
from query_rewriting.record import INFO, metrics_of
from query_rewriting.settings import ModelsConfig, QuestionsConfig
from query_rewriting.target import Target

__all__ = ["QueryRewritingConfig", "QueryRewritingTask", "QueryRewritingTaskset"]

REWARD = "reward"


class QueryRewritingData(vf.TaskData):
    """A question with its gold, which only the reward reads; `target` names the weights that are asked."""

    question_id: str
    dataset: str
    target: str
    encoder: str
    accept: tuple[str, ...] = ()
    reference: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def question(self) -> Question:
        """Return the question with gold."""
        return Question(
            id=self.question_id, text=self.prompt_text, accept=self.accept, reference=self.reference, tags=self.tags
        )


class QueryRewritingState(vf.State):
    """The target of a live rollout, for its harness."""

    target: Any = None


class QueryRewritingTaskConfig(vf.TaskConfig):
    """How answers are scored; `vf-replay` takes other values for saved traces."""

    reward: str = ""
    """Weights of the parts of the score, as right=0.7,similarity=0.2; by default those of the dataset."""
    call_price: float = Field(CALL_PRICE, ge=0)
    """Subtracted from the reward for each request to the target or the rewriter."""


class QueryRewritingTask(vf.Task[QueryRewritingData, QueryRewritingState, QueryRewritingTaskConfig]):
    """One question. A rollout in which a call failed is not scored: it has an error and no reward."""

    target: Target | None = None

    @property
    def key(self) -> str:
        """Return the dataset and the question's id."""
        return f"{self.data.dataset} {self.data.question_id}"

    async def setup(self, trace: vf.Trace) -> None:
        """Give the harness the target."""
        trace.state.target = self.target

    async def score(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> None:
        """Score the submitted answer from its text, so that saved traces are scored again without a call."""
        if not self.scoring_deferred:
            trace.info[INFO][REWARD] = asdict(await asyncio.to_thread(self._reward, trace))
        await super().score(trace, runtime)

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """Return the score of the submitted answer, the weighted mean of its parts."""
        return float(trace.info[INFO][REWARD]["score"])

    @vf.reward
    async def calls(self, trace: vf.Trace) -> float:
        """Return the price of the requests to target and rewriter, below 0."""
        return -self.config.call_price * sum(trace.info[INFO]["requests"].values())

    @vf.metric
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        """Return every part of the score, unweighted."""
        return dict(trace.info[INFO][REWARD]["parts"])

    @vf.metric
    async def counts(self, trace: vf.Trace) -> dict[str, float]:
        """Return what the rollout asked."""
        return metrics_of(trace)

    def _reward(self, trace: vf.Trace) -> Reward:
        submitted = trace.info.get(INFO, {}).get("submitted")
        if submitted is None:
            raise UsageError(
                "no answer was submitted; play this taskset with its own harness or query-rewriting-replay"
            )
        question = self.data.question
        texts = [question.text, submitted["text"], submitted["answer"], *filter(None, [question.reference])]
        vectors = [*self._encoder.encode(texts), None]
        return reward_of(self.data.dataset, self.config)(
            Evidence(
                question=question,
                rewrite=submitted["text"],
                answer=submitted["answer"],
                question_vector=vectors[0],
                rewrite_vector=vectors[1],
                answer_vector=vectors[2],
                reference_vector=vectors[3],
            )
        )

    @property
    def _encoder(self) -> CachedEncoder:
        """Return the target's encoder; of a saved trace, the encoder of the same name."""
        if self.target is not None:
            return self.target.models.encoder
        return encoder_of(ModelSettings(encoder=self.data.encoder), None, light=True)


def reward_of(dataset: str, config: QueryRewritingTaskConfig) -> WeightedReward:
    """Return the reward that a config names; UsageError for an unknown part, and for one that asks a model."""
    reward = make_reward(TaskSettings(dataset=dataset, reward=config.reward))
    if reward.asking:
        raise UsageError(f"--env.taskset.task.reward {config.reward}: a model judges by --env.taskset.task.judges here")
    return reward


class QueryRewritingConfig(QuestionsConfig):
    """Which questions are asked, of which target."""

    split: Literal["train", "validation", "test"] = "train"
    """Part of the questions; test is held out from Query Mutator's training."""
    max_steps: int = Field(8, ge=1)
    """Actions of an episode, and at most as many replies of the policy."""
    max_requests: int | None = Field(None, ge=1)
    """Requests of the whole run to target and rewriter, retries included; later calls fail."""
    models: ModelsConfig = ModelsConfig()
    """Target and rewriter, and how calls reach them."""
    task: QueryRewritingTaskConfig = QueryRewritingTaskConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise a ValueError for a value that Query Mutator does not take."""
        ModelSettings(**self.models.model_dump())
        reward_of(self.dataset, self.task)
        return self


class QueryRewritingTaskset(vf.Taskset[QueryRewritingTask, QueryRewritingConfig]):
    """Any question set of Query Mutator."""

    def __init__(self, config: QueryRewritingConfig) -> None:
        super().__init__(config)
        self.target = Target(config)

    def load(self) -> Iterator[QueryRewritingTask]:
        """Yield a task for each question of the split; opens the target."""
        told = instructions(self.target.task)
        for question in getattr(self.target.split, self.config.split):
            data = QueryRewritingData(
                id=question.id,
                prompt=question.text,
                system_prompt=told,
                question_id=question.id,
                dataset=self.config.dataset,
                target=self.target.identity,
                encoder=self.target.models.encoder.name,
                accept=question.accept,
                reference=question.reference,
                tags=question.tags,
            )
            task = QueryRewritingTask(data, self.config.task)
            task.target = self.target
            yield task
