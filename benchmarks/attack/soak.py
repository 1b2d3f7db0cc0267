"""Long load at zero latency: `python -m benchmarks.attack.soak --minutes 10`.

A trainer and its server, each in a process, run for the given time; memory, descriptors and threads of both must stay
flat. Then 200 clients ask one server for 20 s, some of which leave before their reply: every reply must belong to its
request.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from query_mutator.llm.client import ModelServer
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest
from tests.integration.conftest import ROWS, write_dataset
from tests.integration.killing import ServerProcess, start

SAMPLE_S = 2.0
WARM_UP = 0.2  # share of the time in which caches and pools fill
MEMORY_GROWTH_BYTES = 16 << 20  # from the first quarter after the warm-up to the last
LEAVE_EVERY = 25  # calls of a client, after one of which it leaves before the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds."""

    memory_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """Return what the process `pid` holds now."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            memory_bytes=int(lines["VmRSS"].split()[0]) << 10,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(lines["Threads"]),
        )


def growth(samples: Sequence[Held]) -> Held:
    """Return by how much the last quarter holds more than the first after the warm-up; medians."""
    steady = samples[int(len(samples) * WARM_UP) :]
    quarter = max(1, len(steady) // 4)
    names = ("memory_bytes", "descriptors", "threads")
    of = {name: [getattr(sample, name) for sample in steady] for name in names}
    return Held(**{name: round(median(of[name][-quarter:]) - median(of[name][:quarter])) for name in names})


def soak(*, seconds: float, folder: Path) -> dict[str, list[Held]]:
    """Return samples of a trainer and its server, which run for `seconds` at zero latency."""
    server = ServerProcess(folder, num_parallel=16)
    argv = [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--dataset", str(write_dataset(folder / "questions.jsonl", ROWS))),
        *("--forms", "none", "--ask", "every_step", "--max-episode-steps", "5"),
        *("--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--eval-questions", "3"),
        *("--num-processes", "16", "--batch-size", "8", "--num-steps", "32", "--num-env-steps", str(10**7)),
        *("--save-dir", str(folder), "--cache", "off", "--no-use-linear-lr-decay", "--eval-interval", "50"),
    ]
    trainer = start(argv, folder)
    while not (folder / "latest").exists():
        assert trainer.is_alive(), (folder / "output.txt").read_text(encoding="utf-8")
        time.sleep(0.05)
    samples: dict[str, list[Held]] = {"trainer": [], "server": []}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(min(SAMPLE_S, seconds / 20))
        assert trainer.is_alive(), (folder / "output.txt").read_text(encoding="utf-8")
        samples["trainer"].append(Held.by(trainer.pid or 0))
        samples["server"].append(Held.by(server.pid))
    os.kill(trainer.pid or 0, signal.SIGTERM)
    trainer.join()
    server.kill()
    return samples


def mixed_up(url: str, *, clients: int, seconds: float) -> tuple[int, list[str]]:
    """Return the number of replies to `clients` at once, and those that are not the request's.

    They use both interfaces, streamed and not; now and then one leaves before its reply.
    """
    wrong: list[str] = []
    count = itertools.count()
    ends = time.monotonic() + seconds
    together = threading.Barrier(clients)

    def ask(number: int) -> None:
        kind = (OllamaBackend, OpenAIBackend)[number % 2]
        server = kind(url if kind is OllamaBackend else f"{url}/v1", pool_size=1)
        together.wait()
        for turn in itertools.count():
            if time.monotonic() > ends:
                break
            text = f"client {number}, turn {turn}"
            if turn % LEAVE_EVERY == number % LEAVE_EVERY:
                _leave(url, f"{text}, not awaited")
            reply = _asked(server, text, streamed=turn % 3 == 0)
            next(count)
            if reply != text:
                wrong.append(f"{text}: {reply}")
        server.close()

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(ask, number) for number in range(clients)]:
            done.result()
    return next(count), wrong


def _asked(server: ModelServer, text: str, *, streamed: bool) -> str:
    request = ChatRequest.user(text, model="same", seed=0)
    completion = server.complete_until(request, lambda _: False) if streamed else server.complete(request)
    return completion.text if completion.ok else str(completion.error)


def _leave(url: str, text: str) -> None:
    """Send a request and close the connection."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "same", "messages": [{"role": "user", "content": text}], "stream": False}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head + body)


def main(argv: Sequence[str]) -> int:
    """Print what was held, and whether replies were mixed up; return 1 for a growth or a wrong reply."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the clients")
    flags: Any = parser.parse_args(argv)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(seconds=60 * flags.minutes, folder=Path(folder))
    for name, held in samples.items():
        more, last = growth(held), held[-1]
        print(
            f"{name}: {last.memory_bytes >> 20} MiB ({more.memory_bytes / 2**20:+.1f}), "
            f"{last.descriptors} descriptors ({more.descriptors:+d}), {last.threads} threads ({more.threads:+d})"
        )
        bad += more.memory_bytes > MEMORY_GROWTH_BYTES or more.descriptors > 0 or more.threads > 0
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), num_parallel=flags.clients)
        replies, wrong = mixed_up(server.url, clients=flags.clients, seconds=flags.seconds)
        server.kill()
    print(
        f"{flags.clients} clients: {replies} replies, {len(wrong)} of another request or failed", *wrong[:5], sep="\n"
    )
    return int(bool(bad or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
