"""An episode on the target whose actions a language model names in words."""

from __future__ import annotations

from dataclasses import replace

import verifiers.v1 as vf

from query_mutator.env.engine import EpisodeEngine
from query_mutator.operators import GUARDS, LocalOperator
from query_mutator.session.play import Step
from query_mutator.types import ASK, SUBMIT
from query_rewriting.actions import NOT_READ, REWRITE, actions_in, shown
from query_rewriting.record import Record
from query_rewriting.target import CallFailed, Target

__all__ = ["WordedEpisode"]


class WordedEpisode:
    """Query Mutator's episode, with the policy's own wording as one more operator; its rewrites pass all guards."""

    def __init__(self, target: Target, data: vf.TaskData, record: Record) -> None:
        self._target, self._record = target, record
        self._words = self._note = ""
        own = LocalOperator(name=REWRITE, summary="own words", function=lambda text, _: self._words, guards=GUARDS)
        task = target.task_on(data.id or "", data.prompt_text)
        self._engine = EpisodeEngine.open(replace(task, operators=(*task.operators, own)), 0, observes=False)

    @property
    def steps_left(self) -> int:
        """Return how many actions may follow."""
        return self._engine.task.rules.max_episode_steps - self._engine.episode.steps

    @property
    def has_ended(self) -> bool:
        """Return whether the policy has submitted, or has no action left."""
        return self.steps_left <= 0 or SUBMIT in self._engine.episode.names

    async def take(self, reply: str) -> str:
        """Carry out the actions of a reply, up to one that asks; return what the policy is told."""
        actions = list(actions_in(reply))
        self._note = "" if actions else NOT_READ
        self._record.unread += not actions
        for name, words in actions:
            if name not in self._engine.task.actions:
                self._note = f"There is no {name[:40]!r}.\n"
                break
            await self._act(name, words)
            if name == ASK or self.has_ended:
                break
        episode = self._engine.episode
        return self._note + shown(episode.text, episode.form, episode.answer, self.steps_left)

    async def submit(self) -> None:
        """Note what is submitted; the target is asked if it was never asked."""
        if self._engine.submitted is None:
            await self._act(SUBMIT, "")
        chosen = self._engine.submitted
        assert chosen is not None
        self._record.submit(self._engine.task, chosen.asked, chosen.answer)

    async def _act(self, name: str, words: str) -> None:
        self._words, engine, known = words, self._engine, len(self._engine.episode.known)
        error = await self._target.run(engine.act(engine.task.actions.index(name)), self._record.usage)
        if error is not None:
            raise CallFailed(error)
        episode, guard = engine.episode, engine.guard
        answer = episode.answer if len(episode.known) > known else None
        self._record.add(Step(operator=name, text=episode.text, form=episode.form, answer=answer, guard=guard))
        self._note = "" if guard is None else f"The rewrite was not used: it fails the check {guard!r}.\n"
