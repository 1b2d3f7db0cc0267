"""Several random replies to one request: of one prefill where the server gives them at once, else one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from query_mutator.llm.http_server import _refused_fields
from query_mutator.llm.stack import build_client
from query_mutator.llm.store import Store
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest, Completion, ErrorInfo

REQUEST = ChatRequest.user("Say a number.", model="dice", temperature=0.7, seed=5, samples=3)
SAMPLES = [replace(REQUEST, sample=number) for number in range(3)]


def dice(request: ChatRequest) -> str:
    """Return a reply that depends on the seed."""
    return f"It is {request.seed}."


@pytest.mark.parametrize(("backend", "requests"), [("openai", 1), ("ollama", 3)])
def test_samples_are_kept_apart_and_cost_one_prompt_where_they_can(backend: str, requests: int) -> None:
    with start_server({"dice": dice}, num_parallel=3, latency_ms=30) as server:
        stack = build_client(server.url, backend=backend, cache="off")
        stack.keep(Store(None))
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(stack.client.complete, SAMPLES))
        again = [stack.client.complete(replace(one, samples=1)) for one in SAMPLES]
        stack.close()
        stats = server.stats()
    assert len({reply.text for reply in found}) == 3
    assert [reply.text for reply in again] == [reply.text for reply in found]
    assert [reply.attempts for reply in again] == [0, 0, 0]
    assert [count for route, count in stats["routes"].items() if "chat" in route] == [requests]
    assert stats["max_in_service"] == 1  # the others follow the first, whose prompt is in the server's cache by then
    assert stack.client.totals.calls == requests


def test_a_server_that_refuses_several_is_asked_for_one_at_a_time() -> None:
    refused = ErrorInfo(kind="server", message="n > 1 is not supported", status=400)
    assert _refused_fields({"n": 3, "seed": 1}, refused) == ("n",)


def test_a_sample_that_failed_is_asked_for_again_by_the_others() -> None:
    asked = []

    def once(request: ChatRequest) -> str | Completion:
        asked.append(request.seed)
        return "" if len(asked) == 1 else dice(request)

    with start_server({"dice": once}, num_parallel=3) as server:
        stack = build_client(server.url, backend="ollama", cache="off")
        stack.keep(Store(None))
        first = stack.client.complete(SAMPLES[0])
        others = [stack.client.complete(one) for one in SAMPLES]
        stack.close()
    assert not first.ok
    assert [reply.text for reply in others] == ["It is 5.", "It is 6.", "It is 7."]
