"""A v1 environment of the package `verifiers`: a language model rewrites questions for another model.

taskset.py       the questions, the reward, the metrics
harness.py       the policy is a language model: the conversation and its actions
environments.py  environments of rl_query_mutator_env that rollouts share
"""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

from query_rewriting.harness import QueryRewritingHarness
from query_rewriting.taskset import QueryRewritingTaskset

__all__ = ["QueryRewritingEnv", "QueryRewritingHarness", "QueryRewritingTaskset", "load_environment"]


class QueryRewritingEnvConfig(vf.SingleAgentEnvConfig):
    """The config of a single agent; its harness runs no code of a model, so it needs no container."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class QueryRewritingEnv(vf.SingleAgentEnv, vf.Env[QueryRewritingEnvConfig]):
    """A single agent on the taskset `query-rewriting`."""

    async def stop(self) -> None:
        """Close the models of the taskset."""
        await asyncio.to_thread(self.taskset.environments.close)


def load_environment(config: vf.EnvConfig | dict[str, object] | None = None) -> vf.Env:
    """Return the environment of a config, by default that of the bundled questions on the default target."""
    given = config.model_dump() if isinstance(config, vf.EnvConfig) else dict(config or {})
    given["taskset"] = {"id": "query-rewriting", **dict(given.get("taskset") or {})}
    return vf.load_environment(vf.resolve_env_config(given))
