"""Data that is computed once and read often: token lengths, token rows, batch stores.

Offers LengthCache, RowTokenizer and JsonlSamples (rows of a JSONL file as tokens), BatchWriter and BatchReader, and
collation into rectangular batches. Imports `planning` and `core`.
"""

from query_mutator.batching.generation.collate import CollatedBatch, collate_microbatch, default_collate, pad_sequences
from query_mutator.batching.generation.io import BatchReader, BatchWriter
from query_mutator.batching.generation.jsonl import JsonlSamples
from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.batching.generation.rows import RowTokenizer, TokenRow, tokenizer_fingerprint

__all__ = [
    "BatchReader", "BatchWriter", "CollatedBatch", "JsonlSamples", "LengthCache", "LengthEntry", "RowTokenizer",
    "TokenRow", "collate_microbatch", "default_collate", "pad_sequences", "tokenizer_fingerprint",
]  # fmt: skip
