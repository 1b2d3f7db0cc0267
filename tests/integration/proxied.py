"""A proxy for tests: a plan as the policy, in front of any upstream."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import requests

from benchmarks.proxy_modes import running
from query_mutator import operators
from query_mutator.apply import Limits as RewriteLimits
from query_mutator.apply import Rewriter
from query_mutator.apply.proxy.answers import Mode, PolicyAnswerer
from query_mutator.apply.proxy.app import Proxy
from query_mutator.apply.proxy.metrics import Metrics
from query_mutator.apply.proxy.server import Access, ClientLimits
from query_mutator.apply.proxy.upstream import Address, Upstream
from query_mutator.encoder import Encoder
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.forms import Form
from query_mutator.learners import Plan, PlanPolicy, plan_task
from query_mutator.llm.client import DEFAULT_POLICY, Client
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.stack import Limit
from query_mutator.llm.transport import MAX_REPLY_BYTES
from query_mutator.testing import start_server
from query_mutator.types import Question
from tests.conftest import Librarian, Softener

MODEL = "librarian:latest"
VIRTUAL = MODEL + "+qm"
KILL = "plz how do i kill the process that hangs"  # refused; "stop" in the place of "kill" is answered
SORT = "plz sort my list"
BANK = (Question(id="b", text="what counts things", accept=("Counter",)),)


class PlanRewriter(Rewriter):
    """Acts as a `Rewriter` that loaded the checkpoint of a plan."""

    asks_once = True  # type: ignore[assignment]

    def __init__(self, plan: Plan, encoder: Encoder, client: Client, chosen: Sequence[Form] = ()) -> None:
        calls: Any = SimpleNamespace(eval_client=client)
        settings = SimpleNamespace(batch_size=8)
        models: Any = SimpleNamespace(calls=calls, encoder=encoder, retry_policy=DEFAULT_POLICY, settings=settings)
        self.models, self.call_price = models, None
        self.task, self.policy = plan_task(plan, _task(encoder, chosen)), PlanPolicy(plan)
        self._ids = {}


@contextmanager
def proxy(
    upstream_url: str,
    encoder: Encoder,
    *,
    mode: Mode = "gate",
    plan: Plan | None = None,
    calls: int = 3,
    seconds: float = 20.0,
    api_key: str | None = None,
    limits: ClientLimits | None = None,
    upstream_headers: Mapping[str, str] | None = None,
    others: Sequence[str] = (),
    max_reply_bytes: int = MAX_REPLY_BYTES,
    chosen: Sequence[Form] = (),
    logprobs: bool = False,
    asks_once: bool = True,
    is_own: bool = False,
) -> Iterator[str]:
    """Serve a plan in front of an upstream and yield the proxy's address."""
    client = Limit(OllamaBackend(upstream_url, timeout_s=20, pool_size=8), limit=8)
    rewriter: Any = PlanRewriter(plan or Plan(steps=("neutral",)), encoder, client, chosen)
    rewriter.task = replace(rewriter.task, calls=replace(rewriter.task.calls, logprobs=logprobs))
    rewriter.asks_once = asks_once
    bounds = RewriteLimits(max_calls=calls, deadline_s=seconds)
    metrics = Metrics()
    addresses = [Address(url=each, headers=upstream_headers or {}, is_own=is_own) for each in (upstream_url, *others)]
    upstream = Upstream(addresses, timeout_s=30, max_reply_bytes=max_reply_bytes)
    answerer = PolicyAnswerer(rewriter, upstream, metrics, mode=mode, limits=bounds)
    app = Proxy(upstream, answerer, metrics, access=Access(api_key=api_key), limits=limits or ClientLimits())
    with running(app) as url:
        yield url
    client.close()


@contextmanager
def answering(reply: Callable[[str, dict[str, str], Any], tuple[int, str, bytes]]) -> Iterator[str]:
    """Serve what a function returns for a path, headers and a body: status, type and content."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, kind, content = reply(self.path, headers, json.loads(self.rfile.read(length) or "null"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    front = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{front.server_port}"
    finally:
        front.shutdown()
        front.server_close()


@contextmanager
def recording(seen: list[dict[str, Any]], headers: list[dict[str, str]] | None = None) -> Iterator[str]:
    """Serve the librarian and note the bodies of chat requests, by a small forwarding server."""
    with start_server([Librarian(), Softener()], num_parallel=4) as server:

        def reply(path: str, sent: dict[str, str], body: Any) -> tuple[int, str, bytes]:
            if body is None:
                return 501, "text/plain", b""
            seen.append(body)
            if headers is not None:
                headers.append(sent)
            found = requests.post(server.url + path, json=body, timeout=10)
            return found.status_code, found.headers["Content-Type"], found.content

        with answering(reply) as url:
            yield url


def _task(encoder: Encoder, chosen: Sequence[Form]) -> Task:
    return build_task(
        [Question(id="a", text=SORT)],
        calls=CallSettings(target_model="librarian", mutator_model="softener"),
        encoder=encoder,
        operators=operators.select("spelling,neutral,filler"),
        embedding_dims=4,
        forms=chosen,
        bank=BANK,
    )


def chat(url: str, question: str, *, model: str = VIRTUAL, **fields: Any) -> requests.Response:
    """Ask over Ollama's API; not as a stream unless asked to."""
    body = {"model": model, "stream": False, "messages": [{"role": "user", "content": question}], **fields}
    return requests.post(f"{url}/api/chat", json=body, timeout=20)


def answer(reply: requests.Response) -> str:
    return str(reply.json()["message"]["content"])
