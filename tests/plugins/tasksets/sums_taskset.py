"""A taskset of single turns as a user of verifiers writes one: sums, in words; partial credit for being close."""

from __future__ import annotations

import re

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Its rewards."""

    @vf.reward(weight=3)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the sum, whatever stands around it."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [self.data.answer])

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        """Return 1 for a short reply; a reply that complains breaks the reward."""
        if "nonsense" in trace.last_reply:
            raise RuntimeError("this reward is broken")
        return float(len(trace.last_reply) < 40)


class PreparedTask(SumTask):
    """A task that prepares a runtime."""

    async def setup(self, trace: vf.Trace) -> None:
        """Prepare."""


class SumsConfig(vf.TasksetConfig):
    """How many there are, and what makes them unfit."""

    num_tasks: int = 12
    system: str | None = None
    unfit: str = ""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Yields them."""

    def load(self) -> list[SumTask]:
        """Return the tasks."""
        pairs = [(3 * n + 2, 7 * n + 5) for n in range(self.config.num_tasks)]
        return [self._task(f"wat is {a} plus {b} pls", str(a + b)) for a, b in pairs]

    def _task(self, prompt: str, answer: str) -> SumTask:
        kind = PreparedTask if self.config.unfit == "setup" else SumTask
        messages = [vf.UserMessage(content=prompt), vf.AssistantMessage(content="?"), vf.UserMessage(content=prompt)]
        given = messages if self.config.unfit == "turns" else prompt
        return kind(SumData(prompt=given, system_prompt=self.config.system, answer=answer), self.config.task)
