"""Environments of `rl_query_mutator_env` that rollouts share, with an operator for the policy's own words."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from query_mutator.operators import GUARDS, OPERATORS, LocalOperator, OperatorContext
from rl_query_mutator_env import QueryMutationEnv, make_env

__all__ = ["REWRITE", "Environments"]

REWRITE = "rewrite"  # the action whose words are the policy's own
THREADS = 64  # rollouts that step at once; the setting `batch_size` bounds the calls in flight

_words = threading.local()  # of the step that this thread carries out


def _own_words(question: str, context: OperatorContext) -> str:
    return getattr(_words, "text", "") or question


OPERATORS.add(
    REWRITE, LocalOperator(name=REWRITE, summary="The policy's own wording.", function=_own_words, guards=GUARDS)
)


class Environments:
    """Environments with the same settings, keywords of `make_env`; they share the models, which the first use opens."""

    def __init__(self, *, operators: str, max_steps: int, **settings: Any) -> None:
        self.max_steps = max_steps  # actions of an episode
        rules = {"on_failure": "raise", "ask": "form", "max_asks": None, "max_episode_steps": max_steps}
        self._settings = {"operators": f"{operators},{REWRITE}", **settings, **rules}
        self._made: list[QueryMutationEnv] = []
        self._free: list[QueryMutationEnv] = []
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def take(self) -> QueryMutationEnv:
        """Return an environment that no rollout uses."""
        with self._lock:
            if self._free:
                return self._free.pop()
            atexit.register(self.close)
            self._made.append(make_env(env_id=len(self._made), **self._settings))
            return self._made[-1]

    def give_back(self, env: QueryMutationEnv) -> None:
        """Take back an environment after a rollout."""
        with self._lock:
            self._free.append(env)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a function that blocks, from a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="query-rewriting")
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def step(self, env: QueryMutationEnv, name: str, words: str) -> dict[str, Any]:
        """Take an action of an environment, and return its info; BackendError for a call that failed for good."""

        def stepped() -> dict[str, Any]:
            _words.text = words
            try:
                return env.step(env.task.actions.index(name))[4]
            finally:
                _words.text = ""

        return await self.run(stepped)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close what was opened, which a later use opens again; idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            made, self._made, self._free = self._made, [], []
        for env in made:
            env.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
