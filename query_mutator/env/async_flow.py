"""Drive a flow with asyncio: its calls are awaited, its embeddings are computed in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from query_mutator.encoder import Encoder
from query_mutator.env.flow import Encode, Flow, Prepare
from query_mutator.env.scheduling import CallAttempts, encoded
from query_mutator.llm.retry import RetryPolicy
from query_mutator.types import ChatRequest, Completion

__all__ = ["run_flow_async"]


async def run_flow_async(
    flow: Flow,
    *,
    complete: Callable[[ChatRequest], Awaitable[Completion]],
    encoder: Encoder,
    retry_policy: RetryPolicy,
) -> Any:
    """Run one flow and return its result; `complete` makes a call, and failed ones are retried by the policy.

    A cancelled task closes the flow; whether its call in flight ends at once is up to `complete`.
    """
    result: Any = None
    try:
        while True:
            try:
                need = flow.send(result)
            except StopIteration as stop:
                return stop.value
            if isinstance(need, Prepare):
                result = None
            elif isinstance(need, Encode):
                result = await asyncio.to_thread(encoded, encoder, need.texts)
            else:
                result = await _with_retries(CallAttempts(need, retry_policy, None), complete)
    finally:
        flow.close()


async def _with_retries(tries: CallAttempts, complete: Callable[[ChatRequest], Awaitable[Completion]]) -> Completion:
    while True:
        request, _ = tries.next()
        outcome = tries.ended(request, await complete(request))
        delay_s = tries.delay_s(outcome)
        if delay_s is None:
            return tries.result(outcome)
        await asyncio.sleep(delay_s)
