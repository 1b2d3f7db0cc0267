"""A model server for tests, benchmarks and plug-in authors: Ollama's and OpenAI's routes over real HTTP, no model.

    with start_server({"upper": lambda request: request.messages[-1].content.upper()}, num_parallel=4) as server:
        requests.post(f"{server.url}/api/chat", json=...)

It has slots and a queue, loads, contexts, latency and faults as a server has them; `qm test-server` is the same from a
command line. What is offered here loads no numpy.
"""

from query_mutator.testing.calls import KINDS, Echo, FaultPlan, Latency, PromptError, ServerSettings, TextModel
from query_mutator.testing.routes import StubServer, start_server

__all__ = [
    "KINDS",
    "Echo",
    "FaultPlan",
    "Latency",
    "PromptError",
    "ServerSettings",
    "StubServer",
    "TextModel",
    "start_server",
]
