"""The embedded server where the caller's thread runs an event loop, as in a notebook."""

from __future__ import annotations

import asyncio

import requests

from query_mutator.embedded.models import Echo
from query_mutator.embedded.server import start_server


def test_it_starts_and_stops_inside_a_running_loop() -> None:
    async def notebook() -> int:
        server = start_server([Echo()])
        try:
            return requests.get(f"{server.url}/api/version", timeout=10).status_code
        finally:
            server.close()

    assert asyncio.run(notebook()) == 200
