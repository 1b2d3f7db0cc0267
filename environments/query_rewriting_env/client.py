"""The typed client of the server, in which each client has a session of its own.

with QueryRewritingEnv(base_url="http://127.0.0.1:8000").sync() as env:
    observation = env.reset(seed=0).observation
    result = env.step(QueryRewritingAction(name="submit"))
"""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from .models import QueryRewritingAction, QueryRewritingObservation, QueryRewritingState

__all__ = ["QueryRewritingAction", "QueryRewritingEnv", "QueryRewritingObservation", "QueryRewritingState"]


class QueryRewritingEnv(EnvClient[QueryRewritingAction, QueryRewritingObservation, QueryRewritingState]):
    """Plays episodes; `reset` takes `seed`, `episode_id` and `question`, the index of one."""

    def _step_payload(self, action: QueryRewritingAction) -> dict[str, Any]:
        return {"name": action.name, "text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[QueryRewritingObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = QueryRewritingObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> QueryRewritingState:
        return QueryRewritingState(**payload)
