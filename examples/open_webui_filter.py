"""
title: Query Mutator
description: Rewrites a question before it is sent, and shows what is asked instead.
version: 0.1.0
requirements: httpx
"""

# A filter function of Open WebUI (Admin Panel > Functions > +). It needs `qm serve` with a policy that rewrites before
# it asks, as `qm plan` finds; the chat's model can be any, because only the question is changed.

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from pydantic import BaseModel

Emit = Callable[[dict[str, Any]], Awaitable[None]]


class Filter:
    class Valves(BaseModel):
        url: str = "http://127.0.0.1:11435"
        api_key: str = ""
        timeout_s: float = 30.0

    def __init__(self) -> None:
        self.valves = self.Valves()

    async def inlet(
        self, body: dict[str, Any], __event_emitter__: Emit | None = None, __metadata__: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the request with the rewritten question; as it is if that fails, and for the page's own tasks."""
        messages = body.get("messages") or []
        is_question = len(messages) > 0 and messages[-1].get("role") == "user" and not (__metadata__ or {}).get("task")
        if not is_question or not isinstance(messages[-1].get("content"), str):
            return body
        headers = {"Authorization": f"Bearer {self.valves.api_key}"} if self.valves.api_key else {}
        try:
            async with httpx.AsyncClient(timeout=self.valves.timeout_s, headers=headers) as client:
                reply = await client.post(f"{self.valves.url}/qm/rewrite", json={"messages": messages})
                reply.raise_for_status()
        except httpx.HTTPError as error:
            await _show(__event_emitter__, f"Not rewritten: {error}")
            return body
        found = reply.json()
        if found["question"] == messages[-1]["content"]:
            return body
        await _show(__event_emitter__, f"Asking: {found['question']}")
        return {**body, "messages": [*messages[:-1], {**messages[-1], "content": found["question"]}]}


async def _show(emit: Emit | None, text: str) -> None:
    if emit is not None:
        await emit({"type": "status", "data": {"description": text, "done": True}})
