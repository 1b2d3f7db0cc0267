"""The harness of a language model as the policy: it gets the question, replies with actions, sees what they led to."""

from __future__ import annotations

import functools
import ssl
from typing import Any

import openai
import verifiers.v1 as vf
from pydantic import Field

from query_rewriting.actions import asked, examples
from query_rewriting.episode import WordedEpisode
from query_rewriting.record import recorded
from query_rewriting.target import Target

__all__ = ["QueryRewritingHarness", "QueryRewritingHarnessConfig"]


class QueryRewritingHarnessConfig(vf.HarnessConfig):
    """How the policy is asked."""

    id: vf.ID = "query-rewriting"
    max_retries: int = Field(2, ge=0)
    """Retries of a call to the policy's model after a transient failure."""
    examples: bool = True
    """Begin the conversation with two short episodes."""


class QueryRewritingHarness(vf.Harness[QueryRewritingHarnessConfig]):
    """Plays an episode in this process; every call to the policy's model goes through the run's interception."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play until the policy submits or a limit ends it, and then submit; CallFailed when a call fails for good."""
        target: Target = trace.state.target
        messages: list[Any] = [{"role": "system", "content": data.system_prompt}]
        messages += examples(target.task) if self.config.examples else []
        messages.append({"role": "user", "content": asked(data.prompt_text)})
        policy = openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=secret,
            max_retries=self.config.max_retries,
            http_client=openai.DefaultAsyncHttpxClient(verify=_certificates()),
        )
        with recorded(trace, played_by="language model") as record:
            episode = WordedEpisode(target, data, record)
            async with policy:
                for _ in range(episode.steps_left):
                    reply = await _reply(policy, ctx.model, messages, trace)
                    if reply is None:
                        break
                    told = await episode.take(reply.content or "")
                    if episode.has_ended:
                        break
                    messages += [reply.to_dict(), {"role": "user", "content": told}]
            await episode.submit()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates, once: a client of its own for each rollout would read them for a tenth of a second."""
    return ssl.create_default_context()


async def _reply(policy: openai.AsyncOpenAI, model: str, messages: list[Any], trace: vf.Trace) -> Any:
    """Return the policy's message; None when a limit of the rollout refused the call."""
    try:
        completion = await policy.chat.completions.create(model=model, messages=messages)
    except openai.APIStatusError:
        if trace.stop_condition is not None:
            return None
        raise
    return completion.choices[0].message
