"""One session of the OpenEnv server: an environment of ours, its actions by name, its infos as observations.

All sessions share one task, one client with one limit, and one pool of threads for calls. A call that failed for good
ends its step as an error: `valid` is False, the reward None.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import replace
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

from query_mutator.adapters.openenv.models import (
    Answer,
    CallError,
    QueryRewritingAction,
    QueryRewritingObservation,
    QueryRewritingState,
)
from query_mutator.adapters.openenv.shared import REWRITE, OwnWords, Shared
from query_mutator.env.async_flow import run_flow_async
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.flow import Flow
from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.registry import check_known
from query_mutator.types import ChatRequest, Completion, ErrorInfo
from query_mutator.version import __version__

__all__ = ["QueryRewritingEnvironment"]

NAME, ABOUT = "query_rewriting_env", "Rewrite an ordinary question until a language model answers it better."
MAX_SHOWN = 60  # characters of a client's text in a message
NO_EPISODE = (
    "no episode is in progress; call reset first. Over HTTP each request has an environment of its own: play over the "
    "WebSocket /ws, as EnvClient does"
)
IDLE = "the session was idle for too long; connect again"


class QueryRewritingEnvironment(Environment[QueryRewritingAction, QueryRewritingObservation, QueryRewritingState]):
    """One session; a failed call is an observation, never an exception or a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared, self._own = shared, OwnWords()
        operators = (*shared.task.operators, self._own)
        self._task = replace(shared.task, operators=operators).with_rules()
        self._env = shared.make(self._task)
        self._state = QueryRewritingState()
        self._failed: Counter[str] = Counter()
        self._number: int | None = None  # from the first reset
        self._is_closed = False

    # --- OpenEnv's interface ---------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> QueryRewritingObservation:
        """Do what `reset_async` does, in a program without an event loop."""
        return asyncio.run(self.reset_async(seed, episode_id, **kwargs))

    def step(
        self, action: QueryRewritingAction, timeout_s: float | None = None, **kwargs: Any
    ) -> QueryRewritingObservation:
        """Do what `step_async` does, in a program without an event loop."""
        return asyncio.run(self.step_async(action, timeout_s, **kwargs))

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question: int | str | None = None,
        **kwargs: Any,
    ) -> QueryRewritingObservation:
        """Begin an episode on a question: the next in random order, or that of an index or id.

        Returns an error, and no episode, where no first answer was got. UsageError for a question that does not exist.
        """
        if self._is_closed:
            return self._without_episode(IDLE)
        options = None if question is None else {"question": self._index(question)}
        if self._number is None:
            self._number = next(self._shared.numbers)
            seed = self._shared.seed + self._number if seed is None else seed
        self._state.episode_id, self._state.step_count, self._state.episode_return = None, 0, 0.0
        error = await self._run(self._env.reset_flow(seed=seed, options=options))
        if isinstance(error, ErrorInfo):
            self._state.failed_resets += 1
            return _failed(error.kind, error.message)
        self._state.episode_id = episode_id or str(uuid.uuid4())
        self._state.episodes += 1
        return self._observation()

    async def step_async(
        self, action: QueryRewritingAction, timeout_s: float | None = None, **kwargs: Any
    ) -> QueryRewritingObservation:
        """Take one action; an invalid one takes no step."""
        engine = self._env.engine
        if engine is None or self._state.episode_id is None or self._env.has_ended or self._is_closed:
            return self._without_episode(IDLE if self._is_closed else NO_EPISODE)
        try:
            number = self._number_of(action)
        except UsageError as problem:
            self._state.invalid_actions += 1
            return self._observation(CallError(kind="action", message=str(problem)))
        self._own.text = action.text.strip() or None
        result = await self._run(self._env.step_flow(number), timeout_s)
        self._own.text = None
        if isinstance(result, ErrorInfo):
            self._count(engine, action.name)
        self._state.steps += 1
        self._state.step_count = engine.episode.steps
        error = result if isinstance(result, ErrorInfo) else self._env.last_error
        if error is not None:
            self._state.failed_steps += 1
            return self._observation(CallError(kind=error.kind, message=error.message))
        self._state.episode_return += result[1]
        return self._observation(reward=result[1])

    @property
    def state(self) -> QueryRewritingState:
        """Return the counts of the session."""
        self._state.failed_calls = dict(self._failed)
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return name, description and version."""
        return EnvironmentMetadata(name=NAME, description=ABOUT, version=__version__)

    def close(self) -> None:
        """End the session: the server calls this when it was idle for too long, or its client has left."""
        self._is_closed = True

    # --- actions and calls -----------------------------------------------------------------------------------------

    def _index(self, question: int | str) -> int:
        """Return the index of a question that was named by index or id."""
        ids = [one.id for one in self._task.questions]
        if isinstance(question, int):
            if not 0 <= question < len(ids):
                raise UsageError(f"question {question} must be from 0 to {len(ids) - 1}")
            return question
        if question not in ids:
            shown = str(question)[:MAX_SHOWN]
            raise UsageError(f"no question has the id {shown!r}; give one, or an index from 0 to {len(ids) - 1}")
        return ids.index(question)

    def _number_of(self, action: QueryRewritingAction) -> int:
        """Return the number of an action; UsageError for an unknown name, a missing text, and one that has no place."""
        check_known("action", action.name, self._task.actions)
        if (action.name == REWRITE) != bool(action.text.strip()):
            raise UsageError(
                f"action {action.name!r} with text {action.text[:MAX_SHOWN]!r}: rewrite alone takes a text"
            )
        return self._task.actions.index(action.name)

    def _count(self, engine: EpisodeEngine, name: str) -> None:
        """Count a step that was cut off, which the environment has not counted; it may be the last."""
        episode = engine.episode
        episode.names.append(name)
        episode.steps += 1
        episode.ended = self._task.rules.ends(name, steps=episode.steps)

    async def _run(self, flow: Flow, timeout_s: float | None = None) -> Any:
        """Return the result of a flow, or the ErrorInfo of a reset that failed or of one that took too long.

        What takes too long is cancelled, and its call is cut: question and answers stay as they were.
        """
        limit_s = min(timeout_s or self._shared.step_timeout_s, self._shared.step_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                return await run_flow_async(
                    flow,
                    complete=self._complete,
                    encoder=self._task.encoder,
                    retry_policy=self._shared.retry_policy,
                )
        except BackendError as error:
            return self._env.last_error or ErrorInfo(kind=error.kind, message=str(error))
        except UsageError as error:  # of recorded replies, for a wording that was not recorded
            self._failed["request"] += 1
            return ErrorInfo(kind="request", message=str(error))
        except TimeoutError:
            self._failed["timeout"] += 1
            return ErrorInfo(kind="timeout", message=f"it took longer than {limit_s:g} s")

    async def _complete(self, request: ChatRequest) -> Completion:
        """Make one attempt at a call, and count it."""
        completion = await complete_in_thread(self._shared.client, request, self._shared.threads)
        self._state.calls += 1
        if completion.error is not None:
            self._failed[completion.error.kind] += 1
        return completion

    # --- observations ----------------------------------------------------------------------------------------------

    def _without_episode(self, message: str) -> QueryRewritingObservation:
        self._state.invalid_actions += 1
        return _failed("action", message)

    def _observation(self, error: CallError | None = None, *, reward: float | None = None) -> QueryRewritingObservation:
        """Return the current episode as the client sees it."""
        engine = self._env.engine
        assert engine is not None
        episode, submitted, asked = engine.episode, engine.submitted, list(engine.episode.known.values())
        question = self._task.questions[episode.index]
        self._state.question_id = question.id
        return QueryRewritingObservation(
            reward=reward,
            done=episode.ended,
            valid=error is None,
            error=error,
            question_id=question.id,
            question=episode.original,
            text=episode.text,
            form=episode.form,
            answers=[Answer(text=one.text, form=one.form, answer=one.answer) for one in asked],
            submitted=None if submitted is None else next(n for n, one in enumerate(asked) if one is submitted),
            success=submitted.reward.success if episode.ended and submitted is not None else None,
            action_mask=self._action_mask(engine),
            guard=engine.guard if error is None else None,
            calls=episode.calls,
            steps_left=self._task.rules.max_episode_steps - episode.steps,
        )

    def _action_mask(self, engine: EpisodeEngine) -> dict[str, bool]:
        """Return every action with whether it is allowed; own words are, unless there is no ask left."""
        most_asks = self._task.rules.max_asks
        own = most_asks is None or len(engine.episode.known) < most_asks
        mask = dict(zip(self._task.actions, engine.action_mask(), strict=True))
        return {name: not engine.episode.ended and allowed for name, allowed in (mask | {REWRITE: own}).items()}


def _failed(kind: str, message: str) -> QueryRewritingObservation:
    """Return the observation where there is no episode."""
    return QueryRewritingObservation(valid=False, error=CallError(kind=kind, message=message), done=True)
