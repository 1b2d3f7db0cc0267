"""What one client of the HTTP layer may take from others: connections, memory for bodies, replies nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from query_mutator.embedded.http import TEXT_TYPE, Clients, Connection, Request, Response

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n"


async def answer(request: Request, _: Connection) -> Response:
    """Reply with the number of bytes of the body, once it has arrived."""
    if request.incoming is not None:
        await request.incoming.arrived(1_000_000)
    return Response(200, str(request.held_bytes).encode(), TEXT_TYPE)


def serve(
    scenario: Callable[[Callable[..., Awaitable[Client]]], Awaitable[None]], *, handler: Any = answer, **settings: Any
) -> None:
    """Run a scenario with a function that connects a client, which may send bytes at once."""

    async def run() -> None:
        clients = Clients(handler=handler, request_timeout_s=30.0, **settings)
        server = await asyncio.get_running_loop().create_server(clients.connect, "127.0.0.1", 0)

        async def connect(sent: bytes = b"") -> Client:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writers.append(writer)
            writer.write(sent)
            await asyncio.sleep(0.02)  # for the server to read it
            return reader, writer

        writers: list[asyncio.StreamWriter] = []
        async with asyncio.timeout(20), server:
            try:
                await scenario(connect)
            finally:
                for writer in writers:
                    writer.close()

    asyncio.run(run())


async def reply_of(client: Client) -> bytes:
    """Return the status and the body of the next reply."""
    head = await client[0].readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head.split()[1] + b" " + await client[0].readexactly(length)


def test_the_oldest_connection_without_a_request_gives_way_to_a_new_one() -> None:
    async def scenario(connect: Callable[..., Awaitable[Client]]) -> None:
        halves = [await connect(GET[:9]) for _ in range(3)]
        for _ in range(2):
            assert await reply_of(await connect(GET)) == b"200 0"
        assert [await half[0].read() for half in halves[:2]] == [b"", b""]  # closed
        halves[2][1].write(GET[9:])
        assert await reply_of(halves[2]) == b"200 0"

    serve(scenario, max_connections=3)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_the_largest_half_body_gives_way_to_a_smaller_one(is_incremental: bool) -> None:
    async def scenario(connect: Callable[..., Awaitable[Client]]) -> None:
        small, large, middle = [await connect(POST % (size + 1) + b"x" * size) for size in (100, 600, 200)]
        assert await reply_of(await connect(POST % 300 + b"x" * 300)) == b"200 300"
        assert (await reply_of(large)).startswith(b"503 ")
        for client, length in ((small, b"101"), (middle, b"201")):
            client[1].write(b"x")
            assert await reply_of(client) == b"200 " + length
        assert (await reply_of(await connect(POST % 2000 + b"x" * 2000))).startswith(b"503 ")  # larger than all memory

    serve(scenario, is_incremental=is_incremental, max_bodies_bytes=1000)


def test_a_finished_request_leaves_no_memory_behind() -> None:
    requests: list[Request] = []

    async def handler(request: Request, connection: Connection) -> Response:
        requests.append(request)
        return await answer(request, connection)

    async def scenario(connect: Callable[..., Awaitable[Client]]) -> None:
        client = await connect(POST % 100 + b"x" * 100)
        assert await reply_of(client) == b"200 100"
        await asyncio.sleep(0.02)
        (request,) = requests
        requests.clear()
        assert list(referrers_of(request)) == []

    serve(scenario, handler=handler, is_incremental=True)


def referrers_of(request: Request) -> Iterator[object]:
    """Yield the connections that hold a request."""
    import gc

    return (found for found in gc.get_referrers(request) if isinstance(found, Connection))


def test_a_client_that_reads_no_reply_gets_no_other_one() -> None:
    answered = 0

    async def handler(request: Request, _: Connection) -> Response:
        nonlocal answered
        answered += 1
        return Response(200, b"x" * 1_000_000, TEXT_TYPE)

    async def scenario(connect: Callable[..., Awaitable[Client]]) -> None:
        client = await connect(GET * 100)
        await asyncio.sleep(0.3)
        before = answered
        assert before < 50  # the rest would be 50 MB in the server's memory
        for _ in range(100):
            assert await reply_of(client) == b"200 " + b"x" * 1_000_000
        assert answered == 100

    serve(scenario, handler=handler)


def test_a_client_that_reads_nothing_is_closed() -> None:
    async def handler(request: Request, connection: Connection) -> None:
        stream = connection.stream(request, TEXT_TYPE)
        while True:
            stream.write(b"x" * 1_000_000)
            await connection.drain()

    async def run() -> None:
        clients = Clients(handler=handler, request_timeout_s=0.4, idle_timeout_s=0.4)
        server = await asyncio.get_running_loop().create_server(clients.connect, "127.0.0.1", 0)
        async with asyncio.timeout(20), server:
            clients.keep_sweeping()
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with closing(writer):
                writer.write(GET)
                await asyncio.sleep(0.1)
                assert clients.connections
                while clients.connections:
                    await asyncio.sleep(0.02)

    asyncio.run(run())
