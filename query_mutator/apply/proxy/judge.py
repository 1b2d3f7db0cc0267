"""A model that compares two answers to a question. It is asked in both orders, and only one choice in both counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from query_mutator.apply.proxy.queue import Place
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest

__all__ = ["Choice", "Judge", "JudgeFailed"]

Choice = Literal["first", "second", "tie"]

PROMPT = """\
Two answers to one question follow. Which one helps the person who asked more? A correct answer is better than a wrong \
one, an answer is better than none, and length alone counts for nothing.

Question:
{question}

Answer A:
{a}

Answer B:
{b}

Reply with the letter of the better answer alone: A or B."""
_LETTER = re.compile(r"\b([AB])\b")
_MAX_TOKENS = 16
_AT_ONCE = 4  # calls, in the background


class JudgeFailed(Exception):
    """The judge's call failed."""


class Judge:
    """One model, asked through a client."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self.model = client, model
        self._callers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="qm-judge")

    async def choose(
        self, question: str, first: str, second: str, *, place: Place, options: Mapping[str, Any]
    ) -> Choice:
        """Return the better answer; a tie if the two orders disagree, or a reply names none. JudgeFailed."""
        if first == second:
            return "tie"
        forward = await self._letter(question, first, second, place, options)
        backward = await self._letter(question, second, first, place, options)
        if (forward, backward) == ("A", "B"):
            return "first"
        return "second" if (forward, backward) == ("B", "A") else "tie"

    async def _letter(self, question: str, a: str, b: str, place: Place, options: Mapping[str, Any]) -> str | None:
        prompt = PROMPT.format(question=question, a=a, b=b)
        request = ChatRequest.user(prompt, model=self.model, purpose="judge", max_tokens=_MAX_TOKENS, options=options)
        async with place(self.model):
            reply = await complete_in_thread(self._client, request, self._callers)
        if reply.error is not None:
            raise JudgeFailed(str(reply.error))
        found = _LETTER.search(reply.text)
        return found.group(1) if found else None
