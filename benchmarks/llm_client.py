"""Calls a second from one process: our client, layer by layer, compared with `requests` and urllib3.

    python benchmarks/llm_client.py                       # 3 rounds of 1,500 calls each, interleaved
    python benchmarks/llm_client.py --threads 1 8 64 --rounds 5

The server is `qm test-server --model fixed` in its own process. Every client sends the same body
and parses the reply's JSON; ours also makes the records. Medians over the rounds; CPU time is this process's alone, so
it means something on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from query_mutator.llm.client import Client
from query_mutator.llm.ollama import chat_payload
from query_mutator.llm.stack import build_client
from query_mutator.types import ChatRequest

Call = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with _server() as url:
        for threads in arguments.threads:
            measure(url, threads=threads, calls=arguments.calls, rounds=arguments.rounds)


def measure(url: str, *, threads: int, calls: int, rounds: int) -> None:
    """Print a table of calls a second and CPU time a call."""
    with ExitStack() as stack:
        clients = stack.enter_context(_clients(url, threads))
        rates: dict[str, list[float]] = {name: [] for name in clients}
        cpus: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(rounds):
            for name, call in clients.items():
                rate, cpu_s = _run(call, threads=threads, calls=calls)
                rates[name].append(rate)
                cpus[name].append(cpu_s)
    base = statistics.median(rates["requests"])
    print(f"\n{threads} threads{'':<42} calls/s  x requests  CPU us/call")
    for name in clients:
        rate, cpu_s = statistics.median(rates[name]), statistics.median(cpus[name])
        print(f"{name:<50} {rate:7.0f}  {rate / base:10.2f}  {cpu_s * 1e6:11.0f}")


def _run(call: Call, *, threads: int, calls: int) -> tuple[float, float]:
    each = calls // threads

    def work(thread: int) -> None:
        for number in range(each):
            call(thread * each + number)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))  # warm-up: connections, imports
        wall, cpu = time.perf_counter(), time.process_time()
        list(pool.map(work, range(threads, 2 * threads)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return threads * each / wall, cpu / (threads * each)


@contextmanager
def _clients(url: str, threads: int) -> Iterator[dict[str, Call]]:
    import requests
    import urllib3

    session = requests.Session()
    session.trust_env = False
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=threads))
    pool = urllib3.HTTPConnectionPool(
        url.removeprefix("http://").split(":")[0], int(url.rsplit(":")[-1]), maxsize=threads
    )
    with tempfile.TemporaryDirectory() as folder:
        ours = build_client(
            url, batch_size=threads, adaptive=True, cache="all", cache_path=Path(folder) / "cache.sqlite"
        )
        backend, limit, retry = ours.backend, ours.limit, ours.retry
        yield {
            "requests": lambda number: session.post(f"{url}/api/chat", data=_body(number)).json(),
            "urllib3": lambda number: json.loads(pool.request("POST", "/api/chat", body=_body(number)).data),
            "Ollama": _of(backend),
            "AdaptiveLimit(Ollama)": _of(limit),
            "Retry(AdaptiveLimit(Ollama))": _of(retry),
            "Coalesce(AdaptiveLimit(Ollama))": _of(ours.client._client),  # type: ignore[attr-defined]
            "Cache(Coalesce(AdaptiveLimit(Ollama))), all new": _of(ours.client, fresh=True),
            "Cache(Coalesce(AdaptiveLimit(Ollama))), all known": _of(ours.client),
        }
        ours.close()
        session.close()
        pool.close()


def _of(client: Client, *, fresh: bool = False) -> Call:
    run = iter(range(10**9))

    def call(number: int) -> None:
        assert client.complete(_request(next(run) + 10**9 if fresh else number)).ok

    return call


def _request(number: int) -> ChatRequest:
    return ChatRequest.user(f"How do I sort a list by its second item, case {number}?", model="fixed", seed=0)


def _body(number: int) -> str:
    return json.dumps(chat_payload(_request(number), keep_alive="30m"))


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "query_mutator", "test-server", "--model", "fixed", "--num-parallel", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
