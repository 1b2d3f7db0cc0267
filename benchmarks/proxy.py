"""What `qm serve` adds to a request that passes through, next to LiteLLM's proxy, and 200 clients for a minute.

    python benchmarks/proxy.py --run RUN                           50 clients, an upstream of 1 s a call
    python benchmarks/proxy.py --run RUN --litellm PATH            the same requests through LiteLLM too
    python benchmarks/proxy.py --run RUN --soak 60                 200 clients, 50 ms a call; the upstream is restarted

RUN is any run folder, PATH is LiteLLM's executable. The upstream is the embedded server with the model `babble`, whose
reply is another for every prompt. Its latency depends on the prompt, so each prompt takes the same time on every way:
the overhead of a request is the difference to the same request without a proxy. Ways alternate in blocks; every process
is separate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from query_mutator.embedded.models import Babble

ROOT = Path(__file__).resolve().parents[1]
MODEL, BABBLE = "babble", Babble()
KEY = "sk-0123456789abcdef0123456789abcdef"  # LiteLLM wants one


def main() -> None:
    """Print a line of JSON per way, or the result of the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--litellm")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--requests", type=int, default=250, help="per block")
    parser.add_argument("--soak", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.soak:
        print(json.dumps(soak(arguments.run, arguments.soak)))
        return
    for row in overheads(arguments):
        print(json.dumps(row))


# --- overhead --------------------------------------------------------------------------------------------------------


def overheads(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each way."""
    with ExitStack() as stack:
        upstream = stack.enter_context(embedded(free_port(), latency_ms=1000))
        ways = {"direct": upstream, "qm serve": stack.enter_context(proxy(arguments.run, upstream))}
        if arguments.litellm:
            ways["litellm"] = stack.enter_context(litellm(arguments.litellm, upstream))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for block in range(arguments.blocks):
            order = list(ways.items())[block % len(ways) :] + list(ways.items())[: block % len(ways)]
            for name, url in order:
                prompts = [f"request {block} {number}" for number in range(arguments.requests)]
                seconds[name] += asyncio.run(clients(url, prompts, arguments.clients))
        for name in ways:
            added = sorted(1000 * (a - b) for a, b in zip(seconds[name], seconds["direct"], strict=True))
            at = {share: added[int(share * (len(added) - 1))] for share in (0.5, 0.9, 0.99)}
            median = statistics.median(seconds[name])
            yield {"way": name, "requests": len(added), "median_s": round(median, 4)} | {
                f"added_p{round(100 * share)}_ms": round(value, 2) for share, value in at.items()
            }


async def clients(url: str, prompts: Sequence[str], count: int) -> list[float]:
    """Return the seconds of each request, `count` at once."""
    seconds = [0.0] * len(prompts)
    waiting = iter(enumerate(prompts))
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def one() -> None:
            for place, prompt in waiting:
                body = {"model": MODEL, "stream": False, "messages": [{"role": "user", "content": prompt}]}
                started = time.perf_counter()
                reply = await client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
                seconds[place] = time.perf_counter() - started
                assert reply.json()["choices"][0]["message"]["content"] == expected(prompt), reply.text

        await asyncio.gather(*(one() for _ in range(count)))
    return seconds


def expected(prompt: str) -> str:
    """Return the model's reply."""
    return BABBLE.reply_many([prompt])[0]


# --- soak ------------------------------------------------------------------------------------------------------------


def soak(run: str, seconds: float) -> dict[str, object]:
    """Return what 200 clients saw; the upstream is away for a tenth of the time."""
    port = free_port()
    with ExitStack() as stack:
        first = ExitStack()
        upstream = first.enter_context(embedded(port, latency_ms=50))
        url = stack.enter_context(proxy(run, upstream))
        process = int(Path(f"/proc/{children()['serve']}").name)
        result, used = Counter[str](), []

        async def work() -> None:
            end = time.monotonic() + seconds
            async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=LIMITS) as client:
                tasks = [asyncio.create_task(talk(client, number, end, result)) for number in range(200)]
                await asyncio.sleep(0.3 * seconds)
                used.append(usage(process))
                await asyncio.sleep(0.1 * seconds)
                await asyncio.to_thread(first.close)
                result["restarts"] += 1
                await asyncio.sleep(0.1 * seconds)
                await asyncio.to_thread(lambda: stack.enter_context(embedded(port, latency_ms=50)))
                await asyncio.sleep(max(0.0, end - time.monotonic() - 1.0))
                used.append(usage(process))
                await asyncio.gather(*tasks)

        asyncio.run(work())
    rss, descriptors = zip(*used, strict=True)
    return {**result, "rss_mib": rss, "descriptors": descriptors}


LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=200)


async def talk(client: httpx2.AsyncClient, number: int, end: float, result: Counter[str]) -> None:
    """Ask until the end and count what comes: the own reply, another client's, or a status."""
    turn = 0
    while time.monotonic() < end:
        turn += 1
        said = f"client {number} turn {turn} says hello to you"
        body = {"model": MODEL, "stream": turn % 2 == 0, "messages": [{"role": "user", "content": said}]}
        try:
            reply = await client.post("/api/chat", json=body)
        except httpx2.HTTPError as error:
            result[type(error).__name__] += 1
            continue
        if reply.status_code != 200:
            result[f"status {reply.status_code}"] += 1
            await asyncio.sleep(0.2)
            continue
        lines = [json.loads(line) for line in reply.text.splitlines() if line]
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
        return httpx2.get(url, timeout=2, trust_env=False).status_code < 500
    except httpx2.HTTPError:
        return False


@contextmanager
def embedded(port: int, *, latency_ms: float) -> Iterator[str]:
    """Run the upstream."""
    flags = ["--port", str(port), "--model", MODEL, "--num-parallel", "256"]
    flags += ["--latency-ms", str(latency_ms), "--latency-sigma", "0.2"]
    with process(
        "embedded", [sys.executable, "-m", "query_mutator.embedded", *flags], f"http://127.0.0.1:{port}"
    ) as url:
        yield url


@contextmanager
def proxy(run: str, upstream: str) -> Iterator[str]:
    """Run `qm serve`; nothing is rewritten, so the models need not be those of the run."""
    port = free_port()
    flags = ["--checkpoint", run, "--port", str(port), "--ollama-url", upstream, "--backend", "ollama"]
    flags += ["--target-model", MODEL, "--mutator-model", MODEL]
    command = [sys.executable, "-m", "query_mutator", "serve", *flags]
    with process("serve", command, f"http://127.0.0.1:{port}") as url:
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
        with process("litellm", command, f"http://127.0.0.1:{port}", **settings) as url:
            yield url


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
