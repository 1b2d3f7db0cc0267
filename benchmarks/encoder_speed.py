"""What it takes to encode one short text, and 256 texts, against `SentenceTransformer.encode` with the same weights.

python benchmarks/encoder_speed.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any


def main() -> None:
    """Print one line of JSON: start-up in seconds, the rest in milliseconds, the best of several repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    from query_mutator.embedded.corpus import load_corpus

    texts = [entry.summary for entry in load_corpus().entries[:1024:4]]
    rows = {"ours": measure(_ours, texts, repeats=arguments.repeats)}
    rows["sentence_transformers"] = measure(_theirs, texts, repeats=arguments.repeats)
    print(json.dumps({"threads": arguments.threads, **rows}))


def _ours() -> Callable[[Sequence[str]], object]:
    from query_mutator.encoder.bert import BertEncoder
    from query_mutator.encoder.weights import DEFAULT_ENCODER, Running, find_weights

    return BertEncoder(find_weights(DEFAULT_ENCODER), Running()).encode


def _theirs() -> Callable[[Sequence[str]], object]:
    from sentence_transformers import SentenceTransformer

    from query_mutator.encoder.weights import packaged_folder

    model = SentenceTransformer(str(packaged_folder()), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=64, show_progress_bar=False)


def measure(
    load: Callable[[], Callable[[Sequence[str]], object]], texts: Sequence[str], *, repeats: int
) -> dict[str, Any]:
    """Return import and load time (beyond torch), and the best time for one text and for all."""
    started = time.perf_counter()
    encode = load()
    start_s = time.perf_counter() - started
    one = ["How do I delete a folder and everything inside it?"]
    return {
        "start_s": round(start_s, 2),
        "one_text_ms": round(min(_timed(encode, one) for _ in range(10 * repeats)) * 1e3, 1),
        f"{len(texts)}_texts_ms": round(min(_timed(encode, texts) for _ in range(repeats)) * 1e3),
    }


def _timed(encode: Callable[[Sequence[str]], object], texts: Sequence[str]) -> float:
    started = time.perf_counter()
    encode(texts)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
