"""Data that is computed once and read often: token lengths, token rows, batches as files."""

from query_mutator.batching.generation.io import (
    BatchReader,
    BatchWriter,
    CollatedBatch,
    collate_microbatch,
    default_collate,
    pad_sequences,
)
from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.batching.generation.rows import (
    JsonlSamples,
    RowTokenizer,
    TokenRow,
    load_tokenizer,
    tokenizer_fingerprint,
)

__all__ = [
    "BatchReader", "BatchWriter", "CollatedBatch", "JsonlSamples", "LengthCache", "LengthEntry", "RowTokenizer",
    "TokenRow", "collate_microbatch", "default_collate", "load_tokenizer", "pad_sequences", "tokenizer_fingerprint",
]  # fmt: skip
