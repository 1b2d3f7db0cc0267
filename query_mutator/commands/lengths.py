"""`qm data lengths`: tokenize a data set once and store the lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from tyro.conf import arg

from query_mutator.batching import JsonlSamples, LengthCache, compute_dataset_fingerprint, tokenizer_fingerprint
from query_mutator.batching.tokenizers import load_tokenizer
from query_mutator.cli.common import rows_of, show
from query_mutator.cli.console import progress
from query_mutator.cli.outputs import Output, readable
from query_mutator.commands.data_flags import CacheFlags, TokenizerFlags
from query_mutator.errors import UsageError

PERCENTILES = (10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class LengthsBuildFlags(TokenizerFlags):
    """Tokenize a dataset and store the length of each row."""

    dataset: Annotated[str, arg(aliases=["-d"])]
    """JSONL file with text, messages, instruction and response, or input_ids in every row."""
    output: Annotated[str, arg(name="out", aliases=["--output", "-o"]), Output(readable(LengthCache.load_sync))]
    """File to write: .jsonl as text, anything else binary."""
    skip_bad: bool = False
    """Count rows without tokens instead of stopping at the first."""


@dataclass(frozen=True, kw_only=True)
class LengthsStatsFlags(CacheFlags):
    """Show statistics of a length cache."""


def build_lengths(flags: LengthsBuildFlags) -> None:
    """Write the length cache of a data set and report its contents."""
    tokenizer = load_tokenizer(flags.tokenizer)
    samples = JsonlSamples(flags.dataset, tokenizer, skip_bad=flags.skip_bad)

    with progress("tokenizing", len(samples), unit="row") as bar:
        samples.on_read = bar.update
        lengths = samples.lengths()
    samples.close()
    if not lengths:
        raise UsageError(f"{flags.dataset}: no row has any tokens; check its columns")
    with LengthCache.create(flags.output, tokenizer_fingerprint(tokenizer)) as cache:
        cache.dataset_hash = compute_dataset_fingerprint(flags.dataset, cache.tokenizer_hash).fingerprint
        cache.add_many_sync(list(lengths), list(lengths.values()))
    report = {
        "output": flags.output,
        "samples": len(lengths),
        "tokens": sum(lengths.values()),
        "bad_rows": samples.bad_rows,
        "first_errors": samples.first_errors,
        "tokenizer_hash": cache.tokenizer_hash,
    }
    lines = [f"{flags.output}: {len(lengths)} lengths, {report['tokens']} tokens"]
    lines += [f"skipped {samples.bad_rows} rows, first: {samples.first_errors[0]}"] if samples.bad_rows else []
    show(flags, report, "\n".join(lines))


def show_length_stats(flags: LengthsStatsFlags) -> None:
    """Print count, total, extremes, mean and percentiles."""
    cache = flags.load()
    if not len(cache):
        raise UsageError(f"{flags.cache} is empty; build it again")
    lengths = cache.lengths
    stats: dict[str, float | int] = {
        "samples": len(lengths),
        "total": int(lengths.sum(dtype=np.int64)),
        "min": int(lengths.min()),
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
    }
    stats |= {f"p{percent}": float(np.percentile(lengths, percent)) for percent in PERCENTILES}
    head = {"cache": flags.cache, "tokenizer_hash": cache.tokenizer_hash}
    text = {name.upper() if name[0] == "p" else name: f"{value:g}" for name, value in stats.items()}
    text["total"] = str(stats["total"])
    show(flags, {**head, **stats}, rows_of({**head, **text}))
