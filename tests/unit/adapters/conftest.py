"""GymVecEnv over CartPole and over our environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from query_mutator.adapters.sb3 import GymVecEnv
from query_mutator.llm.client import Client
from tests.unit.adapters.carts import NUM_ENVS, SAME_STEP, MakeTask, Vector, cart_pole, ours


@pytest.fixture(params=[SyncVectorEnv, AsyncVectorEnv])
def vector(request: pytest.FixtureRequest) -> Vector:
    kind: Vector = request.param
    return kind


@pytest.fixture
def carts(vector: Vector) -> Iterator[GymVecEnv]:
    envs = GymVecEnv(vector([cart_pole] * NUM_ENVS, autoreset_mode=SAME_STEP))
    yield envs
    envs.close()


@pytest.fixture
def questions(tiny_task: MakeTask, tiny_client: Client) -> Iterator[GymVecEnv]:
    envs = GymVecEnv(ours(tiny_task, tiny_client))
    yield envs
    envs.close()
