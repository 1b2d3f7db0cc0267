"""What the hand-written BERT forward pass costs, next to `SentenceTransformer.encode` with the same weights.

python benchmarks/encoder_speed.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("ours", "sentence_transformers")
ONE = ("How do I delete a folder and everything inside it?",)

Encode = Callable[[Sequence[str]], Any]


def main() -> None:
    """Print one line of JSON per encoder and one with the largest difference between their vectors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--repeats", type=int, default=5, help="the best of so many counts, and ten times as many of one"
    )
    parser.add_argument("--rows", help="measure one encoder in this process and save its vectors here: KIND,FILE")
    arguments = parser.parse_args()
    if arguments.rows:
        kind, _, path = arguments.rows.partition(",")
        print(json.dumps(measure(kind, Path(path), threads=arguments.threads, repeats=arguments.repeats)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:  # each in its own process: imports and memory are part of what is measured
            own = [f"--rows={kind},{folder}/{kind}.npy", *sys.argv[1:]]
            subprocess.run([sys.executable, __file__, *own], check=True)
        ours, theirs = (np.load(f"{folder}/{kind}.npy") for kind in KINDS)
    print(json.dumps({"largest_difference": float(np.abs(ours - theirs).max()), "texts": len(ours)}))


def measure(kind: str, path: Path, *, threads: int, repeats: int) -> dict[str, Any]:
    """Return import and load time with torch, peak memory, and the best time for one text and for 256."""
    from query_mutator.embedded.corpus import load_corpus

    texts = [entry.summary for entry in load_corpus().entries[:1024:4]]
    started = time.perf_counter()
    import torch

    torch.set_num_threads(threads)
    encode = _ours() if kind == "ours" else _theirs()
    encode(ONE)
    start_s = time.perf_counter() - started
    np.save(path, encode(texts))
    return {
        "encoder": kind,
        "import_and_load_s": round(start_s, 2),
        "one_text_ms": round(min(_timed(encode, ONE) for _ in range(10 * repeats)) * 1e3, 1),
        "texts_per_s": round(len(texts) / min(_timed(encode, texts) for _ in range(repeats)), 1),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _ours() -> Encode:
    from query_mutator.encoder import resolve_encoder

    return resolve_encoder().inner.encode  # without the cache


def _theirs() -> Encode:
    from sentence_transformers import SentenceTransformer

    from query_mutator.encoder import packaged_folder

    model = SentenceTransformer(str(packaged_folder()), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=64, show_progress_bar=False)


def _timed(encode: Encode, texts: Sequence[str]) -> float:
    started = time.perf_counter()
    encode(texts)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
