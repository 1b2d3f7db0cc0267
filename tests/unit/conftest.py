"""A scripted server and a transport to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from query_mutator.llm.transport import Transport
from tests.scripted_server import ScriptedServer

# How long an example takes says nothing on a busy machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start scripted servers, and close them and their transports afterwards."""
    opened: list[Any] = []

    def start(*script: Any, **settings: Any) -> tuple[ScriptedServer, Transport]:
        server = ScriptedServer(*script)
        transport = Transport(server.url, **{"timeout_s": 10.0, **settings})
        opened.extend([transport, server])
        return server, transport

    yield start
    for thing in opened:
        thing.close()
