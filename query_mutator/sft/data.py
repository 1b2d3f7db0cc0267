"""The rows of a file as tokens in memory, with what a plan is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from query_mutator.batching.generation.rows import JsonlSamples, TokenRow, prompt_template, tokenizer_fingerprint
from query_mutator.batching.samples import compute_dataset_fingerprint
from query_mutator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """Token rows by sample id, and the hashes of data and tokenizer."""

    rows: dict[str, TokenRow]
    dataset_hash: str
    tokenizer_hash: str
    prompt: str | None = None  # how a row puts what is asked, see `prompt_template`
    bad_rows: int = 0
    first_errors: list[str] = field(default_factory=list)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Return the tokens of every sample."""
        return {name: row.length for name, row in self.rows.items()}

    @cached_property
    def loss_lengths(self) -> dict[str, int]:
        """Return how many tokens of every sample are learned; the first is predicted by nothing."""
        return {name: int(np.count_nonzero(row.loss_mask[1:])) for name, row in self.rows.items()}

    @property
    def largest_id(self) -> int:
        """Return the largest token id."""
        return max(int(row.input_ids.max()) for row in self.rows.values())


def read_tokens(
    path: str,
    tokenizer: Any,
    *,
    mask_prompt: bool,
    skip_bad: bool = False,
    on_row: Callable[[], object] | None = None,
) -> TokenData:
    """Tokenise a JSONL file; a row that gives nothing is a DatasetError, or counted with `skip_bad`."""
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    samples = JsonlSamples(path, tokenizer, mask_prompt=mask_prompt, skip_bad=skip_bad)
    samples.on_read = on_row
    try:
        rows = dict(samples.tokenized())
        if not rows:
            raise UsageError(f"{path}: no row gives any tokens")
        prompt = prompt_template(samples.row(next(iter(rows))), tokenizer)
    finally:
        samples.close()
    return TokenData(
        rows=rows,
        dataset_hash=compute_dataset_fingerprint(path, tokenizer_hash).fingerprint,
        tokenizer_hash=tokenizer_hash,
        prompt=prompt,
        bad_rows=samples.bad_rows,
        first_errors=samples.first_errors,
    )
