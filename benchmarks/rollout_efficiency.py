"""How well whole training runs keep a server's slots busy, updates and embeddings included.

    efficiency = (sum of service times, counted by the server / min(batch size, slots)) / (first call to last reply)

python benchmarks/rollout_efficiency.py                                  sigma 0, 0.5, 1; encoding no limit
python benchmarks/rollout_efficiency.py --encoder all-MiniLM-L6-v2       the same, every text new to the encoder
python benchmarks/rollout_efficiency.py --sigmas 1 --modes async,phase   against the phase-batched design
python benchmarks/rollout_efficiency.py --sigmas 0 --slots 8 --modes async,sequential   against --no-batching
python benchmarks/rollout_efficiency.py --ceiling                        calls a second at zero latency, model echo
python benchmarks/rollout_efficiency.py --width                          512 environments, a second a call
python benchmarks/rollout_efficiency.py --servers                        two servers of 8 slots; one dies half-way

The server runs in a separate process, with the model `echo` (no language model), which has other words for every
prompt. Every run is a separate process too, with no cache and no evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("mode", "encoder", "sigma", "seed", "calls", "span_s", "calls_per_s", "efficiency", "cpu_s", "rss_mb")


def main() -> None:
    """Print a line of JSON for every run, then the medians."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    arguments = parsed()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if arguments.ceiling:
            show(run(arguments, model="echo", sigma=0.0, latency_ms=0.0, seed=seed, mode="async"))
        elif arguments.width:
            show(run(arguments, model="echo", sigma=0.0, latency_ms=1000.0, seed=seed, mode="async"))
        elif arguments.servers:
            show(several_servers(arguments, seed))
        else:
            for sigma in numbers(arguments.sigmas):
                for mode in arguments.modes.split(","):
                    show(run(arguments, model="echo", sigma=sigma, latency_ms=100.0, seed=seed, mode=mode))
    print(medians())


def parsed() -> argparse.Namespace:
    """Return the flags, with the sizes that `--ceiling`, `--width` and `--servers` stand for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sigmas", default="0,0.5,1", help="spreads of the latency, with commas")
    add("--modes", default="async", help="async, phase, sequential (--no-batching), several with commas")
    add("--encoder", default="hash", help="hash, or the sentence encoder's name")
    add("--seeds", type=int, default=5, help="runs of each kind")
    add("--first-seed", type=int, default=1)
    add("--batch-size", type=int, default=None)
    add("--num-processes", type=int, default=None)
    add("--num-env-steps", type=int, default=None)
    add("--num-steps", type=int, default=None)
    add("--slots", type=int, default=None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--ceiling", action="store_true")
    kind.add_argument("--width", action="store_true")
    kind.add_argument("--servers", action="store_true")
    arguments = parser.parse_args()
    usual = {"batch_size": 8, "num_processes": 16, "num_env_steps": 1024, "num_steps": 32, "slots": 64}
    if arguments.ceiling:
        usual |= {"batch_size": 16, "num_processes": 32, "num_env_steps": 4096}
    elif arguments.width:
        usual |= {"batch_size": 512, "num_processes": 512, "num_env_steps": 16384, "slots": 512}
    elif arguments.servers:
        usual |= {"batch_size": 16, "num_processes": 32, "num_env_steps": 2048, "slots": 8}
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def numbers(text: str) -> list[float]:
    """Return the numbers between commas."""
    return [float(word) for word in text.split(",")]


_rows: list[dict[str, Any]] = []


def show(row: dict[str, Any]) -> None:
    """Print and keep one run."""
    _rows.append(row)
    print(json.dumps(row), flush=True)


def medians() -> str:
    """Return a table of the medians over seeds of every kind of run."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in _rows:
        kinds.setdefault(tuple(row.get(name) for name in ("mode", "encoder", "sigma")), []).append(row)
    lines = [f"{'mode':<14}{'encoder':<20}{'sigma':>6}{'runs':>6}{'calls/s':>9}{'efficiency':>12}"]
    for (mode, encoder, sigma), rows in kinds.items():
        rate = statistics.median(row["calls_per_s"] for row in rows)
        efficiency = statistics.median(row["efficiency"] for row in rows)
        lines.append(f"{mode:<14}{encoder:<20}{sigma:>6}{len(rows):>6}{rate:>9.1f}{efficiency:>12.3f}")
        if bare := [row["requests_per_s"] for row in rows if "requests_per_s" in row]:
            times = statistics.median(row["calls_per_s"] / row["requests_per_s"] for row in rows)
            lines.append(
                f"`requests` in one thread, in the same runs: {statistics.median(bare):.0f} calls/s ({times:.2f} times)"
            )
    return "\n".join(lines)


# ---------------------------------------------------------------- servers and runs


@contextlib.contextmanager
def server(model: str, *, slots: int, latency_ms: float, sigma: float, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the address and the process of a test server."""
    flags = ["--model", model, "--port", 0, "--num-parallel", slots, "--latency-ms", latency_ms]
    flags += ["--latency-sigma", sigma, "--seed", seed]
    command = [sys.executable, "-m", "query_mutator", "test-server", *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process
        finally:
            process.terminate()


def run(
    arguments: argparse.Namespace, *, model: str, sigma: float, latency_ms: float, seed: int, mode: str
) -> dict[str, Any]:
    """Return the figures of one training run against a fresh server."""
    with server(model, slots=arguments.slots, latency_ms=latency_ms, sigma=sigma, seed=seed) as (url, _):
        bare = {"requests_per_s": round(of_requests(url), 1)} if arguments.ceiling else {}
        used = train(arguments, [url], model=model, seed=seed, mode=mode)
        counted = stats(url)
    busy = min(arguments.batch_size, arguments.slots)
    about = {"mode": mode, "encoder": arguments.encoder, "sigma": sigma, "seed": seed}
    return about | figures([counted], used, busy=busy) | bare


def figures(counted: Sequence[dict[str, Any]], used: dict[str, Any], *, busy: int) -> dict[str, Any]:
    """Return what servers and the run's process counted, in short."""
    span_s = max(each["span_s"] for each in counted)
    calls = sum(each["calls"] for each in counted)
    service_s = sum(each["service_s"] for each in counted)
    return {
        "calls": calls,
        "span_s": round(span_s, 3),
        "calls_per_s": round(calls / span_s, 1),
        "efficiency": round(service_s / busy / span_s, 4),
        **used,
    }


def train(arguments: argparse.Namespace, urls: Sequence[str], *, model: str, seed: int, mode: str) -> dict[str, Any]:
    """Run the trainer in a separate process and return its CPU time, peak memory, threads and exit code."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [word for url in urls for word in ("--ollama-url", url)]
        flags += [
            "--target-model",
            model,
            "--mutator-model",
            model,
            "--encoder",
            arguments.encoder,
            "--seed",
            seed,
            "--save-dir",
            folder,
        ]
        flags += ["--batch-size", arguments.batch_size, "--num-processes", arguments.num_processes]
        flags += ["--num-steps", arguments.num_steps, "--num-env-steps", arguments.num_env_steps]
        flags += ["--no-evaluate", "--eval-interval", 0, "--cache", "off"]
        flags += ["--no-batching"] if mode == "sequential" else []
        command = [sys.executable, __file__, "--child", mode, *map(str, flags)]
        done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the run failed with {done.returncode}:\n{done.stderr}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


def several_servers(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the calls a second of one server and of two, and what came of a run that loses one of two half-way."""
    settings: dict[str, Any] = {"slots": arguments.slots, "latency_ms": 100.0, "sigma": 0.5, "seed": seed}

    def go(count: int, *, kill_at: int | None = None) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(server("echo", **settings)) for _ in range(count)]
            if kill_at is not None:
                threading.Thread(target=kill_when, args=(*running[0], kill_at), daemon=True).start()
            used = train(arguments, [url for url, _ in running], model="echo", seed=seed, mode="async")
            counted = [stats(url) for url, process in running if process.poll() is None]
            return figures(counted, used, busy=min(arguments.batch_size, arguments.slots * count))

    one, two = go(1), go(2)
    lost = go(2, kill_at=two["calls"] // 4)
    return {
        "mode": "two servers",
        "encoder": arguments.encoder,
        "sigma": settings["sigma"],
        "seed": seed,
        **two,
        "one_calls_per_s": one["calls_per_s"],
        "times_one": round(two["calls_per_s"] / one["calls_per_s"], 3),
        "one_of_two_killed": {name: lost[name] for name in ("invalid_steps", "env_steps", "calls")},
    }


def of_requests(url: str, *, calls: int = 1500) -> float:
    """Return the calls a second that `requests` makes from one thread; the server forgets them afterwards."""
    import requests

    body = {"model": "echo", "messages": [{"role": "user", "content": "How do I sort a list?"}], "stream": False}
    with requests.Session() as session:
        session.trust_env = False
        session.post(f"{url}/api/chat", json=body).raise_for_status()
        began = time.perf_counter()
        for _ in range(calls):
            session.post(f"{url}/api/chat", json=body).json()
        rate = calls / (time.perf_counter() - began)
        session.delete(f"{url}/debug/stats").raise_for_status()
    return rate


def kill_when(url: str, process: subprocess.Popen[str], calls: int) -> None:
    """Kill a server once it has served so many calls."""
    while stats(url)["calls"] < calls:
        time.sleep(0.05)
    process.kill()


def stats(url: str) -> dict[str, Any]:
    """Return what a server counted."""
    with urllib.request.urlopen(f"{url}/debug/stats", timeout=30) as reply:
        return dict(json.load(reply))


def environ() -> dict[str, str]:
    """Return the environment of the processes begun here."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# ---------------------------------------------------------------- in the run's own process


def child(mode: str, argv: Sequence[str]) -> None:
    """Train, and print what it took; with mode "phase" the reference's scheduling stands in for ours."""
    import rl_query_mutator_env
    import train_query_mutator

    if mode == "phase":
        rl_query_mutator_env.PooledScheduler = PhaseScheduler  # type: ignore[assignment, misc]
    most_threads, after_start_mb = watch_threads()
    code = train_query_mutator.main(argv)
    save_dir = Path(argv[argv.index("--save-dir") + 1])
    summary = json.loads((save_dir / "latest" / "summary.json").read_text(encoding="utf-8"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "rss_mb": round(usage.ru_maxrss / 1024),
        "grown_mb": round(usage.ru_maxrss / 1024 - after_start_mb[0]),
        "threads": most_threads[0],
        "env_steps": summary["env_steps"],
        "invalid_steps": summary["invalid_steps"],
    }
    print(json.dumps(told))
    sys.exit(code)


def watch_threads() -> tuple[list[int], list[float]]:
    """Return two cells that are kept: the most threads at once, and the peak memory when calls began (MB)."""
    most, at_start = [0], [0.0]

    def watch() -> None:
        while True:
            names = [thread.name for thread in threading.enumerate()]
            most[0] = max(most[0], len(names))
            if not at_start[0] and any(name.startswith("qm-call") for name in names):
                at_start[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True, name="watch").start()
    return most, at_start


class PhaseScheduler:
    """All rewrites in batches, wait, all answers in batches, wait: what was there before, as a scheduler."""

    def __init__(self, *, client: Any, encoder: Any, retry_policy: Any, batch_size: int, journal: Any = None) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.batch_size = batch_size
        self._client, self._encoder = client, encoder
        self._pool = ThreadPoolExecutor(batch_size)
        self._flows: list[list[Any]] = []  # key, flow, what it needs
        self._done: list[tuple[Any, Any]] = []

    @property
    def in_progress(self) -> int:
        """Return how many flows were started and not yet returned."""
        return len(self._flows) + len(self._done)

    def start(self, key: Any, flow: Any, *, done: int = 0) -> None:
        """Begin a flow with the next round of phases."""
        self._flows.append([key, flow, None])
        self._advance(self._flows[-1], None)

    def finished(self, *, deadline_s: float | None = None) -> tuple[Any, Any]:
        """Return a flow that ended, after carrying all begun ones to their end, phase by phase."""
        while self._flows:
            self._phase()
        if not self._done:
            raise TimeoutError
        return self._done.pop()

    def close(self) -> None:
        """Stop the workers."""
        self._pool.shutdown()

    def _phase(self) -> None:
        from query_mutator.env.scheduling import Encode

        waiting = list(self._flows)
        encoding = [row for row in waiting if isinstance(row[2], Encode)]
        for row in encoding:
            self._advance(row, self._encoder.encode(row[2].texts))
        calling = [row for row in waiting if row not in encoding]
        for start in range(0, len(calling), self.batch_size):
            batch = calling[start : start + self.batch_size]
            for row, reply in zip(
                batch, self._pool.map(self._client.complete, [r[2].request for r in batch]), strict=True
            ):
                self._advance(row, reply)

    def _advance(self, row: list[Any], result: Any) -> None:
        try:
            row[2] = row[1].send(result)
        except StopIteration as stop:
            self._flows.remove(row)
            self._done.append((row[0], stop.value))


if __name__ == "__main__":
    main()
