"""One session of the server: an environment of `rl_query_mutator_env`, its actions by name, its infos as observations.

OpenEnv runs each session in a thread of its own. All sessions share the models and one limit on calls in flight. A step
with a call that failed for good is visible: `valid` is False, the reward None.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

from query_mutator import __version__
from query_mutator.errors import QueryMutatorError
from query_mutator.operators import GUARDS, OPERATORS, LocalOperator, OperatorContext
from query_rewriting_env.models import (
    REWRITE,
    QueryRewritingAction,
    QueryRewritingObservation,
    QueryRewritingState,
)
from rl_query_mutator_env import QueryMutationEnv, make_env

__all__ = ["Environments", "QueryRewritingEnvironment"]

NO_EPISODE = (
    "action: no episode is in progress; call reset first. Over HTTP each request has an environment of its own: play "
    "over the WebSocket /ws, as EnvClient does"
)

_words = threading.local()  # the wording of the step that this thread carries out


def _own_words(question: str, context: OperatorContext) -> str:
    return getattr(_words, "text", "") or question


@contextmanager
def _saying(text: str) -> Iterator[None]:
    """Let the operator `rewrite` say a text."""
    _words.text = text
    try:
        yield
    finally:
        _words.text = ""


OPERATORS.add(
    REWRITE, LocalOperator(name=REWRITE, summary="The client's own wording.", function=_own_words, guards=GUARDS)
)


class Environments:
    """Environments with the same settings, keywords of `make_env`: they share the models, and are used again."""

    def __init__(self, *, operators: str = "clean", **settings: Any) -> None:
        self._settings = {"on_failure": "mask", "operators": f"{operators},{REWRITE}", **settings}
        self._made: list[QueryMutationEnv] = []
        self._free: list[QueryMutationEnv] = []
        self._lock = threading.Lock()
        self.give_back(self.take())  # the first one opens the models

    def take(self) -> QueryMutationEnv:
        """Return an environment that nobody uses."""
        with self._lock:
            if not self._free:
                self._made.append(make_env(env_id=len(self._made), **self._settings))
                return self._made[-1]
            return self._free.pop()

    def give_back(self, env: QueryMutationEnv) -> None:
        """Take back an environment that is not used any more."""
        with self._lock:
            self._free.append(env)

    def close(self) -> None:
        """Close all environments, and with the last one the models."""
        for env in self._made:
            env.close()


class QueryRewritingEnvironment(Environment[QueryRewritingAction, QueryRewritingObservation, QueryRewritingState]):
    """One session; a failed call is an observation, never an exception or a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, environments: Environments) -> None:
        super().__init__()
        self._environments = environments
        self._env: QueryMutationEnv | None = environments.take()
        self._state = QueryRewritingState()
        self._info: dict[str, Any] | None = None  # of the episode in progress

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, question: int | None = None, **kwargs: Any
    ) -> QueryRewritingObservation:
        """Begin an episode on a question: the next in random order, or that of an index.

        Returns an error, and no episode, where no first answer was got. ValueError for a question that does not exist.
        """
        if self._env is None:
            return _nothing("action: the session was idle for too long; connect again")
        self._info = self._state.episode_id = None
        try:
            _, self._info = self._env.reset(seed=seed, options=None if question is None else {"question": question})
        except QueryMutatorError as error:
            self._state.failed_resets += 1
            return _nothing(f"{getattr(error, 'kind', 'request')}: {error}")
        self._state.episode_id = episode_id or str(uuid.uuid4())
        self._state.step_count, self._state.episode_return = 0, 0.0
        self._state.episodes += 1
        return self._observation()

    def step(
        self, action: QueryRewritingAction, timeout_s: float | None = None, **kwargs: Any
    ) -> QueryRewritingObservation:
        """Take one action; an invalid one takes no step."""
        if self._env is None or self._info is None:
            return _nothing(NO_EPISODE)
        names, text = self._env.task.actions, action.text.strip()
        if action.name not in names or (action.name == REWRITE) != bool(text):
            self._state.invalid_actions += 1
            known = f"one of {', '.join(names)}, and rewrite alone with a text"
            return self._observation(error=f"action: give {known}, not {action.name[:60]!r} with {text[:60]!r}")
        self._state.steps += 1
        self._state.step_count += 1
        try:
            with _saying(text):
                _, reward, *ends, info = self._env.step(names.index(action.name))
        except QueryMutatorError as error:  # as --backend recorded raises for a wording that was not recorded
            self._info = None
            self._state.failed_steps += 1
            return _nothing(f"request: {error}")
        self._info = info
        found = self._observation(reward=reward) if info["valid"] else self._observation(error=self._last_error())
        if info["valid"]:
            self._state.episode_return += reward
        else:
            self._state.failed_steps += 1
        if any(ends):
            self._info, found.done, found.success = None, True, float(info["success"])
        return found

    @property
    def state(self) -> QueryRewritingState:
        """Return the counts of the session."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return name, description and version."""
        about = "Rewrite an ordinary question until a language model answers it better."
        return EnvironmentMetadata(name="query_rewriting_env", description=about, version=__version__)

    def close(self) -> None:
        """End the session: the server calls this when it was idle for too long, or its client has left."""
        if self._env is not None:
            self._environments.give_back(self._env)
            self._env = None

    def _last_error(self) -> str:
        error = self._env.last_error if self._env is not None else None
        return f"{error.kind}: {error.message}" if error is not None else "request: the step failed"

    def _observation(self, *, reward: float | None = None, error: str = "") -> QueryRewritingObservation:
        """Return the current state of the episode."""
        assert self._env is not None
        assert self._env.episode is not None
        assert self._info is not None
        episode, said = self._env.episode, self._info["_text"]
        allowed = dict(zip(self._env.task.actions, map(bool, self._info["action_mask"]), strict=True))
        return QueryRewritingObservation(
            valid=not error,
            error=error,
            reward=reward,
            question_id=said["question_id"],
            question=self._env.task.questions[episode.index].text,
            text=episode.text,
            form=episode.form,
            answer=said["answer"],
            action_mask={**allowed, REWRITE: True},
            calls=int(self._info["calls"]),
        )


def _nothing(error: str) -> QueryRewritingObservation:
    """Return what is observed outside an episode."""
    return QueryRewritingObservation(valid=False, done=True, error=error)
