"""The environment: one agent that plays the taskset in this process, and the target, which is closed after a run."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

__all__ = ["QueryRewritingEnv", "QueryRewritingEnvConfig", "load_environment"]


class QueryRewritingEnvConfig(vf.SingleAgentEnvConfig):
    """The config of a single agent; its harness runs no code of a model, so it needs no container."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class QueryRewritingEnv(vf.SingleAgentEnv, vf.Env[QueryRewritingEnvConfig]):
    """A single agent on the taskset `query-rewriting`."""

    async def stop(self) -> None:
        """Close the target's calls and server."""
        await asyncio.to_thread(self.taskset.target.close)  # the embedded server has an event loop of its own


def load_environment(config: vf.EnvConfig | dict[str, object] | None = None) -> vf.Env:
    """Return the environment of a config, by default that of the bundled questions on the default target."""
    given = config.model_dump() if isinstance(config, vf.EnvConfig) else dict(config or {})
    given["taskset"] = {"id": "query-rewriting", **dict(given.get("taskset") or {})}
    return vf.load_environment(vf.resolve_env_config(given))
