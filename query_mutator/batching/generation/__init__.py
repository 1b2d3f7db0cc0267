"""What is made once and read often: lengths, and the tokens of a data set's rows."""

from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.batching.generation.rows import (
    JsonlSamples,
    RowTokenizer,
    TokenRow,
    tokenizer_fingerprint,
)

__all__ = ["JsonlSamples", "LengthCache", "LengthEntry", "RowTokenizer", "TokenRow", "tokenizer_fingerprint"]
