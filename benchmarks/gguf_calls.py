"""Calls per second of `--gguf` next to the same file behind llama-server over HTTP, at 1, 4 and 8 slots.

    python benchmarks/gguf_calls.py --gguf model.gguf   prompts with one instruction, replies of 32 tokens
    python benchmarks/gguf_calls.py                     a tiny random model: the cost of the call itself

Ways alternate in blocks with as many calls in flight as there are slots, on the same prompts, new ones in each block:
the length of a reply depends on its prompt. A third way calls the binding in this process, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from query_mutator.files.gguf_file import model_name
from query_mutator.llm.llama import DEFAULT_CONTEXT, LlamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.types import ChatRequest
from tests.integration.llama_server import CONTEXT, MODEL, LlamaServer, write_gguf

Call = Callable[[str], object]
INSTRUCTION = "Correct the spelling of the question. Keep its meaning. Reply with the corrected question only." * 3


def main() -> None:
    """Print a line of JSON per number of slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="by default a tiny random model")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--calls", type=int, default=64, help="per block")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.gguf or write_gguf(Path(folder))
        for slots in arguments.slots:
            print(json.dumps(compared(path, slots, arguments)), flush=True)


def compared(path: Path, slots: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of calls per second over the blocks, and the range of the ratio of --gguf to HTTP."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways = dict(started(path, slots, arguments.max_tokens, stack))
        for block in range(-1, arguments.blocks):  # the first loads and warms up
            turn = block % len(ways)
            for name, call in [*ways.items()][turn:] + [*ways.items()][:turn]:
                rate = calls_per_s(call, slots, arguments.calls, seed=str(block))
                if block >= 0:
                    rates.setdefault(name, []).append(rate)
    ratios = sorted(one / other for one, other in zip(rates["gguf"], rates["http"], strict=True))
    medians = {f"{name}_calls_per_s": round(statistics.median(found), 1) for name, found in rates.items()}
    shown = [round(ratios[0], 2), round(statistics.median(ratios), 2), round(ratios[-1], 2)]
    return {"slots": slots, **medians, "gguf_to_http_min_median_max": shown}


def started(path: Path, slots: int, max_tokens: int, stack: ExitStack) -> Iterator[tuple[str, Call]]:
    """Yield the ways to call a file by name."""
    (own,) = LlamaBackend.open([str(path)], pool_size=slots)
    stack.enter_context(closing(own))
    yield "gguf", lambda text: own.complete(ask(text, model_name(path), max_tokens))
    server = stack.enter_context(LlamaServer(path, slots=slots))
    behind = stack.enter_context(closing(OpenAIBackend(server.url, pool_size=slots)))
    yield "http", lambda text: behind.complete(ask(text, MODEL, max_tokens))
    direct = in_process(path, slots)
    yield (
        "in_process",
        lambda text: direct.handle_chat_completions(
            {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
        ),
    )


def in_process(path: Path, slots: int) -> Any:
    """Return the binding's server in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = slots
    params.n_ctx = min(CONTEXT, DEFAULT_CONTEXT) * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # as `LlamaServer` has
    params.verbosity = -1
    params.port = 0
    return xllamacpp.Server(params)


def ask(text: str, model: str, max_tokens: int) -> ChatRequest:
    """Return a request as a rollout makes it."""
    return ChatRequest.user(text, model=model, max_tokens=max_tokens, seed=0)


def calls_per_s(call: Call, slots: int, calls: int, *, seed: str) -> float:
    """Return the calls per second of a block of distinct prompts with a common beginning."""
    prompts = [f"{INSTRUCTION}\n{seed}: how do i sort list number {number}" for number in range(calls)]
    began = time.perf_counter()
    with ThreadPoolExecutor(slots) as pool:
        replies = list(pool.map(call, prompts))
    assert all(getattr(reply, "ok", True) for reply in replies), replies[0]
    return calls / (time.perf_counter() - began)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # of all ways
    main()
