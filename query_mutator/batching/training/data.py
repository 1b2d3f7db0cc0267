"""The rows of a file as tokens in memory, and the hashes that a plan is checked against."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from query_mutator.batching.generation.jsonl import JsonlSamples
from query_mutator.batching.generation.rows import TokenRow, tokenizer_fingerprint
from query_mutator.batching.samples.schema import compute_dataset_fingerprint
from query_mutator.errors import UsageError

__all__ = ["TokenData", "read_tokens"]


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """Token rows by sample id, and the hashes of data and tokenizer."""

    rows: dict[str, TokenRow]
    dataset_hash: str
    tokenizer_hash: str
    bad_rows: int = 0
    first_errors: list[str] = field(default_factory=list)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Return the tokens of every sample."""
        return {name: row.length for name, row in self.rows.items()}

    @cached_property
    def loss_lengths(self) -> dict[str, int]:
        """Return the learned tokens of every sample; nothing predicts the first."""
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
    """Tokenize a JSONL file; a row without tokens is a DatasetError, or counted with `skip_bad`."""
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    with closing(JsonlSamples(path, tokenizer, mask_prompt=mask_prompt, skip_bad=skip_bad)) as samples:
        samples.on_read = on_row
        rows = dict(samples.tokenized())
        if not rows:
            raise UsageError(f"{path}: no row has any tokens; give rows with instruction and response, or text")
        return TokenData(
            rows=rows,
            dataset_hash=compute_dataset_fingerprint(path, tokenizer_hash).fingerprint,
            tokenizer_hash=tokenizer_hash,
            bad_rows=samples.bad_rows,
            first_errors=samples.first_errors,
        )
