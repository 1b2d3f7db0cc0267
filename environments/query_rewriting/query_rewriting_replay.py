"""The harness without a language model: it plays a policy of Query Mutator, or the question as it is.

--env.agent.harness.id query-rewriting-replay --env.agent.harness.policy runs/latest      (or a .qm file)
"""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

from query_mutator.apply import Limits
from query_mutator.env.engine import EpisodeEngine
from query_rewriting.record import Record, recorded
from query_rewriting.target import CallFailed, Target

__all__ = ["QueryRewritingReplayHarness"]


class QueryRewritingReplayConfig(vf.HarnessConfig):
    """Which policy plays."""

    id: vf.ID = "query-rewriting-replay"
    policy: str = ""
    """Run folder, .pt or .qm file of a policy or a plan; by default the question is asked as it is."""
    max_calls: int | None = None
    """Most calls of an episode; the best answer so far is submitted when it is reached."""


class QueryRewritingReplayHarness(vf.Harness[QueryRewritingReplayConfig]):
    """Plays a saved policy on the taskset's target, which has to have the policy's encoder."""

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
        """Play the episode; CallFailed when a call fails for good, also where an earlier answer could be submitted."""
        target: Target = trace.state.target
        with recorded(trace, played_by=self.config.policy or "original question") as record:
            play = self._play if self.config.policy else _ask_original
            await play(target, data, record)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _play(self, target: Target, data: vf.TaskData, record: Record) -> None:
        policy = await asyncio.to_thread(target.policy, self.config.policy)
        flow = policy.flow(data.prompt_text, limits=Limits(max_calls=self.config.max_calls))
        rewrite = await target.run(flow, record.usage)
        for step in rewrite.steps:
            record.add(step)
        if rewrite.error is not None:
            raise CallFailed(rewrite.error)
        assert rewrite.answer is not None
        record.submit(policy.task, (rewrite.text, rewrite.form), rewrite.answer)


async def _ask_original(target: Target, data: vf.TaskData, record: Record) -> None:
    engine = EpisodeEngine.open(target.task_on(data.id or "", data.prompt_text), 0, observes=False)
    error = await target.run(engine.ask(), record.usage)
    if error is not None:
        raise CallFailed(error)
    assert engine.submitted is not None
    record.submit(engine.task, engine.submitted.asked, engine.submitted.answer)
