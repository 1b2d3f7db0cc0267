"""What the store of replies costs: a call, a file of millions of replies, a look-up in it.

python -m benchmarks.reply_store --replies 10000000
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from query_mutator.llm.cache import Cache
from query_mutator.llm.store import Store
from query_mutator.types import ChatRequest, Completion

REPLY = Completion(text="An answer of some length, as small models give it. " * 6, model="m", eval_s=0.5, latency_s=0.6)
REQUEST = ChatRequest.user("A question of some length, as people ask them? " * 2, model="m")
BATCH, LOOK_UPS = 10_000, 2_000


def fill(store: Store, count: int) -> None:
    """Write replies in transactions of many, which a run does not do."""
    for start in range(0, count, BATCH):
        store.execute("BEGIN")
        for number in range(start, min(count, start + BATCH)):
            store.put(hashlib.sha256(b"%d" % number).hexdigest(), REQUEST, REPLY)
        store.execute("COMMIT")


def microseconds(work: Callable[[int], object], count: int) -> float:
    """Return the median time of a call of `work` with other numbers, in µs."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replies.sqlite"
        store = Store(path)
        cache = Cache(SimpleNamespace(complete=lambda _: REPLY, close=lambda: None), run=store)
        for what in ("a call that is made", "a reply that is found"):
            took = microseconds(lambda number: cache.complete(replace(REQUEST, seed=number)), 5000)
            print(f"{what}: {took:.0f} µs")
        fill(store, arguments.replies)
        store.close()
        print(f"{arguments.replies:,} replies: {path.stat().st_size / arguments.replies:.0f} bytes each")
        began = time.perf_counter()
        store = Store(path)
        print(f"open: {time.perf_counter() - began:.3f} s")
        keys = [hashlib.sha256(b"%d" % random.randrange(arguments.replies)).hexdigest() for _ in range(LOOK_UPS)]
        print(f"a look-up: {microseconds(lambda number: store.find(keys[number], REQUEST), LOOK_UPS):.0f} µs")
        store.close()


if __name__ == "__main__":
    main()
