"""What is made once and read often: lengths, tokens, batches."""

from query_mutator.batching.generation.collate import (
    CollatedBatch,
    CollateFn,
    as_token_row,
    collate_microbatch,
    default_collate,
    pad_sequences,
)
from query_mutator.batching.generation.io import BatchReader, BatchWriter
from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.batching.generation.rows import (
    JsonlSamples,
    RowTokenizer,
    TokenRow,
    tokenizer_fingerprint,
)

__all__ = [
    "BatchReader",
    "BatchWriter",
    "CollateFn",
    "CollatedBatch",
    "JsonlSamples",
    "LengthCache",
    "LengthEntry",
    "RowTokenizer",
    "TokenRow",
    "as_token_row",
    "collate_microbatch",
    "default_collate",
    "pad_sequences",
    "tokenizer_fingerprint",
]
