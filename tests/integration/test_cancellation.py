"""A task that awaits a call and is cancelled cuts the call: the server stops, and nobody else is hurt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from query_mutator.encoder import Encoder
from query_mutator.env.flow import Call, Flow
from query_mutator.env.scheduling import run_flow_async
from query_mutator.llm.cancellation import complete_in_thread
from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.limit import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.retry import DEFAULT_POLICY
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion
from tests.conftest import Librarian

SLOW = ChatRequest.user("plz sort my list", model="slow")


class Slow(Librarian):
    name = "slow"

    def __init__(self) -> None:
        self.asked = 0

    def reply(self, prompt: str) -> str:
        self.asked += 1
        time.sleep(1.5 if self.asked == 1 else 0.0)
        return super().reply(prompt)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Slow()], num_parallel=1) as found:
        yield found


@pytest.fixture
def client(server: StubServer) -> Iterator[Client]:
    found = Coalesce(Limit(OllamaBackend(server.url, timeout_s=20, pool_size=1), limit=1))
    yield found
    found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def cancelled(task: asyncio.Task[Completion]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_server_is_left_and_the_connection_is_not_used_again(server: StubServer, client: Client) -> None:
    async def leave_and_ask() -> Completion:
        task = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        await cancelled(task)
        await until(lambda: server.stats()["cancelled"] == 1)
        return await complete_in_thread(client, ChatRequest.user("count plz", model="slow"))

    assert asyncio.run(leave_and_ask()).text == "`collections.Counter` is what you want."
    assert server.stats()["calls"] == 1


def test_a_call_that_waits_for_its_turn_is_not_made(server: StubServer, client: Client) -> None:
    async def leave_the_line() -> Completion:
        first = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        second = asyncio.create_task(complete_in_thread(client, ChatRequest.user("count plz", model="slow")))
        await asyncio.sleep(0.1)
        await cancelled(second)
        return await first

    assert asyncio.run(leave_the_line()).ok
    assert server.stats()["routes"]["/api/chat"] == 1


def test_one_who_shares_the_call_asks_again(server: StubServer, client: Client, hash_encoder: Encoder) -> None:
    def asking() -> Flow:
        completion: Completion = yield Call(request=SLOW, site=None)
        return completion

    async def share_and_leave() -> Completion:
        first = asyncio.create_task(complete_in_thread(client, SLOW))
        await until(lambda: server.stats()["in_service"] == 1)
        other = asyncio.create_task(
            run_flow_async(
                asking(),
                complete=lambda request: complete_in_thread(client, request),
                encoder=hash_encoder,
                retry_policy=DEFAULT_POLICY,
            )
        )
        await until(lambda: isinstance(client, Coalesce) and client.shared == 1)
        await cancelled(first)
        found: Completion = await other
        return found

    found = asyncio.run(share_and_leave())
    assert (found.text, found.attempts) == ("`sorted` is what you want.", 1)  # one that was left costs no attempt
