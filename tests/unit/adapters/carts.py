"""Environments for the tests of adapters: CartPole of seven steps, and ours on the tiny server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

MakeTask = Callable[..., Task]
Vector = type[SyncVectorEnv] | type[AsyncVectorEnv]
SAME_STEP = AutoresetMode.SAME_STEP
NUM_ENVS = 3
MAX_STEPS = 7


class Recorded(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the options of the last reset; its picture is black, and needs no pygame."""

    greeting = "hello"

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.options: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.options = options
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8)

    def add(self, one: int, *, other: int) -> int:
        return one + other


def cart_pole() -> gym.Env[Any, Any]:
    return Recorded(TimeLimit(gym.make("CartPole-v1", render_mode="rgb_array").unwrapped, MAX_STEPS))


def ours(tiny_task: MakeTask, client: Client, **settings: Any) -> BatchedQueryMutationEnv:
    task = tiny_task()
    return BatchedQueryMutationEnv([QueryMutationEnv(task, client=client, env_id=i) for i in range(5)], **settings)
