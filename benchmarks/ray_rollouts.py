"""Training with rollout workers against one process at equal calls in flight, and SIGKILLs of workers at ten moments.

    python -m benchmarks.ray_rollouts                     one process and 1, 2 and 4 workers, in turns, one server
    python -m benchmarks.ray_rollouts --node-local        the same, every worker with a server of its own node
    python -m benchmarks.ray_rollouts --kills 10          workers killed at random moments; compare with no kill

Two Ray nodes run on this machine (the cluster of tests/cluster). The server is a process of its own whose latency
depends on the prompt; steps per second are those of all updates but the first, which starts the episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import torch

from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.checkpoint import read_checkpoint
from tests.cluster.conftest import RAY_ENV, RayCluster
from tests.cluster.test_rollouts import repeated_calls, workers_of
from tests.integration.killing import ServerProcess, transcript, weights

KEYS = ("charts/SPS", "llm/calls_per_s")
ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    *("--encoder", "hash", "--embedding-dims", "4", "--operators", "spelling,neutral,filler", "--seed", "3"),
    *("--no-evaluate", "--eval-interval", "0", "--num-steps", "16", "--save-interval", "1000"),
]


def main() -> None:
    """Print a line of JSON per way, or the result of the kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="calls in flight of each way")
    parser.add_argument("--latency-ms", type=float, default=200)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--node-local", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the nodes end with this process
    with tempfile.TemporaryDirectory(prefix="qm-ray-", dir="/tmp") as folder, two_nodes(Path(folder)) as cluster:
        if arguments.kills:
            print(json.dumps(kills(arguments, cluster, Path(folder))))
            return
        speeds(arguments, Path(folder))


@contextmanager
def two_nodes(folder: Path) -> Iterator[RayCluster]:
    """Run a head and a worker node; commands of this process use them."""
    os.environ.update(RAY_ENV)
    cluster = RayCluster(folder / "ray")
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        cluster.add_worker()
        yield cluster
    finally:
        cluster.close()


def speeds(arguments: argparse.Namespace, folder: Path) -> None:
    """Print steps and calls per second of each way, the median and the range of the rounds."""
    ways: dict[str, list[str]] = {"one process": []}
    ways |= {f"{num} workers": ["--engine", "ray", "--num-workers", str(num)] for num in arguments.workers}
    size, latency = arguments.batch_size, {"latency_ms": arguments.latency_ms, "latency_sigma": 0.6}
    server = ServerProcess(folder, num_parallel=4 * size, **latency)
    where = ["--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"]
    if arguments.node_local:
        where = ["--backend", "embedded", "--latency-ms", str(arguments.latency_ms), "--latency-sigma", "0.6"]
    sizes = ["--batch-size", str(size), "--num-processes", str(2 * size)]
    sizes += ["--num-env-steps", str(2 * size * 16 * arguments.updates)]
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    try:
        for number in range(arguments.rounds):
            for name in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
                run = trained([*FLAGS, *sizes, *where, *ways[name]], folder / f"{number} {name}")
                rows = [*read_json_lines(run / "metrics.jsonl")][1:]
                found[name].append([statistics.fmean(row[key] for row in rows) for key in KEYS])
    finally:
        server.kill()
    base = statistics.median(sps for sps, _ in found["one process"])
    for name, pairs in found.items():
        sps, calls = (sorted(column) for column in zip(*pairs, strict=True))
        median = statistics.median(sps)
        row = {"way": name, "steps_per_s": median, "least": sps[0], "most": sps[-1], "ratio": median / base}
        print(json.dumps({**row, "calls_per_s": statistics.median(calls)}), flush=True)


def kills(arguments: argparse.Namespace, cluster: RayCluster, folder: Path) -> dict[str, object]:
    """Return what SIGKILLs of workers at random moments of a run cost, and whether the run is that of one process."""
    server = ServerProcess(folder, num_parallel=32, latency_ms=20, latency_sigma=1.0)
    flags = [*FLAGS, "--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"]
    flags += ["--deterministic", "--num-processes", "8", "--batch-size", "8"]
    flags += ["--num-env-steps", str(8 * 16 * 2 * arguments.kills)]
    rng, killed, done = random.Random(1), 0, threading.Event()
    try:
        whole = trained(flags, folder / "whole")
        before = finished(server)
        total = read_checkpoint(whole).progress.llm_calls

        def kill() -> None:
            nonlocal killed
            for number in range(arguments.kills):
                moment = int((number + rng.random()) * total / arguments.kills)
                while not done.is_set() and (finished(server) - before < moment or not workers_of(cluster)):
                    time.sleep(0.01)
                if found := workers_of(cluster):
                    rng.choice(found).kill()
                    killed += 1
                time.sleep(0.5)

        killer = threading.Thread(target=kill)
        killer.start()
        run = trained([*flags, "--engine", "ray", "--num-workers", "2"], folder / "killed")
        done.set()
        killer.join()
        answered, counted = finished(server) - before, read_checkpoint(run).progress.llm_calls
    finally:
        server.kill()
    first, second = weights(whole), weights(run)
    return {
        "kills": killed,
        "calls": counted,
        "finished calls made twice": repeated_calls(run),
        "answers lost on their way": answered - counted,
        "same transcript": transcript(whole) == transcript(run),
        "same weights": all(torch.equal(first[name], second[name]) for name in first),
    }


def finished(server: ServerProcess) -> int:
    """Return the calls that the server has answered to the end."""
    calls: int = requests.get(f"{server.url}/debug/stats", timeout=10).json()["calls"]
    return calls


def trained(flags: list[str], folder: Path) -> Path:
    """Train in a process of its own; return the run folder."""
    command = [sys.executable, str(ROOT / "train_query_mutator.py"), *flags, "--save-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return (folder / "latest").resolve()


if __name__ == "__main__":
    main()
