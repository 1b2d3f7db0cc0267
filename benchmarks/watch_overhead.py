"""What `qm watch` with one open page costs the trainer: pairs of runs with and without it, in alternating order.

    python benchmarks/watch_overhead.py                    5 pairs with a latency of 100 ms, 5 without latency
    python benchmarks/watch_overhead.py --pairs 9 --page chromium   a headless browser shows the page

The trainer's time is from its first call to the last reply, as the embedded server counts it; the server, the trainer,
the watcher and the page are separate processes of one machine. The CPU time of the watcher is reported too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rollout_efficiency import environ, server, stats

#: Reads what a browser reads, without showing it.
STREAM = "import sys, urllib.request as web\nfor _ in web.urlopen(sys.argv[1] + 'events'): pass\n"
CASES = {
    "latency 100 ms": {"model": "babble", "latency_ms": 100.0, "sigma": 0.5, "steps": 1024},
    "no latency": {"model": "echo", "latency_ms": 0.0, "sigma": 0.0, "steps": 8192},
}


def main() -> None:
    """Print a line of JSON for every pair, then the median ratio of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--page", choices=("stream", "chromium"), default="stream", help="what holds the page open")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas")
    arguments = parser.parse_args()
    lines = []
    for name in arguments.cases.split(","):
        pairs = [pair(name, number, page=arguments.page) for number in range(arguments.pairs)]
        ratios = sorted(each["ratio"] for each in pairs)
        shares = statistics.median(each["watcher_cpu_share"] for each in pairs)
        lines.append(
            f"{name}: median ratio {statistics.median(ratios):.4f} of {len(ratios)} pairs ({ratios[0]:.4f} to "
            f"{ratios[-1]:.4f}); the watcher took {100 * shares:.1f} % of a core"
        )
    print("\n".join(lines))


def pair(name: str, number: int, *, page: str) -> dict[str, Any]:
    """Return the seconds of a run with and of one without a watcher, and their ratio."""
    seconds: dict[bool, float] = {}
    cpu_share = 0.0
    for is_watched in (True, False) if number % 2 else (False, True):
        seconds[is_watched], share = train(CASES[name], seed=number + 1, page=page if is_watched else "")
        cpu_share += share
    row = {"case": name, "pair": number, "with_s": round(seconds[True], 3), "without_s": round(seconds[False], 3)}
    row |= {"ratio": round(seconds[True] / seconds[False], 4), "watcher_cpu_share": round(cpu_share, 4)}
    print(json.dumps(row), flush=True)
    return row


def train(case: dict[str, Any], *, seed: int, page: str) -> tuple[float, float]:
    """Return the seconds of a run's calls, and the share of a core that the watcher took."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server(case["model"], slots=64, latency_ms=case["latency_ms"], sigma=case["sigma"], seed=seed) as (url, _),
    ):
        values = {"target-model": case["model"], "mutator-model": case["model"], "encoder": "hash", "ollama-url": url}
        values |= {"num-processes": 16, "batch-size": 8, "num-steps": 32, "num-env-steps": case["steps"]}
        values |= {"eval-interval": 0, "cache": "off", "seed": seed, "save-dir": folder}
        flags = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "train_query_mutator", "--no-evaluate", *flags]
        with watching(Path(folder) / "latest", page) if page else contextlib.nullcontext(float) as cpu_s:
            began, before_s = time.perf_counter(), cpu_s()
            done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(f"the run failed with {done.returncode}:\n{done.stderr}")
            share = (cpu_s() - before_s) / (time.perf_counter() - began)
        return stats(url)["span_s"], share


@contextlib.contextmanager
def watching(run: Path, page: str) -> Iterator[Callable[[], float]]:
    """Watch a run that begins later, with one page open; yield a function that returns the watcher's CPU seconds."""
    command = [sys.executable, "-m", "query_mutator", "watch", str(run), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ(), text=True, **pipes) as watcher, browsing(page) as show:
        assert watcher.stdout is not None
        found = re.search(r"http://\S+", watcher.stdout.readline())
        assert found, "qm watch did not start"
        show(found[0])

        def cpu_s() -> float:
            fields = Path(f"/proc/{watcher.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # of the process and the system

        try:
            yield cpu_s
        finally:
            watcher.kill()


@contextlib.contextmanager
def browsing(page: str) -> Iterator[Callable[[str], object]]:
    """Yield a function that opens an address in what shows the page."""
    with contextlib.ExitStack() as stack:
        if page == "stream":
            yield lambda url: stack.callback(subprocess.Popen([sys.executable, "-c", STREAM, url]).kill)
        else:
            from playwright.sync_api import sync_playwright

            driver = stack.enter_context(sync_playwright())
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            stack.callback(browser.close)
            yield lambda url: browser.new_page().goto(url)


if __name__ == "__main__":
    main()
