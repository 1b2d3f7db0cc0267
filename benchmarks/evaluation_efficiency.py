"""How well the final comparison keeps a server's slots busy: all methods and questions are one pool of calls.

    efficiency = (sum of service times, counted by the server / batch size) / (first call to last reply)

python benchmarks/evaluation_efficiency.py                   sigma 0 and 1, 100 ms a call, batch size 8
python benchmarks/evaluation_efficiency.py --plan-calls 3000 with the plan search, whose races are barriers

A short training gives the policy; then `qm eval` runs in its own process, without a cache. Models and encoder are those
of `rollout_efficiency.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from typing import Any

from rollout_efficiency import environ, numbers, server, stats

MODELS = ["--target-model", "echo", "--mutator-model", "echo"]


def main() -> None:
    """Print a line of JSON for every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sigmas", default="0,1", help="spreads of the latency, with commas")
    add("--latency-ms", type=float, default=100.0)
    add("--batch-size", type=int, default=8)
    add("--eval-calls", type=int, default=8000, help="bound of the comparison")
    add("--plan-calls", type=int, default=0, help="calls of the plan search")
    add("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    for seed in range(1, arguments.seeds + 1):
        for sigma in numbers(arguments.sigmas):
            print(json.dumps(run(arguments, sigma=sigma, seed=seed)), flush=True)


def run(arguments: argparse.Namespace, *, sigma: float, seed: int) -> dict[str, Any]:
    """Return the figures of one evaluation against a fresh server."""
    size = ["--batch-size", arguments.batch_size, "--seed", seed]
    slow = server("echo", slots=64, latency_ms=arguments.latency_ms, sigma=sigma, seed=seed)
    with tempfile.TemporaryDirectory() as folder, slow as (url, _):
        short = ["--num-processes", 16, "--num-steps", 8, "--num-env-steps", 128, "--num-mini-batch", 1]
        quiet = ["--no-evaluate", "--eval-interval", 0, "--encoder", "hash", "--save-dir", folder]
        command("train_query_mutator.py", "--ollama-url", url, *MODELS, *size, *short, *quiet)
        forget = urllib.request.Request(f"{url}/debug/stats", method="DELETE")
        urllib.request.urlopen(forget, timeout=30).close()
        bound = ["--eval-calls", arguments.eval_calls, "--plan-calls", arguments.plan_calls, "--cache", "off"]
        out = command("-m", "query_mutator", "eval", "--checkpoint", f"{folder}/latest", *size, *bound, "--json")
        counted = stats(url)
    report, span_s = json.loads(out), counted["span_s"]
    return {
        "sigma": sigma,
        "seed": seed,
        "questions": report["n"],
        "calls": counted["calls"],
        "charged": round(sum(each["calls_per_question"] * report["n"] for each in report["methods"].values())),
        "span_s": round(span_s, 2),
        "efficiency": round(counted["service_s"] / arguments.batch_size / span_s, 4),
    }


def command(*words: object) -> str:
    """Return what one of our commands prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environ(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{words} failed with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
