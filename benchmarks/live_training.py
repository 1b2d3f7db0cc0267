"""Tokens per second that a training gets from a language model, next to a bare loop of threads with the same requests.

    python -m benchmarks.live_training --gguf smollm2                 three pairs, 8 slots
    python -m benchmarks.live_training --gguf smollm2 --steps 512 --pairs 1 -- --encoder hash

What follows `--` are more flags of the training. Each side runs in a process of its own, which starts its own server;
sides alternate, and a loop asks what the training before it asked, in that order: other requests have other tokens. A
rate is of the reply's tokens, from the first call to the last reply: updates and evaluations between them are included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from query_mutator.cli.console import exit_code
from query_mutator.llm.llama import LlamaBackend
from query_mutator.types import ChatRequest, Completion, Message

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    *("--dataset", "general", "--operators", "clean", "--forms", "all", "--ask", "form", "--max-asks", "1"),
    *("--target-max-tokens", "32", "--no-evaluate"),
)
SIDES = ("training", "loop")
Row = dict[str, Any]  # a call: its request, when it started and ended, its tokens


def main() -> None:
    """Print a line of JSON for each pair, then the medians."""
    if sys.argv[1:2] == ["--child"]:
        {"training": training, "loop": loop}[sys.argv[2]](Path(sys.argv[3]), sys.argv[4:])
        return
    arguments, ratios = parsed(), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.pairs):
            found = {side: run(side, Path(folder), arguments) for side in SIDES}
            ratios.append(round(found["training"]["tokens_per_s"] / found["loop"]["tokens_per_s"], 3))
            print(json.dumps({**found, "ratio": ratios[-1]}), flush=True)
    shown = [min(ratios), statistics.median(ratios), max(ratios)]
    print(json.dumps({"pairs": len(ratios), "ratio_min_median_max": shown}))


def parsed() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", default="smollm2", help="the model's file, or smollm2")
    parser.add_argument("--slots", type=int, default=8, help="calls in flight")
    parser.add_argument("--steps", type=int, default=1024, help="environment steps of a training")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("more", nargs="*", help="more flags of the training, after --")
    return parser.parse_args()


def run(side: str, folder: Path, arguments: argparse.Namespace) -> Row:
    """Return the figures of a side, run in a process."""
    out = folder / f"{side}.jsonl"
    out.unlink(missing_ok=True)
    words = training_flags(arguments, folder) if side == "training" else [arguments.gguf, arguments.slots]
    command = [sys.executable, "-m", "benchmarks.live_training", "--child", side, folder, *words]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the {side} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return figures(rows_of(out))


def training_flags(arguments: argparse.Namespace, folder: Path) -> list[object]:
    """Return the flags of a training whose replies no earlier one has cached."""
    cache = Path(tempfile.mkdtemp(dir=folder)) / "replies.sqlite"
    sizes = ["--batch-size", arguments.slots, "--num-env-steps", arguments.steps]
    return [*FLAGS, "--gguf", arguments.gguf, *sizes, "--save-dir", folder, "--cache-path", cache, *arguments.more]


def rows_of(log: Path) -> list[Row]:
    """Return the calls of a log in the order in which they started."""
    return sorted(map(json.loads, log.read_text(encoding="utf-8").splitlines()), key=lambda row: row["start"])


def figures(rows: Sequence[Row]) -> Row:
    """Return calls, tokens of the replies per second, and the mean calls in flight."""
    span = max(row["end"] for row in rows) - rows[0]["start"]
    tokens = sum(row["tokens"] for row in rows)
    return {
        "calls": len(rows),
        "seconds": round(span, 1),
        "tokens_per_s": round(tokens / span, 1),
        "in_flight": round(sum(row["end"] - row["start"] for row in rows) / span, 2),
    }


# ---------------------------------------------------------------- the two sides


def logged(log: Path, call: Callable[..., Completion]) -> Callable[..., Completion]:
    """Return a function that makes a call and appends it to a log; its last argument is the request."""
    lock = threading.Lock()

    def make(*arguments: Any) -> Completion:
        start = time.perf_counter()
        reply = call(*arguments)
        row = {"start": start, "end": time.perf_counter(), "tokens": reply.completion_tokens}
        row["request"] = {**asdict(arguments[-1]), "deadline": None}
        with lock, log.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        return reply

    return make


def training(folder: Path, flags: Sequence[str]) -> None:
    """Train in this process, with each call of the model logged."""
    from train_query_mutator import main as train

    LlamaBackend.complete = logged(folder / "training.jsonl", LlamaBackend.complete)  # type: ignore[method-assign]
    sys.exit(exit_code(train, flags, prog="train"))


def loop(folder: Path, words: Sequence[str]) -> None:
    """Ask what a training asked, with a thread for each slot."""
    gguf, slots = words[0], int(words[1])
    todo, lock = requests_in(folder / "training.jsonl"), threading.Lock()
    (server,) = LlamaBackend.open([gguf], pool_size=slots)
    server.digest(server.default_models()[0])  # loads it, as a training does before its first call
    ask = logged(folder / "loop.jsonl", server.complete)

    def work(_: int) -> None:
        while (request := following()) is not None:
            ask(request)

    def following() -> ChatRequest | None:
        with lock:
            return next(todo, None)

    with closing(server), ThreadPoolExecutor(slots) as pool:
        list(pool.map(work, range(slots)))


def requests_in(log: Path) -> Iterator[ChatRequest]:
    """Yield the requests of a log."""
    for row in rows_of(log):
        fields = {name: value for name, value in row["request"].items() if name != "known_key"}
        messages = tuple(Message(**message) for message in fields.pop("messages"))
        yield ChatRequest(messages=messages, **fields)


if __name__ == "__main__":
    main()
