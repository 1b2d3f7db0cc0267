"""What `qm serve` adds to a request that passes through, next to LiteLLM's proxy, and 200 clients for a minute.

    python benchmarks/proxy.py --run RUN                           50 clients, an upstream of 1 s a call
    python benchmarks/proxy.py --run RUN --litellm PATH            the same requests through LiteLLM too
    python benchmarks/proxy.py --run RUN --soak 60                 200 clients, 50 ms a call; the upstream is restarted

RUN is any run folder, PATH is LiteLLM's executable. The upstream is the test server with the model `echo`, whose
reply is another for every prompt; how long it takes follows from the prompt, so what a request takes beyond that is
known. Ways alternate in blocks; every process is separate. Two loads: `steady`, each client begins at a random moment
of the first second and its first request does not count; `start`, all clients connect and ask at the same instant.

`added` is a way's excess over the upstream's time, less that of direct requests at the same percentile: the client and
the upstream wait for a processor too. `direct again` shows how far two such measurements differ by chance. `cpu_ms` is
the processor time of the proxy per request, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import requests

from query_mutator.testing import Echo, Latency

ROOT = Path(__file__).resolve().parents[1]
MODEL, ECHO = "echo", Echo()
KEY = "sk-0123456789abcdef0123456789abcdef"  # LiteLLM wants one
LATENCY = Latency(mean_s=1.0, sigma=0.2)
SHARES = (0.5, 0.9, 0.99)
DIRECT, AGAIN, OURS, LITELLM = "direct", "direct again", "qm serve", "litellm"


def main() -> None:
    """Print a line of JSON per way and load, or the result of the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--litellm")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=6, help="per client and block")
    parser.add_argument("--soak", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.soak:
        print(json.dumps(soak(arguments.run, arguments.soak)))
        return
    for row in overheads(arguments):
        print(json.dumps(row))


# --- overhead --------------------------------------------------------------------------------------------------------


def overheads(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each load and way."""
    with ExitStack() as stack:
        upstream = stack.enter_context(upstream_server(free_port(), latency=LATENCY))
        ways = {DIRECT: upstream, AGAIN: upstream, OURS: stack.enter_context(proxy(arguments.run, upstream))}
        if arguments.litellm:
            ways[LITELLM] = stack.enter_context(litellm(arguments.litellm, upstream))
        excess: dict[tuple[str, str], list[float]] = defaultdict(list)
        cpu_s: dict[str, float] = defaultdict(float)
        for block in range(arguments.blocks):
            order = list(ways.items())[block % len(ways) :] + list(ways.items())[: block % len(ways)]
            for name, url in order:
                excess["start", name] += asyncio.run(clients(url, block, arguments.clients, requests_each=1))
                before = processor_seconds(name)
                found = clients(url, block, arguments.clients, requests_each=arguments.requests, spread_s=1.0)
                excess["steady", name] += asyncio.run(found)
                cpu_s[name] += processor_seconds(name) - before
        made = arguments.blocks * arguments.clients * (arguments.requests + 1)
        for (load, name), seconds in sorted(excess.items(), reverse=True):
            row: dict[str, object] = {"load": load, "way": name, "requests": len(seconds)}
            for share in SHARES:
                ours, theirs = (1000 * quantile(excess[load, way], share) for way in (name, DIRECT))
                row |= {f"excess_p{100 * share:.0f}_ms": round(ours, 2)}
                row |= {f"added_p{100 * share:.0f}_ms": round(ours - theirs, 2)}
            yield row | {"cpu_ms": round(1000 * cpu_s[name] / made, 2)}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def processor_seconds(name: str) -> float:
    """Return the processor time of a way's proxy, 0 for a way without one."""
    if name not in children():
        return 0.0
    fields = Path(f"/proc/{children()[name]}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def clients(url: str, block: int, count: int, *, requests_each: int, spread_s: float = 0.0) -> list[float]:
    """Return the seconds of each request beyond the upstream's; with a spread without each client's first."""
    seconds: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(number: int) -> None:
            await asyncio.sleep(spread_s * random.Random(block * count + number).random())
            for turn in range(requests_each + bool(spread_s)):
                prompt = f"request {block} {number} {turn}"
                body = {"model": MODEL, "stream": False, "messages": [{"role": "user", "content": prompt}]}
                started = time.perf_counter()
                headers = {"Authorization": f"Bearer {KEY}"}
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                    data = await reply.read()
                took = time.perf_counter() - started
                assert json.loads(data)["choices"][0]["message"]["content"] == expected(prompt), data
                if turn or not spread_s:
                    seconds.append(took - LATENCY.total_s(prompt))

        await asyncio.gather(*map(one, range(count)))
    return seconds


def expected(prompt: str) -> str:
    """Return the model's reply."""
    return ECHO.reply_many([prompt])[0]


# --- soak ------------------------------------------------------------------------------------------------------------


def soak(run: str, seconds: float) -> dict[str, object]:
    """Return what 200 clients saw; the upstream is away for a tenth of the time."""
    port = free_port()
    with ExitStack() as stack:
        first = ExitStack()
        upstream = first.enter_context(upstream_server(port, latency=FAST))
        url = stack.enter_context(proxy(run, upstream))
        process = children()[OURS]
        result, used = Counter[str](), []

        async def work() -> None:
            end = time.monotonic() + seconds
            async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
                tasks = [asyncio.create_task(talk(client, number, end, result)) for number in range(200)]
                await asyncio.sleep(0.3 * seconds)
                used.append(usage(process))
                await asyncio.sleep(0.1 * seconds)
                await asyncio.to_thread(first.close)
                result["restarts"] += 1
                await asyncio.sleep(0.1 * seconds)
                await asyncio.to_thread(lambda: stack.enter_context(upstream_server(port, latency=FAST)))
                await asyncio.sleep(max(0.0, end - time.monotonic() - 1.0))
                used.append(usage(process))
                await asyncio.gather(*tasks)

        asyncio.run(work())
    rss, descriptors = zip(*used, strict=True)
    return {**result, "rss_mib": rss, "descriptors": descriptors}


FAST = Latency(mean_s=0.05, sigma=0.2)


async def talk(client: aiohttp.ClientSession, number: int, end: float, result: Counter[str]) -> None:
    """Ask until the end and count what comes: the own reply, another client's, or a status."""
    turn = 0
    while time.monotonic() < end:
        turn += 1
        said = f"client {number} turn {turn} says hello to you"
        body = {"model": MODEL, "stream": turn % 2 == 0, "messages": [{"role": "user", "content": said}]}
        try:
            async with client.post("/api/chat", json=body) as reply:
                content = await reply.read()
        except aiohttp.ClientError as error:
            result[type(error).__name__] += 1
            continue
        if reply.status != 200:
            result[f"status {reply.status}"] += 1
            await asyncio.sleep(0.2)
            continue
        lines = [json.loads(line) for line in content.splitlines() if line]
        text = "".join(line["message"]["content"] for line in lines if "message" in line)
        result["right" if text == expected(said) else ("incomplete" if not lines[-1].get("done") else "wrong")] += 1


def usage(process: int) -> tuple[float, int]:
    """Return resident memory in MiB and open descriptors of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), len(os.listdir(f"/proc/{process}/fd"))


# --- processes -------------------------------------------------------------------------------------------------------

_CHILDREN: dict[str, int] = {}


def children() -> dict[str, int]:
    """Return process ids by name."""
    return _CHILDREN


@contextmanager
def process(name: str, command: Sequence[str], url: str, **environment: str) -> Iterator[str]:
    """Run a server until it answers, and yield its address."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
        )
        _CHILDREN[name] = child.pid
        try:
            end = time.monotonic() + 120
            while not answers(url):
                if child.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start: {log.read().decode()[-2000:]}")
                time.sleep(0.1)
            yield url
        finally:
            child.terminate()
            child.wait(30)


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        return requests.get(url, timeout=2).status_code < 500
    except requests.RequestException:
        return False


@contextmanager
def upstream_server(port: int, *, latency: Latency) -> Iterator[str]:
    """Run the upstream."""
    flags = ["--port", str(port), "--model", MODEL, "--num-parallel", "256"]
    flags += ["--latency-ms", str(1000 * latency.mean_s), "--latency-sigma", str(latency.sigma)]
    with process(
        "test server", [sys.executable, "-m", "query_mutator", "test-server", *flags], f"http://127.0.0.1:{port}"
    ) as url:
        yield url


@contextmanager
def proxy(run: str, upstream: str) -> Iterator[str]:
    """Run `qm serve`; nothing is rewritten, so the models need not be those of the run."""
    port = free_port()
    flags = ["--checkpoint", run, "--port", str(port), "--ollama-url", upstream, "--backend", "ollama"]
    flags += ["--target-model", MODEL, "--mutator-model", MODEL]
    command = [sys.executable, "-m", "query_mutator", "serve", *flags]
    with process(OURS, command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def litellm(executable: str, upstream: str) -> Iterator[str]:
    """Run LiteLLM's proxy in front of the same server."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        parameters = f"{{model: openai/{MODEL}, api_base: {upstream}/v1, api_key: x}}"
        config.write_text(f"model_list:\n  - model_name: {MODEL}\n    litellm_params: {parameters}\n")
        command = [executable, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
        settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        with process(LITELLM, command, f"http://127.0.0.1:{port}", **settings) as url:
            yield url


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
